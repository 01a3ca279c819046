"""Keys of teachers, reward models and judges: one table by framework, read in both directions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from rlperf.errors import ExportError, Problem
from rlperf.frameworks.adapter import Limitation, node_shape
from rlperf.frameworks.fields import Setting, Target
from rlperf.frameworks.hub import hub_name
from rlperf.frameworks.run import Run, Value
from rlperf.frameworks.scorer_run import ScorerRun
from rlperf.specs.pool import Placement
from rlperf.specs.scorer import Scorer, ScorerKind

Jobs = Literal["dapo", "turns"]
"""Jobs whose files have some keys: groups are filtered, or tools answer in between."""


@dataclass(frozen=True)
class ScorerKeys:
    """How one framework states a scorer of some kinds on some devices.

    Attributes
    ----------
    kinds : that it takes; an import takes the first
    switch : keys with the values that say that it is there; an import asks for all of them
    keys : key -> what of `ScorerRun` it states, or one of the words of `_words`
    together : whether only where one switch puts all roles on the trainer's devices, or only elsewhere; None: both
    unless : keys beside which none is loaded, or no run starts -> which jobs have them (`Jobs`); empty: none
    entry : what the keys of the only scorer begin with, where several have an entry each under other names: every
        sequence then goes to the one whose ``key`` its row of the data names, on devices that they have together
    """

    kinds: tuple[ScorerKind, ...]
    placement: Placement
    switch: Mapping[str, Value]
    keys: Mapping[str, str] = field(default_factory=dict)
    together: bool | None = None
    unless: Mapping[str, Jobs | None] = field(default_factory=dict)
    entry: str = ""

    def in_version(self, target: Target) -> bool:
        """Whether a version has the keys that say who it is."""
        return all(
            target.has(key) for key in (*self.switch, *(k for k, name in self.keys.items() if name == "checkpoint"))
        )

    def settings(self, scorers: Sequence[ScorerRun], target: Target, per_node: int) -> list[Setting] | None:
        """All settings of its scorers; None where their devices fill no whole nodes, or it has room for one alone."""
        shape = node_shape(sum(scorer.devices for scorer in scorers), per_node)
        if shape is None or (len(scorers) > 1 and not self.entry):
            return None
        pool = {"nodes": shape[0], "node_devices": shape[1]}
        if len(scorers) == 1:
            return [*self._states(scorers[0], {**self.switch, **self._given(scorers[0], pool)})]
        # in verl's teacher_model.py replicas lie in nodes by their order: the widest first
        ordered = sorted(scorers, key=lambda one: -one.tensor_parallel * one.pipeline_parallel)
        own = [self._given(one, pool) for one in ordered]
        shared = {key: value for key, value in own[0].items() if not key.startswith(self.entry)}
        found = [*self._states(ordered[0], {**self.switch, **shared})]
        keys = target.table.keys(target.version, target.backend)
        # a new entry has the defaults of its classes, not those of the one that the files ship (dummy weights!)
        shipped = {k: v for k, v in target.defaults(target.backend).items()
                   if k.startswith(self.entry) and not keys[k].open_map}  # fmt: skip
        for number, (one, given) in enumerate(zip(ordered, own, strict=True), 1):
            stated = {**shipped, **given, f"{self.entry}key": one.name}
            there = f"{self.entries}{one.kind}_{number}."
            renamed = {there + key.removeprefix(self.entry): v for key, v in stated.items() if key not in shared}
            found += self._states(one, renamed)
        return found

    @property
    def entries(self) -> str:
        """What the keys of all entries begin with."""
        return self.entry[:-1].rpartition(".")[0] + "."

    def _given(self, scorer: ScorerRun, pool: Mapping[str, Value]) -> dict[str, Value]:
        """What its keys state of one scorer."""
        words = {**pool, **_words(scorer)}
        given = {key: words[name] if name in words else getattr(scorer, name) for key, name in self.keys.items()}
        return {key: value for key, value in given.items() if value is not None}

    @staticmethod
    def _states(scorer: ScorerRun, given: Mapping[str, Value]) -> Iterator[Setting]:
        return (Setting(key, value, f"scorer {scorer.name}") for key, value in given.items() if key)

    def read(self, keys: Mapping[str, Value]) -> list[ScorerRun]:
        """The scorers that a file states, its version's defaults among the keys."""
        switched = (str(keys.get(key)).lower() == str(value).lower() for key, value in self.switch.items())
        named = self.switch or any(keys.get(key) for key, name in self.keys.items() if name == "checkpoint")
        if not named or not all(switched) or any(keys.get(key) for key in self.unless):
            return []
        names = dict.fromkeys(k.removeprefix(self.entries).partition(".")[0] for k in keys if self.is_entry(k))
        if not names:
            return [self._read(keys, self.kinds[0])]
        found = []
        for name in names:
            there = f"{self.entries}{name}."
            own = {self.entry + key.removeprefix(there): v for key, v in keys.items() if key.startswith(there)}
            one = self._read({**keys, **own}, str(own.get(f"{self.entry}key", name)))
            width = one.tensor_parallel * one.pipeline_parallel
            found.append(replace(one, devices=one.data_parallel * width, share=1.0 / len(names)))
        return found

    def is_entry(self, key: str) -> bool:
        """Whether it is one of an entry beside the shipped one, which is then not heeded."""
        return bool(self.entry) and key.startswith(self.entries) and not key.startswith(self.entry)

    def used(self, keys: Mapping[str, Value]) -> set[str]:
        """Keys of a file that state its scorers."""
        known = {*self.switch, *self.keys, *([f"{self.entry}key"] if self.entry else [])}
        return {key for key in keys if key in known or self.is_entry(key)}

    def _read(self, keys: Mapping[str, Value], name: str) -> ScorerRun:
        stated = {
            name: keys[key] for key, name in self.keys.items()
            if keys.get(key) is not None and "${" not in str(keys[key])
        }  # fmt: skip
        devices = int(stated.pop("nodes", 1)) * int(stated.pop("node_devices", 0))
        if self.placement == "shared":
            devices = 0
        architecture = str(stated.pop("checkpoint", ""))
        if "topk" not in str(stated.pop("loss", "topk")):
            stated.pop("top_k", None)
        numbers = {name: float(v) if name == "memory_fraction" else int(v) for name, v in stated.items()}
        if width := numbers.pop("width", None):
            numbers["tensor_parallel"] = int(width * numbers.get("attention_data_parallel", 1))
        return ScorerRun(name, self.kinds[0], self.placement, architecture, devices, **numbers)  # type: ignore[arg-type]


