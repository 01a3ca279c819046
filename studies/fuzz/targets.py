"""Everything that rlperf reads: the files of a sound input, and what is asked of them, through the public functions and
the command line in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from studies.fuzz import seeds

Ask = Callable[[Path], Any]


class TracebackError(Exception):
    """The command line ended with the exit code of a defect."""


@dataclass(frozen=True)
class Target:
    """``files`` : name -> content of a sound input; ``ask`` : what is asked of the folder they lie in, and comes back
    as plain data; ``mutates`` : the file that is mutated (default: the first); ``weight`` : how often, against others.
    """

    name: str
    files: Mapping[str, Callable[[], bytes]]
    ask: Ask
    mutates: str = ""
    weight: int = 4

    @property
    def file(self) -> str:
        """The file that is mutated."""
        return self.mutates or next(iter(self.files))


def command(*words: str, results: bool = True) -> Ask:
    """A command of the command line; ``{}`` in a word is the folder. Its JSON comes back where it prints one."""

    def ask(folder: Path) -> Any:
        from rlperf.cli.main import DEFECT, run

        out, said = io.StringIO(), io.StringIO()
        before = sys.argv
        sys.argv = ["rlperf", *(word.replace("{}", str(folder)) for word in words)]
        code: Any = 0
        try:
            with redirect_stdout(out), redirect_stderr(said):
                run()
        except SystemExit as stopped:
            code = stopped.code
        finally:
            sys.argv = before
        if code == DEFECT:
            raise TracebackError(said.getvalue())
        if code:
            raise RefusedError(code, said.getvalue())
        return json.loads(out.getvalue()) if results and "--json" in words else None

    return ask


class RefusedError(Exception):
    """The command line refused, with this code and these words."""


def _job(folder: Path) -> Any:
    from rlperf.api import ask

    question = ask(folder / "job.yaml")
    context = question.context
    found = {"devices": context.cluster.devices}
    for task in context.tasks:
        reward_s, _ = task.source.reward_s(0)
        found |= {"reward_s": reward_s}
    return found


def _predicted(file: str) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.api import judge

        return judge(folder / file)[2].row()

    return ask


def _sweep(folder: Path) -> Any:
    from rlperf.sweep import read_sweep

    return {"points": read_sweep(folder / "sweep.yaml").points}


def _result(folder: Path) -> Any:
    from rlperf.sweep import read_result

    found = read_result(folder / "out")
    return {"best": found.best(), "counts": found.counts, "columns": len(found.columns)}


def _device(folder: Path) -> Any:
    from rlperf.specs.hardware import load_hardware

    hardware = load_hardware("mine", folder=folder)
    return {"memory_bytes": hardware.device.memory, "rate": hardware.device.memory_bandwidth}


def _calibration(kind: str) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.specs.calibration import load_device_calibration
        from rlperf.specs.engine_calibration import load_engine_calibration
        from rlperf.specs.rl_calibration import load_framework_calibration
        from rlperf.specs.trainer_calibration import load_trainer

        if kind == "devices":
            return {"n": load_device_calibration("mine", folder=folder).n}
        if kind == "engines":
            return {"budget": load_engine_calibration("vllm", folder=folder).token_budget}
        if kind == "trainers":
            return {"low": load_trainer("mine", folder=folder).low}
        return {"low": load_framework_calibration("verl", "fsdp", folder).step_spread.low}

    return ask


def _architecture(folder: Path) -> Any:
    from rlperf.cost.parameters import parameters
    from rlperf.specs.profiles import load_architecture

    return {"parameters": float(parameters(load_architecture(folder / "config.json")))}


def _recording(file: str) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.workload import read_recording

        found = read_recording(folder / file)
        table = found.lengths
        ends = {name: getattr(table, name) for name in ("prompt_tokens", "response_tokens", "cached_tokens")}
        return {name: [int(v.min()), int(v.max())] for name, v in ends.items() if v is not None and v.size} | {
            "rewards_s": [one.reward_time_s for one in found.rewards],
            "latency_s": [one.latency_s for one in found.tool_latencies],
        }

    return ask


def _fitted(folder: Path) -> Any:
    from rlperf.workload import read_recording
    from rlperf.workload.fitting import fit_model

    law = fit_model(read_recording(folder / "packed_lengths_step_0.jsonl")).laws()[1]
    return {"mean_tokens": law.mean(4096.0)}


def _length_model(folder: Path) -> Any:
    from rlperf.workload import load_model
    from rlperf.workload.sampling import sample_lengths

    table = sample_lengths(load_model(folder / "model.yaml"), 8, 4, max_response_tokens=1024, seed=0)
    return {"tokens": [int(table.response_tokens.min()), int(table.response_tokens.max())]}


def _explained(file: str) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.explaining import explain

        found = explain([folder / file]).causes
        return {"rl_step_s": found.rl_step_s, "critical_s": dict(found.critical_s),
                "losses": [{"loss_s": cause.loss_s} for cause in found.causes]}  # fmt: skip

    return ask


def _log(file: str) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.frameworks.logs.read import read_log

        return {f"{stage}_s": seconds for stage, seconds in read_log([folder / file]).stage_means().items()}

    return ask


def _dump(folder: Path) -> Any:
    from rlperf.frameworks.logs.dumps import read_dump

    table = read_dump([folder / "dump.jsonl"])
    return {"tokens": [int(table.prompt_tokens.min()), int(table.response_tokens.min())]}


def _table(kind: str) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.calibrate.validate import validate_paths

        report = validate_paths([folder / "rows.csv"], kind)
        return [{"measured": abs(p.measured), "predicted_s": p.predicted, "low_s": p.low, "high_s": p.high}
                for p in report.predictions]  # fmt: skip

    return ask


def _series(file: str) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.calibrate.kernel_tables import read_series

        return [{"seconds_s": one.measured_s.tolist()} for one in read_series(folder / file)]

    return ask


def _requests(folder: Path) -> Any:
    from rlperf.calibrate.validate import validate_paths

    report = validate_paths([folder], "request_log")
    return [{"predicted_s": p.predicted} for p in report.predictions]


def _engine_traces(folder: Path) -> Any:
    from rlperf.calibrate.requests.engine_trace import read_engine_traces

    return [
        {"latency_s": t.latency_s.tolist()} for t in read_engine_traces([folder / "multiturn_workload_step_0.jsonl"])
    ]


def _imported(file: str, *, predict: bool = False) -> Ask:
    def ask(folder: Path) -> Any:
        from rlperf.frameworks.audit.answer import report
        from rlperf.frameworks.audit.audit import audit
        from rlperf.frameworks.imports import describe, import_config, job_of, job_text

        imported = import_config([folder / file])
        describe(imported)
        job_text(job_of(imported, cluster="dgx_h100", workload="math", name="x"))
        found = audit(imported, cluster="dgx_h100", workload="math", plan=False, predict=predict)
        report(found)
        return found.predicted.row() if found.predicted else None

    return ask


def _pipeline(folder: Path) -> Any:
    from rlperf.plan.pipeline import PipelineProblem, optimize
    from rlperf.sim.pipeline import MicrobatchSizes
    from rlperf.specs.pipeline_profile import read_profile

    problem = PipelineProblem(
        profile=read_profile(folder / "layers.yaml"), microbatches=MicrobatchSizes.equal(3), devices=2,
        memory_bytes=np.full(2, 80e9),
    )  # fmt: skip
    plan = optimize(problem, time_limit_s=0.2)
    return {"makespan_s": plan.makespan_s, "bound_s": plan.bound_s}


def _pieces(folder: Path) -> Any:
    """Short texts: quantities, targets, ranges, choices, axes: one a line."""
    from pydantic import TypeAdapter

    from rlperf.plan.size_target import parse_target
    from rlperf.specs.choice import Counts, Fractions
    from rlperf.sweep.axes import axis_values
    from rlperf.units import parse_quantity

    found: list[dict[str, Any]] = []
    for line in (folder / "pieces.txt").read_text(encoding="utf-8", errors="replace").split("\n"):
        kind, _, rest = line.partition(" ")
        try:
            value: Any = json.loads(rest) if rest[:1] in "[{" and rest else rest
        except (ValueError, RecursionError):
            value = rest
        try:
            if kind == "quantity":
                found.append({"value_s": parse_quantity(value, "s")})
            elif kind == "target":
                found.append({"limit_s": parse_target(rest).limit})
            elif kind == "counts":
                found.append({"tokens": list(TypeAdapter(Counts).validate_python(value))})
            elif kind == "fractions":
                found.append({"tokens": list(TypeAdapter(Fractions).validate_python(value))})
            elif kind == "axis":
                found.append({"first": len(axis_values(value))})
        except ValueError:
            continue
    return found


PIECES = """\
quantity 15 s
quantity 2.5 min
target step<=300s
target usd/step<=5
counts [8, 16]
counts {"min": 8, "max": 64, "factor": 2}
fractions [0.5, 0.9]
axis {"min": 1, "max": 64, "factor": 2}
axis {"min": 0.1, "max": 0.9, "count": 5}
"""


def targets() -> tuple[Target, ...]:
    """All of them."""
    t = seeds.text
    job, small = {"job.yaml": t(seeds.JOB)}, seeds.JOB.replace("nodes: 1", "nodes: 2")
    mine = {"job.yaml": t(seeds.JOB.replace("cluster: dgx_h100", "cluster: generic:mine"))}
    devices = {"devices/mine.yaml": _device_file}
    packed = {"packed_lengths_step_0.jsonl": lambda: seeds.PACKED}
    turns = {"multiturn_workload_step_0.jsonl": lambda: seeds.TURNS}
    config = {"config.json": t(json.dumps(seeds.CONFIG, indent=1))}
    own = {"job.yaml": t(seeds.JOB.replace("Qwen3-0.6B", "./config.json"))}
    trace = {"job.yaml": t(seeds.JOB.replace("workload: math", "workload: packed_lengths_step_0.jsonl"))}
    swept = {name: lambda name=name: seeds.swept()[name] for name in ("out/results.parquet", "out/sweep.json")}
    calibration: dict[str, dict[str, Callable[[], bytes]]] = {
        "devices": {"calibrations/devices/mine.yaml": lambda: seeds.profile("calibrations/devices", "h100_sxm")},
        "engines": {"calibrations/engines/vllm.yaml": lambda: seeds.profile("calibrations/engines", "vllm")},
        "trainers": {"calibrations/trainers/mine.yaml": _trainer_file},
        "frameworks": {
            "calibrations/frameworks/verl_fsdp.yaml": lambda: seeds.profile("calibrations/frameworks", "verl_fsdp")
        },
    }
    log = {"run.log": t(seeds.VERL_LOG + seeds.OTHER_LOGS)}
    request = {"meta.json": t(json.dumps(seeds.META, indent=1)), "requests.jsonl": lambda: seeds.REQUESTS}
    frameworks = {
        "verl.yaml": seeds.VERL, "verl.sh": seeds.VERL_SCRIPT, "nemo.yaml": seeds.NEMO, "slime.sh": seeds.SLIME,
        "miles.sh": seeds.MILES,
        "openrlhf.sh": seeds.OPENRLHF, "areal.yaml": seeds.AREAL, "trl.yaml": seeds.TRL,
        "skyrl.sh": seeds.SKYRL, "rlinf.yaml": seeds.RLINF,
    }  # fmt: skip
    return (
        Target("job", job, _job, weight=12),
        Target("job predicted", job, _predicted("job.yaml"), weight=2),
        Target("rlperf predict", {"job.yaml": t(small)}, command("predict", "{}/job.yaml", "--json"), weight=1),
        Target("rlperf plan", job, command("plan", "{}/job.yaml", "--out", "{}/plan", results=False), weight=1),
        Target("rlperf simulate", job, command("simulate", "{}/job.yaml", "--out", "{}/s", "--json"), weight=1),
        Target("rlperf export", {"job.yaml": _pinned}, command("export", "{}/job.yaml", "--out", "{}/e"), weight=1),
        Target("sweep", {"sweep.yaml": t(seeds.SWEEP)}, _sweep, weight=6),
        Target("rlperf sweep", {"sweep.yaml": t(seeds.SWEEP)},
               command("sweep", "{}/sweep.yaml", "--out", "{}/o", "--workers", "1", "--no-figures", "--json"),
               weight=1),
        Target("sweep's result", swept, _result),
        Target("sweep's spec", swept, _result, "out/sweep.json"),
        Target("rlperf report", {**swept}, command("report", "{}/out"), "out/sweep.json", weight=1),
        Target("plan predicted", {"plan.yaml": seeds.planned}, _predicted("plan.yaml"), weight=2),
        Target("rlperf export of a plan", {"plan.yaml": seeds.planned},
               command("export", "{}/plan.yaml", "--out", "{}/e"), weight=1),
        Target("rlperf report of a plan", {"plan.yaml": seeds.planned}, command("report", "{}/plan.yaml"), weight=1),
        Target("device", devices, _device),
        Target("device predicted", {**devices, **mine}, _predicted("job.yaml"), weight=1),
        Target("link", {"links/mine.yaml": lambda: seeds.profile("links", "ib_ndr").replace(b"ib_ndr", b"mine"),
                        "clusters/c.yaml": lambda: _cluster(b"network: mine"),
                        "job.yaml": t(small.replace("dgx_h100", "c"))}, _predicted("job.yaml"), weight=1),
        Target("cluster", {"clusters/c.yaml": lambda: _cluster(b"network: ib_ndr"),
                           "job.yaml": t(small.replace("dgx_h100", "c"))}, _predicted("job.yaml"), weight=2),
        *(Target(f"calibration of {kind}", files, _calibration(kind), weight=2)
          for kind, files in calibration.items()),
        Target("calibration predicted", {**calibration["devices"], **devices, **mine}, _predicted("job.yaml"),
               weight=1),
        Target("engine predicted", {**calibration["engines"], **job}, _predicted("job.yaml"), weight=1),
        Target("config.json", config, _architecture, weight=8),
        Target("config.json of a vision model", {"config.json": t(json.dumps(seeds.VISION, indent=1))}, _architecture),
        Target("config.json predicted", {**config, **own}, _predicted("job.yaml"), weight=2),
        Target("packed lengths", packed, _recording("packed_lengths_step_0.jsonl"), weight=6),
        Target("packed lengths predicted", {**packed, **trace}, _predicted("job.yaml"), weight=1),
        Target("packed lengths fitted", packed, _fitted, weight=1),
        Target("turns", turns, _recording("multiturn_workload_step_0.jsonl"), weight=6),
        Target("turns explained", turns, _explained("multiturn_workload_step_0.jsonl")),
        Target("turns of an engine", turns, _engine_traces),
        Target("rewards", {"rewards.jsonl": lambda: seeds.REWARDS}, _recording("rewards.jsonl")),
        Target("tools", {"tools.log": lambda: seeds.TOOLS}, _recording("tools.log")),
        Target("workload file", {"lengths.json": t(seeds.WORKLOAD)}, _recording("lengths.json")),
        Target("lengths as CSV", {"lengths.csv": t(seeds.LENGTHS)}, _recording("lengths.csv")),
        Target("lengths as Parquet", {"lengths.parquet": seeds.parquet}, _recording("lengths.parquet")),
        Target("archive", {"trace.tar.gz": seeds.archive}, _recording("trace.tar.gz")),
        Target("compressed", {"trace.jsonl.gz": seeds.gzipped}, _recording("trace.jsonl.gz")),
        Target("length model", {"model.yaml": seeds.length_model}, _length_model),
        Target("rlperf workload", {"model.yaml": seeds.length_model},
               command("workload", "show", "{}/model.yaml", "--json"), weight=1),
        *(Target(f"table of {kind}", {"rows.csv": t(rows)}, _table(kind)) for kind, rows in seeds.TABLES.items()),
        Target("kernels", {"kernels.csv": t(seeds.KERNELS)}, _series("kernels.csv")),
        Target("nccl-tests", {"nccl.txt": t(seeds.NCCL)}, _series("nccl.txt")),
        Target("request log", request, _requests, "requests.jsonl", weight=2),
        Target("request log's settings", request, _requests, "meta.json", weight=2),
        Target("rank timings", {"ranks.jsonl": lambda: seeds.RANKS}, _explained("ranks.jsonl")),
        Target("console log", log, _log("run.log")),
        Target("console log explained", log, _explained("run.log"), weight=2),
        Target("log as CSV", {"steps.csv": t(seeds.STEP_CSV)}, _log("steps.csv")),
        Target("log as JSON", {"state.json": t(seeds.STEP_JSON)}, _log("state.json")),
        Target("event file", {"events.out.tfevents.1": seeds.event_file}, _log("events.out.tfevents.1"), weight=6),
        *(Target(f"dump of {name}", {"dump.jsonl": lambda content=content: content}, _dump)
          for name, content in (("AReaL", seeds.DUMP), ("NeMo-RL", seeds.NEMO_DUMP))),
        *(Target(f"import of {file}", {file: t(content)}, _imported(file)) for file, content in frameworks.items()),
        *(Target(f"audit of {file}", {file: t(content)}, _imported(file, predict=True), weight=1)
          for file, content in frameworks.items()),
        Target("pipeline profile", {"layers.yaml": t(seeds.PIPELINE)}, _pipeline, weight=1),
        Target("pieces", {"pieces.txt": t(PIECES)}, _pieces, weight=8),
    )  # fmt: skip


def _device_file() -> bytes:
    content = seeds.profile("devices", "h100_sxm").replace(b"name: h100_sxm", b"name: mine", 1)
    return content.replace(b"aliases:", b"# aliases:", 1)


def _trainer_file() -> bytes:
    return seeds.profile("calibrations/trainers", "fsdp2").replace(b"id: fsdp2", b"id: mine", 1)


def _pinned() -> bytes:
    opened = (
        ("mini_batch: [8, 16]", "mini_batch: 8"),
        ("[1, 2]", "1"),
        ("[none, full]", "full"),
        ("role: trainer\n", "role: trainer\n    devices: 8\n"),
    )
    text = seeds.JOB
    for before, after in opened:
        text = text.replace(before, after)
    return text.encode()


def _cluster(network: bytes) -> bytes:
    content = seeds.profile("clusters", "dgx_h100").replace(b"name: dgx_h100", b"name: c", 1)
    lines = [network if line.startswith(b"network:") else line for line in content.split(b"\n")]
    return b"\n".join(lines)


def plain(value: Any) -> Any:
    """An answer as dicts, lists and numbers."""
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
