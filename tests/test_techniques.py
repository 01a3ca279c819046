"""What should I switch on: one table of techniques, asked by command, from Python and in the guide."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import rlperf
from rlperf.alternatives import changed_job
from rlperf.api import ask
from rlperf.errors import InfeasibleError, SpecError
from rlperf.frameworks.export import plan_texts
from rlperf.frameworks.expressible import frameworks_with
from rlperf.frameworks.imports import import_config
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.plan.question.context import resolve
from rlperf.report.table import text_table
from rlperf.specs.job import Job
from rlperf.specs.job_document import read_job_document
from rlperf.specs.reader import validate
from rlperf.techniques import HEAD, TECHNIQUES, GainTable, gains

GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "techniques.md"
NAMES = (
    "speculative decoding", "n-gram drafts", "fp8 cache", "prefix caching", "CUDA graphs", "one step off",
    "shared prefix in training",
)  # fmt: skip


def job(**options: object) -> Job:
    """A job with few trainers left open: techniques of the engine are tried."""
    asked = rlperf.short_job("Qwen3-8B", 8, "h100", prompts=32, **options)  # type: ignore[arg-type]
    layout = {"tensor_parallel": [1, 2], "context_parallel": 1, "ulysses": 1, "pipeline_parallel": 1}
    return Job.model_validate({**asked.stated(), "pools": [{"role": "trainer", "layout": layout}]})


@cache
def table() -> GainTable:
    return gains(job(framework="nemo_rl", max_response="8k"), NAMES, draws=1)


def test_every_technique_asked_for_has_its_row_and_figures_or_a_reason() -> None:
    rows = {row.name: row for row in table().rows}
    assert set(rows) == set(NAMES)
    for row in rows.values():
        assert (row.gain is None) != (row.rl_step_s is not None)
        assert row.gain is not None or row.said
        if row.gain is not None and row.low is not None and row.high is not None:
            assert row.low <= row.gain <= row.high
    drafts = rows["speculative decoding"]
    assert drafts.gain is not None and drafts.gain > 0.1 and re.fullmatch(r"eagle3:\d", drafts.said)
    assert "no acceptance of ngram drafts is known" in rows["n-gram drafts"].said
    assert rows["prefix caching"].said == "on already"


def test_what_is_on_already_is_held_against_an_rl_step_without_it() -> None:
    """A share of an rl_step is saved, as by every other row: +145 % of one stood there."""
    graphs = next(row for row in table().rows if row.name == "CUDA graphs")
    assert graphs.said == "on already" and graphs.rl_step_s == pytest.approx(table().rl_step_s)
    assert graphs.gain is not None and 0.1 < graphs.gain < 0.5


def test_what_does_not_pay_says_what_is_in_its_way() -> None:
    cache_row = next(row for row in table().rows if row.name == "fp8 cache")
    assert cache_row.gain is not None
    assert cache_row.gain > 0.02 or "of an engine_step in its tail" in cache_row.said


def test_the_table_fits_80_letters_and_a_line_says_who_has_a_key() -> None:
    found = table()
    screen = Console(width=80, file=StringIO(), record=True)
    screen.print(text_table(HEAD, found.cells(), screen.width))
    lines = screen.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(found.cells()) == sum(row.gain is not None for row in found.rows)
    for _, *figures in found.cells():
        assert any(all(each in line for each in figures) for line in lines)  # none goes on below
    notes = dict(zip((row.name for row in found.rows), found.notes(), strict=True))
    assert notes["speculative decoding"].startswith(
        "speculative decoding (miles, nemo_rl, skyrl, slime, verl): eagle3:"
    )
    assert "(state what your engine logs" in notes["n-gram drafts"]
    without = "nemo_rl main has no key for trainer.shared_prefix (True)"
    assert notes["shared prefix in training"] == f"shared prefix in training (areal): no figures: {without}"


def test_the_table_says_what_plans_say() -> None:
    """It had the mean of two draws: 4 min 18 s asynchronously where `rlperf plan` of the same job said 3 min 57 s."""
    asked = job(framework="nemo_rl", max_response="8k")
    cache_row = next(row for row in table().rows if row.name == "fp8 cache")
    now, changed = (
        rlperf.plan_job(each).phases[0].predicted.rl_step_s
        for each in (asked, changed_job(asked, {"pools.rollout.settings.kv_dtype": "fp8"}, "fp8"))
    )
    assert (table().rl_step_s, cache_row.rl_step_s) == pytest.approx((now, changed))
    assert cache_row.gain == pytest.approx(1.0 - changed / now)


def test_a_row_that_no_run_stands_behind_says_so() -> None:
    """Muon stood there at 0 % (-2 .. 2) as fp8 training did at 6 (4 .. 8): only the guide told them apart."""
    asked = job(framework="slime", max_response="8k")
    muon, training = gains(asked, ("Muon", "fp8 training"), draws=1).rows[::-1]
    assert "no run with it is measured" in muon.said and muon.gain is not None
    assert "measured" not in training.said and training.gain is not None


def test_what_the_job_has_already_changes_nothing_for_sure() -> None:
    """The doubt of its drafts, which both have, went to one end twice: one step off gained +0 % (-35 .. -35)."""
    asked = changed_job(
        job(framework="nemo_rl", max_response="4k"),
        {"modes": ["one_step_off"], "limits.staleness": 1, "pools.rollout.settings.speculation": "eagle3:3"}, "x",
    )  # fmt: skip
    (row,) = gains(asked, ("one step off",), draws=1).rows
    assert (row.gain, row.low, row.high) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    assert row.said == "staleness 1, the plan as it is has it"


def test_drafts_gain_what_a_plan_with_them_open_gains() -> None:
    asked = job(framework="nemo_rl", max_response="8k")
    drafts = next(row for row in table().rows if row.name == "speculative decoding")
    changed = rlperf.what_if(
        asked, {"x": {"pools.rollout.settings.speculation": [f"eagle3:{k}" for k in (1, 2, 3, 5)]}}, draws=1
    )
    assert drafts.gain == pytest.approx(1.0 - (changed.rows[1].ratio or 0.0), rel=1e-9)


def test_what_a_rule_refuses_whatever_else_is_chosen_is_refused_before_it_is_costed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers of prompts are simulated engine by engine: of agents a minute and a half went into plans that verl's rule
    refuses all, and a `--what-if all` on eight nodes did not end."""
    monkeypatch.setattr("rlperf.plan.judge.decisions.screen", None)
    asked = job(framework="verl", max_response="4k").stated()
    asked["pools"].append({"role": "rollout", "settings": {"prefill_replicas": [1, 2]}})
    with pytest.raises(InfeasibleError) as refused:
        rlperf.plan_job(Job.model_validate(asked))
    assert refused.value.nearest_miss == "verl refuses it: prompts are read by engines of their own with SGLang alone"


