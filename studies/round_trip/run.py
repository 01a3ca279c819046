"""How many configurations import, predict, export again and then predict the same; and how many planned jobs do.

Run: python -m studies.round_trip.run FOLDER [PLANS] [CANDIDATES]
FOLDER: configurations; PLANS: sampled jobs per framework, 50; CANDIDATES: configurations that searches kept, 50
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import polars as pl

import rlperf
from rlperf.api import Question, ask
from rlperf.errors import InfeasibleError, RlperfError, SpecError
from rlperf.frameworks.audit.audit import audit
from rlperf.frameworks.export import losses, write_file, write_plan
from rlperf.frameworks.imports import import_config, job_of, job_text, keys_text
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.plan.answer.plan import Phase, Plan
from rlperf.plan.answer.prediction import prediction_of
from rlperf.plan.judge.budgets import scored_apart
from rlperf.plan.judge.evaluate import Evaluation, Judge
from rlperf.plan.question.context import Context, TaskContext
from rlperf.plan.search.screen import screen
from rlperf.specs.job import Job
from studies.round_trip.sample import sampled

SAME = 1e-9
STAGES = ("files", "imported", "predicted", "exported", "same")


def configs(written: Sequence[Path]) -> list[Path]:
    """Of the files of an export those that an import reads: configurations before scripts."""
    read = [path for path in written if path.suffix in (".yaml", ".sh") and path.name != "run_all.sh"]
    return sorted(read, key=lambda path: (path.suffix == ".sh", path.name))


def trip(file: Path, folder: Path) -> int:
    """Stages of `STAGES` that a file passes: to an import, a prediction, an export, and to the same prediction."""
    passed = 1
    try:
        imported = import_config([file])
        job = job_of(imported)
        passed += 1
        seconds = rlperf.predict_job(job).rl_step_s
        passed += 1
        path = folder / "job.yaml"
        path.write_text(job_text(job))
        path.with_suffix(".keys.yaml").write_text(keys_text(imported))
        written = write_file(path, None, folder / "out")
        passed += 1
        again = rlperf.predict_job(job_of(import_config(configs(written), imported.framework))).rl_step_s
    except RlperfError as error:
        print(f"{file.name}: {error}", file=sys.stderr)
        return passed
    return passed + (abs(again / seconds - 1.0) <= SAME)


def files(folder: Path) -> pl.DataFrame:
    """Counts over the configurations of a folder."""
    passed = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with TemporaryDirectory() as scratch:
            passed.append(trip(file, Path(scratch)))
    return pl.DataFrame({name: [sum(each > index for each in passed)] for index, name in enumerate(STAGES)})


@dataclass(frozen=True)
class PlanTrip:
    """A sampled job, planned, exported and imported again.

    Attributes
    ----------
    refused : why there is no plan: nothing fits, or no file could say what the job states
    excess : rl_step of the imported files over the plan's own - 1 [1]
    lost : settings of the plan that the files do not say, in words; what a recipe has to code is none
    findings : what an audit of the files finds, hints left out
    """

    job: Job
    refused: str = ""
    excess: float = 0.0
    lost: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether the plan is exactly what its files say."""
        return not self.refused and abs(self.excess) <= SAME and not self.lost and not self.findings


CODED = ("turns with tools", "dynamic sampling", "a staleness of at most", "checkpoint ")
"""What no framework takes from a file: the workload's own code, or a bound that it does not have."""


def plan_trip(job: Job) -> PlanTrip:
    """One job on the way to files and back."""
    try:
        plan = rlperf.plan_job(job)
    except (SpecError, InfeasibleError) as error:
        return PlanTrip(job, str(error).partition("\n")[0])
    return trip_of(job, plan)


def trip_of(job: Job, plan: Plan) -> PlanTrip:
    """What the files of a plan predict, leave out, and make an audit say."""
    workload, phase = job.tasks[0].workload, plan.phases[0]
    with TemporaryDirectory() as scratch:
        read = import_config(configs(write_plan(plan, None, scratch)), plan.job.framework)
    told = audit(read, cluster=job.cluster, workload=workload, plan=False, gains=False)
    again, found = told.predicted, told.findings
    return PlanTrip(
        job,
        excess=math.inf if again is None else again.rl_step_s / phase.predicted.rl_step_s - 1.0,
        lost=tuple(each for each in losses(plan) if not any(word in each.partition(":")[0] for word in CODED)),
        findings=tuple(f"{each.key}: {each.message}" for each in found if each.severity != "hint"),
    )


