"""What must hold of any plan: more never hurts, names mean nothing, equal rates scale the time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import rlperf
from rlperf.api import ask
from rlperf.errors import InfeasibleError, SpecError
from rlperf.plan import size
from rlperf.plan.answer.plan import Plan
from rlperf.plan.floor import floor_of
from rlperf.plan.planner import plan_job
from rlperf.plan.search.splits import splits
from rlperf.plan.size import size_job
from rlperf.plan.size_target import parse_target
from rlperf.plan.sizing import Sizing
from rlperf.specs.hardware import Hardware
from rlperf.specs.job import Job
from studies.metamorphic.run import RULES, objective, pairs

from .quick import slow_but
from .test_plan_decisions import TASK, job, trainer


def narrow(**changes: object) -> Job:
    """The same with little left open: where the claim is of sizes and prices, any layout bears it out."""
    return job(**{"trainer_backends": ["fsdp2"], "modes": ["colocated"], "pools": pools(1), **changes})


def pools(*tensor_parallel: int) -> list[dict[str, object]]:
    return [{"role": "rollout", "layout": {"tensor_parallel": tensor_parallel}}, trainer(*tensor_parallel)]


def planned(found: Job) -> Plan:
    question = ask(found)
    return plan_job(question.context, facts=question.facts)


def rl_step_s(plan: Plan) -> float:
    return plan.phases[0].predicted.rl_step_s


@pytest.mark.slow
def test_an_open_precision_is_no_worse_than_any_of_its_values() -> None:
    """Closed forms rank the 8-bit caches of this job last of 16 finalists, events the best of them first."""
    task = {**TASK, "workload": "searching", "prompts_per_step": 128, "group_size": 8, "mini_batch": 32,
            "max_prompt_tokens": 1024}  # fmt: skip
    asked = {"architecture": "Qwen2.5-7B", "framework": "slime", "engine": "sglang", "nodes": 3, "algorithm": "dapo",
             "modes": ["one_step_off"], "limits": {"staleness": 1}, "tasks": [task],
             "objective": {"minimize": "step_time", "bold": True}}  # fmt: skip
    pinned, opened = (
        planned(job(**asked, pools=[{"role": "rollout", "settings": {"kv_dtype": dtype}}]))
        for dtype in ("fp8", ["bf16", "fp8"])
    )
    assert opened.objective <= pinned.objective * (1 + 1e-9)


AREAL = {"architecture": "Qwen2.5-7B", "cluster": "dgx_h200", "framework": "areal", "engine": "sglang"}
VERL = {"architecture": "Qwen2.5-32B", "cluster": "dgx_a100", "framework": "verl", "engine": "vllm"}


@pytest.mark.parametrize(("asked", "workload", "group", "field", "values"), [
    (AREAL, "tool_use", 4, "activation_recompute", ["selective", "none", "full"]),
    pytest.param(VERL, "programming", 8, "offload", ["none", "optimizer"], marks=pytest.mark.slow),
])  # fmt: skip
def test_an_open_variant_is_no_worse_than_any_of_its_values(
    asked: dict[str, object], workload: str, group: int, field: str, values: list[str]
) -> None:
    """Variants of every grid leave no place among 16 finalists for the one that events put first."""
    task = {**TASK, "workload": workload, "prompts_per_step": 128, "group_size": group, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 4096}  # fmt: skip
    asked = {**asked, "nodes": 2, "modes": ["colocated"], "limits": {"staleness": 1}, "tasks": [task],
             "objective": {"minimize": "step_time", "bold": True}}  # fmt: skip
    pinned, opened = (
        planned(job(**asked, pools=[{"role": "trainer", "layout": {field: stated}}])) for stated in (values[0], values)
    )
    assert opened.objective <= pinned.objective * (1 + 1e-9)


BOLD = {"minimize": "step_time", "bold": True}
LONG = {**TASK, "workload": "math", "max_prompt_tokens": 1024, "mini_batch": 32}


@pytest.mark.parametrize(
    ("asked", "task", "name", "values"),
    [
        # two shares of memory are one to the closed forms, and with the smaller one engines preempt: 3.8 %
        pytest.param({"architecture": "Qwen2.5-32B", "framework": "nemo_rl", "engine": "sglang", "nodes": 1},
                     {**LONG, "prompts_per_step": 64, "group_size": 8, "max_response_tokens": 4096},
                     "memory_fraction", [0.9, 0.5, 0.6, 0.7, 0.8], marks=pytest.mark.slow),
        # trainers beside a second engine took the place of one that events like better: 1.0 %
        ({"architecture": "Qwen2.5-7B", "cluster": "dgx_a100", "framework": "slime", "engine": "sglang", "nodes": 2},
         {**LONG, "prompts_per_step": 128, "group_size": 4, "max_response_tokens": 8192},
         "max_running", [64, 256, 1024]),
    ],
)  # fmt: skip
def test_an_open_setting_of_the_engine_is_no_worse_than_its_first_value(
    asked: dict[str, object], task: dict[str, object], name: str, values: list[float]
) -> None:
    pinned, opened = (
        planned(job(**asked, tasks=[task], modes=["colocated"], objective=BOLD, limits={"staleness": 1},
                    pools=[{"role": "rollout", "settings": {name: given}}]))
        for given in (values[0], values)
    )  # fmt: skip
    assert opened.objective <= pinned.objective * (1 + 1e-9)


@pytest.mark.slow
def test_updates_that_batches_stream_to_are_judged_as_if_they_were_stated() -> None:
    """Closed forms take groups to end evenly; two waves end apart: 64 prompts an update took 12 % longer than 16."""
    task = {"name": "t", "workload": "math", "prompts_per_step": 64, "group_size": 4, "mini_batch": 16,
            "max_prompt_tokens": 1024, "max_response_tokens": 1024}  # fmt: skip
    asked = {"architecture": "Qwen3-30B-A3B", "cluster": "dgx_a100", "framework": "verl", "nodes": 2,
             "modes": ["streaming"], "engine": "vllm", "objective": {"bold": True}}  # fmt: skip
    pinned, opened = (
        planned(Job.model_validate({**asked, "tasks": [{**task, "mini_batch": updates}]})) for updates in (16, [16, 64])
    )
    assert rl_step_s(opened) <= rl_step_s(pinned) * (1 + 1e-9)


@pytest.mark.slow
def test_an_open_recompute_is_no_worse_where_scoring_has_a_budget_of_its_own() -> None:
    """Timed with training's budget, what recomputes by large microbatches dominates what keeps activations by small."""
    task = {**TASK, "workload": "searching", "group_size": 8, "mini_batch": 32, "max_prompt_tokens": 1024}
    asked = {"architecture": "Qwen3-30B-A3B", "cluster": "dgx_a100", "framework": "nemo_rl", "nodes": 4,
             "modes": ["disaggregated"], "algorithm": "dapo", "limits": {"staleness": 1}, "tasks": [task],
             "objective": {"minimize": "step_time", "bold": True}}  # fmt: skip
    pinned, opened = (
        planned(job(**asked, pools=[{"role": "trainer", "layout": {"activation_recompute": stated}}]))
        for stated in ("none", ["none", "selective", "full"])
    )
    assert opened.objective <= pinned.objective * (1 + 1e-9)


