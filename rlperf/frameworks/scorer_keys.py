"""Keys of teachers, reward models and judges: one table by framework, read in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlperf.errors import ExportError
from rlperf.frameworks.adapter import node_shape
from rlperf.frameworks.fields import Setting, Target
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.run import Run, ScorerRun, Value
from rlperf.specs.pool import Placement
from rlperf.specs.scorer import ScorerKind


@dataclass(frozen=True)
class ScorerKeys:
    """How one framework states a scorer of some kinds on some devices.

    Attributes
    ----------
    kinds : that it takes; an import takes the first
    switch : keys with the values that say that it is there; an import asks for all of them
    keys : key -> what of `ScorerRun` it states (``nodes`` and ``node_devices``: its devices by node)
    together : whether only where one switch puts all roles on the trainer's devices, or only elsewhere; None: both
    """

    kinds: tuple[ScorerKind, ...]
    placement: Placement
    switch: Mapping[str, Value]
    keys: Mapping[str, str] = field(default_factory=dict)
    together: bool | None = None

    def in_version(self, target: Target) -> bool:
        """Whether a version has the keys that say who it is."""
        return all(
            target.has(key) for key in (*self.switch, *(k for k, name in self.keys.items() if name == "checkpoint"))
        )

    def settings(self, scorer: ScorerRun, per_node: int) -> list[Setting] | None:
        """All settings of one scorer; None where its devices fill no whole nodes."""
        shape = node_shape(scorer.devices, per_node)
        if shape is None:
            return None
        words = {"nodes": shape[0], "node_devices": shape[1], "checkpoint": hub_name(scorer.architecture)}
        given = {key: words[name] if name in words else getattr(scorer, name) for key, name in self.keys.items()}
        whole = {**self.switch, **{key: value for key, value in given.items() if value is not None}}
        return [Setting(key, value, f"scorer {scorer.name}") for key, value in whole.items()]

    def read(self, keys: Mapping[str, Value]) -> ScorerRun | None:
        """The scorer that a file states; None where it states none."""
        if not all(key in keys and str(keys[key]).lower() == str(value).lower() for key, value in self.switch.items()):
            return None
        stated = {name: keys[key] for key, name in self.keys.items() if keys.get(key) is not None}
        devices = int(stated.pop("nodes", 1)) * int(stated.pop("node_devices", 0))
        architecture = str(stated.pop("checkpoint", ""))
        numbers = {name: float(v) if name == "memory_fraction" else int(v) for name, v in stated.items()}
        return ScorerRun(self.kinds[0], self.kinds[0], self.placement, architecture, devices, **numbers)  # type: ignore[arg-type]


def _engine(prefix: str) -> dict[str, str]:
    """verl's words for an engine."""
    return {
        f"{prefix}tensor_model_parallel_size": "tensor_parallel",
        f"{prefix}gpu_memory_utilization": "memory_fraction",
        f"{prefix}max_num_seqs": "max_running",
    }


