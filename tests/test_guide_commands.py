"""Commands on lines of their own, and Python, of README and all pages but tutorials run as written, on small files.

What asks, serves, needs a device or takes minutes is named with the test that runs it instead.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlperf
from rlperf.calibrate.serving.rows import CostTable, case_of, serve
from rlperf.calibrate.tables import read_table
from rlperf.cli.main import app
from rlperf.sweep import Sweep
from rlperf.workload import LengthTable, load_model
from rlperf.workload.sampling import sample_rl_steps
from rlperf.workload.writers import write_polytrace
from tests.recipes import recipe

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
"""Whose pages run block by block in `test_docs.py`, as does README's Python."""
PAGES = (ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != TUTORIALS))
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""Blocks without a title; those with one are files of a recipe, which its own test takes."""
LINE = re.compile(r"^(?: {4})?(rlperf .*)$", re.MULTILINE)

ELSEWHERE = {
    "rlperf init": "test_without_a_file.py",
    "rlperf ui": "test_ui.py",
    "rlperf plan job.yaml --what-if all": "test_docs.py",
    "rlperf calibrate measure": "test_measure.py",
    "rlperf calibrate serving": "test_pooling.py",
    "rlperf calibrate device": "test_served_devices.py",
    "rlperf sweep sweep.yaml --out DIR --backend": "test_sweep_run.py",
    "rlperf validate measured/": "test_leave_out_inference.py",
    "rlperf validate served.csv --kind inference --leave-out": "test_leave_out_inference.py",
}
"""How commands begin that are not run here: they ask, serve, need devices or a cluster, or fit for minutes."""

BOUNDED = {
    "rlperf size ": ("--most-nodes", "1"),
    "rlperf plan --model ": ("--prompts", "32", "--max-response", "2k"),
}
"""What is said to commands, as they begin, that else plan a dozen clusters, or whole batches of long responses."""

LONG = ("workloads", "audit", "calibrate")
"""Pages whose commands take seconds together."""

JUDGES = re.compile("rlperf (audit|verdict) ")
"""Commands whose exit code says whether what they were given is good."""

FEW = "pools: [{role: trainer, layout: {tensor_parallel: [1, 2], context_parallel: 1, pipeline_parallel: 1}}]\n"
"""What a job of the pages leaves less open than the tutorial's, whose own test plans it as it stands."""
STEP = (
    "(TaskRunner pid=1) step:{n} - response_length/mean:973.0 - timing_s/gen:{gen} - timing_s/old_log_prob:12.0 - "
    "timing_s/update_actor:48.4 - timing_s/update_weights:3.0 - timing_s/step:{step}\n"
)


def commands(page: Path) -> list[str]:
    """Commands of a page in their order, without comments."""
    lines = (match[1] for match in LINE.finditer(page.read_text().replace("\\\n", " ")))
    return list(dict.fromkeys(" ".join(line.split()).partition(" #")[0] for line in lines))


def elsewhere(line: str) -> bool:
    return any(line.startswith(begin) for begin in ELSEWHERE)


def script() -> str:
    """The tutorial's configuration as verl's command line, of responses that are simulated at once."""
    return (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "data.train_batch_size=64 data.max_prompt_length=1024 data.max_response_length=2048 "
        "actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.nnodes=1\n"
    )