def _words(scorer: ScorerRun) -> dict[str, Value]:
    """What keys state of a scorer in words of their own, beside its nodes.

    ``width`` : devices of a tensor-parallel group, where requests are split between several groups of a replica
    ``loss`` : verl's, of which one alone asks for several log-probabilities
    """
    several = scorer.top_k > 1
    return {
        "checkpoint": hub_name(scorer.architecture),
        "width": scorer.tensor_parallel // scorer.attention_data_parallel,
        "data_parallel": max(scorer.devices // (scorer.tensor_parallel * scorer.pipeline_parallel), 1),
        "loss": "forward_kl_topk" if several else None,
        "top_k": scorer.top_k if several else None,
    }


SHARES = 0.01
"""How far shares that add up to 1 may be off it, as 0.33 of three are."""


def _engine(prefix: str) -> dict[str, str]:
    """verl's words for an engine."""
    return {
        f"{prefix}tensor_model_parallel_size": "width",
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
_NO_MODEL: Mapping[str, Jobs | None] = {
    "reward.remote_url": None, "train.agent_func_path": "turns", "algo.dynamic_filtering_enable": "dapo",
}  # fmt: skip
"""Rewards are a function's or an agent's, and groups are filtered by no others (openrlhf/cli/train_ppo_ray.py 0.11)."""
_PLACEMENTS: tuple[Placement, ...] = ("own", "shared")
_BEFORE_010: tuple[Mapping[str, str], Mapping[str, Jobs | None]] = (
    {"reward_pretrain": "checkpoint", "reward_num_nodes": "nodes", "reward_num_gpus_per_node": "node_devices"},
    {"remote_rm_url": None, "agent_func_path": "turns", "dynamic_filtering": "dapo"},
)
"""The same of OpenRLHF up to 0.9, whose flags have no dots."""
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
                "distillation.distillation_loss.loss_mode": "loss",
                "distillation.distillation_loss.topk": "top_k",
                f"{_TEACHER}model_path": "checkpoint",
                f"{_TEACHER}num_replicas": "data_parallel",
                **_engine(f"{_TEACHER}inference."),
                f"{_TEACHER}inference.data_parallel_size": "attention_data_parallel",
                f"{_TEACHER}inference.expert_parallel_size": "expert_parallel",
            },
            entry=_TEACHER,
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
        *(
            ScorerKeys(("reward",), placement, {}, keys, together=placement == "shared", unless=unless)
            for keys, unless in ((_BY_ROLE, _NO_MODEL), _BEFORE_010)
            for placement in _PLACEMENTS
        ),
    ),
    "areal": (
        ScorerKeys(("teacher",), "shared", {"teacher.engine_type": "train"}, {"teacher.train.path": "checkpoint"}),
    ),
}
"""Framework -> how it states scorers (sources: the keys of ``facts/*.tsv``)."""


