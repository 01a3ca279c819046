"""Plan and Prediction: what rlperf answers. Frozen, complete, re-loadable; the JSON forms are stable interfaces."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PlainSerializer, model_validator

from rlperf.plan.answer import notebook
from rlperf.plan.answer.uses import CriticUse, ScorerUse
from rlperf.plan.question.pool import BatchSettings, PoolPlan, ResponseTokens, ScorerPlan
from rlperf.plan.question.words import layout_words, pool_rows, token_words
from rlperf.specs.frozen import Frozen
from rlperf.specs.job import Job
from rlperf.specs.modes import Mode
from rlperf.specs.pool import Role
from rlperf.units import human_seconds, human_share, human_usd

if TYPE_CHECKING:
    import polars as pl


class PredictedStages(Frozen):
    """Seconds of one rl_step by stage. Overlapped stages may add up to more than the step."""

    rollout: float = 0.0
    reward: float = 0.0
    scoring: float = 0.0
    training: float = 0.0
    weight_sync: float = 0.0
    data_movement: float = 0.0
    offload: float = 0.0
    other: float = 0.0


class MemoryUse(Frozen):
    """Peak bytes per device of one role, with its parts, the device's memory, and what the job's risk leaves of it."""

    total: float
    low: float
    high: float
    limit: float = Field(description="memory of the device [bytes]")
    allowed: float = Field(description="most that the total may be for the job's out_of_memory_risk [bytes]")
    risk: float = Field(description="probability that the role runs out of memory [1]")
    parts: dict[str, float]


class OperatorShare(Frozen):
    """One operator of one role: its seconds in the rl_step, its share of the role, and what bounds it."""

    role: Role
    operator: str
    seconds: float
    share: float
    bound: Literal["compute", "bandwidth", "latency", "network"]
    speed_of_light: float = Field(description="ideal seconds on the data sheet's peak / predicted seconds")


class CalibrationUse(Frozen):
    """Which calibrations a prediction used, and whether it left their range."""

    ids: tuple[str, ...] = ()
    extrapolated: bool = False
    notes: tuple[str, ...] = ()


class RunTotals(Frozen):
    """A whole run in time and money. ``goodput``: seconds in rl_steps that count over all seconds."""

    rl_steps: int
    total_s: float
    low_s: float = Field(description="with every rl_step at its 5th percentile")
    high_s: float = Field(description="with every rl_step at its 95th percentile")
    start_up_s: float
    checkpoint_s: float
    validation_s: float
    handovers_s: float = Field(0.0, description="changes of layout between tasks that take turns")
    lost_s: float = Field(description="work that failures and spot nodes that leave undo, and restarts")
    failures: float = Field(description="expected number")
    departures: float = Field(0.0, description="spot nodes that leave, expected number")
    on_demand_s: float | None = Field(None, description="where spot nodes are stated: the same if none of them left")
    on_demand_usd: float | None = Field(None, description="and at the price of the others")
    goodput: float
    device_hours: float
    usd: float | None = None
    usd_per_rl_step: float | None = None
    usd_per_million_tokens: float | None = None
    best_checkpoint_every: int | None = Field(None, description="rl_steps between checkpoints that lose least")


class Prediction(Frozen):
    """What one configuration is predicted to do. ``low_s`` and ``high_s`` are the 5th and 95th percentile."""

    schema_version: Literal[1] = 1
    rl_step_s: float
    low_s: float
    high_s: float
    stages_s: PredictedStages
    memory_bytes: dict[Role, MemoryUse]
    tokens_per_s_per_device: float
    usd_per_step: float | None = None
    trained_tokens: float
    truncated_fraction: float = Field(description="responses cut at the maximum length")
    scorers: tuple[ScorerUse, ...] = Field((), description="teachers, reward models and judges beside the pools")
    critic: CriticUse | None = Field(None, description="where it has devices of its own")
    gains: tuple[str, ...] = Field((), description="what each technique that is switched on gains")
    idle_fraction: dict[str, float] = Field(default_factory=dict, description="device idle by cause")
    operators: tuple[OperatorShare, ...] = ()
    assumed: tuple[str, ...] = ()
    calibration: CalibrationUse = CalibrationUse()
    fits: bool = Field(True, description="the memory holds it, and no rule of the framework or limit refuses it")
    warnings: tuple[str, ...] = Field((), description="what to know before any other number")
    advice: tuple[str, ...] = Field((), description="the first knobs to turn")
    run: RunTotals | None = Field(None, description="where the job states one and one configuration is predicted")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf predict --json` prints it."""
        return self.model_dump(mode="json")

    def row(self) -> dict[str, Any]:
        """One flat row: names end in their unit, stages and memory with their role."""
        return {
            "rl_step_s": self.rl_step_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            **{f"{name}_s": seconds for name, seconds in self.stages_s.model_dump().items()},
            **{f"{role}_memory_bytes": use.total for role, use in self.memory_bytes.items()},
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "usd_per_step": self.usd_per_step,
            "trained_tokens": self.trained_tokens,
            "truncated_fraction": self.truncated_fraction,
            "fits": self.fits,
        }

    def __str__(self) -> str:
        stages = ((name.replace("_", " "), seconds) for name, seconds in self.stages_s.model_dump().items())
        largest = sorted(stages, key=lambda stage: -stage[1])[:3]
        memory = ", ".join(
            f"{role} {human_share(use.total / use.limit)} of memory" for role, use in self.memory_bytes.items()
        )
        spread = f"{human_seconds(self.low_s)} .. {human_seconds(self.high_s)}"
        return (
            f"rl_step {human_seconds(self.rl_step_s)} ({spread}): "
            + ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in largest)
            + f"\n{self.tokens_per_s_per_device:,.0f} tokens/s per device; {memory}"
        )

    def to_frame(self) -> pl.DataFrame:
        """One row: seconds by stage, bytes by role."""
        return notebook.frame([self.row()])

    def _repr_html_(self) -> str:
        """A prediction for a notebook: the rl_step, its stages, and memory against the device's."""
        stages = [
            (name.replace("_", " "), human_seconds(seconds), human_share(seconds / self.rl_step_s))
            for name, seconds in self.stages_s.model_dump().items()
            if seconds > 0
        ]
        memory = [
            (role, f"{use.total / 1e9:.1f} GB", f"{use.limit / 1e9:.1f} GB", human_share(use.risk, 1))
            for role, use in self.memory_bytes.items()
        ]
        usd = "" if self.usd_per_step is None else f", {human_usd(self.usd_per_step)} USD"
        return (
            f"<p><b>rl_step {human_seconds(self.rl_step_s)} "
            f"({human_seconds(self.low_s)} .. {human_seconds(self.high_s)})</b>, "
            f"5th to 95th percentile{usd}; "
            f"{self.tokens_per_s_per_device:,.0f} tokens/s per device</p>"
            + notebook.table(["stage", "time", "share"], stages)
            + notebook.table(["role", "memory per device", "device", "risk to run out"], memory)
        )


