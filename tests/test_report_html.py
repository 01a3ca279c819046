"""Reports: self-contained pages with every part, figures that draw, provenance that leaves nothing out."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlperf.api import ask, plan_job, size_job, sweep_job
from rlperf.cli.report import judged, report
from rlperf.errors import SpecError
from rlperf.plan.answer.plan import Plan
from rlperf.report.plan_drawings import judged_drawings, operators, plan_drawings
from rlperf.report.plan_files import write_plan_files
from rlperf.report.plan_html import Judged, plan_page
from rlperf.report.provenance import ASSUMED, FITTED, READ, constants_of, counts
from rlperf.report.sweep_figures import front, held, scaling, sweep_drawings
from rlperf.report.sweep_html import sweep_page
from rlperf.report.sweep_text import unlike
from rlperf.specs.job import Job
from rlperf.sweep import Sweep, SweepResult

JOB: dict[str, Any] = {
    "name": "small <job>", "architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "price": "2.50 USD/h",
    "trainer_backends": ["megatron"],
    "tasks": [{"name": "math", "workload": "math", "prompts_per_step": 16, "group_size": 4,
               "max_prompt_tokens": 1024, "max_response_tokens": 4096}],
}  # fmt: skip
VOID = {"meta", "link", "img", "source", "br"}


class Balanced(HTMLParser):
    """Counts tags, and fails on one that closes what is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def read(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_job(Job.model_validate(JOB))


@pytest.fixture(scope="module")
def found(plan: Plan) -> tuple[Judged, ...]:
    return tuple(judged(plan, Path()))


@pytest.fixture(scope="module")
def swept() -> SweepResult:
    grid = {
        "nodes": [1, 2, 4],
        "tasks.math.prompts_per_step": [16, 32, 64],
        "pools.trainer.layout.tensor_parallel": [1, 2, 3],
        "pools.trainer.layout.context_parallel": [1, 2],
    }
    return sweep_job(Sweep(name="sweep & more", job=JOB, grid=grid), workers=1)


@pytest.mark.slow
def test_a_plan_page_is_whole_and_loads_nothing(plan: Plan, found: tuple[Judged, ...]) -> None:
    assert found[0][2].rl_step_s == pytest.approx(plan.phases[0].predicted.rl_step_s, rel=1e-12)
    page = plan_page(plan, found)
    parsed = read(page)
    expected = ["Summary", "Plan", "Timeline", "Memory", "The ten best", "Why", "What takes the time", "Sensitivity",
                "Error bars", "How good the choice is", "Where every constant is from"]  # fmt: skip
    assert parsed.headings == expected
    assert all(reference.startswith(("#", "data:")) for reference in parsed.references)
    assert "<script" not in page and "@import" not in page and "url(" not in page
    assert "<title>small &lt;job&gt;</title>" in page and 'name="viewport"' in page


@pytest.mark.slow
def test_without_the_job_s_files_the_page_says_what_is_missing(plan: Plan) -> None:
    page = plan_page(plan, missing="no such workload")
    assert "no such workload" in page and "Where every constant is from" not in read(page).headings


@pytest.mark.slow
def test_every_figure_of_a_plan_draws_in_both_widths(plan: Plan, found: tuple[Judged, ...]) -> None:
    context, task, evaluation = found[0]
    drawings = [*plan_drawings(plan.phases[0]), *judged_drawings(context, task, evaluation)]
    names = [drawing.name for drawing in drawings]
    assert names[:3] == ["timeline", "memory", "operators"] and names[-2:] == ["lengths", "roofline"]
    for drawing in drawings:
        assert drawing.svg.startswith(b"<?xml") and drawing.png.startswith(b"\x89PNG")
        assert drawing.narrow != drawing.svg
        assert drawing.caption.endswith(".")
    assert plan_drawings(plan.phases[0])[0].svg == drawings[0].svg, "the same plan gives the same figure"


def test_no_operator_is_above_the_roof(found: tuple[Judged, ...]) -> None:
    context, task, evaluation = found[0]
    from rlperf.cost.roofline import sheet_flop_per_s

    peak, bandwidth = sheet_flop_per_s(context.hardware, "bf16"), context.hardware.device.memory_bandwidth
    rows = operators(task, evaluation)
    assert len(rows) == 6
    for name, flop, moved, seconds in rows:
        assert flop / seconds <= min(peak, flop / moved * bandwidth), name


def test_pools_apart_have_memory_panels_of_their_own(plan: Plan) -> None:
    apart = plan.phases[0].model_copy(update={"mode": "disaggregated"})
    drawings = {drawing.name: drawing.svg.decode() for drawing in plan_drawings(apart)}
    assert "rollout, GB per device" in drawings["memory"] and "trainer, GB per device" in drawings["memory"]
    assert "rollout pool" in drawings["timeline"] and "trainer pool" in drawings["timeline"]


def test_provenance_covers_every_calibration_and_tells_standings_apart() -> None:
    context = ask(Job.model_validate(JOB)).context
    found = constants_of(context)
    places = {constant.where for constant in found}
    trainer = context.trainers[0]
    assert places == {"device h100_sxm", "cluster dgx_h100", f"calibration {context.hardware.calibration.id}",
                      f"engine {context.engine.id}", f"trainer {trainer.calibration.id}",
                      f"framework {trainer.framework.id}"}  # fmt: skip
    by_name = {(c.where.split()[0], c.name): c for c in found}
    assert by_name["device", "memory_bandwidth"].standing == READ
    assert by_name["device", "memory_bandwidth"].value == f"{context.hardware.device.memory_bandwidth:.6g}"
    gemm = [c for c in found if c.where.startswith("calibration") and c.name.startswith("gemm[") and " bf16]" in c.name]
    assert gemm and all(c.standing == FITTED and "measurements" in c.source for c in gemm)
    for name in trainer.framework.assumed:
        if not name.startswith("weight_sync"):
            assert by_name["framework", name].standing == ASSUMED, name
    assert sum(counts(found).values()) == len(found)
    assert all(constant.source for constant in found)


def test_a_borrowed_calibration_is_assumed() -> None:
    context = ask(Job.model_validate({**JOB, "cluster": "generic:h800_sxm"})).context
    if not context.hardware.calibration.extrapolated:
        pytest.skip("the device has measurements of its own")
    rows = [c for c in constants_of(context) if c.where.startswith("calibration")]
    assert rows and all(c.standing == ASSUMED and "borrowed from" in c.source for c in rows)


def test_points_that_do_not_run_are_not_said_to_differ_in_their_work() -> None:
    task = {"name": "math", "workload": "math", "prompts_per_step": 16, "max_response_tokens": 2048}
    job = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task]}
    grid = {"architecture": ["Qwen3-235B-A22B", "Llama-3.1-405B"]}
    refused = sweep_job({"job": job, "grid": grid}, workers=1)
    assert refused.counts == {"infeasible": 2} and unlike(refused) is None