def write_table(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def served(path: Path) -> None:
    """Rows of an engine that takes 5 % longer than predicted."""
    rows: list[dict[str, object]] = [
        {"row_id": f"r{tensor}_{load}", "engine": "vllm", "architecture": "Llama-3.1-8B",
         "gpu": "h100_sxm", "n_gpus": tensor, "tensor_parallel": tensor, "gemm_dtype": "bf16",
         "mode": "online_concurrency", "isl": 1000, "osl": 500, "concurrency": load, "measured_tpot_ms": 1.0}
        for tensor in (1, 2, 4, 8) for load in (1, 8, 32, 64)
    ]  # fmt: skip
    write_table(path, rows)
    costs = CostTable()
    for row, line in zip(rows, read_table(path), strict=True):
        row["measured_tpot_ms"] = 1.05e3 * float(serve(case_of(line), costs).tpot_s)
    write_table(path, rows)


def kernels(path: Path) -> None:
    """Products at half of the data sheet's bandwidth and peak."""
    rows: list[dict[str, object]] = [
        {"gpu": "h100_sxm", "dtype": "bfloat16", "m": m, "n": n, "k": k,
         "latency_us": 2.0 * (1.0 + max(2.0 * m * n * k / 989e6, 2.0 * (m * n + n * k + m * k) / 3.35e6))}
        for m in (1, 64, 1024, 8192) for n in (1024, 4096, 8192) for k in (1024, 4096)
    ]  # fmt: skip
    write_table(path, rows)


def ranks(path: Path) -> None:
    """Seconds of four ranks, one of them slow."""
    lines = [{"rl_step": 0, "stage": "rollout", "rank": rank, "seconds": 10.0, "tokens": 5000} for rank in range(4)]
    lines += [{"rl_step": 0, "stage": "training", "rank": rank, "seconds": 3.0 + rank, "tokens": 2000}
              for rank in range(4)]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def recorded() -> LengthTable:
    return sample_rl_steps(load_model("programming"), [0, 1, 9], 24, 4, max_response_tokens=16000, seed=1)


@pytest.fixture(scope="module")
def made_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file of a job that is planned at once."""
    job = tmp_path_factory.mktemp("planned") / "job.yaml"
    job.write_text(recipe("pinned.yaml", "tutorials/first-run.md"))
    shown = CliRunner().invoke(app, ["plan", str(job), "--out", str(job.parent / "plan")])
    assert shown.exit_code == 0, shown.output
    return job.parent / "plan" / "plan.yaml"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: LengthTable) -> Path:
    """A folder with every file that the pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    config = recipe("grpo.yaml", "tutorials/audit.md").replace("gpu_memory_utilisation", "gpu_memory_utilization")
    config = config.replace("max_response_length: 8192", "max_response_length: 2048")
    job = recipe("job.yaml", "tutorials/first-run.md")
    Path("job.yaml").write_text(re.sub(r"(max_response_tokens: ).*", r"\g<1>2048", job) + FEW)
    for name in ("run_grpo.yaml", "config.yaml"):
        Path(name).write_text(config)
    for name in ("run_grpo.sh", "launch.sh", "run.sh"):
        Path(name).write_text(script())
    for name, share in (("console.log", 1.0), ("run.log", 1.0), ("run64.log", 1.0), ("run128.log", 0.7)):
        Path(name).write_text("".join(STEP.format(n=n, gen=80 * share, step=150 * share) for n in range(1, 5)))
    Path("measured.csv").write_text(recipe("measured.csv", "tutorials/validate-calibrate.md"))
    Path("curves.csv").write_text(
        "model,gpu,n_gpus,engine,method,k,acceptance_length,sampling,concurrency,metric,with_spec,speedup,kind\n"
        + "".join(f"Qwen3-{size}B,h100_sxm,1,vLLM,EAGLE-3,3,2.{size},,4,acceptance only,,,acceptance\n"
                  for size in (4, 8, 14, 32))
    )  # fmt: skip
    for folder in ("traces", "trace", "held-out", "rollouts", "timings"):
        Path(folder).mkdir()
    Path("rollouts/1.jsonl").write_text('{"prompt_tokens": 200, "response_tokens": 1000}\n' * 512)
    for folder in ("traces", "trace", "held-out"):
        write_polytrace(recorded, Path(folder))
    kernels(Path("gemm.csv"))
    kernels(Path("timings/gemm.csv"))
    ranks(Path("ranks.jsonl"))
    return tmp_path


def words_of(line: str) -> list[str]:
    """A command's words, with names of files as a shell finds them."""
    words = [word.replace("~", os.environ["HOME"], 1) if word.startswith("~") else word for word in shlex.split(line)]
    return [name for word in words[1:] for name in (map(str, Path().glob(word)) if "*" in word else [word])]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.stem in LONG else ()) for page in PAGES if commands(page)],
    ids=lambda page: page.stem,
)
def test_commands_of_a_page_run_as_written(page: Path, desk: Path, made_plan: Path) -> None:
    lines = [line for line in commands(page) if not elsewhere(line)]
    if any("served.csv" in line for line in lines):
        served(Path("served.csv"))
    if any("plan.yaml" in line for line in lines):
        Path("plan.yaml").write_text(made_plan.read_text())
    for line in lines:
        if line.startswith("rlperf import"):
            Path("job.yaml").unlink()  # a file that is there is not written over
        bounds = [word for begin, more in BOUNDED.items() if line.startswith(begin) for word in more]
        shown = CliRunner().invoke(app, [*words_of(line), *bounds])
        assert isinstance(shown.exception, SystemExit | None), f"{line}: {shown.exception}"
        assert shown.exit_code == 0 or JUDGES.match(line), f"{line}: {shown.output}"


@pytest.mark.parametrize("page", [p for p in PAGES[1:] if PYTHON.search(p.read_text())], ids=lambda page: page.stem)
def test_python_of_a_page_runs_as_written(page: Path, desk: Path) -> None:
    text = page.read_text()
    if '"DIR"' in text:
        rlperf.sweep_job(Sweep(name="small", job="job.yaml", grid={"nodes": [1, 2]}), "DIR", workers=1)
    Path("my-model").mkdir()
    shutil.copy(ROOT / "rlperf" / "specs" / "architectures" / "Qwen2.5-7B.json", "my-model/config.json")
    names: dict[str, object] = {}
    for block in PYTHON.findall(text):
        exec(compile(block, page.name, "exec"), names)


def test_commands_run_elsewhere_are_still_on_a_page() -> None:
    written = [line for page in PAGES for line in commands(page)]
    for begin, test in ELSEWHERE.items():
        assert any(line.startswith(begin) for line in written), begin
        assert (ROOT / "tests" / test).exists()
