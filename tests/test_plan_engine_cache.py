"""What closed forms do not see of an engine's cache: who waits for a slot, and finalists that all run over."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlperf.api import plan_job
from rlperf.plan.answer.plan import Plan
from rlperf.plan.judge import decisions, finalists, tuning, value
from rlperf.plan.judge.engine_cache import with_all_running
from rlperf.plan.judge.evaluate import Judge
from rlperf.plan.question.context import Context
from rlperf.plan.search.configuration import Configuration
from rlperf.plan.search.screen import Screened
from rlperf.sim.rl_step.demand import Batch
from rlperf.specs.job import Job

TASK = {
    "name": "math", "workload": "math", "prompts_per_step": 128, "group_size": 8, "max_prompt_tokens": 2048,
    "max_response_tokens": 8192,
}  # fmt: skip
TRAINER = {
    "role": "trainer", "layout": {"ulysses": 2, "data_parallel": 4, "activation_recompute": "none"},
    "settings": {"backend": "fsdp2", "token_budget": 16384, "scoring_token_budget": 32768},
}  # fmt: skip


def planned(**running: Any) -> Plan:
    engines = {"role": "rollout", "layout": {"tensor_parallel": 1}, "settings": {"memory_fraction": 0.9, **running}}
    base = {"architecture": "Qwen3-8B", "cluster": "dgx_h100", "nodes": 1, "framework": "verl", "tasks": [TASK]}
    return plan_job(Job.model_validate({**base, "trainer_backends": "fsdp2", "pools": [engines, TRAINER]}))


@pytest.mark.parametrize(
    ("slots", "stated", "seconds", "cache", "peak", "found"),
    [
        (104, None, 96.0, 1e6, 60.0, 128),
        (104, None, 99.8, 1e6, 60.0, None),  # not worth it
        (128, None, 96.0, 1e6, 60.0, None),  # all run at once already
        (104, (104,), 96.0, 1e6, 60.0, None),  # the job says how many
        (104, None, 96.0, 3e4, 60.0, None),  # a cache for few of the longest
        (104, None, 96.0, 1e6, 80.0, None),  # the trainer no longer fits beside it
    ],
)
def test_all_run_at_once_where_that_is_faster(
    slots: int, stated: tuple[int, ...] | None, seconds: float, cache: float, peak: float, found: int | None
) -> None:
    asked = SimpleNamespace(settings=SimpleNamespace(max_running=stated))
    tried = SimpleNamespace(memory=SimpleNamespace(kv_tokens=np.array([cache])), rl_step_s=seconds)
    judge: Any = SimpleNamespace(
        context=SimpleNamespace(job=SimpleNamespace(pool=lambda role: asked)),
        evaluate=lambda demand, larger: tried, peak=lambda one, other: peak, room=lambda one: 70.0,
    )  # fmt: skip
    configuration = SimpleNamespace(
        batch=Batch(128, 8, 128, 2048, 8192, 128),
        pool=lambda role: SimpleNamespace(settings=SimpleNamespace(max_running=slots)),
        with_rollout=lambda max_running: max_running,
    )
    evaluation: Any = SimpleNamespace(
        configuration=configuration, replicas=SimpleNamespace(writers=8), rl_step_s=100.0,
        demand=SimpleNamespace(request_tokens=10240.0),
    )  # fmt: skip
    assert with_all_running(judge, evaluation) == found


@pytest.mark.slow
def test_an_open_max_running_is_no_worse_than_all_at_once() -> None:
    """The cache has room for 104 half-grown requests of 128: the other 24 began late, and the batch ended with them."""
    plan = planned()
    assert plan.phases[0].pool("rollout").settings.max_running == 128
    assert plan.objective < 0.97 * planned(max_running=104).objective


def test_the_best_of_every_mode_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B on 8 H100: colocated, whose `max_running` events raise, lost to async where both were open."""
    monkeypatch.setattr(value, "judged_objective", lambda _, e: e.value)
    monkeypatch.setattr(value, "_price", lambda *_: 0.0)
    judged = tuple(
        SimpleNamespace(value=value, configuration=SimpleNamespace(alternative=(mode, "fsdp2", "bf16")))
        for mode, value in (("async", 1.0), ("async", 2.0), ("async", 3.0), ("colocated", 5.0), ("colocated", 4.0))
    )
    best = tuning._best(None, judged, 2)  # type: ignore[arg-type]
    assert [each.value for each in best] == [1.0, 2.0, 4.0, 5.0]  # type: ignore[attr-defined]