def test_of_engines_that_the_trainer_waits_for_neither_way_the_fastest_is_judged() -> None:
    """Closed forms held 64 and 256 requests level, as training sets the pace; events did not: 2.9 %."""

    def quicker(hardware: Hardware) -> Hardware:
        device = hardware.device
        return replace(hardware, device=device.model_copy(update={"memory_bandwidth": device.memory_bandwidth * 1.05}))

    trainer = {"tensor_parallel": 1, "pipeline_parallel": 2, "context_parallel": 2, "virtual_pipeline": 4,
               "activation_recompute": "none", "offload": "none"}  # fmt: skip
    tool = {**LONG, "workload": "tool_use", "prompts_per_step": 64}
    asked = {"architecture": "Qwen2.5-32B", "cluster": "mi300x_node", "framework": "slime", "nodes": 2, "tasks": [tool],
             "modes": ["one_step_off"], "engine": "sglang", "algorithm": "dapo", "limits": {"staleness": 1},
             "objective": BOLD}  # fmt: skip
    pinned, opened = (
        objective({**asked, "pools": [
            {"role": "rollout", "layout": {"tensor_parallel": 4}, "settings": {"max_running": slots}},
            {"role": "trainer", "layout": trainer},
        ]}, quicker)
        for slots in (256, [64, 256])
    )  # fmt: skip
    assert pinned is not None and opened is not None and opened <= pinned * (1 + 1e-9)


