"""The recipes of docs/contributing.md work as they stand: each thing is registered in the one place that it names."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from rlperf.api import ask, plan_job, predict_job
from rlperf.errors import SpecError

from .recipes import ROOT, copied_package, page, recipe, run_in

JOB = {
    "name": "small", "architecture": "Qwen3-0.6B", "nodes": 1, "modes": ["colocated"], "cluster": "dgx_h100",
    "limits": {"truncated_fraction": 1.0},
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 256, "group_size": 4, "mini_batch": 64,
               "max_prompt_tokens": 512, "max_response_tokens": 1024}],
}  # fmt: skip


def saved(job: dict[str, object], folder: Path) -> Path:
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def test_every_recipe_names_one_place_and_a_test_that_exists() -> None:
    rows = re.findall(r"^\| \[(an? [\w ]+)\]\(#([\w-]+)\) \| (`[^|]+) \| `tests/([\w.]+)::(\w+)` \|$", page(), re.M)
    assert [row[0] for row in rows] == [
        "a GPU", "a framework", "a layer kind", "an execution mode", "a trainer backend", "an objective",
    ]  # fmt: skip
    headings = [heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", page(), re.M)]
    assert headings == [anchor for _, anchor, *_ in rows]
    for _, _, place, file, test in rows:
        folders = re.findall(r"`((?:rlperf|hwprofiles)/[\w/]*)", place)
        assert len(folders) == 1 and (ROOT / folders[0]).parent.is_dir(), place
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), test


@pytest.mark.slow
def test_a_gpu_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "half_h100.yaml").write_text(recipe("devices/half_h100.yaml"))
    plan = plan_job(saved({**JOB, "cluster": "generic:half_h100"}, tmp_path))
    whole = plan_job(saved({**JOB, "cluster": "generic:h100_sxm"}, tmp_path))
    predicted, twice = plan.phases[0].predicted, whole.phases[0].predicted
    assert 1.1 < predicted.stages_s.rollout / twice.stages_s.rollout < 2.5
    assert 1.2 < predicted.stages_s.training / twice.stages_s.training < 2.5
    assert predicted.high_s / predicted.low_s > 1.1 * twice.high_s / twice.low_s
    assert predicted.calibration.extrapolated and any("of h100_sxm" in note for note in predicted.calibration.notes)


def test_a_gpu_s_file_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    file = tmp_path / "devices" / "half_h100.yaml"
    file.write_text("# a GPU\n" + recipe("devices/half_h100.yaml").replace("name: half_h100", "name: pigeon"))
    with pytest.raises(SpecError, match=r"half_h100\.yaml:2: name: 'pigeon' .*rename the file to pigeon\.yaml") as told:
        plan_job(saved({**JOB, "cluster": "generic:half_h100"}, tmp_path))
    assert "or write `name: half_h100`" in str(told.value)


def test_a_cluster_s_file_has_its_name(tmp_path: Path) -> None:
    """Asked for by its file's name, it was "there is no cluster named pigeon", which is what stands in it."""
    (tmp_path / "clusters").mkdir()
    file = tmp_path / "clusters" / "ours.yaml"
    stated = {"device": "h100", "devices_per_node": 8, "network": "ib_ndr", "host_memory": "2 TiB"}
    file.write_text(yaml.safe_dump({"name": "pigeon", **stated}))
    with pytest.raises(SpecError, match=r"ours\.yaml:\d: name: 'pigeon' .*rename the file to pigeon\.yaml"):
        ask(saved({**JOB, "cluster": "ours"}, tmp_path))
    assert ask(saved({**JOB, "cluster": "clusters/ours.yaml"}, tmp_path)).context.cluster.name == "pigeon"


@pytest.mark.parametrize(
    ("stated", "written", "says"),
    [
        ("relative: h100_sxm", "relative: h1000", r"half_h100\.yaml:14: relative: there is no device named 'h1000'"),
        ("network: ib_ndr", "network: ib_400", r"half_h100\.yaml:13: network: there is no link named 'ib_400'"),
        ("1.67 TB/s", "1670 TB/s", r"half_h100\.yaml:7: memory_bandwidth: .*100 TB/s\): is its unit right\?"),
        ("memory: 40 GiB", "memory: 40 MiB", r"half_h100\.yaml:6: memory: .*\(4 GB to 4 TB\): is its unit right\?"),
        ("494.7 TFLOP/s", "494.7 PFLOP/s", r"half_h100\.yaml:5: peaks\.bf16: .*is its unit right\?"),
    ],
)
def test_a_gpu_s_mistakes_are_told_where_they_stand(stated: str, written: str, says: str, tmp_path: Path) -> None:
    """Names were told without their file, and a thousandfold bandwidth was planned with."""
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "half_h100.yaml").write_text(recipe("devices/half_h100.yaml").replace(stated, written))
    with pytest.raises(SpecError, match=says):
        ask(saved({**JOB, "cluster": "generic:half_h100"}, tmp_path))


def test_what_a_gpu_s_file_leaves_to_others(tmp_path: Path) -> None:
    """`vendor: Nvidia` was nobody has code for; a network that nobody named was one port, unsaid."""
    (tmp_path / "devices").mkdir()
    sheet = recipe("devices/half_h100.yaml").replace("vendor: NVIDIA", "vendor: Nvidia").replace("network: ib_ndr", "")
    (tmp_path / "devices" / "half_h100.yaml").write_text(sheet)
    job = {**JOB, "cluster": "generic:half_h100", "framework": "verl"}
    assert not ask(saved(job, tmp_path)).context.warned
    said = "generic:half_h100: its device names no network: one port of roce_100 a node"
    assert said not in predict_job(saved(job, tmp_path)).assumed
    assert said in predict_job(saved({**job, "nodes": 2}, tmp_path)).assumed


