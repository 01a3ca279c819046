"""``rlperf workload``: read, fit, sample, judge and convert length workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlperf.cli.output import AsJson, console, print_json, progress
from rlperf.errors import Problem, SpecError
from rlperf.units import token_count

if TYPE_CHECKING:
    from rlperf.workload.fidelity import Fidelity
    from rlperf.workload.model import LengthModel
    from rlperf.workload.records import Recording

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Read, fit, sample and check length workloads (PolyTrace formats).\n\n"
    "Example: rlperf workload show math --max-response-tokens 16384",
)


def _tokens(text: str) -> int:
    """A number of tokens as job files write it."""
    if (count := token_count(str(text))) is None:
        raise typer.BadParameter(f"{text!r} is not a number of tokens: write it as 16384 or 16k")
    return count


def _in_tokens(text: str) -> Any:
    return typer.Option(help=text, parser=_tokens, metavar="<tokens>")


Paths = Annotated[list[str], typer.Argument(help="PolyTrace files, folders or .tar.gz archives; also .csv, .parquet.")]
Skip = Annotated[bool, typer.Option("--skip-damaged", help="Leave damaged records out, count and report them.")]
Cap = Annotated[int | None, _in_tokens("Maximum response length of the recording; default: stated or inferred.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="tokenizer.json, for a framework's dump that holds text only (rlperf[tokenizer]).")
]
Figure = Annotated[Path | None, typer.Option(help="Also draw a figure (.svg, .png or .pdf).")]


@app.command()
def show(
    paths: Annotated[list[str], typer.Argument(help="A preset, a model file, or recorded files.")],
    max_response_tokens: Annotated[
        int | None, _in_tokens("Cap to show the truncated share for, as 16384 or 16k.")
    ] = None,
    rl_step: Annotated[int | None, typer.Option(help="Forecast this rl_step (models only).")] = None,
    skip_damaged: Skip = False,
    tokenizer: Tokenizer = None,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """What a preset, a fitted model or a recording holds.

    Example: rlperf workload show math --max-response-tokens 16384
    """
    from rlperf.report import workload as report
    from rlperf.workload.library import PRESETS, load_model

    if len(paths) == 1 and (
        paths[0] in PRESETS or paths[0].endswith((".yaml", ".yml")) or not _looks_like_path(paths[0])
    ):
        model = load_model(paths[0])
        summary: dict[str, Any] = report.model_summary(model, max_response_tokens, rl_step)
        if figure is not None:
            report.draw(figure, model=model)
    else:
        recording = _read(paths, skip_damaged, max_response_tokens, tokenizer)
        summary = report.recording_summary(recording)
        if figure is not None:
            report.draw(figure, recording=recording)
    if as_json:
        print_json(summary)
    else:
        report.print_summary(console(), summary)


def _looks_like_path(text: str) -> bool:
    return "/" in text or "." in text or Path(text).exists()


@app.command()
def fit(
    paths: Paths,
    out: Annotated[Path, typer.Option("--out", "-o", help="Model file to write (.yaml).")],
    task: Annotated[str, typer.Option(help="Name of the task in the model.")] = "",
    like: Annotated[str | None, typer.Option(help="Fit the same laws as this model or preset, new parameters.")] = None,
    max_response_tokens: Cap = None,
    skip_damaged: Skip = False,
    tokenizer: Tokenizer = None,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Fit a length model to recorded rl_steps: the uncensored law, the prompt's effect, drift, turns.

    Example: rlperf workload fit trace/packed_lengths_step_0.jsonl trace/packed_lengths_step_1.jsonl -o model.yaml
    """
    from rlperf.report import workload as report
    from rlperf.workload.fitting import fit_model
    from rlperf.workload.library import load_model, save_model

    recording = _read(paths, skip_damaged, max_response_tokens, tokenizer)
    if recording.distributions:
        model = _from_distributions(recording, task)
    else:
        with progress("fitting"):
            model = fit_model(recording, task=task, like=None if like is None else load_model(like))
    save_model(model, out)
    if figure is not None:
        report.draw(figure, model=model, recording=recording if recording.lengths.n else None)
    summary = report.model_summary(model) | {"file": str(out), "skipped": len(recording.skipped)}
    if as_json:
        print_json(summary)
    else:
        report.print_summary(console(), summary)


