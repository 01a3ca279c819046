"""``rlperf calibrate``: constants from kernel timings, engines from served rows, and the timings themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlperf.cli.calibrate_logs import logs
from rlperf.cli.output import AsJson, print_json, progress
from rlperf.errors import SpecError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Fit constants from measurements, or measure the device at hand.\n\n"
    "Example: rlperf calibrate kernels timings.csv --out h100_sxm.yaml",
)
app.command()(logs)

Out = Annotated[Path, typer.Option("--out", help="file or folder to write")]


@app.command()
def kernels(
    files: Annotated[list[Path], typer.Argument(help="CSVs of kernel timings, or nccl-tests output")],
    out: Out,
    device: Annotated[str | None, typer.Option(help="which device, when the files hold several")] = None,
    base: Annotated[Path | None, typer.Option(help="calibration that stands where the files are silent")] = None,
    source: Annotated[str | None, typer.Option(help="where the timings are from, for the file's header")] = None,
    check: Annotated[bool, typer.Option(help="also compute errors on left-out shapes")] = True,
    add: Annotated[bool, typer.Option("--add", help="keep what the base holds of other kernels")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit a device's constants; report errors inside and on left-out shapes; write a calibration file.

    Example: rlperf calibrate kernels timings/*.csv --out h100_sxm.yaml
    """
    from rlperf.calibrate.kernels import calibration_text, fit_device
    from rlperf.specs.writer import write_atomic

    with progress("fitting kernels") as bar:
        calibration, fits = fit_device(
            files,
            device,
            base,
            source=source,
            check=check,
            add=add,
            folder=Path(),
            progress=lambda text: bar(0.5, text),
        )
    path = write_atomic(out, calibration_text(calibration))
    rows = [(fit.series.name, fit.constants.quality) for fit in fits]
    if as_json:
        print_json(
            {
                "file": str(path),
                "id": calibration.id,
                "device": calibration.device,
                "n": calibration.n,
                "series": [{"name": name, **quality.model_dump()} for name, quality in rows],
            }
        )
        return
    typer.echo(f"{'series':58s} {'n':>5s} {'in':>7s} {'left out':>9s}  measured/predicted")
    for name, quality in rows:
        left = "" if not check else f"{quality.left_out_mape:8.1f}%"
        spread = f"{quality.spread.low:.2f} .. {quality.spread.high:.2f}"
        typer.echo(f"{name:58s} {quality.n:5d} {quality.in_sample_mape:6.1f}% {left:>9s}  {spread}")
    typer.echo(f"{calibration.n} timings of {calibration.device} -> {path}")


@app.command()
def device(
    file: Annotated[Path, typer.Argument(help="CSV of served rows (form of measured/inference.csv)")],
    name: Annotated[str, typer.Option(help="device profile to fit, such as mi355x")],
    out: Out,
    check: Annotated[bool, typer.Option(help="also leave one architecture out in turn")] = True,
    as_json: AsJson = False,
) -> None:
    """Tell a device's constants from served rows, where none of its kernels was timed; write a calibration file.

    Example: rlperf calibrate device served.csv --name mi355x --out mi355x.yaml
    """
    from rlperf.calibrate.kernels import calibration_text
    from rlperf.calibrate.served_devices import KNOBS, fit_served_device
    from rlperf.calibrate.tables import read_table
    from rlperf.specs.writer import write_atomic

    fit = fit_served_device(read_table(file), name, check=check)
    path = write_atomic(out, calibration_text(fit.calibration))
    if as_json:
        print_json({"file": str(path), "rows": fit.rows, "values": fit.values, "narrowed": fit.narrowed})
        return
    for knob, value in fit.values.items():
        typer.echo(f"{KNOBS[knob].said:62s} {value:10.4g}   {100.0 * fit.narrowed[knob]:3.0f} % of the prior's width")
    typer.echo(
        f"{name}: {fit.rows} rows, {fit.in_sample_mape:.1f} % inside, {fit.left_out_mape:.1f} % left out -> {path}"
    )


