"""Site: the hardware and the software on which the pools of an rl_step run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlperf.sim.rl_step.demand import Batch, Demand
from rlperf.specs.architecture import Architecture
from rlperf.specs.cluster import Cluster
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware
from rlperf.specs.pool import Role
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.specs.speculation import Method
from rlperf.specs.trainer_calibration import TrainerCalibration


@dataclass(frozen=True, eq=False)
class TrainerStack:
    """A trainer backend: its calibration as the framework sets it, and the framework's behaviour with it.

    ``keys`` : the backend whose keys and rules the framework has for it, most often its own
    """

    backend: str
    calibration: TrainerCalibration
    framework: FrameworkCalibration
    keys: str

    def scoring_passes(self, site: Site, updates: int) -> int:
        """Forward passes per rl_step on the trainer's devices: old policy, reference, and the critic's values for PPO.

        Whether the old policy is scored says the site; else the framework's rule for so many ``updates`` of one pass
        over the batch.
        """
        rule = self.framework.old_policy_pass
        ruled = rule == "always" or (rule == "off_policy" and updates * site.epochs > 1)
        old = ruled if site.old_policy is None else site.old_policy
        return int(old) + ("reference" in site.roles) + ("critic" in site.roles)


@dataclass(frozen=True, eq=False)
class Site:
    """Where an rl_step runs, and with what.

    Attributes
    ----------
    hardware, rollout_hardware : of the trainer and of the rollout; the same object where they share a cluster
    engine : the rollout engine's profile
    trainers : trainer backends that pools may name, by index
    roles : who works on these devices: beside rollout and trainer reference and critic, unless it has its own
    old_policy : whether the trainer scores the old policy, where that is stated
    adapter_rank : of the adapters that are trained (LoRA); None where all weights are
    scores_prompts : the engine returns a log-probability of every prompt token (a teacher's does)
    router_replay : none, R2 or R3: whose choice of experts scoring and training repeat
    adapter_jobs : LoRA jobs that share engines and trainer [1]
    turn_samples : every turn is computed as a sample of its own; else what a trajectory's turns share is computed once
    trained_draft : method of the draft head that is trained with the policy; None where none is
    critic_apart : a critic has devices of its own, and is none of ``roles``
    policy_moves : the engine's model is trained, so that a draft head that is not falls behind it
    epochs : times that a batch is trained on [1]
    """

    hardware: Hardware
    rollout_hardware: Hardware
    engine: EngineCalibration
    trainers: tuple[TrainerStack, ...]
    roles: tuple[Role, ...] = ("rollout", "trainer")
    old_policy: bool | None = None
    adapter_rank: int | None = None
    scores_prompts: bool = False
    trained_draft: Method | None = None
    router_replay: str = "none"
    adapter_jobs: int = 1
    turn_samples: bool = False
    critic_apart: bool = False
    policy_moves: bool = True
    epochs: int = 1

    @property
    def critic(self) -> Site:
        """The devices of a critic that has its own: one pass, of values, and the updates of one network."""
        return replace(self, roles=("critic",), old_policy=False, trained_draft=None, critic_apart=False)

    @property
    def cluster(self) -> Cluster:
        """The trainer's cluster."""
        return self.hardware.cluster

    def updates(self, batch: Batch) -> int:
        """Optimizer updates of an rl_step: every epoch has those of one pass over the batch."""
        return batch.updates * self.epochs

    def trained(self, demand: Demand) -> Demand:
        """What the trainer is given of a demand."""
        return demand.by_turn if self.turn_samples else demand

    @property
    def critic_shared(self) -> bool:
        """Whether PPO's critic is held and updated on the trainer's devices."""
        return {"trainer", "critic"} <= set(self.roles)

    def networks(self, policy: Architecture) -> tuple[tuple[Site, Architecture], ...]:
        """Every network that is held and updated here, and the devices as it alone has them; the policy comes first."""
        if self.critic_shared:
            alone = replace(self, roles=tuple(role for role in self.roles if role != "critic"))
            return (alone, policy), (self.critic, policy.critic)
        return ((self, policy.critic if "critic" in self.roles else policy),)