TRIED = """
import dataclasses
import sys
from pathlib import Path
from rlperf.api import plan_job
from rlperf.errors import InfeasibleError, SpecError
from rlperf.frameworks.adapter import checked
from rlperf.frameworks.export import losses, write_plan
from rlperf.frameworks.fields import field
from rlperf.frameworks.imports import import_config
from rlperf.frameworks.keyless import degrees
from rlperf.specs.pool import LayoutChoice, PoolSpec

folder = Path(sys.argv[1])
plan = plan_job(folder / "job.yaml")
phase, trainer = plan.phases[0], plan.phases[0].pool("trainer")
assert phase.predicted.calibration.ids[-1] == "mine (with overheads of verl_fsdp)", phase.predicted.calibration.ids
write_plan(plan, "mine", folder)
written = sorted(path.name for path in folder.glob("*.yaml") if path.name != "job.yaml")
assert len(written) == 1, written
found = import_config([folder / written[0]])
assert found.adapter.name == "mine" and not found.unknown, (found.adapter.name, found.unknown)
run = found.run
assert (run.batch.prompts, run.batch.group_size, run.batch.mini) == (256, 4, 64)
assert run.trainer.devices == trainer.devices == 8
assert run.trainer.token_budget == trainer.settings.token_budget
assert run.rollout.tensor_parallel == phase.pool("rollout").layout.tensor_parallel
for role in ("trainer", "rollout"):  # what is planned is what the file says, degree by degree
    planned, read = phase.pool(role).layout, getattr(run, role)
    for at in degrees():
        if at.group == role:
            assert getattr(read, at.name) == getattr(planned, at.name), (str(at), planned)
said = (folder / "EXPORT.md").read_text()
assert "rollout.max_running = " in said and "trainer.zero_stage" not in said, said
assert any("rollout.max_running" in line for line in losses(plan, "mine"))
for pinned in ({"ulysses": (4,)}, {"zero_stage": (2,)}):
    pools = (PoolSpec(role="trainer", layout=LayoutChoice(**pinned)),)
    try:
        plan_job(plan.job.model_copy(update={"pools": pools}))
    except InfeasibleError as error:
        assert f"no key of mine 1.0 states trainer.{next(iter(pinned))}" in str(error), error
    else:
        raise AssertionError(f"{pinned} has no key")
wrong = field("trainer.tensor_parallel", "learn.tp")
try:
    checked(dataclasses.replace(found.adapter, fields=(*found.adapter.fields, wrong)))
except LookupError as error:
    assert "learn.tp (trainer.tensor_parallel)" in str(error), error
else:
    raise AssertionError("learn.tp is no key")
try:
    plan_job(plan.job, modes=("async",), limits={"staleness": 1})
except SpecError as error:
    assert "mine 1.0 has no mode async" in str(error), error
else:
    raise AssertionError("a mode that it has not")
"""


@pytest.mark.slow
def test_a_framework_is_three_files_of_one_folder(tmp_path: Path) -> None:
    """In a copy of the package with the three files added, and nothing else changed."""
    package = copied_package(tmp_path)
    for name in ("mine.py", "facts/mine.yaml", "facts/mine.tsv"):
        (package / "frameworks" / name).write_text(recipe(name))
    (tmp_path / "run").mkdir()
    saved({**JOB, "framework": "mine"}, tmp_path / "run")
    run_in(tmp_path, "-c", TRIED, str(tmp_path / "run"))


@pytest.mark.slow
def test_a_framework_leaves_the_tests_green(tmp_path: Path) -> None:
    """The recipe's files, commands and line, in a copy: what the repository tests of frameworks and pages holds."""
    package = copied_package(tmp_path, "tests", "docs", "README.md", "pyproject.toml")
    for name in ("mine.py", "facts/mine.yaml", "facts/mine.tsv"):
        (package / "frameworks" / name).write_text(recipe(name))
    for command in recipe("written anew").splitlines():
        run_in(tmp_path, *command.removeprefix("python ").split())
    nav = tmp_path / "docs" / "website" / "mkdocs.yml"
    beside = "          - verl: reference/frameworks/verl.md\n"
    assert beside in nav.read_text()
    nav.write_text(nav.read_text().replace(beside, beside + recipe("mkdocs.yml")))
    tests = [*(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").glob("test_frameworks_*.py")))]
    run_in(
        tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not data",
        *tests, "tests/test_docs.py", "tests/test_trainer_backends.py",
        "-k", "mine or critic or reference or every_page or links or names_a_key",
    )  # fmt: skip


@pytest.mark.slow
def test_a_row_of_modes_leaves_the_tests_green(tmp_path: Path) -> None:
    """The recipe's row before all others, in a copy: what the repository tests and prints of modes still holds."""
    package = copied_package(tmp_path, "tests", "docs", "pyproject.toml")
    table = package / "specs" / "modes.py"
    first = '        ModeTraits("colocated",'
    assert first in table.read_text()
    row = textwrap.indent(recipe("rlperf/specs/modes.py"), 8 * " ").rstrip("\n,") + ",\n"
    table.write_text(table.read_text().replace(first, row + first))
    run_in(tmp_path, "-m", "rlperf.frameworks.reference", "docs")
    files = ("test_modes.py", "test_rl_step_modes.py", "test_frameworks_tables.py", "test_rl_step_report.py")
    run_in(
        tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not data", "--doctest-modules",
        *(f"tests/{name}" for name in files), "rlperf/specs/modes.py",
        # of the nine modes planned and exported, two tell whether a row before them moves what is known of them
        "-k", "not planned_predicted_drawn_and_exported or colocated-verl or async-slime",
    )  # fmt: skip