_TEACHER = "distillation.teacher_models.teacher_model."
_REWARD = "reward.reward_model."
_OPD = "on_policy_distillation."
_BY_ROLE = {
    "reward.model_name_or_path": "checkpoint",
    "reward.num_nodes": "nodes",
    "reward.num_gpus_per_node": "node_devices",
}
_NODES = {f"{_REWARD}nnodes": "nodes", f"{_REWARD}n_gpus_per_node": "node_devices"}
SCORER_KEYS: dict[str, tuple[ScorerKeys, ...]] = {
    "verl": (
        ScorerKeys(
            ("teacher",),
            "own",
            {"distillation.enabled": True},
            {
                "distillation.nnodes": "nodes",
                "distillation.n_gpus_per_node": "node_devices",
                "distillation.distillation_loss.topk": "top_k",
                f"{_TEACHER}model_path": "checkpoint",
                f"{_TEACHER}num_replicas": "data_parallel",
                **_engine(f"{_TEACHER}inference."),
            },
        ),
        ScorerKeys(
            ("reward", "judge"),
            "own",
            {f"{_REWARD}enable": True, f"{_REWARD}enable_resource_pool": True},
            {**_NODES, f"{_REWARD}model_path": "checkpoint", **_engine(f"{_REWARD}rollout.")},
        ),
        ScorerKeys(
            ("reward", "judge"),
            "shared",
            {f"{_REWARD}enable": True, f"{_REWARD}enable_resource_pool": False},
            {f"{_REWARD}model_path": "checkpoint", **_engine(f"{_REWARD}rollout.")},
        ),
    ),
    "slime": (
        ScorerKeys(
            ("teacher",), "shared", {"use-opd": True, "opd-type": "megatron"}, {"opd-teacher-load": "checkpoint"}
        ),
    ),
    "nemo_rl": (
        ScorerKeys(
            ("teacher",),
            "own",
            {f"{_OPD}enabled": True, f"{_OPD}non_colocated_teachers.enabled": True},
            {
                f"{_OPD}teacher_model_by_agent_name.default_teacher": "checkpoint",
                f"{_OPD}non_colocated_teachers.default_teacher_cfg.num_nodes": "nodes",
                f"{_OPD}non_colocated_teachers.default_teacher_cfg.gpus_per_node": "node_devices",
                f"{_OPD}non_colocated_teachers.default_teacher_cfg.tensor_model_parallel_size": "tensor_parallel",
                f"{_OPD}non_colocated_teachers.default_teacher_cfg.pipeline_model_parallel_size": "pipeline_parallel",
            },
        ),
        ScorerKeys(
            ("reward",),
            "own",
            {"env.reward_model.reward_model_cfg.enabled": True},
            {
                "env.reward_model.model_name": "checkpoint",
                "env.reward_model.resources.num_nodes": "nodes",
                "env.reward_model.resources.gpus_per_node": "node_devices",
                "env.reward_model.dtensor_cfg.tensor_parallel_size": "tensor_parallel",
            },
        ),
    ),
    "openrlhf": (  # train.colocate_all hands a reward model the actor's placement group, whatever its devices
        ScorerKeys(("reward",), "own", {}, _BY_ROLE, together=False),
        ScorerKeys(("reward",), "shared", {}, _BY_ROLE, together=True),
    ),
    "areal": (ScorerKeys(("teacher",), "shared", {"teacher.engine_type": "train"}, {"teacher.path": "checkpoint"}),),
}
"""Framework -> how it states scorers (sources: the keys of ``facts/*.tsv``)."""


def ways_of(kind: ScorerKind, framework: str, target: Target, *, together: bool) -> list[ScorerKeys]:
    """How a version states scorers of a kind; ``together``: all roles are on the trainer's devices."""
    ways = (way for way in SCORER_KEYS.get(framework, ()) if kind in way.kinds and way.together in (None, together))
    return [way for way in ways if way.in_version(target)]


def scorer_settings(run: Run, framework: str, target: Target) -> list[Setting]:
    """Settings of all scorers of a run.

    Raises
    ------
    ExportError : a scorer that no key of this version states, by its name
    """
    found: list[Setting] = []
    for scorer in run.scorers:
        ways = {way.placement: way for way in ways_of(scorer.kind, framework, target, together=run.together)}
        way = ways.get(scorer.placement)
        made = way.settings(scorer, run.devices_per_node) if way else None
        taken = {setting.key for setting in found}
        if made is None or any(not target.has(s.key) or s.key in taken for s in made):
            where = "devices of its own" if scorer.placement == "own" else "the trainer's devices"
            nearest = "".join(f"; nearest: placement: {other}" for other in ways if way is None)
            second = made and taken & {s.key for s in made}
            why = "a second of its kind" if second else f"{where}: {scorer.devices}{nearest}"
            raise ExportError(
                "a scorer has no keys", f"{framework}=={target.version}", {f"{scorer.kind} {scorer.name}": why}
            )
        found += made
    return found


def read_scorers(framework: str, keys: Mapping[str, Value]) -> tuple[tuple[ScorerRun, ...], frozenset[str]]:
    """Scorers that a file's own keys state, and those keys."""
    found: list[ScorerRun] = []
    used: set[str] = set()
    for way in SCORER_KEYS.get(framework, ()):
        scorer = way.read(keys) if way.switch else None
        if scorer is not None:
            found.append(scorer)
            used |= {*way.switch, *(key for key in way.keys if key in keys)}
    return tuple(found), frozenset(used)