def test_the_job_itself_without_a_plan_is_an_error_and_no_row() -> None:
    asked = rlperf.short_job("Qwen3-32B", 1, "h100", framework="verl", max_response="4k")
    with pytest.raises(InfeasibleError, match="nothing fits Qwen3-32B"):
        gains(asked, ("n-gram drafts",), draws=1)


@pytest.mark.slow
def test_what_the_framework_itself_refuses_says_so_and_progress_moves_with_every_row() -> None:
    shares: list[tuple[float, str]] = []
    asked = job(framework="verl", max_response="4k")
    names = ("prefill apart from decode", "fp8 cache")
    rows = gains(asked, names, draws=1, report=lambda share, text: shares.append((share, text))).rows
    refused = next(row for row in rows if row.name == names[0])
    assert refused.gain is None
    assert refused.said == "no plan: verl refuses it: prompts are read by engines of their own with SGLang alone"
    done = [share for share, _ in shares]
    assert done == sorted(done) and done[-1] <= 1.0
    # how many are at work together is the machine's; what is refused before it is costed takes no time to be named
    begun = {name: min(share for share, text in shares if name in text) for name in ("as it is", names[1])}
    assert begun["as it is"] == 0.0


def test_an_unknown_technique_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"no technique named 'warp drive' \(there are speculative decoding"):
        gains(names=("warp drive",))
    with pytest.raises(SpecError, match=r"'fp8cache' \(did you mean fp8 cache\?\)"):
        gains(names=("fp8cache",))


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("fp8", ["fp8 rollouts", "fp8 cache", "fp8 training"]),
        ("async", ["fully asynchronous"]),
        ("one_step_off", ["one step off"]),
        ("cuda graphs", ["CUDA graphs"]),
        ("-", []),
    ],
)
def test_words_of_a_techniques_name_or_key_call_it(word: str, names: list[str]) -> None:
    assert [each.name for each in TECHNIQUES if each.called(word)] == names


