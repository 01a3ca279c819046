"""Rollout dumps of the frameworks as length tables, where they hold lengths; text is counted with a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.specs.reader import first_record, parse_json, read_text, reading
from rlperf.units import MOST_COUNT
from rlperf.workload import read_recording
from rlperf.workload.lengths import RECOUNT, LengthTable

Count = Callable[[str], int]


@dataclass(frozen=True)
class _Row:
    """One response: its prompt (an identity to group by), lengths, rl_step or ``of_updates`` an optimizer update;
    whether text was counted."""

    group: str
    prompt_tokens: int
    response_tokens: int
    rl_step: int
    counted: bool = False
    of_updates: bool = False

    def response_up_to(self, cap: int | None) -> int:
        """Tokens of the response, at the cap where those of its text are as good as that (`RECOUNT`)."""
        near = cap is not None and self.counted and self.response_tokens >= (1.0 - RECOUNT) * cap
        return cap if near and cap is not None else self.response_tokens

    @property
    def plausible(self) -> bool:
        """Whether its numbers are counts."""
        numbers = (self.prompt_tokens, self.response_tokens, self.rl_step)
        return all(0 <= number <= MOST_COUNT for number in numbers)


def read_rollouts(
    paths: Sequence[Path | str], *, tokenizer: str | None = None, max_response_tokens: int | None = None,
    updates: int = 1,
) -> LengthTable:  # fmt: skip
    """Lengths of a run however they were recorded: dumps of a framework, tables or lines of lengths, PolyTrace.

    The first file tells which. Parameters and errors are those of `read_dump` and of `rlperf.workload.read_recording`.
    """
    if hold_dumps(paths):
        return read_dump(paths, tokenizer=tokenizer, max_response_tokens=max_response_tokens, updates=updates)
    return read_recording(list(paths), max_response_tokens=max_response_tokens).lengths


def hold_dumps(paths: Sequence[Path | str]) -> bool:
    """Whether files or folders hold a framework's rollout dumps; the first file tells."""
    first = next(_files(paths), None)
    return first is not None and holds_dump(first)


def read_dump(
    paths: Sequence[Path | str], *, tokenizer: str | None = None, max_response_tokens: int | None = None,
    updates: int = 1,
) -> LengthTable:  # fmt: skip
    """Lengths of the responses in rollout dumps of verl, NeMo-RL, AReaL (JSON lines), TRL (Parquet) or slime (torch).

    Parameters
    ----------
    tokenizer : tokenizer.json, or a folder or hub name, for dumps that hold text only (verl, TRL)
    max_response_tokens : cap of the run; responses at it count as cut, those of text also where they are near it
    updates : optimizer updates of an rl_step, by which TRL numbers its dumps

    Raises
    ------
    SpecError : a form that no framework writes, or text without a tokenizer
    """
    count = _counter(tokenizer)
    rows: list[_Row] = []
    for path in _files(paths):
        with reading(path):
            found = list(_read(path, count))
        wrong = next((row for row in found if not row.plausible), None)
        if wrong is not None:
            tokens = f"{wrong.prompt_tokens!s:.24} + {wrong.response_tokens!s:.24}"  # 400 digits are no float
            raise SpecError(Problem(f"holds a response of {tokens} tokens in rl_step {wrong.rl_step!s:.24}", str(path)))
        rows += found
    rows = _by_rl_step(rows, updates)
    if not rows:
        raise SpecError(Problem("holds no responses", str(paths[0])))
    keys = {name: index for index, name in enumerate(dict.fromkeys((row.rl_step, row.group) for row in rows))}
    return LengthTable(
        prompt_tokens=np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        response_tokens=np.array([row.response_up_to(max_response_tokens) for row in rows], dtype=np.int64),
        group=np.array([keys[row.rl_step, row.group] for row in rows], dtype=np.int64),
        rl_step=np.array([row.rl_step for row in rows], dtype=np.int64),
        turn=np.zeros(len(rows), dtype=np.int64),
        max_response_tokens=max_response_tokens,
        source=", ".join(Path(path).name for path in paths),
    )


