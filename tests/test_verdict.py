"""`rlperf verdict`: one line first, then what to change, in the framework's own keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlperf.cli.main import app
from rlperf.files import audit_config
from rlperf.frameworks.audit import audit as auditing
from rlperf.frameworks.audit.answer import best_words, pools_words, report
from rlperf.frameworks.audit.beside_log import Compared
from rlperf.frameworks.audit.verdict import CHANGES, lines_of, verdict_of
from rlperf.plan.compare import job_of_plan
from rlperf.specs.job import Job

SCRIPT = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
  data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=4096 actor_rollout_ref.rollout.n=8 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.tensor_model_parallel_size=8 \\
  actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8 trainer.nnodes=1
"""


def test_a_run_is_normal_slow_or_fast_against_its_own_prediction(script: Path) -> None:
    found = audit_config(script, cluster="dgx_h100", plan=False)
    assert found.predicted is not None
    low, due, high = found.predicted.low_s, found.predicted.rl_step_s, found.predicted.high_s

    def said(seconds: float) -> str:
        logged = replace(found, measured=(Compared("rollout", seconds, due / 2), Compared("rl_step", seconds, due)))
        verdict = verdict_of(logged)
        assert verdict is not None
        return lines_of(verdict)[0]

    assert said(due).startswith("normal: ")
    assert said(0.9 * low).startswith("faster than expected: ")
    other = verdict_of(replace(found, measured=(Compared("rl_step", 2.0 * high, due),), unlike=True))
    assert other is not None and other.line.startswith("not comparable: ") and other.slowest is None
    assert said(2.0 * high).startswith(f"slow by {100 * (2.0 * high / due - 1):.0f} %: ")
    assert (
        "look first at rollout"
        in lines_of(
            verdict_of(
                replace(found, measured=(Compared("rollout", 3 * due, due / 2), Compared("rl_step", 3 * high, due)))
            )  # type: ignore[arg-type]
        )[1]
    )


def test_a_stage_that_stands_out_is_named_although_others_make_up_for_it(script: Path) -> None:
    found = audit_config(script, cluster="dgx_h100", plan=False)
    assert found.predicted is not None
    due = found.predicted.rl_step_s
    for training, named in ((0.5, True), (0.25, False)):
        stages = Compared("rollout", 0.3 * due, 0.7 * due), Compared("training", training * due, 0.2 * due)
        verdict = verdict_of(replace(found, measured=(*stages, Compared("rl_step", due, due))))
        assert verdict is not None and verdict.line.startswith("normal: ")
        assert ("look first at training" in lines_of(verdict)[1]) is named


def test_changes_are_the_largest_gains_and_few(script: Path) -> None:
    found = audit_config(script, cluster="dgx_h100", plan=False)
    verdict = verdict_of(found)
    assert verdict is not None
    gains = [change.gain_s for change in verdict.changes]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) <= CHANGES
    offered = {finding.key: finding.gain_s for finding in found.findings if finding.gain_s}
    assert offered, "an engine over all eight devices of an 8B has something to gain"
    assert gains[0] == pytest.approx(max(offered.values()))
    lines = [line for line in lines_of(verdict) if line.startswith(("1. ", "2. ", "3. "))]
    assert len(lines) == len(gains)
    assert all(line.count(change.key) == 1 for line, change in zip(lines, verdict.changes, strict=True))