def test_a_techniques_own_name_calls_no_other() -> None:
    assert all([each for each in TECHNIQUES if each.called(one.name)] == [one] for one in TECHNIQUES)


@pytest.mark.parametrize(("options", "said"), [(["--out", "plans"], "writes no files"), (["--bold"], "")])
def test_no_option_beside_what_if_is_passed_over(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from rlperf.cli.main import app

    asked: list[Job] = []

    def found(one: Job, *_: object, **__: object) -> GainTable:
        asked.append(one)
        return GainTable(1.0, ())

    monkeypatch.setattr("rlperf.techniques.gains", found)
    words = ["plan", "--model", "Qwen3-0.6B", "--gpus", "8", "--what-if", "fp8", *options]
    error = CliRunner().invoke(app, words).exception
    assert said in str(error) if said else asked[0].objective.bold


def test_every_row_names_frameworks_that_exist_and_says_what_is_measured() -> None:
    assert len({each.name for each in TECHNIQUES}) == len(TECHNIQUES)
    for each in TECHNIQUES:
        assert set(frameworks_with(each.key)) <= set(FRAMEWORKS)
        assert each.measured and each.assumed


def test_the_guide_has_every_row() -> None:
    text = GUIDE.read_text()
    for each in TECHNIQUES:
        assert f"| {each.name} | {each.measured} | {each.assumed} |" in text


def test_what_is_trained_on_late_says_how_late() -> None:
    (row,) = gains(
        names=("fully asynchronous",), draws=1, model="Qwen3-8B", gpus=16, max_response="4k", prompts=32
    ).rows
    assert "staleness 4" in row.said and "bound" not in row.said and all(HEAD)
    # slime has no key for the bound: one rl_step behind is planned, and its engines may run further ahead
    (row,) = gains(job(framework="slime", max_response="2k"), ("fully asynchronous",), draws=1).rows
    assert row.gain is not None and row.said.startswith("staleness 1, which its files do not bound: samples may be sta")


def test_what_is_served_in_8_bits_already_is_said_to_be() -> None:
    """Blocks of eight bits made a row of fp8 that gains nothing, and seemed to be in the way of itself."""
    pools = [{"role": "rollout", "settings": {"rollout_dtype": "fp8_block"}}]
    asked = Job.model_validate({**job(framework="slime", max_response="2k").stated(), "pools": pools})
    row, cache = gains(asked, ("fp8 rollouts", "fp8 cache"), draws=1).rows
    assert row.said == "the plan as it is has fp8_block" and "has" not in cache.said


def test_products_of_training_in_8_bits_have_a_key_of_their_own_or_are_refused(tmp_path: Path) -> None:
    """``precision: fp8`` is none of any framework's: Megatron has fp8_cfg or flags, the other files say 16 bits."""
    assert frameworks_with("trainer.compute_dtype", "fp8") == ("miles", "nemo_rl", "slime")
    trained = [{"role": "trainer", "settings": {"compute_dtype": "fp8"}}]
    task = {"name": "t", "workload": "math", "prompts_per_step": 16, "mini_batch": 16, "max_response_tokens": 1024}
    words = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "tasks": [task], "pools": trained}
    for framework in ("verl", "areal", "openrlhf"):
        with pytest.raises(SpecError, match=r"(has no key for|rlperf writes no) trainer\.compute_dtype \(fp8\)"):
            ask(Job.model_validate({**words, "framework": framework}), to_plan=True)
    plan = rlperf.plan_job(Job.model_validate({**words, "framework": "nemo_rl"}))
    assert plan.phases[0].pools[1].settings.backend == "megatron"  # DTensor has none
    text = next(each for name, each in plan_texts(plan, "nemo_rl").items() if name.endswith(".yaml"))
    assert "precision: bfloat16" in text and "precision: fp8" not in text
    (tmp_path / "n.yaml").write_text(text)
    assert import_config([tmp_path / "n.yaml"], "nemo_rl").run.trainer.compute_dtype == "fp8"