@pytest.mark.slow
def test_a_trainer_of_fewer_replicas_is_judged_beside_one_of_more() -> None:
    """Four replicas wait less for each other than eight: closed forms had them 0.1 % behind, and left them out."""
    task = {**TASK, "workload": "programming", "prompts_per_step": 64, "group_size": 4, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 1024}  # fmt: skip
    asked = {"architecture": "Qwen2.5-32B", "cluster": "mi300x_node", "framework": "slime", "nodes": 4, "tasks": [task],
             "modes": ["colocated"], "engine": "sglang", "algorithm": "dapo", "objective": BOLD}  # fmt: skip
    pinned, opened = (
        objective({**asked, "pools": pools}) for pools in ([{"role": "trainer", "layout": {"context_parallel": 2}}], [])
    )
    assert pinned is not None and opened is not None and opened <= pinned * (1 + 1e-9)


@pytest.mark.slow
def test_activations_that_fit_are_kept_where_stages_are_judged_apart() -> None:
    """Two stages of 22 and 18 layers keep theirs with 8,192 tokens; closed forms had 16,384 before them: 0.2 %.

    Two settings that gain only together (half the chunks, half the tokens) are still not reached: engines without the
    room that SGLang's share of memory leaves beside itself lost 0.22 % here by it.
    """
    task = {**TASK, "workload": "searching", "prompts_per_step": 32, "group_size": 4, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 2048}  # fmt: skip
    asked = {"architecture": "Qwen3-14B", "cluster": "dgx_h100", "framework": "slime", "nodes": 2, "tasks": [task],
             "modes": ["colocated"], "engine": "sglang", "algorithm": "dapo", "objective": BOLD}  # fmt: skip
    pinned, opened = (
        objective({**asked, "pools": [{"role": "trainer", "settings": {"token_budget": budget}}]})
        for budget in (8192, [8192, 16384, 32768])
    )
    assert pinned is not None and opened is not None and opened <= pinned * (1 + 1e-9)


def test_stages_in_one_piece_are_judged_beside_chunks() -> None:
    """Two stages of 22 and 18 layers take less than four chunks each of 20, which closed forms prefer: 0.1 %."""
    task = {**TASK, "workload": "math", "prompts_per_step": 64, "group_size": 4, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 1024}  # fmt: skip
    asked = {"architecture": "Qwen3-14B", "cluster": "dgx_h100", "framework": "slime", "nodes": 2, "tasks": [task],
             "modes": ["disaggregated"], "limits": {"staleness": 1}, "objective": BOLD}  # fmt: skip
    layout = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}
    engines = {"role": "rollout", "layout": {"tensor_parallel": 2, "data_parallel": 4}}
    pinned, opened = (
        objective({**asked, "pools": [engines, {"role": "trainer", "layout": {**layout, "virtual_pipeline": chunks}}]})
        for chunks in (1, [1, 2, 4])
    )
    assert pinned is not None and opened is not None and opened <= pinned * (1 + 1e-9)


@pytest.mark.slow
def test_an_open_trainer_backend_is_no_worse_than_any_of_them() -> None:
    """The better one's finalists were few among the other's: 0.85 %, agents of an 8B with AReaL."""
    task = {**TASK, "workload": "searching", "prompts_per_step": 64, "group_size": 4, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 2048}  # fmt: skip
    asked = {"architecture": "Llama-3.1-8B", "cluster": "mi300x_node", "framework": "areal", "nodes": 4,
             "tasks": [task], "modes": ["async"], "limits": {"staleness": 1}, "algorithm": "dapo",
             "objective": BOLD}  # fmt: skip
    opened, *pinned = (
        objective({**asked, "trainer_backends": backends})
        for backends in (["fsdp2", "megatron"], ["fsdp2"], ["megatron"])
    )
    assert opened is not None and None not in pinned
    assert all(opened <= each * (1 + 1e-9) for each in pinned if each is not None)