class PredictedNumbers(Frozen):
    """The numbers of a `Prediction`, without its operators, assumptions and calibration."""

    rl_step_s: float
    low_s: float
    high_s: float
    stages_s: PredictedStages
    memory_bytes: dict[Role, MemoryUse]
    tokens_per_s_per_device: float
    usd_per_step: float | None
    trained_tokens: float
    truncated_fraction: float
    scorers: tuple[ScorerUse, ...]
    critic: CriticUse | None
    gains: tuple[str, ...]
    idle_fraction: dict[str, float]
    fits: bool
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    run: RunTotals | None


class PredictReport(Frozen):
    """What ``rlperf predict --json`` prints: a `Prediction`, its numbers apart from what explains them."""

    schema_version: Literal[1] = 1
    job: str
    predicted: PredictedNumbers
    operators: tuple[OperatorShare, ...]
    assumed: tuple[str, ...]
    calibration: CalibrationUse

    @classmethod
    def of(cls, job: str, prediction: Prediction) -> PredictReport:
        """The report of one prediction."""
        numbers = {name: getattr(prediction, name) for name in PredictedNumbers.model_fields}
        return cls(
            job=job,
            predicted=PredictedNumbers(**numbers),
            operators=prediction.operators,
            assumed=prediction.assumed,
            calibration=prediction.calibration,
        )


class RunnerUp(Frozen):
    """Another choice than the plan, and whether the intervals can tell the two apart."""

    rl_step_s: float
    low_s: float
    high_s: float
    loss: float = Field(description="its objective / objective of the plan - 1")
    priced: float = Field(description="the same with the price of leaving the beaten path, which decides")
    distinguishable: bool
    differs: tuple[str, ...] = Field(description="what it does otherwise, in words")
    mode: Mode
    backend: str = Field(description="of the trainer")
    layouts: tuple[str, str] = Field(description="of the engines and of the trainer, in words")
    off_path: bool = Field(description="it does what no published recipe does")

    @property
    def verdict(self) -> str:
        """How it compares, in words: better by itself where the plan is nearer to the beaten path, or others gain."""
        where = "off the beaten path, " if self.off_path else ""
        if not self.distinguishable:
            return f"{where}cannot be told apart from the plan"
        return where + ("worse beyond the intervals" if self.loss >= 0.0 else "better by itself, not chosen")

    @property
    def why_not(self) -> str:
        """Of a runner-up that takes less than the plan, why the plan is not it; empty where it takes no less."""
        if self.loss >= 0.0:
            return ""
        if self.priced >= 0.0:
            return f"the plan is nearer to the beaten path, which counts {100 * (self.priced - self.loss):.1f} %"
        return "the plan is better with the other tasks and rl_steps in view"