@pytest.mark.parametrize(
    ("cluster", "name", "dtype", "why"),
    [
        ("dgx_h100", "compute_dtype", "nvfp4", "h100_sxm multiplies no nvfp4: it has no unit for four bits"),
        ("dgx_a100", "compute_dtype", "fp8", "a100_80g_sxm multiplies no fp8: it has no unit for eight bits"),
        ("dgx_a100", "rollout_dtype", "fp8", ""),  # weights alone, widened as they are read
        ("dgx_a100", "kv_dtype", "fp8", ""),
        ("ascend_910b_node", "rollout_dtype", "fp8", "ascend_910b multiplies no fp8: it has no unit for eight bits"),
        ("ascend_910b_node", "kv_dtype", "fp8", "ascend_910b reads no fp8: it has no unit for eight bits"),
        (
            "generic:v100",
            "rollout_dtype",
            "fp16",
            "pools: compute_dtype of the trainer is bf16 unless.*state compute_dtype: fp16",
        ),
        (
            "generic:v100",
            "compute_dtype",
            "fp16",
            "pools: rollout_dtype of the rollout is bf16 unless.*state rollout_dtype: fp16",
        ),
        ("mi355x_node", "rollout_dtype", "nvfp4", "mi355x multiplies no nvfp4: it has no unit for its scales"),
        ("mi355x_node", "rollout_dtype", "w4a4_mxfp4", ""),
    ],
)
def test_products_that_a_device_has_no_unit_for_are_refused(
    cluster: str, name: str, dtype: str, why: str, tmp_path: Path
) -> None:
    """Training in fp8 on A100 was planned at the rate of bf16, and whatever states no dtype on V100 at that of fp16."""
    role = "trainer" if name == "compute_dtype" else "rollout"
    pools = [{"role": role, "settings": {name: dtype}}]
    tasks = [{"name": "t", "workload": "math", "prompts_per_step": 16, "max_response_tokens": 1024}]
    job = {"architecture": "Qwen3-8B", "nodes": 1, "framework": "nemo_rl", "tasks": tasks, "pools": pools}
    (tmp_path / "job.json").write_text(json.dumps({**job, "cluster": cluster}))
    document = read_job_document(tmp_path / "job.json")
    with pytest.raises(SpecError, match=why) if why else nullcontext():
        resolve(validate(document, Job), document=document)


@pytest.mark.slow
def test_tasks_that_take_turns_are_asked_together() -> None:
    """The table had the first task's rl_step, 6 min 52 s, for two that take 7 min 31 s, and the first task's gain."""
    asked = job(framework="verl", max_response="2k").stated()
    asked["tasks"] = [{**asked["tasks"][0], "name": name, "workload": name} for name in ("math", "programming")]
    both = Job.model_validate(asked)
    found = gains(both, ("fp8 rollouts",), draws=1)
    steps = [phase.predicted.rl_step_s for phase in rlperf.plan_job(both).phases]
    assert len(steps) == 2
    assert found.rl_step_s == pytest.approx(sum(steps))
    (unchanged,) = rlperf.what_if(both, draws=1).rows
    assert unchanged.rl_step_s == pytest.approx(sum(steps))


def test_what_a_framework_has_no_key_for_is_refused_with_those_that_have_one() -> None:
    """A V100 asks for fp16 and every refusal said "leave it out, as it runs bf16", which the device cannot."""
    pools = [{"role": "rollout", "settings": {"rollout_dtype": "fp16"}}]
    job = rlperf.short_job("Qwen2.5-3B", 8, "v100", framework="openrlhf", max_response="4k")
    with pytest.raises(
        SpecError, match=r"no key for rollout\.rollout_dtype.*name one that has: areal, nemo_rl, verl\)"
    ):
        rlperf.plan_job(job, pools=pools)


@pytest.mark.parametrize(
    ("framework", "settings", "said"),
    [
        ("areal", {"kv_dtype": "fp8"}, r"kv_dtype \(fp8\).*or state engine: sglang, for which it has one\)"),
        ("verl==0.9", {"borrows": True}, r"verl 0\.9 has no key for rollout\.borrows.*that has: verl==main\)"),
    ],
)
def test_what_its_other_engine_or_release_has_is_not_said_to_be_had_by_the_framework_itself(
    framework: str, settings: dict[str, object], said: str
) -> None:
    """AReaL with vLLM has no key for an 8-bit cache: "name one that has: areal", it was told."""
    asked = rlperf.short_job("Qwen3-8B", 16, "h100", framework=framework, mode="one_step_off", staleness=1)
    pools = [{"role": "rollout", "settings": settings}]
    with pytest.raises(SpecError, match=said):
        rlperf.plan_job(asked, pools=pools)
