"""A sweep's run: refused when it is wrong, resumed after a kill, the same on every backend."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from rlperf.api import asked, sweep_job
from rlperf.errors import SpecError
from rlperf.report.sweep_figures import write_sweep_figures
from rlperf.report.sweep_text import unlike
from rlperf.sweep import Sweep, check_sweep, read_result, read_sweep
from rlperf.sweep.run import run_task, tasks_of
from rlperf.sweep.store import Store, context_digest

JOB: dict[str, Any] = {
    "name": "small", "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "trainer_backends": ["megatron"],
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 8, "group_size": 4,
               "max_prompt_tokens": 1024, "max_response_tokens": 2048}],
}  # fmt: skip
TP = "pools.rollout.layout.tensor_parallel"
GRID = {"tasks.math.prompts_per_step": [8, 16], TP: [1, 2, 4, 8], "nodes": [1, 2, 3]}
FILES = ("results.parquet", "results.csv", "columns.csv")


def write(folder: Path, **fields: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"job": JOB, **fields}, sort_keys=False))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    sweep_job(write(folder, grid=GRID), folder / "out", workers=1)
    return folder / "out"


WRONG = [
    ({"nods": [1]}, "unknown field.*did you mean nodes"),
    ({"pools.rollout.layout.tensor_paralel": [1]}, "unknown field.*did you mean tensor_parallel"),
    ({"tasks.maths.group_size": [4]}, "no entry 'maths'.*did you mean math"),
    ({"nodes": []}, "the axis is empty"),
    ({"nodes": {"min": 4, "max": 2, "step": 1}}, "the range is empty"),
    ({"nodes": {"min": 1, "max": 4}}, "one of step, factor or count"),
    ({"nodes": {"min": 1, "max": 10**9, "step": 1}}, "1,000,000,000 points"),
    ({"nodes": [0, 1]}, "greater than 0"),
    ({"cluster": ["dgx_h100", "dgx_h1000"]}, "dgx_h1000.*did you mean dgx_h100"),
    ({"architecture": ["Qwen3-8C"]}, "Qwen3-8C"),
    ({"tasks.math.workload": ["maths"]}, "maths"),
    ({}, "nothing varies"),
]


@pytest.mark.parametrize(("grid", "message"), WRONG)
def test_a_wrong_sweep_is_refused_before_anything_is_done(grid: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        sweep_job(write(tmp_path, grid=grid), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_problems_come_in_one_message_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, grid={"nods": [1], "tasks.math.group_sise": [2], "seed": [-1]})
    with pytest.raises(SpecError) as error:
        read_sweep(path)
    lines = path.read_text().splitlines()
    assert len(error.value.problems) == 3
    for problem in error.value.problems:
        assert problem.line is not None and problem.message.split(":")[0].split(".")[-1] in lines[problem.line - 1]


def test_a_billion_points_of_several_axes_are_refused_at_once(tmp_path: Path) -> None:
    grid = {"nodes": {"min": 1, "max": 1000, "step": 1}, "seed": {"min": 1, "max": 10**6, "count": 10**6}}
    started = time.perf_counter()
    with pytest.raises(SpecError, match=r"1,000,000,000 points \(1,000 x 1,000,000\)"):
        read_sweep(write(tmp_path, grid=grid))
    assert time.perf_counter() - started < 1.0


def test_a_value_that_only_some_combinations_allow_is_not_refused() -> None:
    grid = {"modes": ["colocated", "async"], "limits.staleness": [0, 2]}
    assert check_sweep(Sweep(job=JOB, grid=grid)).points == 4
    with pytest.raises(SpecError, match=r"async needs limits\.staleness"):
        check_sweep(Sweep(job=JOB, grid={"modes": ["async"]}))


def test_files_and_result_read_back(whole: Path) -> None:
    found = read_result(whole)
    assert found.frame.equals(pl.read_parquet(whole / "results.parquet"))
    table = pl.read_csv(whole / "results.csv", infer_schema_length=None)
    assert table.height == 24 and table.columns == found.frame.columns
    told = pl.read_csv(whole / "columns.csv")["column"].to_list()
    assert told == found.frame.columns
    assert found.to_dict()["rows"][0]["point"] == 0 and json.dumps(found.to_dict())
    assert "24 points" in found._repr_html_()
    assert found.best() == found.frame.sort("rl_step_s").row(0, named=True)


def test_a_result_that_is_negative_is_a_damaged_file(whole: Path, tmp_path: Path) -> None:
    """One bit of a value is enough, and the file reads as before."""
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    frame = pl.read_parquet(folder / "results.parquet")
    frame.with_columns(-pl.col("trained_tokens")).write_parquet(folder / "results.parquet")
    with pytest.raises(SpecError, match=r"trained_tokens: negative, or no finite number .* damaged"):
        _ = read_result(folder).frame


def test_an_unfinished_folder_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with pytest.raises(SpecError, match=r"no finished sweep.*run the sweep to its end"):
        read_result(tmp_path)


def test_what_is_there_is_not_done_again_and_strangers_are_left_out(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = write(tmp_path, grid=GRID)
    checked = read_sweep(path)
    tasks = tasks_of(checked, context_digest(checked))
    assert len(tasks) == 6
    sweep_job(path, out, workers=1)
    parts = {part.name: part.stat().st_mtime_ns for part in (out / "parts").iterdir()}
    assert set(parts) == {f"{task.key}.parquet" for task in tasks}
    (out / "parts" / "0123.parquet").write_bytes((out / "parts" / f"{tasks[0].key}.parquet").read_bytes())
    for name, age_s in ((".old.part", 10_000), (".young.part", 1)):
        (out / "parts" / name).write_bytes(b"cut off")
        os.utime(out / "parts" / name, (time.time() - age_s,) * 2)
    (out / "parts" / f"{tasks[1].key}.parquet").unlink()
    sweep_job(path, out, workers=1)
    after = {part.name: part.stat().st_mtime_ns for part in (out / "parts").iterdir()}
    again = [name for name, when in parts.items() if after[name] != when]
    assert again == [f"{tasks[1].key}.parquet"]
    assert ".old.part" not in after and ".young.part" in after, "another process may still be writing it"
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("damage", ["cut off", "empty", "other rows", "no parquet"])
def test_a_damaged_part_is_made_again(damage: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    parts = sorted((out / "parts").glob("*.parquet"))
    content = parts[0].read_bytes()
    other = parts[1].read_bytes()
    parts[0].write_bytes(
        {"cut off": content[:-20], "empty": b"", "other rows": other, "no parquet": b"x" * 900}[damage]
    )
    sweep_job(write(tmp_path, grid=GRID), out, workers=1)
    assert parts[0].read_bytes() == content
    assert (out / "results.parquet").read_bytes() == (whole / "results.parquet").read_bytes()


def test_another_job_does_not_take_results_of_this_one() -> None:
    first = check_sweep(Sweep(job=JOB, grid=GRID))
    other = check_sweep(Sweep(job={**JOB, "reference": False}, grid=GRID))
    events = check_sweep(Sweep(job=JOB, grid=GRID, method="events"))
    keys = [{task.key for task in tasks_of(each, context_digest(each))} for each in (first, other, events)]
    assert not keys[0] & keys[1] and not keys[0] & keys[2]
    assert keys[0] == {task.key for task in tasks_of(first, context_digest(first))}


def test_a_changed_input_file_changes_the_tasks(tmp_path: Path) -> None:
    from rlperf.workload import load_model
    from rlperf.workload.model import LengthModel

    assert isinstance(load_model("math"), LengthModel)
    shipped = Path(sys.modules["rlperf"].__file__ or "").parent / "workload" / "presets" / "math.yaml"
    (tmp_path / "mine.yaml").write_text(shipped.read_text())
    job = {**JOB, "tasks": [{**JOB["tasks"][0], "workload": "mine.yaml"}]}
    checked = check_sweep(Sweep(job=job, grid=GRID), folder=tmp_path)
    before = context_digest(checked)
    (tmp_path / "mine.yaml").write_text(shipped.read_text() + "# changed\n")
    assert context_digest(checked) != before


def _run(path: str, out: str) -> None:
    sweep_job(path, out, workers=1)


@pytest.mark.slow
def test_killed_at_ten_random_moments_and_resumed_it_is_the_same(whole: Path, tmp_path: Path) -> None:
    path, out = write(tmp_path, grid=GRID), tmp_path / "out"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlperf.api", "rlperf.plan.planner", "rlperf.sweep.run"])
    moments = random.Random(20250601)

    def there() -> int:
        return len(list((out / "parts").glob("*.parquet")))

    seen = []
    for number in range(10):
        before = there()
        child = context.Process(target=_run, args=(str(path), str(out)))
        child.start()
        child.join(moments.uniform(0.02, 0.3))
        while number % 2 and child.is_alive() and there() == before:
            child.join(0.002)  # every other kill comes right after a task, so that some hit the middle of the work
        child.kill()
        child.join()
        seen.append(there())
    assert seen == sorted(seen) and seen[0] < 6 and any(0 < count < 6 for count in seen)
    sweep_job(path, out, workers=1)
    assert contents(out) == contents(whole)


@pytest.mark.slow
def test_two_processes_find_the_same(whole: Path, tmp_path: Path) -> None:
    done: list[float] = []
    sweep_job(write(tmp_path, grid=GRID), tmp_path / "out", workers=2, report=lambda share, _text: done.append(share))
    assert contents(tmp_path / "out") == contents(whole)
    assert done == sorted(done) and done[0] == 0.0 and done[-1] == 1.0 and len(done) == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_a_local_dask_cluster_finds_the_same(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    sweep_job(write(tmp_path, grid=GRID), tmp_path / "out", workers=2, backend="dask")
    assert contents(tmp_path / "out") == contents(whole)


def test_a_backend_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecError, match=r"ray is not installed.*pip install 'rlperf\[ray\]'"):
        sweep_job(write(tmp_path, grid=GRID), tmp_path / "out", backend="ray")


WRONG_BACKENDS: dict[str, dict[str, Any]] = {
    r"backend 'dsk' is none of processes, dask, ray \(did you mean dask\?\)": {"backend": "dsk"},
    "workers must be at least 1": {"workers": 0},
    r"the address tcp://there:1 is read by no processes .* \(backend dask, or ray\)": {"address": "tcp://there:1"},
}


@pytest.mark.parametrize("message", WRONG_BACKENDS)
def test_a_backend_that_is_none_and_an_address_that_nobody_reads_are_refused(message: str) -> None:
    """Another backend was Ray's, no workers one for each core, and a cluster's address passed over."""
    with pytest.raises(SpecError, match=message):
        sweep_job({"job": JOB, "grid": {"nodes": [1]}}, **WRONG_BACKENDS[message])


def test_the_best_by_a_column_that_is_none_is_refused(whole: Path) -> None:
    """A misspelt column was a file that cannot be read."""
    with pytest.raises(SpecError, match=r"no column 'rl_stp_s' \(did you mean rl_step_s\?\)"):
        read_result(whole).best("rl_stp_s")
    with pytest.raises(SpecError, match="column 'status' holds text, of which none is best"):
        read_result(whole).best("status")


def test_the_best_by_throughput_is_the_largest(whole: Path) -> None:
    found = read_result(whole)
    rate = found.frame["tokens_per_s_per_device"]
    best = found.best("tokens_per_s_per_device")
    assert best is not None and best["tokens_per_s_per_device"] == rate.max() > rate.min()


def test_ray_finds_the_same(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    sweep_job(write(tmp_path, grid=GRID), tmp_path / "out", workers=2, backend="ray")
    assert contents(tmp_path / "out") == contents(whole)


def test_one_task_is_a_function_of_its_content() -> None:
    checked = check_sweep(Sweep(job=JOB, grid={"nodes": [1]}))
    task = tasks_of(checked, "x")[0]
    from rlperf.sweep.columns import columns_of

    results = [
        run_task(task, base=checked.base, folder=None, method="screen", ask=asked, columns=columns_of(checked),
                 sweep=name)
        for name in ("a", "b")
    ]  # fmt: skip
    assert results[0] == results[1]


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="a folder is due"):
        Store.open(tmp_path / "file")


def test_cli_sweeps_and_says_what_failed(tmp_path: Path) -> None:
    path = write(tmp_path, grid={TP: [1, 3]})
    command = [
        str(Path(sys.executable).with_name("rlperf")),
        "sweep",
        str(path),
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["counts"] == {"ok": 1, "infeasible": 1} and said["best"][TP] == 1
    assert all((tmp_path / "out" / name).is_file() for name in said["files"])


def test_pools_as_a_whole_may_vary_and_an_axis_of_one_value_makes_no_other_work(tmp_path: Path) -> None:
    """A sweep over ``pools`` ended in a traceback, at its figures; points of one maximum were said to differ in it."""
    adapters = [{"role": "trainer", "settings": {"lora_rank": 8}}]
    grid = {"pools": [[], adapters], "nodes": [1, 2], "tasks.math.max_response_tokens": [1024]}
    found = sweep_job(write(tmp_path, grid=grid), tmp_path / "out", workers=1)
    assert found.counts == {"ok": 4} and unlike(found) is None
    assert write_sweep_figures(found, tmp_path / "out")
    longer = sweep_job(write(tmp_path, grid={"tasks.math.max_response_tokens": [512, 1024]}), workers=1)
    assert (unlike(longer) or "").startswith("points differ in max response tokens")


def test_chunks_put_together_are_the_whole(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlperf.sweep.store.CHUNK", 7)
    found = sweep_job(write(tmp_path, grid=GRID), tmp_path / "out", workers=1)
    assert found.frame.equals(pl.read_parquet(whole / "results.parquet"))
    assert (tmp_path / "out" / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()
    assert not list((tmp_path / "out").rglob("*.part"))
    again = sweep_job(write(tmp_path, grid=GRID), tmp_path / "again", workers=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "out") and again.best() == found.best()


def test_points_that_share_a_cluster_go_at_a_thousand_a_second() -> None:
    trainer = "pools.trainer.layout."
    grid = {
        TP: [1, 2, 4, 8], "pools.rollout.settings.max_running": list(range(16, 272, 16)),
        f"{trainer}tensor_parallel": [1, 2, 4, 8], f"{trainer}context_parallel": [1, 2, 4, 8],
        f"{trainer}zero_stage": [0, 1, 2, 3], f"{trainer}activation_recompute": ["none", "selective", "full"],
    }  # fmt: skip
    sweep_job(Sweep(job=JOB, grid={TP: [1]}), workers=1)  # what is read once is no point's time
    began = time.perf_counter()
    found = sweep_job(Sweep(job=JOB, grid=grid), workers=1)
    assert found.frame.height == 12_288 and found.counts["ok"] > 1000
    assert 12_288 / (time.perf_counter() - began) > 1000.0  # about 15,000 on two idle cores


_PARENT = """
import os, sys, time
from pathlib import Path
from joblib import Parallel, delayed
from rlperf.processes import worked

def busy(number):
    Path(sys.argv[1], f"{os.getpid()}").write_text("")
    time.sleep(60)

if __name__ == "__main__":
    Parallel(n_jobs=2)(delayed(worked)(busy, number, os.getpid()) for number in range(2))
"""


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    script, pids = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(_PARENT)
    pids.mkdir()
    parent = subprocess.Popen([sys.executable, str(script), str(pids)])
    limit = time.monotonic() + 60
    while len(list(pids.iterdir())) < 2 and time.monotonic() < limit:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    workers = [path.name for path in pids.iterdir()]
    assert len(workers) == 2
    while any(Path("/proc", pid).exists() for pid in workers) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path("/proc", pid).exists()]