@pytest.mark.slow
def test_budgets_say_nothing_to_a_trainer_that_counts_sequences() -> None:
    """The first of several stood for all, and was refused for being shorter than a sequence."""
    task = {**LONG, "workload": "programming", "prompts_per_step": 128, "group_size": 8, "max_response_tokens": 8192}
    asked = {"architecture": "Llama-3.1-8B", "cluster": "dgx_a100", "framework": "trl", "nodes": 4, "tasks": [task],
             "modes": ["colocated"], "objective": BOLD}  # fmt: skip
    stated, opened = (
        objective({**asked, "pools": [{"role": "trainer", "settings": {"token_budget": budget}}]})
        for budget in (32768, [8192, 16384, 32768])
    )
    assert stated is not None and opened is not None and opened == pytest.approx(stated, rel=1e-9)


@pytest.mark.slow
def test_engines_that_run_ahead_are_judged_with_the_places_of_one_batch() -> None:
    """256 places ran two batches at once, whose groups end later than those of 128: 0.9 %."""
    task = {**LONG, "workload": "tool_use", "prompts_per_step": 64, "group_size": 8, "max_response_tokens": 2048}
    asked = {"architecture": "Qwen3-30B-A3B", "cluster": "dgx_h200", "framework": "areal", "nodes": 3, "tasks": [task],
             "modes": ["async"], "engine": "sglang", "algorithm": "dapo", "limits": {"staleness": 1},
             "objective": BOLD}  # fmt: skip
    stated, opened = (
        objective({**asked, "pools": [{"role": "rollout", "settings": {"memory_fraction": share}}]})
        for share in (0.5, [0.5, 0.6, 0.7, 0.8, 0.9])
    )
    assert stated is not None and opened is not None and opened <= stated * (1 + 1e-9)


def test_engines_hold_the_longest_request_that_turns_make() -> None:
    """What tools append is beyond the batch's limits: a cache for 3,072 tokens met a request of 5,638."""
    task = {**TASK, "workload": "searching", "prompts_per_step": 64, "mini_batch": 32, "max_prompt_tokens": 1024}
    plan = planned(job(architecture="Qwen3-30B-A3B", framework="trl", nodes=2, algorithm="dapo", tasks=[task],
                       modes=["colocated"], objective=BOLD))  # fmt: skip
    assert plan.phases[0].pools[0].layout.tensor_parallel > 1  # at 1 there is room for 4,568 tokens


@pytest.mark.slow
def test_budgets_are_judged_of_two_trainers_whatever_their_engines() -> None:
    """Engines of one device and of two were level behind one trainer, and left no place for the other's: 2.0 %."""
    tool = {**TASK, "workload": "tool_use", "prompts_per_step": 64, "group_size": 8, "mini_batch": 32,
            "max_prompt_tokens": 1024, "max_response_tokens": 2048}  # fmt: skip
    asked = {"architecture": "Qwen3-14B", "cluster": "mi300x_node", "framework": "nemo_rl", "nodes": 2, "tasks": [tool],
             "modes": ["k_step_off"], "limits": {"staleness": 1}, "engine": "vllm", "algorithm": "dapo",
             "objective": BOLD}  # fmt: skip
    two = {"role": "rollout", "layout": {"tensor_parallel": 2}}
    stated, opened = (objective({**asked, "pools": pools}) for pools in ([two], []))
    assert stated is not None and opened is not None and opened <= stated * (1 + 1e-9)


def test_an_open_batch_is_no_worse_than_any_of_its_values() -> None:
    """Engines that run all requests at once were asked about with the batch alone that judged best before: 3.7 %."""
    task = {**TASK, "workload": "math", "group_size": 8, "mini_batch": 32, "max_prompt_tokens": 2048,
            "max_response_tokens": 8192}  # fmt: skip
    asked = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 4, "objective": {"minimize": "token_time"}}
    stated, opened = (objective({**asked, "tasks": [{**task, "prompts_per_step": n}]}) for n in (128, [64, 128]))
    assert stated is not None and opened is not None and opened <= stated * (1 + 1e-9)


ONCE = tuple(dict.fromkeys(RULES))


@pytest.mark.parametrize("number", slow_but((1, len(ONCE)), 1))
def test_no_pair_of_the_study_is_violated(number: int) -> None:
    """Rules of the study once each; ``python -m studies.metamorphic.run`` goes through 500 pairs."""
    assert [(pair, excess) for pair, excess in pairs(number, rules=ONCE[:number]) if not pair.holds(excess)] == []