class Sensitivity(Frozen):
    """What happens to the choice when one input is off by some share."""

    input: str
    change: float = Field(description="relative change of the input")
    rl_step_s: float = Field(description="the plan's rl_step under the change")
    loss: float = Field(
        description="objective of the plan, all tasks and rl_steps, over the then best one's - 1; 0 = the choice stands"
    )
    switches_to: tuple[str, ...] = Field((), description="what the then best candidate does otherwise")


class ParetoPoint(Frozen):
    """A candidate that no other one beats in time, devices and memory together."""

    rl_step_s: float
    device_s: float = Field(description="devices x rl_step")
    usd_per_step: float | None = None
    memory_share: float = Field(description="largest peak over the memory of its device")
    differs: tuple[str, ...] = Field(description="from the plan, in words; empty: it is the plan")


class GroupTime(Frozen):
    """What one group of rl_steps takes in a phase that covers several."""

    rl_steps: tuple[int, int]
    rl_step_s: float
    low_s: float
    high_s: float


class SwitchGain(Frozen):
    """What changing layouts between groups would save, where it is not certain and the plan keeps one."""

    saves: float = Field(description="share of the plan's objective, changes paid")
    low: float = Field(description="5th percentile, on common random numbers")
    high: float = Field(description="95th percentile")


class HandoverCost(Frozen):
    """What tasks pay that take turns on the same devices, where their layouts or policies differ."""

    change_s: float = Field(description="of one change: states loaded and cut anew, engines started with a cold cache")
    changes: float = Field(description="per rl_step of all tasks; 0: they keep one layout")
    per_rl_step_s: float = Field(description="what the changes take of every rl_step of all tasks")


class Phase(Frozen):
    """The plan for some tasks over a group of rl_steps (first and last included)."""

    tasks: tuple[str, ...]
    rl_steps: tuple[int, int]
    mode: Mode
    staleness: int = 0
    settings: BatchSettings
    responses: ResponseTokens | None = Field(None, description="lengths planned for, mean over rl_steps")
    pools: tuple[PoolPlan, ...]
    scorers: tuple[ScorerPlan, ...] = ()
    predicted: Prediction
    groups: tuple[GroupTime, ...] = Field((), description="of several groups of rl_steps, what each takes")
    runner_up: RunnerUp | None = None
    next_best: tuple[RunnerUp, ...] = Field(
        (), description="after the runner-up, best first, then the best of other modes and backends"
    )
    tied: int = Field(0, description="other judged candidates that the intervals cannot tell from this one")
    ties: tuple[tuple[str, ...], ...] = Field((), description="the best of them: what each does otherwise")
    simplest: tuple[str, ...] = Field(
        (), description="what the simplest of the tied does otherwise; empty: the plan is it"
    )
    sensitivity: tuple[Sensitivity, ...] = ()
    pareto: tuple[ParetoPoint, ...] = ()
    off_path: bool = Field(False, description="its layouts are none that published recipes have")
    binds: tuple[str, ...] = Field((), description="what holds the choice back: memory, tail, divisibility ...")

    def pool(self, role: Role) -> PoolPlan:
        """The pool that serves ``role``."""
        return next(pool for pool in self.pools if pool.role == role)

    def row(self) -> dict[str, Any]:
        """One flat row of a phase: what is run, with which degrees, and what it is predicted to do."""
        row: dict[str, Any] = {
            "tasks": ", ".join(self.tasks),
            "first_rl_step": self.rl_steps[0],
            "last_rl_step": self.rl_steps[1],
            "mode": self.mode,
            "staleness": self.staleness,
            **self.settings.model_dump(),
        }
        for pool in self.pools:
            row |= pool.row()
        return {**row, **self.predicted.row()}

    def _repr_html_(self) -> str:
        """A phase for a notebook: its pools and its prediction."""
        first, last = self.rl_steps
        return (
            f"<p>{escape(', '.join(self.tasks))}, rl_steps {first} to {last}: {self.mode}</p>"
            + notebook.table(["role", "devices", "layout", "settings"], pool_rows(self.pools, self.scorers))
            + self.predicted._repr_html_()
        )