def _from_distributions(recording: Recording, task: str) -> LengthModel:
    from rlperf.workload.distributions import models_from_distributions

    if recording.lengths.n:
        raise SpecError("recorded lengths and distribution parameters cannot be fitted together: name one kind of file")
    models: dict[str, LengthModel] = {}
    for content, name in zip(recording.distributions, recording.files, strict=False):
        models |= models_from_distributions(content, f"{Path(name).name}")
    if not task and len(models) > 1:
        raise SpecError(f"the file holds several tasks: choose one with --task ({', '.join(models)})")
    chosen = task or next(iter(models))
    if chosen not in models:
        raise SpecError(f"the file holds no task {chosen!r}; it holds {', '.join(models)}")
    return models[chosen]


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="A preset or a model file.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder (PolyTrace files), or a .json, .csv, .parquet file.")
    ],
    prompts: Annotated[int | None, typer.Option(help="Prompts per rl_step; default: as fitted.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Responses per prompt; default: as fitted.")] = None,
    rl_steps: Annotated[int, typer.Option(help="How many rl_steps.")] = 1,
    first_rl_step: Annotated[int, typer.Option(help="Number of the first rl_step.")] = 0,
    max_prompt_tokens: Annotated[int | None, _in_tokens("Longest prompt.")] = None,
    max_response_tokens: Annotated[int | None, _in_tokens("Cap of a response; default: as recorded.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same sample.")] = 0,
    data_parallel: Annotated[int, typer.Option(help="Replicas that the files describe.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks per replica that the files describe.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Draw rl_steps from a model and write them as PolyTrace files, which PolyTrace's replay reads.

    Example: rlperf workload sample programming -o planned --prompts 64 --max-response-tokens 32768
    """
    from rlperf.report import workload as report
    from rlperf.workload.library import load_model
    from rlperf.workload.records import Recording
    from rlperf.workload.sampling import sample_rl_steps

    if rl_steps < 1:
        raise SpecError(f"--rl-steps must be at least 1, not {rl_steps}")
    law = load_model(model)
    table = sample_rl_steps(
        law,
        range(first_rl_step, first_rl_step + rl_steps),
        law.prompts_per_step if prompts is None else prompts,
        law.group_size if group_size is None else group_size,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=law.max_response_tokens if max_response_tokens is None else max_response_tokens,
        seed=seed,
    )
    written = _write(table, out, data_parallel, tensor_parallel)
    summary = {
        **report.recording_summary(Recording(table)),
        "kind": "sample",
        "provenance": law.provenance.headline(),
        "files": [str(p) for p in written],
    }
    if as_json:
        print_json(summary)
    else:
        report.print_summary(console(), summary)


@app.command()
def fidelity(
    model: Annotated[str, typer.Argument(help="A preset or a model file.")],
    paths: Paths,
    fitted_on: Annotated[
        list[str] | None,
        typer.Option(help="Recorded files that the model was fitted on, to judge their resampling beside it."),
    ] = None,
    replicates: Annotated[int, typer.Option(help="Predictive replicates and bootstrap resamples per rl_step.")] = 200,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    max_response_tokens: Cap = None,
    skip_damaged: Skip = False,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """How faithful a model is to recorded rl_steps, best to others than it was fitted on.

    Statistical: distances and quantiles of every marginal, group maxima, totals. System: simulated rollout time of each
    recorded rl_step against rl_steps sampled from the model, on several layouts.

    Example: rlperf workload fidelity model.yaml trace/packed_lengths_step_2.jsonl
    """
    from rlperf.cli.rollout_layouts import rollouts
    from rlperf.report import workload as report
    from rlperf.workload.fidelity import fidelity as judge
    from rlperf.workload.library import load_model

    law = load_model(model)
    recording = _read(paths, skip_damaged, max_response_tokens)
    before = _read(fitted_on, skip_damaged, max_response_tokens).lengths if fitted_on else None
    with progress("rl_steps") as bar:
        result = judge(
            law,
            recording.lengths,
            rollouts(recording.lengths.multi_turn),
            replicates=replicates,
            seed=seed,
            progress=lambda done, total: bar(done / max(total, 1)),
            fitted_on=before,
        )
    if figure is not None:
        report.draw(figure, model=law, recording=recording)
    if as_json:
        print_json(_fidelity_json(result))
    else:
        report.print_fidelity(console(), result)


def _fidelity_json(result: Fidelity) -> dict[str, Any]:
    from rlperf.workload.fidelity import bias, bias_noise, width_ratio

    maximum = result.group_maximum
    content = asdict(result)
    return {
        "system_bias": result.system_bias,
        "system_bias_noise": result.system_bias_noise,
        "interval_coverage": result.interval_coverage,
        "interval_width_ratio": result.interval_width_ratio,
        "group_max_ratio_error": result.group_max_ratio_error,
        "group_max_ratio_tolerance": None if maximum is None else maximum.tolerance,
        "group_max_ratio": content.pop("group_maximum"),
        "totals_bias": bias(result.totals),
        "totals_coverage": sum(o.inside for o in result.totals) / len(result.totals),
        "totals_width_ratio": width_ratio(result.totals),
        "baseline": _baseline_json(result, content.pop("baseline"), content.pop("baseline_group_max_ratio_error")),
        "layouts": [
            {
                "name": name,
                "bias": bias(part),
                "bias_noise": bias_noise(part),
                "coverage": sum(o.inside for o in part) / len(part),
                "width_ratio": width_ratio(part),
            }
            for name in dict.fromkeys(o.quantity for o in result.system)
            for part in [[o for o in result.system if o.quantity == name]]
        ],
        **content,
        "meaning": "simulated rollouts of recorded against sampled lengths; not a replay on GPUs against measured time",
    }


def _baseline_json(result: Fidelity, outcomes: Any, group_error: float | None) -> dict[str, Any] | None:
    """Resampling of what the model was fitted on, judged as the model is; null where it was not named."""
    from rlperf.workload.fidelity import bias, coverage, width_ratio

    if not result.baseline:
        return None
    return {
        "system_bias": bias(result.baseline),
        "interval_coverage": coverage(result.baseline),
        "interval_width_ratio": width_ratio(result.baseline),
        "group_max_ratio_error": group_error,
        "outcomes": outcomes,
    }


@app.command()
def convert(
    paths: Paths,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A .csv, .parquet or .json file, or a folder (PolyTrace files).")
    ],
    max_response_tokens: Cap = None,
    skip_damaged: Skip = False,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Any readable trace as a plain table, a workload file, or packed-length files.

    Example: rlperf workload convert trace -o lengths.parquet
    """
    recording = _read(paths, skip_damaged, max_response_tokens, tokenizer)
    if not recording.lengths.n:
        raise SpecError("nothing to convert: no lengths were read")
    written = _write(recording.lengths, out, 1, 1)
    summary = {"files": [str(p) for p in written], "rows": recording.lengths.n, "skipped": len(recording.skipped)}
    if as_json:
        print_json(summary)
    else:
        console().print(f"{recording.lengths.n:,} rows -> {', '.join(map(str, written))}", soft_wrap=True)


def _write(table: Any, out: Path, data_parallel: int, tensor_parallel: int) -> list[Path]:
    from rlperf.workload.tables import write_table
    from rlperf.workload.writers import write_polytrace, write_workload

    if out.suffix in (".csv", ".parquet"):
        return [write_table(table, out)]
    if out.suffix == ".json":
        return [write_workload(table, out)]
    if out.suffix:
        raise SpecError(f"{out}: write to a folder, or to a .csv, .parquet or .json file")
    return write_polytrace(table, out, data_parallel=data_parallel, tensor_parallel=tensor_parallel)


def _read(paths: Sequence[str], skip_damaged: bool, cap: int | None, tokenizer: str | None = None) -> Recording:
    """Read with a progress bar; what was skipped is reported on stderr. Dumps of a framework count as recordings."""
    from rlperf.frameworks.logs.dumps import hold_dumps, read_dump
    from rlperf.workload.readers import read_recording
    from rlperf.workload.records import Recording

    if hold_dumps(paths):
        dumped = read_dump(paths, tokenizer=tokenizer, max_response_tokens=cap)
        return Recording(dumped, files=tuple(paths), samples_read=dumped.n)
    with _reading() as advance:
        recording = read_recording(
            [Path(p) for p in paths], skip_damaged=skip_damaged, progress=advance, max_response_tokens=cap
        )
    if recording.skipped:
        screen = console(error=True)
        screen.print(
            f"skipped {len(recording.skipped)} damaged records or groups ({recording.skipped_groups} incomplete prompt"
            f" groups); {recording.samples_read:,} responses read",
            soft_wrap=True,
        )
        for problem in recording.skipped[:20]:
            screen.print(f"  {problem}", soft_wrap=True, markup=False)
        if len(recording.skipped) > 20:
            screen.print(f"  and {len(recording.skipped) - 20} more", soft_wrap=True)
    if recording.empty:
        words = f"nothing is left without what is damaged, {len(recording.skipped):,} records or groups"
        raise SpecError(Problem(words, paths[0], suggestion="what is wrong with each stands above"))
    return recording


@contextmanager
def _reading() -> Iterator[Any]:
    with progress("reading") as bar:
        yield lambda done, total: bar(done / total if total else 0.0)