def test_more_nodes_are_never_slower() -> None:
    times = [rl_step_s(planned(narrow(nodes=n, pools=pools(1, 2)))) for n in (1, 2, 3)]
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in pairwise(times))


TRAYS = {"cluster": "gb200_nvl72", "modes": ["one_step_off"], "limits": {"staleness": 1}}


TAUGHT = {"scorers": [{"name": "t", "kind": "teacher", "architecture": "Qwen3-8B", "placement": "own", "devices": 8}]}


@pytest.mark.parametrize(("nodes", "asked", "prompts"), [(10, {}, 80), (48, TRAYS, 128), (11, TAUGHT, 80)])
def test_a_node_more_than_divides_well_is_no_slower(nodes: int, asked: dict[str, object], prompts: int) -> None:
    """Eleven nodes were planned on eight, 5 % slower than ten; of 49 trays 1, 7, 13 ... trained: three times slower."""
    task = {**TASK, "prompts_per_step": prompts, "mini_batch": prompts, "group_size": 8, "max_response_tokens": 4096}
    fewer, more = (rl_step_s(planned(narrow(nodes=n, tasks=[task], **asked))) for n in (nodes, nodes + 1))
    assert more <= fewer * (1 + 1e-9)


def test_a_rollout_cluster_leaves_the_trainer_nodes_that_divide_well() -> None:
    """One more node beside engines of their own was refused: no degrees made 168 devices."""
    engines = {"role": "rollout", "cluster": "hgx_h20", "nodes": 9}
    asked = job(nodes=21, pools=[engines], modes=["async"], limits={"staleness": 1}, tasks=[TASK])
    found = {(split.rollout, split.trainer) for split in splits(ask(asked).context)}
    assert found == {(rollout, trainer) for rollout in (72, 64) for trainer in (168, 160)}


def test_names_of_tasks_change_nothing() -> None:
    other = {**TASK, "name": "zeta", "max_response_tokens": 1024}
    first = planned(narrow(tasks=[TASK, other], pools=pools(1, 2)))
    second = planned(narrow(tasks=[{**TASK, "name": "b"}, {**other, "name": "a"}], pools=pools(1, 2)))
    assert first.objective == pytest.approx(second.objective, rel=1e-12)
    assert [p.pools for p in first.phases] == [p.pools for p in second.phases]


def test_a_second_task_adds_its_own_time() -> None:
    other = {**TASK, "name": "short", "max_response_tokens": 256}
    # the same budgets for all: alone, the short one is offered those of its own lengths
    rollout, trainer = pools(1, 2)
    given = [rollout, {**trainer, "settings": {"token_budget": [3072, 10240]}}]
    both, one, two = (planned(narrow(tasks=tasks, pools=given)) for tasks in ([TASK, other], [TASK], [other]))
    apart = one.objective + two.objective
    assert apart * (1 - 1e-9) <= both.objective <= apart * 1.01  # one layout for both, which is neither's own


def test_a_longer_horizon_of_equal_groups_multiplies_the_objective() -> None:
    ten, one = planned(narrow(horizon={"rl_steps": 10})), planned(narrow())
    assert ten.objective == pytest.approx(10 * one.objective, rel=0.1)


def test_sizing_finds_the_smallest_cluster_that_meets_the_target() -> None:
    times = {n: rl_step_s(planned(narrow(nodes=n))) for n in (1, 2)}
    limit = (times[1] + times[2]) / 2
    found = size_job(narrow(), parse_target(f"step<={limit} s"), lambda j: ask(j).pair, most_nodes=4)
    assert found.best is not None
    assert found.best.nodes == 2
    assert found.plan is not None
    assert rl_step_s(found.plan) <= limit
    none = size_job(narrow(), parse_target("step<=1 ms"), lambda j: ask(j).pair, most_nodes=2)
    assert none.best is None
    # the floor alone says it: nothing is planned
    assert [(row.nodes, row.rl_step_s) for row in none.rows] == [(2, None)]
    assert "the floor is" in none.rows[0].note and none.floors[0].rl_step_s > none.target.limit


