"""Job: what the user asks. The same form serves plan, predict, import and audit.

A scalar is *pinned*, a list or range is *open*, absence leaves the value to the planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.choice import Counts, Naturals, Ratios, TokenCount, TokenCounts
from rlperf.specs.framework_names import LISTED
from rlperf.specs.frozen import Frozen
from rlperf.specs.modes import MODES, Mode
from rlperf.specs.objectives import Minimize
from rlperf.specs.pool import PoolSpec, Role
from rlperf.specs.rl_calibration import Transport
from rlperf.specs.scorer import Scorer
from rlperf.units import Bytes, NonNegativeInt, PositiveInt, Seconds, Usd, UsdPerHour

Algorithm = Literal["grpo", "dapo", "ppo"]
AS_DEAR_AS: Mapping[str, Algorithm] = {
    **dict.fromkeys(
        ("gspo", "cispo", "rloo", "drgrpo", "gmpo", "reinforce", "reinforce++", "reinforceplusplus"), "grpo"
    ),
    **dict.fromkeys(("vapo", "vcppo"), "ppo"),
}
"""Objectives that differ in their loss or advantage alone: the same passes of the same models, so the same seconds."""


def _known_algorithm(given: object) -> object:
    """Refuse the name of another objective with the one that costs the same: no file would say the loss asked for."""
    same = AS_DEAR_AS.get(str(given).lower().replace("_", "").replace("-", ""))
    if same:
        words = "has a critic, as ppo" if same == "ppo" else "has no critic and takes what grpo does"
        raise ValueError(f"{given} {words}: say {same} here, and its loss in the framework's own file")
    return given


MOST_TASKS = 32
"""Tasks of a job: each has a screen and finalists of its own, which take a second or more."""


class ImageTokens(Frozen):
    """Images, or pairs of video frames, in a task's prompts."""

    share: float = Field(gt=0, le=1, description="of a prompt's tokens")
    tokens: float = Field(1024.0, ge=1, description="of one image (or pair of frames), as the language model sees it")


class Task(Frozen):
    """One task: its lengths and its batch.

    ``prompts_per_step`` and ``mini_batch`` count prompts (times group_size = sequences).
    """

    other_words: ClassVar[Mapping[str, str]] = {
        "environments": "max_trajectories", "max_turns": "turns of the workload (rlperf workload show)",
    }  # fmt: skip

    name: str = Field(min_length=1)
    workload: str = Field(min_length=1, description="shipped preset, a fitted length file, or the path of a trace")
    architecture: str | None = Field(None, description="where this task trains a policy of its own")
    prompts_per_step: Counts
    group_size: Counts = (8,)
    mini_batch: Counts | None = Field(None, description="prompts per optimizer update; default prompts_per_step")
    generated_prompts: PositiveInt | None = Field(
        None,
        description="prompts rolled out per rl_step where filtering drops some (DAPO); default: as the workload's "
        "filtering says, else prompts_per_step",
    )
    generation_batch: PositiveInt | None = Field(
        None,
        description="prompts that are generated at once where filtering drops some (DAPO's gen_batch_size): whole "
        "batches follow one another until enough groups are left, and each waits for its longest response",
    )
    max_prompt_tokens: TokenCount = 2048
    max_response_tokens: TokenCounts
    over_provision: Ratios = Field(
        (1.0,),
        description="prompts in flight over prompts that an rl_step waits for; above 1 the unfinished are continued in "
        "the next rl_step (partial rollouts)",
    )
    max_trajectories: Counts | None = Field(
        None,
        description="that the environment (sandboxes, tools) has under way at once; larger batches run in waves; of "
        "several numbers the plan takes the best",
    )
    images: ImageTokens | None = Field(None, description="default: what the workload states")
    reward_s: Seconds | None = Field(None, description="reward time per rl_step; default: what the workload states")
    rl_steps: Naturals | None = Field(None, description="recorded rl_steps of a trace to use; default all")

    @model_validator(mode="after")
    def _mini_batch_divides(self) -> Task:
        if self.mini_batch and min(self.mini_batch) > max(self.prompts_per_step):
            raise ValueError(
                f"mini_batch ({min(self.mini_batch)} prompts) is above prompts_per_step ({max(self.prompts_per_step)})"
            )
        return self

    @model_validator(mode="after")
    def _enough_are_generated(self) -> Task:
        if self.generated_prompts is not None and self.generated_prompts < min(self.prompts_per_step):
            raise ValueError(
                f"generated_prompts ({self.generated_prompts}) is below prompts_per_step "
                f"({min(self.prompts_per_step)}): filtering cannot leave more than is rolled out"
            )
        return self


class Objective(Frozen):
    """What to minimise (a row of `OBJECTIVES`), and what counts beside it."""

    minimize: Minimize = "step_time"
    bold: bool = Field(
        False, description="take what is predicted best, however far off the beaten path and by how little"
    )
    risk: float = Field(0.0, ge=0, le=1, description="0: the mean counts; 1: the 95th percentile counts")


