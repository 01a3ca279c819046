"""``rlperf profiles``: what is shipped, and what each profile says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.output import AsJson, console, print_json
from rlperf.cost.parameters import active_parameters, parameters
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.units import UNITS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Devices, links, clusters, architectures, lengths, calibrations.\n\nExample: rlperf profiles list devices",
)
KINDS = ("devices", "links", "clusters", "architectures", "workloads", "jobs", "calibrations/devices",
         "calibrations/engines", "calibrations/trainers", "calibrations/frameworks")  # fmt: skip
QUANTITY = re.compile(r"([0-9.e+-]+) (\S+)")


@app.command("list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="devices, links, clusters, architectures, workloads, jobs, calibrations/...")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Names of the profiles of one kind, or of all kinds.

    Example: rlperf profiles list devices
    """
    if kind is not None and kind not in KINDS:
        raise SpecError(f"there is no kind of profile named {kind!r} ({did_you_mean(kind, KINDS) or ', '.join(KINDS)})")
    names = {each: _names(each) for each in ([kind] if kind else KINDS)}
    if as_json:
        print_json(names)
        return
    from rich.columns import Columns

    out = console()
    for each, found in names.items():
        out.print(f"[bold]{each}[/bold] ({len(found)})")
        out.print(Columns(found, padding=(0, 2)))


def _names(kind: str) -> list[str]:
    from rlperf.specs.presets import preset_rows
    from rlperf.specs.profiles import profile_names
    from rlperf.workload.library import PRESETS

    if kind == "workloads":
        return list(PRESETS)
    return list(preset_rows()) if kind == "jobs" else list(profile_names(kind))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a profile, such as h100_sxm, dgx_h100 or Qwen2.5-32B.")],
    as_json: AsJson = False,
) -> None:
    """One profile with its sources.

    Example: rlperf profiles show h100_sxm
    """
    from pydantic import BaseModel

    from rlperf.specs import profiles
    from rlperf.specs.engine_calibration import load_engine_calibration
    from rlperf.specs.presets import preset
    from rlperf.specs.rl_calibration import load_framework_calibration
    from rlperf.specs.trainer_calibration import load_trainer
    from rlperf.workload import load_model

    loaders: dict[str, Callable[[str], BaseModel]] = {
        "device": profiles.load_device,
        "cluster": profiles.load_cluster,
        "link": profiles.load_link,
        "architecture": profiles.load_architecture,
        "trainer": load_trainer,
        "engine": load_engine_calibration,
        "framework": load_framework_calibration,
        "job": preset,
        "workload": load_model,
    }
    failures: list[Problem] = []
    for kind, load in loaders.items():
        try:
            spec = load(name)
        except SpecError as error:
            if Path(name).parent.name == f"{kind}s" and Path(name).is_file():
                raise  # a file where profiles of this kind are kept, and what is wrong with it
            failures += error.problems
            continue
        _print(kind, spec, as_json, profiles.architecture_reading(name).note if kind == "architecture" else "")
        return
    if profiles.is_path(name) and Path(name).expanduser().exists():
        profiles.load_architecture(name)  # a file that is there, and what is wrong with it
    near = {each.suggestion.rstrip("?") for each in failures if each.suggestion and "mean" in each.suggestion}
    hint = "; ".join(sorted(near)) + "?" if near else "see rlperf profiles list"
    raise SpecError(f"no {', '.join([*loaders][:-1])} or {[*loaders][-1]} is named {name!r} ({hint})")


def _print(kind: str, spec: object, as_json: bool, assumed: str) -> None:
    from pydantic import BaseModel

    assert isinstance(spec, BaseModel)
    data = spec.model_dump(mode="json", exclude_none=True)
    if kind == "architecture":
        from rlperf.specs.architecture import Architecture

        assert isinstance(spec, Architecture)
        data |= {"parameters": parameters(spec), "active_parameters": active_parameters(spec)}
    if assumed:
        data["assumed"] = [*data["assumed"], assumed]
    if as_json:
        print_json({"kind": kind, **data})
        return
    from rich.table import Table

    table = Table(title=f"{kind} {data.get('name', '')}", show_header=False, box=None)
    for key, value in data.items():
        table.add_row(key, _text(value))
    console().print(table)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, str) and (found := QUANTITY.fullmatch(value)) and found[2] in UNITS:
        return f"{float(found[1]):.4g} {found[2]}"  # bytes of memory as printed have twelve digits; --json keeps them
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        said = [_text(each).replace("\n", ", ") for each in value]
        between = "\n" if any(isinstance(each, dict) for each in value) else ", "
        return between.join(f"{said.count(one)} x {one}" if len(said) > 4 else one for one in dict.fromkeys(said))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