def test_every_number_of_few_nodes_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five nodes may do where six, whose layouts nobody runs, do not: bisecting from eight would miss them."""

    def tried(meets: set[int], off: set[int], most: int = 64) -> list[int]:
        def row(_: object, nodes: int) -> tuple[size.SizeRow, None]:
            return size.SizeRow("c", nodes, 8 * nodes, 1.0, 1.0, None, nodes in meets, off_path=nodes in off), None

        monkeypatch.setattr(size._Tried, "_row", row)
        asked = size._Tried(job(), parse_target("step<=1h"), lambda j: ask(j).pair, most, lambda _share, _text: None)
        return [each.nodes for each in asked.search().rows if each.nodes not in (1, 2, 4, 8, 16, 32, 64)]

    more = set(range(8, 65))
    assert tried({5, 7, *more}, set()) == [5]
    assert tried({6, 7, *more}, {7}) == [5, 6]
    assert tried({6, 7, *more}, {6, 7}) == [5, 6, 7]
    assert tried(set(range(16, 65)), set()) == [12, 14, 15]  # of more, those that halve what is left
    assert tried({6, 7}, set(), most=7) == [5, 6, 7]  # the most nodes too, which no doubling comes to
    assert tried(set(range(41, 49)), set(), most=48) == [40, 41, 42, 44, 48]
    assert tried(set(), set(), most=5) == [5]


def test_nodes_on_which_the_floor_is_too_dear_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All doublings up to 64 nodes were planned, whatever one rl_step cost at least: 3 min 44 s for three clusters."""

    def row(_: object, nodes: int) -> tuple[size.SizeRow, None]:
        return size.SizeRow("c", nodes, 8 * nodes, 9.0, 1.0, 9.0, False), None

    monkeypatch.setattr(size._Tried, "_row", row)
    asked = job(price="3 USD/h")
    node_usd = floor_of(ask(asked).context).rl_step_s * 8 * 3.0 / 3600.0

    def tried(usd: float) -> list[int]:
        target = parse_target(f"usd/step<={usd}")
        found = size._Tried(asked, target, lambda j: ask(j).pair, 64, lambda _share, _text: None)
        return [each.nodes for each in found.search().rows]

    assert tried(5.0 * node_usd) == [1, 2, 4]
    assert tried(0.5 * node_usd) == [1]


def sized(found: Job, target: str, *clusters: str, most_nodes: int = 2) -> Sizing:
    return size_job(found, parse_target(target), lambda j: ask(j).pair, clusters=clusters, most_nodes=most_nodes)


def test_usd_targets_take_the_cheapest_and_bill_every_device_of_the_nodes() -> None:
    found = sized(narrow(price="3 USD/h"), "usd/step<=100")
    assert (found.best is not None, found.by) == (True, "usd")
    for row in found.rows:
        assert row.rl_step_s is not None
        assert row.usd_per_step == pytest.approx(row.rl_step_s * row.devices * 3.0 / 3600.0)
    assert found.best == min(found.rows, key=lambda row: row.usd_per_step or 0.0)
    pinned = job(price="3 USD/h", pools=[{"role": "trainer", "devices": 4}, {"role": "rollout", "devices": 4}])
    (row,) = sized(pinned, "usd/step<=100", most_nodes=1).rows
    assert row.devices == 8 and row.rl_step_s is not None  # four of them idle, and are paid for
    assert row.usd_per_step == pytest.approx(row.rl_step_s * 8 * 3.0 / 3600.0)


def test_a_price_is_a_clusters_own_and_without_one_nothing_is_called_the_cheapest() -> None:
    small = narrow(price="3 USD/h")
    found = sized(small, "step<=1h", "dgx_h100", "dgx_a100", most_nodes=1)
    assert {row.cluster: row.usd_per_step is None for row in found.rows} == {"dgx_h100": False, "dgx_a100": True}
    assert found.by == "devices" and "not known, as dgx_a100 has no price (give --price dgx_a100=" in found.verdict
    none = sized(narrow(), "step<=1h", "dgx_h100", "dgx_a100", most_nodes=1)
    assert "as dgx_a100 and dgx_h100 have no price (give --price dgx_a100=...,dgx_h100=... in USD per" in none.verdict
    both = sized(small, "step<=1h", "dgx_h100=30 USD/h", "dgx_a100=0.1 USD/h", most_nodes=1)
    assert both.by == "usd" and both.best is not None and both.best.cluster == "dgx_a100"
    assert "cheapest" in both.verdict
    with pytest.raises(SpecError, match="what a device of dgx_a100 costs"):
        sized(small, "usd/step<=100", "dgx_a100", most_nodes=1)
    with pytest.raises(SpecError, match="price of cluster dgx_a100"):
        sized(small, "step<=1h", "dgx_a100=cheap", most_nodes=1)