class Limits(Frozen):
    """What a plan must respect."""

    step: Seconds | None = Field(None, description="longest rl_step", gt=0)
    usd_per_step: Usd | None = Field(None, gt=0)
    staleness: NonNegativeInt = Field(0, description="policy versions that a trained sample may be behind")
    truncated_fraction: float | None = Field(None, ge=0, le=1, description="most responses cut at the maximum length")
    out_of_memory_risk: float = Field(
        0.01, gt=0, le=1, description="most probability per run of running out of device memory"
    )
    host_memory: Bytes | None = Field(None, description="per node; default the cluster's")


class Horizon(Frozen):
    """Over which rl_steps to plan, and in how long groups."""

    rl_steps: PositiveInt = 1
    group: PositiveInt | None = Field(
        None,
        description="rl_steps per group; default: all in one, and a quarter of them where a trend of the lengths goes "
        "on past the recorded rl_steps",
    )
    switch: Seconds | None = Field(
        None,
        description="cost of changing layout between groups, and between tasks that take turns; default: never between "
        "groups, and a start of the framework between tasks",
    )
    handover_every: PositiveInt = Field(
        1, description="rl_steps of a task before the next one's turn, where tasks take turns"
    )


class SpotNodes(Frozen):
    """Nodes that their provider takes back; rates and prices are the user's to state."""

    pools: Literal["rollout", "all"] = Field(
        "rollout",
        description="whose nodes leave: rollout's, which goes on without them, or all, and the run starts again",
    )
    leaves: Seconds = Field(gt=0, description="mean time until one node leaves")
    returns: Seconds = Field(0.0, ge=0, description="mean time until another takes its place")
    price: UsdPerHour | None = Field(None, gt=0, description="of these nodes, per device and hour; default: as others")


class WholeRun(Frozen):
    """What surrounds the rl_steps of a whole run; rates are the user's to state, none is built in."""

    rl_steps: PositiveInt | None = Field(None, description="of the run; default those of the horizon")
    checkpoint_every: NonNegativeInt = Field(0, description="rl_steps between checkpoints; 0: none")
    checkpoint: Seconds = Field(0.0, ge=0, description="that one blocks")
    validation_every: NonNegativeInt = Field(0, description="rl_steps between validation passes; 0: none")
    validation: Seconds = Field(0.0, ge=0, description="of one pass")
    device_mtbf: Seconds | None = Field(None, gt=0, description="mean time between failures of one device; null: none")
    recovery: Seconds = Field(0.0, ge=0, description="from a failure to the restart, beside the start-up")
    spot: SpotNodes | None = Field(None, description="nodes that leave; null: none")


def _as_list(given: object) -> object:
    return (given,) if isinstance(given, str) else given


def _as_objective(given: object) -> object:
    return {"minimize": given} if isinstance(given, str) else given


def _twice(names: Iterable[str]) -> list[str]:
    counts = Counter(names)
    return sorted(name for name, count in counts.items() if count > 1)


