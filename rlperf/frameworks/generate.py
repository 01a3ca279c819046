"""Writes the key tables of ``facts/`` from the frameworks' key lists: ``python -m rlperf.frameworks.generate DATA``.

DATA is a folder with one sub-folder a framework, each with the composed defaults or argparse listings as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlperf.frameworks.extra_keys import EXTRA_KEYS
from rlperf.frameworks.releases import DRIFT, NOT_BEFORE, RELEASES
from rlperf.specs.framework_names import FACTS
from rlperf.specs.writer import write_atomic

VERL_RELEASES = {"v0.4.1": "0.4", "v0.5.0": "0.5", "v0.6.1": "0.6", "v0.7.1": "0.7", "v0.8.0": "0.8", "v0.9.0": "0.9",
                 "main": "main"}  # fmt: skip
VERL_TRAINERS = {"ppo_trainer": "fsdp2", "ppo_megatron_trainer": "megatron"}
NAMED = {"verl": "distillation.teacher_models.teacher_model"}
"""Sections of which users make more, under names of theirs."""
Entry = tuple[str, str, str, str, str]
"""key, default as JSON, span, backend, kind"""


def verl(folder: Path) -> tuple[list[str], list[Entry]]:
    """Every key of the composed default config of each release, for the FSDP and the Megatron trainer."""
    releases = list(VERL_RELEASES)
    spans: dict[str, dict[str, list[tuple[str, int, int]]]] = {}
    for trainer, backend in VERL_TRAINERS.items():
        found = [json.loads((folder / f"keys_{release}_{trainer}.json").read_text()) for release in releases]
        for key in sorted(set().union(*found)):
            texts = [json.dumps(keys[key]) if key in keys else None for keys in found]
            spans.setdefault(key, {})[backend] = _runs(texts)
    entries: list[Entry] = []
    names = list(VERL_RELEASES.values())
    for key, by_backend in spans.items():
        shared = by_backend.get("fsdp2") == by_backend.get("megatron")
        for backend, runs in by_backend.items():
            if shared and backend == "megatron":
                continue
            for text, first, last in runs:
                entries.append((key, text, _span(first, last, names), "" if shared else backend, ""))
    return names, entries


def _runs(texts: Sequence[str | None]) -> list[tuple[str, int, int]]:
    """Maximal stretches of equal text: (text, first index, last index)."""
    runs, start = [], 0
    for text, group in groupby(texts):
        length = len(list(group))
        if text is not None:
            runs.append((text, start, start + length - 1))
        start += length
    return runs


def _span(first: int, last: int, names: Sequence[str]) -> str:
    if first == 0 and last == len(names) - 1:
        return ""
    return f"{names[first] if first else ''}-{names[last] if last < len(names) - 1 else ''}"


def nemo_rl(folder: Path) -> tuple[list[str], list[Entry]]:
    """Defaults of the parent GRPO config, and every other path that a shipped config uses."""
    defaults = json.loads((folder / "defaults_grpo.json").read_text())
    paths = json.loads((folder / "known_paths.json").read_text())
    entries = [(key, json.dumps(value), "", "", "") for key, value in defaults.items()]
    entries += [(key, "", "", "", "") for key in paths if key not in defaults and not key.endswith("_override_")]
    return ["main"], entries


def openrlhf(folder: Path) -> tuple[list[str], list[Entry]]:
    """Flags of ``openrlhf.cli.train_ppo_ray``."""
    flags = json.loads((folder / "flags.json").read_text())
    entries = []
    for name, row in flags.items():
        kind = row["type"] + (":" + "|".join(row["choices"]) if row["choices"] else "")
        # A flag of several values (argparse's nargs) is listed with the type of one of them.
        several = isinstance(row["default"], str | list) or name == "--actor.eps_clip_low_high"
        kind = "" if kind == "float" and several else kind
        default = None if name == "--logger.wandb.run_name" else row["default"]
        entries.append((name.removeprefix("--"), json.dumps(default).replace("Infinity", "1e308"), "", "", kind))
    return ["0.11"], entries


def slime(folder: Path) -> tuple[list[str], list[Entry]]:
    """Known flags of slime, Megatron and SGLang."""
    flags = json.loads((folder / "flags.json").read_text())
    return ["main"], [(name.removeprefix("--"), "", "", "", "") for name in flags if name.startswith("--")]


def areal(folder: Path) -> tuple[list[str], list[Entry]]:
    """Fields of ``GRPOConfig``."""
    return ["main"], _typed(json.loads((folder / "keys_grpo.json").read_text()))


def trl(folder: Path) -> tuple[list[str], list[Entry]]:
    """Fields of ``GRPOConfig``."""
    return ["1.16"], _typed(json.loads((folder / "grpo_config.json").read_text()))


_TYPES = {"str": "str", "int": "int", "float": "float", "bool": "bool"}


def _typed(fields: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    entries = []
    for key, row in fields.items():
        text = re.sub(r"<class '(\w+)'>", r"\1", row["type"])
        parts = {part.strip() for part in text.split("|")} - {"None"}
        kind = _TYPES.get(next(iter(parts)), "") if len(parts) == 1 else ""
        if any(part.startswith("dict") for part in parts):
            kind = "map"
        default = row["default"]
        if isinstance(default, str) and "MISSING" in default:
            default = None
        entries.append((key, json.dumps(default), "", "", kind))
    return entries


READERS = {"verl": verl, "nemo_rl": nemo_rl, "openrlhf": openrlhf, "slime": slime, "areal": areal, "trl": trl}


def _by_release(framework: str, entries: Iterable[Entry]) -> list[Entry]:
    """The entries with what is known of older releases."""
    drift = DRIFT.get(framework, ())
    moved, begins = {row[0] for row in drift}, NOT_BEFORE.get(framework, {})
    found = list(drift)
    for key, default, span, backend, kind in entries:
        if key not in moved:
            since = next((at for name, at in begins.items() if f"{key}.".startswith(name and f"{name}.")), None)
            found.append((key, default, span or (f"{since}-" if since else ""), backend, kind))
    return found


def table_text(framework: str, versions: Iterable[str], entries: Iterable[Entry]) -> str:
    """The table as text: sections of dotted prefixes, rows sorted within."""
    whole = _by_release(framework, {*entries, *EXTRA_KEYS.get(framework, ())})
    rows = sorted(whole, key=lambda row: (row[0].rpartition(".")[0], row))
    partial = RELEASES.get(framework, ())
    lines = [
        f"# {framework}: keys, defaults, first and last version. Generated: python -m rlperf.frameworks.generate DATA",
        f"# versions: {' '.join((*partial, *versions))}",
        *([f"# partial: {' '.join(partial)}"] if partial else []),
        *([f"# named: {NAMED[framework]}"] if framework in NAMED else []),
    ]
    for section, group in groupby(rows, key=lambda row: row[0].rpartition(".")[0]):
        lines.append(f"[{section}]")
        for key, *columns in group:
            lines.append("\t".join([key.rpartition(".")[2], *columns]).rstrip("\t"))
    return "\n".join(lines) + "\n"


def main(data: str) -> None:
    """Write every table."""
    for framework, reader in READERS.items():
        versions, entries = reader(Path(data) / framework)
        write_atomic(FACTS / f"{framework}.tsv", table_text(framework, versions, entries))


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("data", help="folder with one sub-folder a framework")
    main(asked.parse_args().data)