def ways_of(kind: ScorerKind, framework: str, target: Target, *, together: bool) -> list[ScorerKeys]:
    """How a version states scorers of a kind; ``together``: all roles are on the trainer's devices."""
    ways = (way for way in SCORER_KEYS.get(framework, ()) if kind in way.kinds and way.together in (None, together))
    return [way for way in ways if way.in_version(target)]


def scorer_settings(run: Run, framework: str, target: Target, beside: Collection[str] = ()) -> list[Setting]:
    """Settings of all scorers of a run, in a file that has the keys ``beside``.

    Raises
    ------
    ExportError : a scorer that no key of this version states, by its name
    """
    found: list[Setting] = []
    for scorers in _alike(run, framework, target):
        scorer = scorers[0]
        ways = {way.placement: way for way in ways_of(scorer.kind, framework, target, together=run.together)}
        way = ways.get(scorer.placement)
        made = way.settings(scorers, target, run.devices_per_node) if way else None
        taken = {setting.key for setting in found}
        if made is None or any(not target.has(s.key) or s.key in taken for s in made):
            nearest = "".join(f"; nearest: placement: {other}" for other in ways if way is None)
            second = made and taken & {s.key for s in made}
            why = "a second of its kind" if second else f"{_WHERE[scorer.placement]}: {scorer.devices}{nearest}"
            raise ExportError(
                "a scorer has no keys", f"{framework}=={target.version}", {f"{scorer.kind} {scorer.name}": why}
            )
        if way and (against := [key for key in way.unless if key in beside]):
            refused = {f"{scorer.kind} {scorer.name}": f"beside {', '.join(against)} none is loaded"}
            raise ExportError("a scorer has no place", f"{framework}=={target.version}", refused)
        found += made
    return found


def routed(run: Run) -> tuple[Limitation, ...]:
    """What only the rows of the data say, which teacher scores a row (an import takes equal shares), or who asks it."""
    found = []
    if shares := ", ".join(f"{one.name} {one.share:g}" for one in run.scorers if one.share < 1.0):
        rows = "rows name it: data_source, as teacher_key says"
        found.append(Limitation(f"shares of sequences ({shares})", "a key each", rows))
    for one in run.scorers:
        if one.prompt_tokens or one.response_tokens > 1:
            read = f"{one.prompt_tokens:,} tokens that {one.name} reads beside a sequence"
            asked = f"{read}, {one.response_tokens:,} that it writes"
            found.append(Limitation(asked, "what your reward function asks it", "files read back as 0 and 1"))
    return tuple(found)


def _alike(run: Run, framework: str, target: Target) -> list[list[ScorerRun]]:
    """The scorers of a run: those together that have an entry each, each other by itself."""
    found: dict[object, list[ScorerRun]] = {}
    for scorer in run.scorers:
        ways = ways_of(scorer.kind, framework, target, together=run.together)
        way = next((way for way in ways if way.placement == scorer.placement), None)
        found.setdefault(scorer.kind if way and way.entry else scorer.name, []).append(scorer)
    return [*found.values()]


_CALLED: dict[ScorerKind, str] = {"reward": "reward model"}
_WHERE: dict[Placement, str] = {"own": "devices of its own", "shared": "the trainer's devices"}


def homeless_scorers(
    scorers: Sequence[Scorer], framework: str, targets: Sequence[Target], together: Collection[bool]
) -> list[Problem]:
    """Scorers that no file of a framework can say, of their kind or on such devices: refused before planning.

    ``together``: whether all roles are on the trainer's devices, in the modes that a job leaves open
    """
    found = []
    for one in scorers:
        ways = [way for target in targets for both in together
                for way in ways_of(one.kind, framework, target, together=both)]  # fmt: skip
        had = dict.fromkeys(way.placement for way in ways)
        if any(placement in had for placement in one.placement):
            continue
        kind, where = _CALLED.get(one.kind, one.kind), f" on {_WHERE[one.placement[0]]}" if had else ""
        others = [name for name, all_ways in SCORER_KEYS.items() if any(one.kind in way.kinds for way in all_ways)]
        elsewhere = f"framework: {' or '.join(others)}" if others else "no framework's files have them"
        hint = f"placement: {' or '.join(had)}" if had else elsewhere
        message = f"scorer {one.name}: {framework} {targets[0].version} has no keys for a {kind}{where}"
        found.append(Problem(message, suggestion=f"{hint}; `rlperf predict` tells it as it stands"))
    return found