def test_prices_of_several_clusters_are_stated_at_once_and_name_what_is_tried() -> None:
    small = narrow(price="3 USD/h")
    found = rlperf.size_job(small, "step<=1h", prices={"h100": 30, "a100": "0.1 USD/h"}, most_nodes=1)
    assert found.by == "usd" and found.best is not None and found.best.cluster == "dgx_a100"
    assert found == sized(small, "step<=1h", "dgx_h100=30", "dgx_a100=0.1", most_nodes=1)
    twice = sized(small, "step<=1h", "dgx_h100", "h100=30", most_nodes=1)  # one cluster, named and priced
    assert [row.usd_per_step for row in twice.rows] == [found.rows[0].usd_per_step]


def test_everything_wrong_with_any_cluster_is_told_before_the_first_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*_: object, **__: object) -> None:
        raise AssertionError("planned before every name was read")

    monkeypatch.setattr(size, "plan_job", planned)
    with pytest.raises(SpecError, match=r"dgx_h10.*did you mean dgx_h100(.|\n)*no cluster named 'nope'"):
        sized(job(), "step<=1h", "dgx_h100", "dgx_h10", "nope")
    with pytest.raises(SpecError, match=r"dgx_h100 costs(.|\n)*dgx_a100 costs"):
        sized(job(), "usd/step<=1", "dgx_h100", "dgx_a100")


@pytest.mark.parametrize("mode", slow_but(("colocated", "one_step_off", "async"), "colocated"))
def test_no_cluster_beats_the_floor(mode: str) -> None:
    asked = job(modes=[mode], limits={"staleness": 2}, framework="verl", trainer_backends=["fsdp2"])
    found = sized(asked, "step<=1h", most_nodes=4)
    (floor,) = found.floors
    assert 0.0 < floor.rl_step_s <= min(row.rl_step_s for row in found.rows if row.rl_step_s is not None)


def test_a_floor_is_its_modes_own_and_says_so() -> None:
    """An asynchronous one was what the framework adds, 300 ms, and called the longest response alone."""
    asked = {"limits": {"staleness": 2}, "framework": "verl", "trainer_backends": ["fsdp2"]}
    turns, ahead = (floor_of(ask(job(modes=[mode], **asked)).context) for mode in ("colocated", "async"))
    assert turns.waits_for.startswith("its longest response alone, and")
    assert ahead.waits_for.startswith("a group's longest response alone, shared by the 3 batches under way, and")
    # a group waits for half a period until its batch is there: two and a half of them
    assert turns.rl_step_s / 5.0 < ahead.rl_step_s < turns.rl_step_s / 2.5


def test_engines_that_nothing_holds_have_no_floor_and_a_row_that_says_why() -> None:
    pinned = job(pools=[{"role": "rollout", "layout": {"tensor_parallel": 3}}])
    found = sized(pinned, "step<=1h", most_nodes=1)
    assert (found.best, found.floors) == (None, ())
    assert all(row.note and row.rl_step_s is None for row in found.rows)
    with pytest.raises(InfeasibleError, match="no layout of the rollout pool"):
        floor_of(ask(pinned).context)


@pytest.mark.slow
def test_sizing_says_where_nodes_stop_helping() -> None:
    tiny = {**TASK, "prompts_per_step": 4, "mini_batch": 4}
    found = sized(job(tasks=[tiny], trainer_backends=["fsdp2"]), "step<=1h", most_nodes=64)
    (floor,) = found.floors
    steps = {row.nodes: row.rl_step_s for row in found.rows if row.rl_step_s is not None}
    assert found.best is not None and found.best.nodes == 1  # more were asked for the floor's sake
    assert floor.enough_nodes is not None and max(steps) == 2 * floor.enough_nodes < 64
    assert min(steps.values()) >= 0.95 * steps[floor.enough_nodes]
    assert all(min(steps.values()) < 0.95 * s for n, s in steps.items() if n < floor.enough_nodes)


@pytest.mark.parametrize("text", ["step>=300s", "speed<=3", "step<=fast", "usd/step<=-1", "step <= 3 GB"])
def test_targets_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="target"):
        parse_target(text)