def test_a_rival_alternative_is_judged_as_if_it_were_stated_and_few_of_one_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five candidates each of three backends, 0, 4 and 6 % above the best, and of the best one's with a worse batch."""
    monkeypatch.setattr(finalists, "_grid", lambda one: one.name)
    named = [(backend, number) for number in range(5) for backend in ("best", "rival", "behind", "batch")]
    above = {"best": 0.0, "rival": 0.04, "behind": 0.06, "batch": 0.06}
    kinds = {"batch": "best"}
    named.sort(key=lambda each: 100.0 * above[each[0]] + each[1])
    screened: Any = SimpleNamespace(
        configurations=[
            SimpleNamespace(alternative=each[0], kind=kinds.get(each[0], each[0]), name=each) for each in named
        ],
        priced=np.array([100.0 * (1.0 + above[backend]) + number for backend, number in named]),
    )
    found = Counter(name[0] for name in {one.name for one in finalists._of_each_alternative(screened, 16)})
    assert found == {"best": 5, "rival": 5, "behind": 3}


def test_scoring_is_not_timed_anew_where_it_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """An rl_step of 130 s, 20 s of it scoring: 110 s without, which is near 105 and not near 100."""
    monkeypatch.setattr(tuning, "judged_objective", lambda _, e: e.rl_step_s)
    trainer = SimpleNamespace(scoring_s=np.array([20.0]), values_s=np.zeros(1))
    evaluation: Any = SimpleNamespace(rl_step_s=130.0, trainer=trainer)
    assert [tuning._may_win(None, evaluation, least) for least in (105.0, 100.0)] == [True, False]  # type: ignore[arg-type]


def test_all_at_once_is_tried_with_every_engine_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """30B-A3B on 8 H200: TP 1 with all at once beat two TP 2 that judged better, and was not tried."""
    monkeypatch.setattr(value, "judged_objective", lambda _, e: e.value)
    monkeypatch.setattr(value, "_price", lambda *_: 0.0)
    judged = tuple(
        SimpleNamespace(
            value=value,
            configuration=SimpleNamespace(
                mode=mode,
                alternative=(mode, "fsdp2", "bf16"),
                pool=lambda _, layout=layout: SimpleNamespace(
                    layout=layout, settings=SimpleNamespace(memory_fraction=0.9)
                ),
            ),
        )
        for mode, layout, value in (
            ("async", "TP 2", 808.3),
            ("async", "TP 2", 808.5),
            ("async", "TP 2 EP 2", 808.6),
            ("async", "TP 1", 831.5),
            ("async", "TP 4", 901.6),
            ("colocated", "TP 8", 990.0),
        )
    )
    found = tuning._best_of_each_engine(None, judged)  # type: ignore[arg-type]
    assert [each.value for each in found] == [808.3, 808.6, 831.5, 990.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("framework", "architecture", "cluster", "nodes", "batch", "response"),
    [
        ("rlinf", "Qwen3-14B", "dgx_a100", 3, (64, 8), 8192),  # 2.9 % slower
        pytest.param("nemo_rl", "Qwen3-30B-A3B", "dgx_a100", 2, (128, 8), 4096, marks=pytest.mark.slow),  # 2.3 %
        pytest.param("rlinf", "Qwen3-30B-A3B", "mi300x_node", 3, (256, 4), 8192, marks=pytest.mark.slow),  # 0.2 %
    ],
)
def test_an_open_share_of_memory_is_no_worse_than_a_stated_one_where_groups_stream(
    framework: str, architecture: str, cluster: str, nodes: int, batch: tuple[int, int], response: int
) -> None:
    """Who comes last is preempted by a small cache, so that the first groups end sooner, beside fewer."""
    task = {**TASK, "prompts_per_step": batch[0], "group_size": batch[1], "mini_batch": 32, "max_prompt_tokens": 1024}
    base = {
        "architecture": architecture, "cluster": cluster, "nodes": nodes, "framework": framework, "modes": "streaming",
        "engine": "sglang" if framework == "nemo_rl" else "vllm", "tasks": [{**task, "max_response_tokens": response}],
        "objective": {"bold": True}, "limits": {"staleness": 1},
    }  # fmt: skip
    stated = {"pools": [{"role": "rollout", "settings": {"memory_fraction": 0.6}}]}
    open_, pinned = (plan_job(Job.model_validate({**base, **pools})).objective for pools in ({}, stated))
    assert open_ <= 1.001 * pinned