@app.command()
def engine(
    file: Annotated[Path, typer.Argument(help="CSV of served rows (form of measured/inference.csv)")],
    name: Annotated[str, typer.Option(help="engine profile to fit, such as vllm")],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Fit the three overheads of an engine on a stated split of configurations, and write its profile.

    Example: rlperf calibrate engine served.csv --name vllm --out vllm.yaml
    """
    from rlperf.calibrate.serving.engines import engine_text, fit_engine
    from rlperf.calibrate.tables import read_table
    from rlperf.specs.engine_calibration import load_engine_calibration
    from rlperf.specs.writer import write_atomic

    fitted = fit_engine(read_table(file), load_engine_calibration(name), name=file.name)
    path = write_atomic(out, engine_text(fitted.engine))
    overhead = fitted.engine.overhead
    if as_json:
        print_json({"file": str(path), "id": fitted.engine.id, "rows": fitted.rows, **overhead.model_dump()})
        return
    fixed = {"step": overhead.step, "layer": overhead.per_layer, "expert layer": overhead.per_expert_layer}
    place, seconds = max(fixed.items(), key=lambda item: item[1])
    typer.echo(
        f"{name}: {fitted.rows} rows, {fitted.in_sample_mape:.1f} % inside, {fitted.left_out_mape:.1f} % left out; "
        f"{seconds * 1e6:.1f} us a {place}, {overhead.per_request * 1e6:.1f} us a request, "
        f"kernels x {overhead.kernel_scale:.2f} -> {path}"
    )


@app.command()
def speculation(
    file: Annotated[Path, typer.Argument(help="CSV of acceptance curves (form of measured/speculation.csv)")],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Fit the acceptance of drafted tokens by method, pooled over models; write the calibration file.

    Example: rlperf calibrate speculation curves.csv --out speculation.yaml
    """
    from rlperf.calibrate.speculation.acceptance import calibration_text, fit_speculation
    from rlperf.calibrate.speculation.gains import cost_spread
    from rlperf.calibrate.tables import read_table
    from rlperf.specs.speculation_calibration import load_speculation
    from rlperf.specs.writer import write_atomic

    shipped, table = load_speculation(), read_table(file)
    found = fit_speculation(table, name=file.name, base=shipped)
    found = found.model_copy(update={"cost": cost_spread(table, found) or found.cost})
    path = write_atomic(out, calibration_text(found))
    if as_json:
        print_json({"file": str(path), **found.model_dump(mode="json")})
        return
    for fit in found.acceptance:
        typer.echo(
            f"{fit.method:8s} first draft {fit.first:.3f}, x {fit.falls:.3f} per depth, over curves "
            f"{100 * fit.spread:.0f} % of the tokens; {fit.provenance.n} points{_kept(fit, shipped.acceptance)}"
        )
    kept = _kept(found.frozen, [shipped.frozen])
    typer.echo(f"a frozen head yields {found.frozen.value:.3f} of a trained one's tokens{kept}")
    kept = _kept(found.cost, [shipped.cost])
    typer.echo(f"gains lie {100 * found.cost.value:.0f} % off at a known acceptance{kept} -> {path}")


def _kept(one: object, shipped: Sequence[object]) -> str:
    """That the file says nothing about a constant, in words."""
    return " (not in this file: as shipped)" if one in shipped else ""


@app.command()
def serving(
    file: Annotated[Path, typer.Argument(help="CSV of served rows (form of measured/inference.csv)")],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Fit all serving engines at once, partially pooled over releases, devices and families, and write their profiles.

    Every row that can be predicted enters; how well rows do that no fit saw is for validate --leave-out to say.

    Example: rlperf calibrate serving measured/inference.csv --out engines/
    """
    from rlperf.calibrate.serving_profiles import calibrate_serving, profile_text
    from rlperf.calibrate.tables import read_table
    from rlperf.specs.writer import write_atomic

    if out.exists() and not out.is_dir():
        raise SpecError(f"{out} is a file; name a folder for the profiles")
    found = calibrate_serving(read_table(file), file=file.name)
    paths = {name: write_atomic(out / f"{name}.yaml", profile_text(one)) for name, one in found.engines.items()}
    if as_json:
        print_json({"rows": found.rows, "files": [str(path) for path in paths.values()]})
        return
    typer.echo(f"{'profile':20s} {'rows':>5s} {'inside':>7s} {'configuration left out':>23s}")
    for name, one in found.engines.items():
        quality = one.overhead.quality
        typer.echo(f"{name:20s} {quality.n:5d} {quality.in_sample_mape:6.1f}% {quality.left_out_mape:22.1f}%")
    typer.echo(f"{found.rows} rows -> {out}")


@app.command()
def measure(
    out: Out,
    suite: Annotated[
        list[str] | None, typer.Option(help="gemm, attention, decode, moe, stream, collectives or engine")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="at most so many shapes a suite, for a quick look")] = None,
) -> None:
    """Time kernels on the device at hand with PyTorch (optional) and write CSVs that ``calibrate kernels`` reads.

    Example: rlperf calibrate measure --out timings/
    """
    from rlperf.calibrate.measure import KERNELS
    from rlperf.calibrate.measure import measure as run

    if out.exists() and not out.is_dir():
        raise SpecError(f"{out} is a file; name a folder for the CSVs")
    for path in run(suite or KERNELS, out, limit=limit):
        typer.echo(str(path))
