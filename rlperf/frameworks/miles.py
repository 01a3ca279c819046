"""miles, a fork of slime: its flags, and beside them LoRA, a critic on GPUs of its own, RDMA and a bound on staleness.

Only what differs from `rlperf.frameworks.slime.adapter` stands here. Unknown flags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import Source, node_shape
from rlperf.frameworks.fields import LORA_RANK, Field, Setting, Target, Unit, field
from rlperf.frameworks.keytable import Value
from rlperf.frameworks.run import Run, ref
from rlperf.frameworks.slime.adapter import FIELDS, SERVED, Slime, served
from rlperf.frameworks.slime.reading import BOUND, SlimeFacts

_TRANSFER, _FULLY = "update-weight-transfer-mode", "fully-async"
_SENT = {"rdma": "p2p", "packed_broadcast": "broadcast"}
_OWN = {
    _TRANSFER, _FULLY, BOUND, "pause-generation-mode", "use-miles-router", "use-session-server", "lora-rank",
    "skip-actor-forward-only", "allow-partial-train-step",
}  # fmt: skip
"""Flags that are in no release of slime: others of the fork are in slime's older ones, too."""
_EXAMPLE = "fully_async_rollout.generate_rollout_fully_async"
"""The rollout function of examples/fully_async, which releases without ``fully-async`` put on their path."""
_DTYPE = ref("rollout.rollout_dtype")
MILES_FIELDS: tuple[Field, ...] = (
    # processors/__init__.py of 0.0.2: slime's, and mxfp8; nothing calls quantizer_nvfp4.py
    *(replace(each, unit=served(*SERVED, "mxfp8")) if each.at == _DTYPE else each for each in FIELDS),
    field("trainer.lora_rank", "lora-rank", LORA_RANK, "0: none; with target-modules, megatron-to-hf-mode bridge"),
    field("run.weight_sync", _TRANSFER,
          Unit(lambda value, _: "rdma" if value == "p2p" else None, lambda value, _: _SENT.get(value),
               takes=frozenset(_SENT)),
          "p2p: RDMA from pinned host memory"),
)  # fmt: skip


@dataclass(frozen=True)
class MilesFacts(SlimeFacts):
    """What its own rules ask beside slime's."""

    fsdp: bool = False
    ends_named: bool = False
    sends_p2p: bool = False
    lora_targets: bool = True
    bridge: bool = True
    draft_layers: bool = True
    plain_rows: bool = False
    saves: bool = True
    length_stated: bool = True
    prefill_scores: bool = True


_CHECKOUT = re.compile(r"(?:\$\{?)?miles(?![a-z])", re.IGNORECASE)
"""The last part of a path to a checkout of it, or a variable that holds one: ``miles-main``, ``${MILES:?...}``."""