@dataclass(frozen=True)
class Choice:
    """What is asked of a candidate where trajectories at once are bounded."""

    name: str
    layout: str
    batch: int = 512
    mode: str = "colocated"
    variant: tuple[str, ...] = ()
    staleness: int = 0

    def pool(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(layout=self.layout)


@pytest.mark.parametrize(("fastest", "beside"), [("TP 2", ["b"]), ("TP 4", ["d"])])
def test_with_fewer_at_once_every_candidate_is_judged_once(
    fastest: str, beside: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other engines served best their first candidate stood there twice: a plan was its own runner-up."""
    screened: Any = SimpleNamespace(
        configurations=[Choice("a", "TP 2"), Choice("b", "TP 2"), Choice("c", "TP 4"), Choice("d", "TP 4")]
    )
    demand = SimpleNamespace(batch=SimpleNamespace(max_trajectories=None))
    best: Any = SimpleNamespace(configuration=screened.configurations[0], demand=demand, rl_step_s=100.0)
    halved = SimpleNamespace(configuration=Choice("a", "TP 2", 256), demand=SimpleNamespace(batch=256), rl_step_s=50.0)
    judge: Any = SimpleNamespace(
        evaluate=lambda demand, one: SimpleNamespace(
            configuration=one, demand=demand, rl_step_s=40.0 if one.layout == fastest == "TP 4" else 60.0
        )
    )
    monkeypatch.setattr(tuning, "with_fewer_at_once", lambda *_: [halved])
    monkeypatch.setattr(tuning, "with_less_staleness", lambda *_: [])
    found: Any = tuning._fewer_at_once(judge, best, screened, "each")
    assert [each.configuration.name for each in found] == ["a", "c", *beside]
    assert {each.configuration.batch for each in found} == {256}


def test_engines_that_no_finalist_has_are_judged_where_closed_forms_have_them_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What events find of all finalists may be more than closed forms have of engines that they rank behind."""
    base = {"architecture": "Qwen3-8B", "cluster": "dgx_a100", "nodes": 1, "framework": "verl"}
    base |= {"modes": "one_step_off", "limits": {"staleness": 1}, "objective": {"bold": True}}
    job = Job.model_validate({**base, "tasks": [{**TASK, "prompts_per_step": 16, "max_response_tokens": 16384}]})
    best = plan_job(job).objective
    alone: list[float] = []

    def slow(context: Context, screened: Screened, __: int) -> list[Configuration]:
        engines = screened.configurations[-1].pool("rollout").layout
        chosen = [one for one in screened.configurations if one.pool("rollout").layout == engines][:3]
        task = context.tasks[0]
        demand, judge = task.source.demand(task.batches[0], None, context.job.seed), Judge(context, task)
        alone.extend(judge.evaluate(demand, each).rl_step_s for each in chosen)
        return chosen

    monkeypatch.setattr(decisions, "finalists_of", slow)
    assert plan_job(job).objective == pytest.approx(best, rel=1e-6)
    assert min(alone) > 1.01 * best, "the finalists alone are slower"