def unsayable_scorers(scorers: Sequence[Scorer], framework: str, targets: Sequence[Target]) -> list[Problem]:
    """What a job states of its scorers together and no file can, where the framework has keys for each by itself."""
    found, of_keys = [], dict[frozenset[str], list[Scorer]]()
    ways_by_keys: dict[frozenset[str], list[ScorerKeys]] = {}
    for scorer in scorers:
        ways = [w for t in targets for both in (False, True) for w in ways_of(scorer.kind, framework, t, together=both)]
        keys = frozenset(key for way in ways for key, name in way.keys.items() if name == "checkpoint")
        if keys:
            of_keys.setdefault(keys, []).append(scorer)
            ways_by_keys[keys] = ways
    for keys, alike in of_keys.items():
        names, shares = ", ".join(each.name for each in alike), sum(each.share for each in alike)
        if len(alike) > 1 and not any(way.entry for way in ways_by_keys[keys]):
            message = f"scorers {names}: {framework} has keys for one of them"
            found.append(Problem(message, suggestion="leave one, or name another framework"))
        elif abs(shares - 1.0) > SHARES:
            one = "each sequence to one of its teachers" if len(alike) > 1 else "every sequence to its scorer"
            message = (
                f"scorer{'s' * (len(alike) > 1)} {names}: {framework} sends {one}, and share adds up to {shares:g}"
            )
            found.append(Problem(message, suggestion="let share add up to 1"))
        elif (several := max(each.top_k for each in alike)) > 1 and not _says(ways_by_keys[keys], "top_k"):
            others = [name for name, all_ways in SCORER_KEYS.items() if _says(all_ways, "top_k")]
            message = f"scorers {names}: {framework} has no key for top_k ({several})"
            found.append(Problem(message, suggestion=f"leave it out, or framework: {' or '.join(others)}"))
        elif len({each.top_k for each in alike}) > 1:
            message = f"scorers {names}: {framework} has one key for top_k, and they differ in it"
            found.append(Problem(message, suggestion="give all of them the same"))
    return found


def _says(ways: Sequence[ScorerKeys], name: str) -> bool:
    """Whether some key of theirs states it of a scorer."""
    return any(name in way.keys.values() for way in ways)


def displaced_scorers(
    scorers: Sequence[Scorer], framework: str, targets: Sequence[Target], jobs: Collection[Jobs]
) -> list[Problem]:
    """Scorers that a framework does not load beside keys that files of such ``jobs`` have: refused before planning."""
    found = []
    for one in scorers:
        ways = [w for t in targets for both in (False, True) for w in ways_of(one.kind, framework, t, together=both)]
        against = [[key for key, job in way.unless.items() if job in jobs] for way in ways]
        if ways and all(against):
            others = [name for name, all_ways in SCORER_KEYS.items() if name != framework
                      and any(one.kind in way.kinds for way in all_ways)]  # fmt: skip
            kind = _CALLED.get(one.kind, one.kind)
            message = f"scorer {one.name}: beside {', '.join(against[0])} {framework} loads no {kind}"
            hint = f"leave it out, as a function of yours rewards there, or framework: {' or '.join(others)}"
            found.append(Problem(message, suggestion=hint))
    return found


def misled(framework: str, keys: Mapping[str, Value], scorers: Sequence[ScorerRun]) -> dict[str, tuple[bool, str]]:
    """Keys of a file that state its scorers otherwise than they run: whether it is refused at launch, and why.

    By verl's workers/config/distillation.py and trainer/ppo/v1/trainer_base.py:825-842 (0.9.1).
    """
    found: dict[str, tuple[bool, str]] = {}
    for way in SCORER_KEYS.get(framework, ()):
        here = [scorer for scorer in scorers if scorer.kind in way.kinds]
        count = {name: key for key, name in way.keys.items() if name in ("nodes", "node_devices")}
        if "nodes" in count and any(one.placement == way.placement == "own" and not one.devices for one in here):
            found[count["nodes"]] = True, "gives the scorer no devices of its own: at least one node"
        if not here or not any(map(way.is_entry, keys)):
            continue
        why = "is dropped beside entries of other names: give it one, too"
        found |= {key: (False, why) for key in keys if way.entry and key.startswith(way.entry)}
        stated = [keys[key] for key in count.values() if isinstance(keys.get(key), int)]
        if len(stated) == len(count) and (total := sum(scorer.devices for scorer in here)) != prod(stated):
            words = " x ".join(map(str, stated))
            found[count["nodes"]] = True, f"{words} devices, where replicas of all entries take {total}"
    return found


def read_scorers(
    run: Run, framework: str, keys: Mapping[str, Value], defaults: Mapping[str, Value]
) -> tuple[tuple[ScorerRun, ...], frozenset[str]]:
    """Scorers that the own keys of a run's file state over its version's ``defaults``, and those keys."""
    found: list[ScorerRun] = []
    used: set[str] = set()
    for way in SCORER_KEYS.get(framework, ()):
        if way.together in (None, run.together) and (scorers := way.read({**defaults, **keys})):
            found += scorers
            used |= way.used(keys)
    return tuple(found), frozenset(used)