@dataclass(frozen=True)
class Miles(Slime):
    """The adapter."""

    name: str = "miles"
    title: str = "miles"
    fields: tuple[Field, ...] = MILES_FIELDS
    unscored: int = 0

    def detect(self, source: Source) -> float:
        """slime's flags beside one that no release of slime has, a function of miles', or run in its checkout."""
        functions = (str(value) for value in source.keys.values())
        own = _OWN & set(source.keys) or any(value.startswith("miles.") for value in functions)
        there = "miles/" in source.entry or _CHECKOUT.match(source.folder.rstrip("/").rpartition("/")[2])
        return 0.97 if super().detect(source) and (own or there) else 0.0

    def placement(self, run: Run, target: Target) -> list[Setting]:
        """As slime's, and a critic's GPUs: as many as the actor's, as ranks are paired."""
        settings = super().placement(run, target)
        if run.algorithm != "ppo":
            return settings
        shape = node_shape(run.critic_devices, run.devices_per_node) if run.critic_devices else None
        if shape is None:
            nearest = "a critic pool with placement: own and as many devices as the trainer, and plan again"
            raise ExportError("a critic has GPUs of its own", self.name, {"nearest": nearest})
        if run.traits.shares_devices:
            settings.append(Setting("rollout-num-gpus", run.rollout.devices, "else engines take the critic's, too"))
        return [
            *settings,
            Setting("critic-num-nodes", shape[0], "the critic trains beside the actor"),
            Setting("critic-num-gpus-per-node", shape[1], "as many GPUs as the actor's"),
        ]

    def endless(self, run: Run, target: Target) -> list[Setting]:
        """Its own flag, or before that the example of its repository; both bound the staleness."""
        bound = Setting(BOUND, run.staleness, "versions that a group may lie behind")
        if target.has(_FULLY):
            return [Setting(_FULLY, True, "rollouts go on through training and sync"), bound]
        return [Setting("rollout-function-path", _EXAMPLE, "yours: examples/fully_async on PYTHONPATH"), bound]

    def training(self, run: Run) -> list[Setting]:
        """As slime's, and what adapters and a trained draft head need beside their switch."""
        settings = super().training(run)
        if rank := run.trainer.lora_rank:
            settings += [
                Setting("lora-alpha", 2 * rank, "yours"),
                Setting("target-modules", "all-linear", "yours"),
                Setting("megatron-to-hf-mode", "bridge", "without it nothing is adapted"),
            ]
        if run.rollout.draft_training:
            settings.append(Setting("mtp-num-layers", 1, "yours: as many as the checkpoint has"))
        return settings

    def data(self, run: Run) -> list[Setting]:
        """As slime's; with megatron-to-hf-mode bridge a run counts from 0 and goes on from an adapter's own folder.

        utils/arguments.py:1980-1983 of 0.0.2; backends/megatron_utils/checkpoint.py:120 and 154 for the folder.
        """
        settings = super().data(run)
        if not (run.trainer.lora_rank and run.resumes and run.rl_steps):
            return settings
        kept = next(setting.value for setting in settings if setting.key == "save")
        counted = run.before[-1].rl_steps if run.before else (run.last_rl_step or 0) - run.rl_steps
        adapter = f"{kept}/iter_{(counted or 1) - 1:07d}/adapter"
        return [
            *(setting for setting in settings if setting.key not in ("num-rollout", "load")),
            Setting("num-rollout", run.rl_steps, "rl_steps of this phase: bridge counts from 0"),
            Setting("lora-adapter-path", adapter, "the last of the phase before"),
        ]

    def asked(self, run: Run) -> MilesFacts:
        """What rules ask of a run that is written."""
        return MilesFacts(**vars(super().asked(run)), sends_p2p=run.weight_sync == "rdma")

    def read(self, source: Source, target: Target) -> tuple[Run, frozenset[str]]:
        """As slime's, with the critic's GPUs, the bound on staleness and what its own rules ask."""
        run, used = super().read(source, target)
        flat = source.keys
        unscored = flat.get("use-rollout-logprobs") and not flat.get("get-mismatch-metrics")
        unscored = unscored or (flat.get("skip-actor-forward-only") and run.batch.updates == 1)
        run = replace(run, old_policy=not unscored)
        if run.algorithm == "ppo":
            run = _with_critic(run, flat)
        if flat.get(_FULLY) and not run.traits.shares_devices:
            run = replace(run, mode="async", staleness=int(flat.get(BOUND) or 1))
        assert isinstance(run.facts, SlimeFacts)
        facts = MilesFacts(
            **vars(run.facts),
            fsdp=flat.get("train-backend") == "fsdp",
            ends_named=any(flat.get(f"decoder-{end}-pipeline-num-layers") is not None for end in ("first", "last")),
            sends_p2p=flat.get(_TRANSFER) == "p2p",
            lora_targets=bool(flat.get("target-modules")),
            bridge=flat.get("megatron-to-hf-mode") == "bridge",
            draft_layers=bool(flat.get("mtp-num-layers")),
            plain_rows=flat.get("qkv-format") == "bshd",
            saves=flat.get("save-interval") is None or bool(flat.get("save")),
            length_stated=any(flat.get(key) is not None for key in ("num-rollout", "num-epoch")),
            prefill_scores=not flat.get("recompute-logprobs-via-prefill") or bool(flat.get("true-on-policy-mode")),
        )
        return replace(run, facts=facts), used | _ALSO_READ


def _with_critic(run: Run, flat: Mapping[str, Value]) -> Run:
    """PPO: the critic's GPUs, by default as many as the actor's, on top of all others.

    Colocated engines take the critic's GPUs, too, unless ``rollout-num-gpus`` says the actor's (miles_validate_args).
    """
    per_node = run.trainer.devices // max(int(flat.get("actor-num-nodes") or 1), 1)
    nodes = int(flat.get("critic-num-nodes") or flat.get("actor-num-nodes") or 1)
    critic = nodes * int(flat.get("critic-num-gpus-per-node") or per_node)
    rollout = run.rollout.devices
    if run.traits.shares_devices and flat.get("rollout-num-gpus") != run.trainer.devices:
        rollout += critic
    devices = run.devices + critic
    on_node = max(run.devices_per_node, min(int(flat.get("num-gpus-per-node") or 8), devices))
    return replace(
        run,
        critic_devices=critic,
        devices=devices,
        nodes=-(-devices // on_node),
        devices_per_node=on_node,
        rollout=run.rollout.having(devices=rollout, data_parallel=rollout // run.rollout.replica_devices),
    )


_ALSO_READ = frozenset(
    {
        "critic-num-nodes", "critic-num-gpus-per-node", "num-rollout", "num-epoch", "save", "save-interval",
        "target-modules", "megatron-to-hf-mode", "mtp-num-layers", "qkv-format", "train-backend", BOUND, _FULLY,
        "skip-actor-forward-only", "true-on-policy-mode", "recompute-logprobs-via-prefill",
    }
)  # fmt: skip

ADAPTER = Miles()