class DefaultsComparison(Frozen):
    """The plan against what the framework runs by default, on the same devices, batches and rl_steps."""

    framework: str = Field(description="name and version")
    runs: str = Field("", description="what it runs by default, in words")
    objective: float | None = Field(None, description="value of the objective over the horizon; null: it does not run")
    saves: float | None = Field(None, description="1 - the plan's objective / the defaults'")
    low: float | None = Field(None, description="5th percentile of what is saved, on common random numbers")
    high: float | None = Field(None, description="95th percentile")
    why_not: str | None = Field(None, description="why the defaults do not run, or are not known")
    notes: tuple[str, ...] = ()


StatedJob = Annotated[Job, PlainSerializer(Job.stated)]
"""A job of which only what was stated is written: the rest is filled in anew."""


class Plan(Frozen):
    """The answer to a job: phases, and how good the answer is."""

    schema_version: Literal[1] = 1
    job: Job
    asked: StatedJob | None = Field(None, description="the job before its framework said what of it it runs")
    status: Literal["optimal", "feasible"]
    objective: float = Field(description="over the horizon: seconds, USD, or the mean of device-s per 1e6 tokens")
    bound: float = Field(description="no choice of what was judged is below, wherever it lies (objective.bold)")
    mip_gap: float = Field(description="what the solver left of the program, where leaving the beaten path has a price")
    candidates: int = Field(description="columns and pairs of columns that were refused or costed one by one")
    combinations: int = Field(0, description="whole configurations among which dominance proves the best was found")
    rejected: dict[str, int]
    screen_regret: float = Field(description="screen's choice over the program's best, both judged, - 1")
    static_objective: float | None = Field(None, description="best that keeps one layout throughout, for all tasks too")
    static_low: float | None = Field(None, description="5th percentile of what that plan takes above this one [1]")
    static_high: float | None = Field(None, description="95th percentile")
    switching: SwitchGain | None = Field(
        None, description="changes of layout that are not 95 % certain to pay, and not planned"
    )
    handovers: HandoverCost | None = Field(None, description="between tasks that take turns")
    defaults: DefaultsComparison | None = Field(None, description="against the framework's defaults")
    run: RunTotals | None = Field(None, description="the whole run, where the job states one")
    phases: tuple[Phase, ...]

    @model_validator(mode="after")
    def _phases_are_of_the_job(self) -> Plan:
        """A phase of a task that the job lacks would be judged as another one; one without both pools as none."""
        known = {task.name for task in self.job.tasks}
        for phase in self.phases:
            if not phase.tasks or not known.issuperset(phase.tasks):
                raise ValueError(f"a phase is of {', '.join(phase.tasks) or 'no task'}; the job has {', '.join(known)}")
            if missing := {"rollout", "trainer"}.difference(pool.role for pool in phase.pools):
                raise ValueError(f"a phase has no {' and no '.join(sorted(missing))} pool")
        return self

    @property
    def question(self) -> Job:
        """The job to plan anew, under another framework too: as it was asked where that is known."""
        return self.asked or self.job

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `rlperf plan --json` prints it."""
        return self.model_dump(mode="json")

    def lengths(self, phase: Phase) -> str:
        """Tokens of the responses that a phase is planned for, in words."""
        said, cap, cut = phase.responses, phase.settings.max_response_tokens, phase.predicted.truncated_fraction
        if said and said.tasks:
            own = (f"{each.task}: {token_words(each, each.max_response_tokens, each.truncated_fraction)}"
                   for each in said.tasks)  # fmt: skip
            return "responses of " + "; ".join(own)
        names = dict.fromkeys(task.workload.rsplit("/", 1)[-1] for task in self.job.tasks if task.name in phase.tasks)
        return f"responses of {', '.join(names)}: {token_words(said, cap, cut)}"

    def __str__(self) -> str:
        first = self.phases[0]
        batch = f"{first.settings.prompts_per_step} prompts x {first.settings.group_size}; {self.lengths(first)}"
        named = (f"{pool.role} {pool.devices} x {pool.device} {layout_words(pool.layout)}" for pool in first.pools[:2])
        pools = "; ".join(named)
        more = f" (first of {len(self.phases)} phases)" if len(self.phases) > 1 else ""
        takes = "; ".join(str(first.predicted).splitlines())
        return f"{self.job.name}, {first.mode}: {pools}{more}\n{batch}\n{takes}"

    def to_frame(self) -> pl.DataFrame:
        """One row per phase: of which job, what is run, its degrees, and its prediction."""
        of = {name: getattr(self.job, name) for name in ("architecture", "cluster", "nodes", "framework")}
        return notebook.frame([{"job": self.job.name, **of, **phase.row()} for phase in self.phases])

    def _repr_html_(self) -> str:
        """A plan for a notebook, phase by phase."""
        words = f"{self.job.architecture} on {self.job.cluster}, {self.status}"
        head = f"<p><b>{escape(self.job.name)}</b>: {escape(words)}</p>"
        return head + "".join(phase._repr_html_() for phase in self.phases)