class Job(Frozen):
    """An RLVR training job on a cluster."""

    other_words: ClassVar[Mapping[str, str]] = {
        "model": "architecture", "gpus": "nodes (x devices_per_node)", "gpu": "cluster", "mode": "modes",
        "workload": "workload of an entry of tasks", "prompts": "prompts_per_step of an entry of tasks",
        "group": "group_size of an entry of tasks", "mini_batch": "mini_batch of an entry of tasks",
        "max_prompt": "max_prompt_tokens of an entry of tasks", "staleness": "staleness of limits",
        "max_response": "max_response_tokens of an entry of tasks",
    }  # fmt: skip
    """Those of `rlperf.specs.short_job`."""

    schema_version: Literal[1] = 1
    name: str = "job"
    architecture: str = Field(
        min_length=1, description="shipped or published name, or path of a Hugging Face config.json"
    )
    like: str | None = Field(
        None, description="family that a config.json of an unknown model_type is read as; intervals are wider for it"
    )
    max_positions: PositiveInt | None = Field(
        None, description="of the policy, where its configuration is overridden; default: its architecture's"
    )
    cluster: str = Field(min_length=1, description="shipped name, 'generic:<device>', or path of a cluster file")
    nodes: PositiveInt | None = Field(None, description="default: as the cluster file says")
    devices_per_node: PositiveInt | None = Field(None, description="default: as the cluster file says")
    price: UsdPerHour | None = Field(None, gt=0, description="per device and hour; overrides the cluster's")
    algorithm: Annotated[Algorithm, BeforeValidator(_known_algorithm, json_schema_input_type=Algorithm)] = "grpo"
    reference: bool = Field(
        True, description="score with a frozen reference policy (a KL term); default: yes, but not for dapo"
    )
    old_policy: bool | None = Field(
        None, description="score the policy that generated before it is updated; default: as the framework does"
    )
    framework: str = Field("verl", description=f"{LISTED}; with ==version if it matters")
    in_flight_updates: bool | None = Field(
        None, description="engines take new weights while they generate; default: as the framework does"
    )
    weight_sync: Transport | None = Field(
        None, description="how weights reach the engines, where the framework has several ways; default: its usual one"
    )
    trainer_backends: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        Field(description="any of calibrations/trainers (fsdp2, megatron, deepspeed, ...); default: the framework's"),
    ] = ()
    engine: str = "vllm"
    tasks: tuple[Task, ...] = Field(min_length=1)
    modes: Annotated[tuple[Mode, ...], BeforeValidator(_as_list, json_schema_input_type=Mode | list[Mode])] = (
        "colocated",
    )
    sharing: Literal["time", "devices", "mixed"] = Field(
        "time",
        description="several tasks take turns on all devices, run at once on parts of them, or are mixed in one batch",
    )
    roles: tuple[Role, ...] | None = Field(None, description="default: rollout, trainer, and what the algorithm needs")
    objective: Annotated[Objective, BeforeValidator(_as_objective, json_schema_input_type=Minimize | Objective)] = (
        Objective()
    )
    limits: Limits = Limits()
    horizon: Horizon = Horizon()
    run: WholeRun | None = Field(None, description="where stated, the whole run is predicted too")
    pools: tuple[PoolSpec, ...] = ()
    scorers: tuple[Scorer, ...] = Field(
        (), description="teachers, reward models and judges that read the sequences before they are trained on"
    )
    seed: NonNegativeInt = 0

    @model_validator(mode="before")
    @classmethod
    def _dapo_has_no_reference(cls, given: object) -> object:
        """DAPO removes the KL term (Yu et al. 2025, arXiv 2503.14476, section 2.3)."""
        if isinstance(given, dict) and given.get("algorithm") == "dapo" and "reference" not in given:
            return {**given, "reference": False}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if wrong := list(self._contradictions()):
            raise ValueError("\n".join(wrong))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Fields that exclude each other, each in a line; what it begins with is where it is told."""
        if len(self.tasks) > MOST_TASKS:
            yield (
                f"{len(self.tasks)} tasks: at most {MOST_TASKS} are planned one by one, each with a search of its own; "
                "tasks of like lengths can be one, and so can a recorded mix of them"
            )
        if twice := _twice(task.name for task in self.tasks):
            yield f"tasks: names stand twice: {', '.join(twice)}"
        if double := _twice(pool.role for pool in self.pools):
            yield f"pools: several for one role: {', '.join(double)}"
        if again := _twice(scorer.name for scorer in self.scorers):
            yield f"scorers: names stand twice: {', '.join(again)}"
        shared = [mode for mode in self.modes if MODES[mode].shares_devices]
        if shared and any(pool.cluster for pool in self.pools):
            yield f"pools: a rollout pool on a cluster of its own excludes mode {' and '.join(shared)}"
        short = [mode for mode in self.modes if MODES[mode].least_staleness > self.limits.staleness]
        if short:
            least = max(MODES[mode].least_staleness for mode in short)
            asked = f"{' and '.join(short)} {'needs' if len(short) == 1 else 'need'}"
            yield f"modes: {asked} limits.staleness of at least {least}: limits: {{staleness: {least}}}"
        if self.run and self.run.spot and self.run.spot.pools == "rollout" and shared:
            yield f"run.spot: rollout has no nodes of its own in mode {shared[0]}: spot: {{pools: all}}"
        if self.run and self.run.spot and self.sharing == "devices":
            yield "run.spot: tasks that share the devices leave no spot nodes of their own: sharing: time"
        if not self.modes:
            yield "modes must name at least one alternative"

    def of_task(self, name: str | None = None) -> Job:
        """The job with one of its tasks alone; ``name`` may be left out where there is one only, or all are mixed.

        Raises
        ------
        SpecError : no such task, or several and none is named
        """
        if self.sharing == "mixed" and name is None:
            return self
        names = [task.name for task in self.tasks]
        if name is None and len(names) > 1:
            several = f"the job has {len(names)} tasks ({', '.join(names)}), and one at a time is predicted"
            raise SpecError(Problem(several, suggestion="name it with --task, or plan the job"))
        if name is not None and name not in names:
            hint = did_you_mean(name, names) or f"it has {', '.join(names)}"
            raise SpecError(Problem(f"the job has no task {name!r}", suggestion=hint))
        kept = tuple(task for task in self.tasks if name in (None, task.name))
        return self.model_copy(update={"tasks": kept})

    def stated(self) -> dict[str, Any]:
        """The fields that were given, as a file has them; a changed job fills in the rest anew."""
        return self.model_dump(mode="json", exclude_none=True, exclude_unset=True)

    def pool(self, role: Role) -> PoolSpec:
        """What the user says of ``role``; an empty pool where nothing is said."""
        return next((pool for pool in self.pools if pool.role == role), None) or _unsaid(role)

    @property
    def all_roles(self) -> tuple[Role, ...]:
        """Roles of this job: those named, or what the algorithm needs."""
        if self.roles:
            return self.roles
        extra: list[Role] = []
        if self.reference and all(scorer.kind != "reference" for scorer in self.scorers):
            extra.append("reference")
        if self.algorithm == "ppo":
            extra.append("critic")
        return ("rollout", "trainer", *extra)


@cache
def _unsaid(role: Role) -> PoolSpec:
    """An empty pool: a plan asks thousands of times."""
    return PoolSpec(role=role)