def _by_rl_step(rows: list[_Row], updates: int) -> list[_Row]:
    """Rows that are numbered by optimizer updates by their rl_steps, of which every update's file repeats the last.

    TRL writes its last generation batch at every logged update (`_logs` of trl/trainer/grpo_trainer.py, 1.16).
    """
    last: dict[int, int] = {}
    for row in rows:
        if row.of_updates:
            rl_step = (row.rl_step - 1) // updates
            last[rl_step] = max(last.get(rl_step, 0), row.rl_step)
    return [
        replace(row, rl_step=(row.rl_step - 1) // updates + 1) if row.of_updates else row
        for row in rows
        if not row.of_updates or last[(row.rl_step - 1) // updates] == row.rl_step
    ]


def _files(paths: Sequence[Path | str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".parquet", ".pt"))
        else:
            yield path


def _read(path: Path, count: Count) -> Iterator[_Row]:
    if path.suffix == ".parquet":
        yield from _parquet(path, count)
    elif path.suffix == ".pt":
        yield from _torch(path)
    else:
        step = re.search(r"(\d+)(?=\.jsonl?$)", path.name)
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                yield from _json_row(line, path, number, count, int(step[1]) if step else 0)


def _json_row(line: str, path: Path, number: int, count: Count, step: int) -> Iterator[_Row]:
    with reading(path, number):
        row = parse_json(line, path, number)
        if not isinstance(row, dict):
            raise SpecError(Problem(f"holds a {type(row).__name__} where an object is due", str(path), number))
        if "seqlen" in row and "prompt_len" in row:  # AReaL: lengths and versions
            prompt = int(row["prompt_len"])
            version = int(row.get("tail_version", step))
            yield _Row(str(row.get("task_id", number)), prompt, int(row["seqlen"]) - prompt, version)
        elif "input_lengths" in row or "token_loss_mask" in row:  # NeMo-RL: token ids and masks
            yield from _nemo(row, number, step)
        elif (names := _text_fields(row)) is not None:  # verl: input and output; others: prompt and completion
            asked, answered = (_text(row[name]) for name in names)
            uid = re.sub(r"(_\d+){1,2}$", "", str(row.get("uid", ""))) or asked
            yield _Row(uid, count(asked), count(answered), int(row.get("step", step)), counted=True)
        else:
            raise SpecError(Problem(f"has fields {', '.join(list(row)[:6])}: no known dump", str(path), number))


def _text_fields(row: dict[str, Any]) -> tuple[str, str] | None:
    """The fields of prompt and response where a dump holds text."""
    pairs = (("input", "output"), ("prompt", "response"), ("prompt", "completion"))
    return next((pair for pair in pairs if pair[0] in row and isinstance(row.get(pair[1]), str | list)), None)


def holds_dump(path: Path | str) -> bool:
    """Whether a file looks like a framework's rollout dump, and not like recorded lengths."""
    if Path(path).suffix == ".pt":
        return True
    if Path(path).suffix == ".parquet":
        import polars as pl

        with reading(path):
            return "response_tokens" not in pl.read_parquet_schema(path)
    row = first_record(path)
    if row is None:
        return False
    known = {"seqlen", "input_lengths", "token_loss_mask"} & set(row)
    names = _text_fields(row)
    said = None if names is None else row[names[1]]  # a list is of messages, or of recorded lengths
    return bool(known) or isinstance(said, str) or (isinstance(said, list) and bool(said) and isinstance(said[0], dict))


def _nemo(row: dict[str, Any], number: int, step: int) -> Iterator[_Row]:
    """One sample, or a batch of them; the loss mask is 1 on generated tokens.

    Those of one prompt begin alike; where no tokens are stated, ``idx`` tells them apart.
    """
    names = ("token_loss_mask", "input_lengths", "token_ids", "idx")
    masks, lengths, tokens, indices = (row.get(name) for name in names)
    if masks is None:
        raise SpecError(Problem("states no token_loss_mask: what was generated of input_lengths is not known"))
    masks = masks if masks and isinstance(masks[0], list) else [masks]
    tokens = [tokens] if tokens and not isinstance(tokens[0], list) else tokens or []
    totals = lengths if isinstance(lengths, list) else [lengths if lengths is not None else len(masks[0])]
    for position, total in enumerate(totals):
        mask = masks[position][: int(total)] if position < len(masks) else []
        generated = int(sum(mask))
        index = indices[position] if isinstance(indices, list) else indices
        group = str(index if index is not None else number)
        if position < len(tokens) and generated:
            group = str(hash(tuple(tokens[position][: mask.index(1)])))
        yield _Row(group, int(total) - generated, generated, step)


def _parquet(path: Path, count: Count) -> Iterator[_Row]:
    """TRL's ``completions_{step}.parquet``: prompt and completion as text or messages."""
    import polars as pl

    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise SpecError(Problem(f"is not Parquet: {error}", str(path))) from error
    missing = {"prompt", "completion"} - set(frame.columns)
    if missing:
        raise SpecError(Problem(f"has no column {', '.join(sorted(missing))}", str(path)))
    step = re.search(r"(\d+)", path.stem)
    for row in frame.iter_rows(named=True):
        prompt, completion = _text(row["prompt"]), _text(row["completion"])
        rl_step = int(row.get("step") or (step[1] if step else 0))
        yield _Row(prompt, count(prompt), count(completion), rl_step, counted=True, of_updates=True)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(part.get("content", part)) if isinstance(part, dict) else str(part) for part in value)
    return str(value)


def _torch(path: Path) -> Iterator[_Row]:
    """slime's ``rollout_data/{id}.pt``."""
    try:
        import torch
    except ImportError as error:
        raise SpecError(
            Problem(
                "is a torch file, and torch is not installed", str(path), suggestion="pip install torch, or convert it"
            )
        ) from error
    data = torch.load(path, weights_only=True, map_location="cpu")
    step = re.search(r"(\d+)", path.stem)
    for number, sample in enumerate(data.get("samples", [])):
        response = int(sample["response_length"])
        group = str(sample.get("group_index", sample.get("index", number)))
        yield _Row(group, len(sample["tokens"]) - response, response, int(step[1]) if step else 0)


def _counter(tokenizer: str | None) -> Count:
    """Counts tokens of a text."""
    if tokenizer is None:

        def refuse(_: str) -> int:
            raise SpecError(
                Problem(
                    "the dump holds text, not lengths",
                    suggestion="--tokenizer tokenizer.json counts it (pip install 'rlperf[tokenizer]')",
                )
            )

        return refuse
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as error:
        raise SpecError(Problem("tokenizers is not installed", suggestion="pip install tokenizers")) from error
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise SpecError(Problem("no such tokenizer", str(file)))
    loaded = tokenizers.Tokenizer.from_file(str(file))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
