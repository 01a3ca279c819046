"""What a pool is: its layout and its settings, each attribute declared once, and the forms that follow from it.

`LayoutForm` and `SettingsForm` are the table: name, owner, who decides, default, unit, meaning. A form says what may
stand for a value: a job leaves values open (`LayoutChoice`, `PoolSettings`), a plan states them (`LayoutValues`,
`SettingsValues`), the costs read them filled in (`Settings`; layouts as arrays: `rlperf.layout.Layout`). Lists of names
come from `ATTRIBUTES` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from rlperf.specs.choice import TOKENS, Counts, Flags, Fractions, Naturals, Words, counted
from rlperf.specs.frozen import Frozen
from rlperf.specs.speculation import DraftSetting
from rlperf.units import NonNegativeInt, PositiveInt, UsdPerHour

Role = Literal["rollout", "trainer", "reference", "reward", "critic"]
Placement = Literal["own", "shared"]
"""On devices of its own, or on those of the trainer in turn."""
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "activations", "both"]
Owner = Literal["engine", "trainer", "both"]
Part = Literal["layout", "settings"]
Kind = Literal["count", "fraction", "flag", "word"]
Decided = Literal["searched", "listed", "derived", "stated"]
"""Who decides where a job says nothing: the planner; the default, but the planner where the job lists several; what
follows from other values; the default."""


def _words(unit: str, meaning: str) -> str:
    return meaning if unit in ("", "1") else f"{unit} {meaning}"


@dataclass(frozen=True)
class Attribute:
    """One row of the table of layout and settings.

    Attributes
    ----------
    part : which of the two it belongs to
    owner : the pools that have it: rollout pools (engine), the others (trainer), both
    default : what it is where nobody decides; None: nothing
    kind, unit : type of its value, and what it counts (``dtype``: a word that names one)
    meaning : after the unit, as in "devices that share every matrix product"
    short : of a degree, in the words of a layout
    several : a job may list several values
    """

    name: str
    part: Part
    owner: Owner
    decided: Decided
    default: int | float | str | bool | None
    kind: Kind
    unit: str
    meaning: str
    short: str
    several: bool

    @property
    def words(self) -> str:
        """What it is, with its unit: ``devices that share every matrix product``."""
        return _words(self.unit, self.meaning)

    @property
    def degree(self) -> bool:
        """Whether it cuts the work of a replica into parts."""
        return self.unit in ("devices", "stages", "chunks")

    @property
    def axis(self) -> bool:
        """Whether the planner's columns enumerate it, and a job may list which values."""
        return self.several and self.decided == "searched"

    def belongs_to(self, role: str) -> bool:
        """Whether pools of a role have it."""
        return self.owner in ("both", "engine" if role == "rollout" else "trainer")


@dataclass(frozen=True)
class _Facts:
    owner: Owner
    decided: Decided
    unit: str
    meaning: str
    short: str


def _is(owner: Owner, decided: Decided, default: object, unit: str, meaning: str, short: str = "") -> Any:
    """A row of the table; its name and type are those of the field."""
    field: FieldInfo = Field(default, description=_words(unit, meaning))  # type: ignore[assignment]
    field.metadata.append(_Facts(owner, decided, unit, meaning, short))
    return field


class _Form(Frozen):
    """A form of the table; ``absent``: what is not named is None rather than the default."""

    absent: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.absent:
            for field in cls.model_fields.values():
                if not field.is_required():
                    field.default = None
            cls.model_rebuild(force=True)

    def stated(self) -> dict[str, Any]:
        """What is not None, by name; of several values the first."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {n: v[0] if isinstance(v, tuple) else v for n, v in named.items() if v is not None}


Degree = TypeVar("Degree")
Number = TypeVar("Number")
Flag = TypeVar("Flag")
Recomputed = TypeVar("Recomputed")
Offloaded = TypeVar("Offloaded")


class LayoutForm(_Form, Generic[Degree, Number, Flag, Recomputed, Offloaded]):
    """The table of layouts: how a pool's work is spread over its devices."""

    tensor_parallel: Degree = _is("both", "searched", 1, "devices", "that share every matrix product", "TP")
    pipeline_parallel: Degree = _is("both", "searched", 1, "stages", "that the layers are cut into", "PP")
    data_parallel: Degree = _is("both", "searched", 1, "replicas", "of the pool; follows from its devices", "DP")
    context_parallel: Degree = _is("trainer", "searched", 1, "devices", "that share a sequence in a ring", "CP")
    ulysses: Degree = _is(
        "trainer", "searched", 1, "devices", "that share a sequence by all-to-all over heads", "Ulysses"
    )
    expert_parallel: Degree = _is("both", "searched", 1, "devices", "that the experts are spread over", "EP")
    expert_tensor_parallel: Degree = _is("trainer", "searched", 1, "devices", "that share every expert", "ETP")
    virtual_pipeline: Degree = _is("trainer", "searched", 1, "chunks", "of layers per stage; 1: not interleaved", "VPP")
    sequence_parallel: Flag = _is("trainer", "derived", False, "", "activations outside the matrices are split too")
    zero_stage: Number = _is(
        "trainer", "searched", 0, "", "0 replicas, 1 optimizer sharded, 2 gradients, 3 weights (FSDP)"
    )
    shard_size: Number = _is("trainer", "searched", 0, "devices", "of an HSDP shard group; 0: all of data_parallel")
    activation_recompute: Recomputed = _is("trainer", "searched", "none", "", "none, selective, full")
    offload: Offloaded = _is("trainer", "searched", "none", "", "to host memory: none, optimizer, activations, both")
    microbatch: Degree = _is("trainer", "searched", 1, "sequences", "per forward where no token_budget is used")
    attention_data_parallel: Degree = _is(
        "engine", "searched", 1, "devices", "of a replica that split its requests", "attention DP"
    )