def plans(framework: str, count: int, seed: int = 77, *, few: bool = False) -> Iterator[PlanTrip]:
    """So many sampled jobs (`sampled`) that can be planned, and those refused between them."""
    random, planned, refused = Random(f"{framework} {seed}"), 0, 0
    while planned < count and refused <= REFUSED:
        found = plan_trip(sampled(framework, random, few=few))
        planned, refused = (planned, refused + 1) if found.refused else (planned + 1, 0)
        yield found


def candidates(framework: str, count: int, seed: int = 77, *, each: int = 4) -> Iterator[PlanTrip]:
    """So many configurations that a search looked at, ``each`` of a sampled job, drawn from all that it kept.

    A plan is only ever its search's best; what else a framework can say is judged, written and read back here.
    """
    random, tried, refused = Random(f"{framework} {seed}"), 0, 0
    while tried < count and refused <= REFUSED:
        job = sampled(framework, random, few=True)
        try:
            question = ask(job, to_plan=True)
        except SpecError as error:
            refused += 1
            yield PlanTrip(job, str(error).partition("\n")[0])
            continue
        refused = 0
        for plan in drawn(question, random, min(each, count - tried)):
            tried += 1
            yield trip_of(job, plan)


def drawn(question: Question, random: Random, most: int) -> Iterator[Plan]:
    """Plans of what the screen of a question keeps, some with pipeline stages or a scoring budget of their own."""
    context, facts = question.context, question.facts
    task, job = context.tasks[0], context.job
    demands = tuple(task.source.demand(batch, None, job.seed) for batch in task.batches)
    screened, judge = screen(context, task, demands, facts, keep=KEPT), Judge(context, task)
    rows = random.sample(range(len(screened.configurations)), min(most, len(screened.configurations)))
    for row in rows:
        demand = demands[screened.demand[row]]
        found = judge.evaluate(demand, screened.configurations[row])
        better = judge.staged(found) if facts.states_stages and random.random() < 0.5 else None
        if better is None and facts.states_scoring and random.random() < 0.5:
            better = scored_apart(judge, found)
        if better is not None:
            found = judge.evaluate(demand, better)
        yield Plan(
            job=job, status="feasible", objective=found.rl_step_s, bound=0.0, mip_gap=0.0, candidates=1, rejected={},
            screen_regret=0.0, phases=(_phase(context, task, found),),
        )  # fmt: skip


def _phase(context: Context, task: TaskContext, found: Evaluation) -> Phase:
    """What files take of a phase: what it is and its seconds, not what a plan says beside them, most of the work."""
    chosen = found.configuration
    return Phase(
        tasks=task.names, rl_steps=(0, 0), mode=chosen.mode, staleness=chosen.staleness, settings=chosen.settings,
        pools=chosen.pools, scorers=chosen.scorers, predicted=prediction_of(context, task, found, operators=False),
    )  # fmt: skip


REFUSED = 100
"""Sampled jobs that may be refused one after another: what refuses more is no job's fault."""
KEPT = 400
"""Configurations of a search among which some are drawn."""


def main() -> None:
    """All tables, and every plan that is not what its files say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="configurations")
    parser.add_argument("plans", nargs="?", type=int, default=50, help="jobs per framework")
    parser.add_argument("candidates", nargs="?", type=int, default=50)
    asked = parser.parse_args()
    print(files(asked.folder))
    for what, count, trips in (("plans", asked.plans, plans), ("candidates", asked.candidates, candidates)):
        rows = []
        for name in FRAMEWORKS:
            found = list(trips(name, count))
            for each in found:
                if each.refused or not each.same:
                    print(name, each.refused or (each.excess, each.lost, each.findings), each.job, file=sys.stderr)
            refused = sum(bool(each.refused) for each in found)
            rows.append((name, refused, len(found) - refused, sum(each.same for each in found)))
        print(what, pl.DataFrame(rows, schema=["framework", "refused", "made", "same"], orient="row"))


if __name__ == "__main__":
    main()