def test_gains_of_a_large_batch_are_not_judged_and_that_is_said(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = audit_config(script, cluster="dgx_h100", plan=False)
    key = next(each.key for each in judged.findings if each.gain_s)
    monkeypatch.setattr(auditing, "MOST_OFFERED", 128 * 8 - 1)
    found = audit_config(script, cluster="dgx_h100", plan=False)
    assert not any(each.gain_s for each in found.findings)
    note = next(note for note in found.notes if note.startswith("gains not predicted: an rl_step has 1,024 sequences"))
    assert key in note and note in report(found)
    verdict = verdict_of(found)
    assert verdict is not None and lines_of(verdict)[-1] == note
    assert not any(note.startswith("gains not predicted") for note in judged.notes)


def test_the_command_answers_first(script: Path) -> None:
    shown = CliRunner().invoke(app, ["verdict", str(script), "--cluster", "dgx_h100", "--no-plan"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0].startswith("not judged: ")
    assert "assumed: workload math" in shown.output


def test_what_will_fail_is_why_there_is_no_verdict(tmp_path: Path) -> None:
    """It said that the pinned layout cannot be laid out, where the audit knew which key it was and what mends it."""
    (tmp_path / "run.sh").write_text(
        "python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint Qwen3-30B-A3B "
        "--rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512 --rollout-max-response-len 8192 "
        "--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --rollout-num-gpus-per-engine 4\n"
    )
    asked = ["verdict", str(tmp_path / "run.sh"), "--framework", "slime", "--cluster", "dgx_h100", "--no-plan"]
    for form in ([], ["--json"]):
        said = CliRunner().invoke(app, [*asked, *form])
        assert said.exit_code == 1
        assert "expert-model-parallel-size: 16 trainer GPUs are no multiple of expert TP x EP x PP (set" in said.output


def test_the_planners_best_is_named_where_it_gains_more_than_a_change_does(script: Path) -> None:
    """Of a configuration that lacked a token budget alone, the budget and a plan with it were two changes to make."""
    found = audit_config(script, cluster="dgx_h100")
    assert found.predicted is not None and found.best is not None
    due = found.predicted.rl_step_s
    gain = due - found.best.phases[0].predicted.rl_step_s
    assert gain > 0.03 * due
    offer = next(each for each in found.findings if each.gain_s)
    for gained, named in ((gain - 0.02 * due, True), (gain, False)):
        verdict = verdict_of(replace(found, findings=(replace(offer, gain_s=gained),)))
        assert verdict is not None
        assert any(change.key == "the planner's plan" for change in verdict.changes) is named


def test_a_plan_of_the_files_own_layouts_says_what_it_sets(script: Path) -> None:
    """ "the planner's layouts" were advised, with a gain of 32 %, to a file that has those very layouts."""
    best = audit_config(script, cluster="dgx_h100").best
    assert best is not None
    same = job_of_plan(best)
    phase = best.phases[0]
    layouts = f"{phase.mode}: {pools_words(phase)}"
    assert best_words(best, same) == best_words(best, None) == layouts

    def having(part: str, **values: object) -> Job:
        pools = [
            pool.model_copy(update={part: getattr(pool, part).model_copy(update=values)})
            if pool.role == "trainer" else pool
            for pool in same.pools
        ]  # fmt: skip
        return same.model_copy(update={"pools": tuple(pools)})

    budget = phase.pool("trainer").settings.token_budget
    words = best_words(best, having("settings", token_budget=None))
    assert words == f"the file's layouts with trainer token_budget {budget} instead of unset"
    assert best_words(best, having("layout", tensor_parallel=(64,), microbatch=(7,))) == layouts
    assert best_words(best, same.model_copy(update={"modes": ("async",)})) == layouts


@pytest.mark.parametrize("stated", [False, True])
def test_a_log_without_lengths_is_held_against_a_presets_with_a_word(
    script: Path, stated: bool, tmp_path: Path
) -> None:
    """A console of NeMo-RL was "faster than expected" by responses half as long, and nothing said whose those were."""
    first = audit_config(script, cluster="dgx_h100", plan=False)
    assert first.predicted is not None
    values = {"timing_s/step": first.predicted.rl_step_s, "timing_s/gen": 0.6 * first.predicted.rl_step_s}
    values |= {"response_length/mean": 2000.0} if stated else {}
    lines = (json.dumps({"step": step, "data": values}) + "\n" for step in range(1, 5))
    (tmp_path / "run.jsonl").write_text("".join(lines))
    found = audit_config(script, cluster="dgx_h100", plan=False, log=tmp_path / "run.jsonl")
    assert any("does not say how long its responses are" in each for each in found.cautions) is not stated