def test_sweep_figures_hold_what_nobody_minimises_over(swept: SweepResult) -> None:
    drawings = {drawing.name: drawing for drawing in sweep_drawings(swept)}
    assert {"response_nodes", "response_prompts_per_step", "scaling", "pareto"} <= set(drawings)
    assert "heat_trainer_tensor_parallel_trainer_context_parallel" in drawings
    assert "Held: prompts per step 64" in drawings["pareto"].caption
    # drawn late, each figure still shows its own points
    assert "weak scaling" in drawings["scaling"].svg.decode()
    fine = swept.frame.filter(swept.frame["status"] == "ok")
    part, words = held(swept, fine, ("nodes",))
    assert set(part["tasks.math.prompts_per_step"]) == {64} and words == "prompts per step 64"
    assert set(part["nodes"]) == {1, 2, 4}


def test_scaling_shows_strong_and_weak(swept: SweepResult) -> None:
    fine = swept.frame.filter(swept.frame["status"] == "ok")
    figure = scaling(fine, "tasks.math.prompts_per_step", 9.0)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["strong scaling, 64 prompts", "weak scaling, 2 prompts per device"]
    ideal, real = figure.axes[0].get_lines()[:2]
    assert np.allclose(ideal.get_ydata()[0], real.get_ydata()[0])
    assert ideal.get_ydata()[-1] == pytest.approx(ideal.get_ydata()[0] / 4)
    assert real.get_ydata()[-1] > ideal.get_ydata()[-1]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert any(label.startswith("most in ") for label in labels)


def test_front_has_no_point_that_another_beats() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.random(300), rng.random(300)
    kept = front(a, b)
    for i in range(300):
        beaten = bool(((a <= a[i]) & (b <= b[i]) & ((a < a[i]) | (b < b[i]))).any())
        assert (i in kept) == (not beaten)


@pytest.mark.slow
def test_a_sweep_page_has_failures_columns_and_a_warning(swept: SweepResult) -> None:
    page = sweep_page(swept, ask(Job.model_validate(JOB)).context)
    parsed = read(page)
    assert parsed.headings == ["Summary", "Best points", "Figures", "Points without a result", "Columns of the results",
                               "Where the constants are from"]  # fmt: skip
    assert all(reference.startswith(("#", "data:")) for reference in parsed.references)
    assert "sweep &amp; more" in page and "tokens_per_s_per_device" in page
    assert unlike(swept) is not None and "do not do the same work" in page


def test_a_sweep_without_any_result_still_has_a_page() -> None:
    found = sweep_job(Sweep(job=JOB, grid={"pools.trainer.layout.tensor_parallel": [3, 5]}), workers=1)
    assert found.best() is None and sweep_drawings(found) == []
    assert "No point can be run" in sweep_page(found)


def test_answers_as_frames_plain_data_and_in_notebooks(plan: Plan) -> None:
    prediction = plan.phases[0].predicted
    frame = prediction.to_frame()
    assert frame.height == 1 and frame["rl_step_s"][0] == prediction.rl_step_s
    assert prediction.to_dict()["rl_step_s"] == prediction.rl_step_s
    assert plan.to_frame().height == len(plan.phases) and plan.to_frame()["trainer_devices"][0] == 8
    assert Plan.model_validate(plan.to_dict()) == plan
    sizing = size_job(Job.model_validate(JOB), "step<=1000s", most_nodes=1)
    assert sizing.to_frame()["meets"].to_list() == [True] and sizing.to_dict()["best"]["nodes"] == 1
    for answer in (plan, prediction, sizing):
        read(answer._repr_html_())
        with pytest.raises(Exception, match=r"frozen|cannot assign"):
            answer.plan = None  # type: ignore[misc, union-attr, assignment]


def test_the_command_writes_the_page_of_a_plan(plan: Plan, tmp_path: Path, undrawn: None) -> None:
    write_plan_files(plan, tmp_path)
    report(tmp_path / "plan.yaml", None)
    assert "Where every constant is from" in (tmp_path / "report.html").read_text()
    with pytest.raises(SpecError, match="no such file"):
        report(tmp_path / "nothing", None)