class LayoutChoice(LayoutForm[Counts | None, Naturals | None, Flags | None, Words | None, Words | None]):
    """Layout of a pool as a job leaves it: every attribute pinned, open or absent."""

    absent = True

    @model_validator(mode="after")
    def _known_words(self) -> LayoutChoice:
        for name, words, known in (
            ("activation_recompute", self.activation_recompute, get_args(Recompute)),
            ("offload", self.offload, get_args(Offload)),
        ):
            for word in words or ():
                if word not in known:
                    raise ValueError(f"{name} {word!r} is not one of {', '.join(known)}")
        if self.zero_stage and max(self.zero_stage) > 3:
            raise ValueError("zero_stage is 0, 1, 2 or 3")
        return self


class LayoutValues(LayoutForm[PositiveInt, NonNegativeInt, bool, Recompute, Offload]):
    """Layout of a pool as a plan states it (`rlperf.Layout` as plain numbers and words)."""

    @property
    def devices(self) -> int:
        """Devices of the layout."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.ulysses * self.data_parallel

    def pinned(self) -> LayoutChoice:
        """The choice that leaves nothing open.

        >>> LayoutValues(tensor_parallel=4).pinned().tensor_parallel
        (4,)
        """
        return LayoutChoice(**self.stated())


# What a job may list several of (Open...), and what it states.
OpenWord = TypeVar("OpenWord")
OpenFlag = TypeVar("OpenFlag")
OpenCount = TypeVar("OpenCount")
OpenFraction = TypeVar("OpenFraction")
Word = TypeVar("Word")
Switch = TypeVar("Switch")
Count = TypeVar("Count")
OpenNatural = TypeVar("OpenNatural")


class SettingsForm(_Form, Generic[OpenWord, OpenFlag, OpenCount, OpenFraction, Word, Switch, Count, OpenNatural]):
    """The table of settings: what a pool has beside its layout."""

    backend: str | None = _is("both", "searched", None, "", "engine (vllm, sglang, trtllm) or trainer backend")
    max_running: OpenCount = _is("engine", "searched", None, "requests", "that one replica runs at once")
    memory_fraction: OpenFraction = _is(
        "engine", "searched", None, "1", "share of device memory that the engine may take"
    )
    kv_dtype: OpenWord = _is("engine", "listed", "bf16", "dtype", "of the cache")
    rollout_dtype: OpenWord = _is("engine", "listed", "bf16", "dtype", "of the engine's weights")
    prefix_caching: OpenFlag = _is("engine", "listed", True, "", "equal prompts are prefilled once")
    speculation: OpenWord = _is(
        "engine", "listed", "none", "", "drafted tokens: mtp:3, eagle3:3, ngram:4, mtp:0-5 by requests running, none"
    )
    draft_acceptance: float | None = _is(
        "engine", "stated", None, "1", "share of first drafts accepted; default: as measured of other models"
    )
    draft_training: Switch = _is("engine", "stated", False, "", "the draft head is trained with the policy")
    prefill_replicas: OpenNatural = _is(
        "engine", "listed", 0, "replicas", "that read prompts for the others; 0: each reads its own"
    )
    borrows: OpenFlag = _is(
        "engine", "listed", False, "", "the trainer's devices, too, while it waits for the last responses"
    )
    chunked_prefill: Switch = _is("engine", "stated", True, "", "prompts share engine_steps with decoding requests")
    engine_token_budget: Count = _is("engine", "stated", 8192, "tokens", "per engine_step")
    cuda_graphs: bool | None = _is("engine", "stated", None, "", "of decoding engine_steps; default: the engine's")
    expert_dispatch: str | None = _is(
        "both", "stated", None, "",
        "how tokens reach experts: nccl (engines gather all of them, trainers send a copy per expert), deepep (once "
        "to a device); default: the engine's, the framework's",
    )  # fmt: skip
    token_budget: OpenCount = _is(
        "trainer", "searched", None, "tokens", "per packed microbatch and replica in training"
    )
    scoring_token_budget: PositiveInt | None = _is(
        "trainer", "derived", None, "tokens", "per scoring microbatch and replica; default: as in training"
    )
    scoring_microbatch: PositiveInt | None = _is(
        "trainer",
        "derived",
        None,
        "sequences",
        "per scoring forward, unless scoring_token_budget says tokens; default: as in training",
    )
    compute_dtype: Word = _is("trainer", "stated", "bf16", "dtype", "of the matrix products")
    packing: Switch = _is("trainer", "stated", True, "", "sequences packed without padding")
    lora_rank: PositiveInt | None = _is(
        "trainer", "stated", None, "1", "rank of adapters; default: all weights are trained"
    )
    lora_jobs: Count = _is("trainer", "stated", 1, "jobs", "whose adapters are trained side by side on one base")
    epochs: Count = _is("trainer", "stated", 1, "times", "that every batch is trained on")
    parked: Switch = _is(
        "trainer", "searched", False, "", "trainer states wait in host memory while a colocated engine runs"
    )
    first_stage_layers: PositiveInt | None = _is(
        "trainer", "derived", None, "layers", "of the first pipeline stage, where uneven"
    )
    last_stage_layers: PositiveInt | None = _is(
        "trainer", "derived", None, "layers", "of the last pipeline stage, where uneven"
    )
    optimizer: Word = _is("trainer", "stated", "adam", "", "adam, or muon for the matrices of layers")
    router_replay: Word = _is(
        "trainer", "stated", "none", "", "experts of a token as recorded: none, R2 (old policy's pass), R3 (rollout)"
    )
    shared_prefix: Switch = _is(
        "trainer", "stated", False, "", "what responses of a group begin with is scored and trained on once"
    )
    turn_samples: Switch = _is(
        "trainer", "stated", False, "", "every turn is a sample of its own, with the context before it"
    )
    freeze_vision: Switch = _is("trainer", "stated", False, "", "the vision tower is not trained")
    chunked_loss: Switch = _is(
        "trainer", "stated", False, "", "logits are made and reduced chunk by chunk (fused kernels)"
    )
    whole_gradients: Switch = _is(
        "trainer", "stated", False, "", "gradients wait unsharded for an update's last microbatch and are reduced once"
    )

    def filled(self) -> Settings:
        """What the costs read: of several values the first, the default where nothing is stated.

        >>> PoolSettings(kv_dtype=("fp8", "bf16")).filled().kv_dtype, SettingsValues(backend="vllm").filled().kv_dtype
        ('fp8', 'bf16')
        """
        return Settings(**self.stated())

    _tokens = field_validator(
        "engine_token_budget", "token_budget", "scoring_token_budget", mode="before", json_schema_input_type=TOKENS
    )(counted)


_Share = Annotated[float, Field(gt=0.0, le=1.0)]
SETTING_WORDS = {
    "optimizer": ("adam", "muon"),
    "router_replay": ("none", "R2", "R3"),
    "expert_dispatch": ("nccl", "deepep"),
}
"""Settings that are one of a few words."""


class PoolSettings(
    SettingsForm[
        Words | None, Flags | None, Counts | None, Fractions | None, str | None, bool | None, PositiveInt | None,
        Naturals | None,
    ]
):  # fmt: skip
    """Settings of a pool as a job leaves them: pinned, open or absent."""

    absent = True
    other_words: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("quantization", "weight_dtype", "weights_dtype"), "rollout_dtype of the rollout pool"
    )

    @model_validator(mode="after")
    def _known_values(self) -> PoolSettings:
        for word in self.speculation or ():
            DraftSetting.parse(word)
        if self.draft_acceptance is not None and not 0.0 < self.draft_acceptance <= 1.0:
            raise ValueError(f"draft_acceptance {self.draft_acceptance} is not a share above 0 and at most 1")
        for name, known in SETTING_WORDS.items():
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        return self

    def listed(self) -> list[str]:
        """Settings that are open because the job lists several.

        >>> PoolSettings(kv_dtype=("bf16", "fp8"), prefix_caching=(True,)).listed()
        ['kv_dtype']
        """
        return [a.name for a in ATTRIBUTES if a.part == "settings" and a.decided == "listed"
                and len(getattr(self, a.name) or ()) > 1]  # fmt: skip

    def alternatives(self) -> tuple[PoolSettings, ...]:
        """One of these per combination of the settings that are open where a job lists several."""
        names = [a.name for a in ATTRIBUTES if a.part == "settings" and a.decided == "listed"]
        choices: list[list[Any]] = [[(value,) for value in getattr(self, name) or ()] or [None] for name in names]
        opened = product(*choices)
        return tuple(self.model_copy(update=dict(zip(names, values, strict=True))) for values in opened)


class SettingsValues(
    SettingsForm[
        str | None, bool | None, PositiveInt | None, _Share | None, str | None, bool | None, PositiveInt | None,
        NonNegativeInt | None,
    ]
):  # fmt: skip
    """Settings of a pool as a plan states them; None: the pool has no such setting, or nothing to set it for."""

    absent = True
    backend: str

    def pinned(self) -> PoolSettings:
        """The choice that leaves nothing open."""
        return PoolSettings(**self.stated())


class Settings(SettingsForm[str, bool, int | None, float | None, str, bool, int, int]):
    """Settings of a pool as the costs read them, whether a job or a plan states them: no default is left to fill in."""

    def planned(self, role: Role, **chosen: Any) -> SettingsValues:
        """What a plan states of a pool: the settings of its role, those that the planner has chosen replaced.

        >>> Settings().planned("trainer", backend="fsdp2", lora_rank=8).stated()["lora_rank"]
        8
        """
        return SettingsValues(**{each.name: getattr(self, each.name) for each in of_role(role, "settings")} | chosen)


_KINDS: dict[type, Kind] = {bool: "flag", float: "fraction", int: "count", str: "word"}


def _holds(annotation: object, type_: type) -> bool:
    """Whether a type stands somewhere in an annotation; of a literal, the type of its values."""
    if annotation is type_ or get_origin(annotation) is type_ or isinstance(annotation, type_):
        return True
    return any(_holds(part, type_) for part in get_args(annotation))


def _attributes() -> Iterator[Attribute]:
    parts: tuple[tuple[Part, type[_Form], type[_Form], type[_Form]], ...] = (
        ("layout", LayoutForm, LayoutChoice, LayoutValues),
        ("settings", SettingsForm, PoolSettings, Settings),
    )
    for part, form, choice, filled in parts:
        for name, field in form.model_fields.items():
            row = next(each for each in field.metadata if isinstance(each, _Facts))
            kind = next(word for type_, word in _KINDS.items() if _holds(filled.model_fields[name].annotation, type_))
            several = _holds(choice.model_fields[name].annotation, tuple)
            yield Attribute(name, part, default=field.default, kind=kind, several=several, **vars(row))


ATTRIBUTES = tuple(_attributes())
"""Every attribute of a pool, layout before settings, in the order of the forms."""
LayoutForm.other_words = {each.short.lower(): each.name for each in ATTRIBUTES if each.short} | {"sp": "ulysses"}


TOLD = frozenset({"draft_acceptance"})
"""Settings that tell what was measured: nothing is set by them, so that no framework needs a key."""


def of_role(role: str, part: Part | None = None) -> tuple[Attribute, ...]:
    """Attributes that pools of a role have, of layout and settings or of one of them.

    >>> [each.name for each in of_role("rollout", "layout")][-1]
    'attention_data_parallel'
    """
    return tuple(each for each in ATTRIBUTES if part in (None, each.part) and each.belongs_to(role))


class PoolSpec(Frozen):
    """A role, its devices and their layout, as a job leaves them."""

    role: Role
    devices: Counts | None = None
    cluster: str | None = Field(None, description="a cluster of its own for this pool (rollout only, own devices)")
    nodes: PositiveInt | None = Field(None, description="nodes of that cluster; default: what devices fill")
    price: UsdPerHour | None = Field(None, gt=0, description="of its devices, each per hour; overrides the cluster's")
    placement: Placement | None = Field(
        None, description="of a critic: own, on devices beside the trainer's; default: shared, the trainer's in turn"
    )
    layout: LayoutChoice = LayoutChoice()
    settings: PoolSettings = PoolSettings()

    @property
    def apart(self) -> bool:
        """Whether a critic has devices that nobody else has."""
        return self.placement == "own"

    @model_validator(mode="after")
    def _fits_the_role(self) -> PoolSpec:
        if self.placement is not None and self.role != "critic":
            raise ValueError(
                f"placement is a critic's to state, not of a {self.role} pool (a reference, a reward model or a judge "
                "on devices of its own: scorers)"
            )
        if self.cluster is not None and self.role != "rollout":
            raise ValueError("only the rollout pool can stand on a cluster of its own")
        if self.price is not None and self.cluster is None:
            raise ValueError("price is of a cluster of the pool's own; the job's is price of the job")
        plain = LayoutValues().pinned()
        stated = {*self.settings.stated(), *(n for n, values in self.layout if values not in (None, getattr(plain, n)))}
        given = [a.name for a in ATTRIBUTES if a.name in stated and not a.belongs_to(self.role)]
        if given:
            raise ValueError(f"{', '.join(given)} cannot be set on a {self.role} pool")
        return self
