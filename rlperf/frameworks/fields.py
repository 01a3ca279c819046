"""Field tables: which neutral value stands under which key, with its unit conversion, read in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rlperf.frameworks.keytable import ABSENT, KeyTable, Value
from rlperf.frameworks.run import Ref, Run, as_type, ref, types_of

Convert = Callable[[Value, Run], Value]


@dataclass(frozen=True)
class Unit:
    """How a neutral value and a framework's value turn into each other; both see what else is known of the run.

    ``takes``: the neutral values that the key can hold; None: any
    """

    read: Convert
    write: Convert
    note: str = ""
    takes: frozenset[str] | frozenset[int] | None = None


def _same(value: Value, _: Run) -> Value:
    return value


SAME = Unit(_same, _same)
CHECKPOINTING = Unit(lambda value, _: "full" if value else "none", lambda value, _: value != "none")
"""Activation recompute that is on or off."""
RECOMPUTE = Unit(lambda value, _: value or "none", lambda value, _: None if value == "none" else value)
"""Activation recompute by how much it recomputes; null for none."""
DISTRIBUTED = Unit(lambda value, _: 1 if value else 0, lambda value, _: value >= 1, takes=frozenset({0, 1}))
"""ZeRO stage 1 as Megatron's distributed optimizer."""
RESHARD = Unit(lambda value, _: 3 if value else 2, lambda value, _: value >= 3, takes=frozenset({2, 3}))
"""ZeRO stage of FSDP2: whether a layer's weights are let go of after its forward pass."""
LORA_RANK = Unit(lambda value, _: int(value) or None, _same)
ETP = "null: as wide as tensor parallel"
"""Megatron's own reading of expert tensor parallel that is not stated (parallel_state.py)."""
NEGATED = Unit(lambda value, _: not value, lambda value, _: not value)
SAMPLES = Unit(
    lambda value, run: -(-int(value) // run.batch.group_size),
    lambda value, run: int(value) * run.batch.group_size,
    "samples = prompts x group_size",
)

UPDATES = Unit(
    lambda value, run: -(-run.batch.prompts // max(int(value), 1)),
    lambda value, run: max(run.batch.prompts // value, 1),
    "optimizer updates of an rl_step",
)
"""Prompts of an update, where a framework states how many updates there are."""

TOKENS_PER_DEVICE = Unit(
    lambda value, run: int(value) * run.trainer.sequence_split,
    lambda value, run: -(-int(value) // run.trainer.sequence_split),
    "per GPU; times context parallel at run time",
)


def words(**pairs: str) -> Unit:
    """Neutral word -> the framework's word, and back; unknown words pass as they are."""
    back = {theirs: ours for ours, theirs in pairs.items()}
    return Unit(lambda value, _: back.get(value, value), lambda value, _: pairs.get(value, value))


def computes(unit: Unit = SAME, dtypes: Iterable[str] = ("bf16", "fp16", "fp32")) -> Unit:
    """Of a key for a precision that holds no other than these; of training's products 8 bits have keys of their own.

    >>> computes(words(bf16="bfloat16")).takes == {"bf16", "fp16", "fp32"}
    True
    """
    return replace(unit, takes=frozenset(dtypes))


COMPUTE_DTYPE = computes(words(bf16="bfloat16", fp16="float16"))
_RECIPES = {"fp8": "blockwise", "mxfp8": "mxfp8"}
FP8_FORMAT = Unit(
    lambda value, _: "fp8",
    lambda value, _: "e4m3" if value in _RECIPES else None,
    takes=frozenset({"bf16", *_RECIPES}),
)
"""Megatron's ``fp8-format``: products of 8 bits where one is stated, whichever (transformer_config.py, ``fp8``)."""
FP8_RECIPE = Unit(
    lambda value, run: value if value == "mxfp8" and run.trainer.compute_dtype == "fp8" else run.trainer.compute_dtype,
    lambda value, _: _RECIPES.get(str(value)),
    takes=FP8_FORMAT.takes,
)
"""Megatron's ``fp8-recipe``, read after the format: how values are scaled. Blocks of mxfp8 alone take other seconds."""


def _cache_dtype(value: Value, _: Run) -> Value:
    return {"auto": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}.get(value, value)


KV_DTYPE = Unit(_cache_dtype, words(bf16="auto").write)
"""Engines call a KV cache in the weights' own type ``auto``; both 8-bit formats take as much room and time."""
SGLANG_KV_DTYPE = Unit(_cache_dtype, words(bf16="auto", fp8="fp8_e4m3").write)
"""SGLang has no plain ``fp8``: its server wants the format (``--kv-cache-dtype`` in its server_args.py)."""


_WORDS = {"auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
ENGINE_DTYPE = Unit(
    lambda value, _: _WORDS.get(str(value), value),
    lambda value, _: "float16" if value == "fp16" else "bfloat16",
    takes=frozenset({"bf16", "fp16"}),
)
"""What an engine computes in, quantised or not (no null, which AReaL's types refuse); read before what is quantised."""


def quantized(*same: str, **theirs: str) -> Unit:
    """How an engine quantises weights, if it does: neutral types under their own name, and those under another word.

    >>> quantized("fp8", int4_wo="compressed-tensors").takes == {"bf16", "fp8", "int4_wo"}
    True
    """
    known = words(**theirs)
    return Unit(
        lambda value, run: known.read(str(value), run),
        lambda value, run: None if value in (None, "bf16", "fp16") else known.write(value, run),
        takes=frozenset({"bf16", *same, *theirs}),
    )


QUANTIZED_SGLANG = quantized("fp8", "mxfp8", "mxfp4", int4_wo="compressed-tensors", nvfp4="modelopt_fp4")
"""SGLang's ``--quantization`` (`choices` in its server_args.py); int4 is as Kimi-K2-Thinking's checkpoint holds it."""
QUANTIZED_VLLM = quantized("fp8", "mxfp4", int4_wo="compressed-tensors", nvfp4="modelopt_fp4")
"""vLLM's ``quantization`` (QuantizationMethods of its model_executor/layers/quantization)."""


def zero_as(nothing: Value) -> Unit:
    """0 (ours: off, or all) against the framework's word for it, such as -1 or null."""
    return Unit(lambda value, _: 0 if value == nothing or value is None else value, lambda value, _: value or nothing)


def one_as(nothing: Value) -> Unit:
    """1 (ours: off) against the framework's word for it, such as null."""
    return Unit(
        lambda value, _: 1 if value == nothing or value is None else value,
        lambda value, _: nothing if value == 1 else value,
    )


DEEPEP = Unit(
    lambda value, run: "deepep" if value else run.trainer.expert_dispatch,
    lambda value, _: value == "deepep",
)
FLEX = Unit(
    lambda value, run: "deepep" if value == "flex" else run.trainer.expert_dispatch,
    lambda value, _: "flex" if value == "deepep" else "alltoall",
)
"""Megatron's two keys for DeepEP: the dispatcher that it is a backend of, and (needed before 0.15) DeepEP itself."""
OPTIMIZER = Unit(lambda value, _: "muon" if "muon" in str(value).lower() else "adam", _same)
"""Muon in any of its variants; whatever else is there moves what Adam moves."""


def replay_as(word: str) -> Unit:
    """A switch for one way of repeating routers' choices (R2, R3); where it is off, another key may name the other."""
    return Unit(
        lambda value, run: word if value else run.trainer.router_replay or "none",
        lambda value, _: value == word,
        takes=frozenset({"none", word}),
    )


@dataclass(frozen=True)
class Field:
    """One field of a run and its key. ``keys``: the first that exists in the version; none: see `elsewhere`.

    ``until``: the last version that heeds the key; later ones take it, and nothing reads it.
    """

    at: Ref
    keys: tuple[str, ...]
    unit: Unit = SAME
    note: str = ""
    backend: str = ""
    read_only: bool = False
    unread: bool = False
    until: str = ""

    def key(self, table: KeyTable, version: str, backend: str) -> str | None:
        """The key of this version and backend, or None where it has none."""
        if self.backend and backend and self.backend != backend:
            return None
        return next((key for key in self.keys if table.find(key, version, backend) is not None), None)

    def outlived(self, table: KeyTable, version: str) -> bool:
        """Whether the version takes the key and heeds it no more."""
        return bool(self.until) and table.versions.index(version) > table.versions.index(self.until)

    def takes(self, value: object) -> bool:
        """Whether its key has a word for the value."""
        return self.unit.takes is None or value in self.unit.takes

    def states(self, table: KeyTable, version: str, backend: str, value: object = None) -> bool:
        """Whether a file of this version and backend can say the value; None: any."""
        if value is not None and not self.takes(value):
            return False
        if self.outlived(table, version):
            return False
        if not self.keys:
            return not (self.backend and backend and self.backend != backend)
        return not self.read_only and self.key(table, version, backend) is not None


def field(
    name: str, keys: str, unit: Unit = SAME, note: str = "", *, backend: str = "", read_only: bool = False,
    until: str = "",
) -> Field:  # fmt: skip
    """A field whose alternative keys are separated by spaces, newest first; ``name`` must be one of a run's (`ref`)."""
    return Field(ref(name), tuple(keys.split()), unit, note or unit.note, backend, read_only, until=until)


def elsewhere(
    names: str, where: str, unit: Unit = SAME, *, backend: str = "", unread: bool = False
) -> tuple[Field, ...]:
    """Fields that the adapter's own ``emit`` and ``read`` state, in no key of their own: ``where`` says in what.

    ``unread``: the reader does not find them there under this name, so what was written cannot be held against them.
    """
    return tuple(Field(ref(name), (), unit, where, backend, unread=unread) for name in names.split())


def megatron_degrees(section: str) -> tuple[Field, ...]:
    """A trainer's degrees by Megatron's own names in a ``section`` of the keys."""
    return (
        field("trainer.tensor_parallel", section + "tensor_model_parallel_size", backend="megatron"),
        field("trainer.pipeline_parallel", section + "pipeline_model_parallel_size", backend="megatron"),
        field("trainer.virtual_pipeline", section + "virtual_pipeline_model_parallel_size", one_as(None),
              backend="megatron"),
        field("trainer.context_parallel", section + "context_parallel_size", backend="megatron"),
        field("trainer.expert_parallel", section + "expert_model_parallel_size", backend="megatron"),
        field("trainer.expert_tensor_parallel", section + "expert_tensor_parallel_size", note=ETP, backend="megatron"),
        field("trainer.sequence_parallel", section + "sequence_parallel", backend="megatron"),
    )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One key as it is written, and why."""

    key: str
    value: Value
    why: str = ""


@dataclass(frozen=True)
class Target:
    """A framework version and backend with its keys."""

    table: KeyTable
    version: str
    backend: str = ""

    def has(self, key: str) -> bool:
        """Whether the key exists."""
        return self.table.find(key, self.version, self.backend) is not None

    def defaults(self, backend: str = "") -> dict[str, Value]:
        """Every key with its default; with ``backend``, those of that trainer only."""
        keys = self.table.keys(self.version, backend)
        return {key: spec.default for key, spec in keys.items() if spec.default is not ABSENT}

    def default(self, key: str) -> Value:
        """Its default, or None."""
        spec = self.table.find(key, self.version, self.backend)
        return None if spec is None or spec.default is ABSENT else spec.default


def write_fields(fields: Iterable[Field], run: Run, target: Target) -> list[Setting]:
    """Every neutral value of the run that has a key, in the framework's unit."""
    settings = []
    for entry in fields:
        value = run.value(entry.at)
        key = entry.key(target.table, target.version, target.backend)
        if value is None or key is None or entry.read_only or entry.outlived(target.table, target.version):
            continue
        settings.append(Setting(key, entry.unit.write(value, run), entry.note))
    return settings


MANDATORY = "???"
"""OmegaConf's word for a value that has no default."""


def read_fields(fields: Iterable[Field], flat: Mapping[str, Value], target: Target, run: Run) -> tuple[Run, set[str]]:
    """The run with what the keys say, and the keys that were read. ``flat`` holds the defaults too.

    An older key only speaks where no newer one has, and one that the version heeds no more says nothing. A value that
    its field cannot hold is named in ``Run.wrong``.
    """
    used: set[str] = set()
    stated: set[Ref] = set()
    for entry in fields:
        for key in entry.keys:
            if entry.backend and target.backend and entry.backend != target.backend:
                continue
            if key in flat and flat[key] is not None:
                used.add(key)
                if flat[key] == MANDATORY:
                    run = replace(run, missing=(*run.missing, key))
                elif not entry.outlived(target.table, target.version) and (
                    entry.at not in stated or key == entry.keys[0]
                ):
                    run = put(run, entry.at, entry.unit.read(flat[key], run), key)
                    stated.add(entry.at)
                break
    return run, used


def put(run: Run, at: Ref, value: Value, key: str) -> Run:
    """The run with a value that a file states under ``key``, or with the complaint that its type is wrong."""
    value, fits = as_type(value, types_of(at.group)[at.name])
    if not fits:
        return replace(run, wrong=(*run.wrong, f"{key}: {value!r} is no {at}"))
    return run.having({at: value})


_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")


def resolve(flat: Mapping[str, Value]) -> dict[str, Value]:
    """Values with ``${a.b}``, ``${.sibling}``, ``${oc.select:key,default}``, ``${mul:a,b}`` and the like filled in.

    What cannot be resolved (environment variables, unknown resolvers, cycles) stays as it is.

    >>> resolve({"a": 3, "b": "${mul:${a}, 4}", "c": "${oc.select:a,1}", "d.e": "${.f}", "d.f": True})
    {'a': 3, 'b': 12, 'c': 3, 'd.e': True, 'd.f': True}
    """
    done = dict(flat)
    for _ in range(12):
        changed = False
        for key, value in done.items():
            if isinstance(value, str) and "${" in value:
                filled = _filled(key, value, done)
                if filled != value:
                    done[key], changed = filled, True
        if not changed:
            break
    return done


def _filled(key: str, text: str, flat: Mapping[str, Value]) -> Value:
    for match in _INTERPOLATION.finditer(text):
        value, known = _interpolated(key, match[1], flat)
        if not known or (isinstance(value, str) and "${" in value and match[0] in value):
            continue
        if match[0] == text:
            return value
        return text.replace(match[0], str(value))
    return text


def _interpolated(key: str, body: str, flat: Mapping[str, Value]) -> tuple[Value, bool]:
    """Value of one innermost interpolation, and whether it is known."""
    name, colon, arguments = body.partition(":")
    if not colon:
        path = _absolute(key, body.strip())
        return flat.get(path), path in flat
    parts = [part.strip() for part in arguments.split(",")]
    if name == "oc.select":
        path = _absolute(key, parts[0])
        if path in flat and flat[path] is not None:
            return flat[path], True
        return _literal(parts[1]) if len(parts) > 1 else None, len(parts) > 1 or path in flat
    if name == "oc.env":
        return (_literal(parts[1]), True) if len(parts) > 1 else (None, False)
    numbers = [_literal(part) for part in parts]
    if all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return _computed(name, numbers)
    return None, False


def _computed(name: str, numbers: list[Value]) -> tuple[Value, bool]:
    """The arithmetic resolvers of NeMo-RL (nemo_rl/utils/config.py): mul, div, add, max, min; of RLinf
    (rlinf/utils/omega_resolver.py): multiply, subtract, int_div."""
    if name == "mul" and numbers:
        product: Value = 1
        for number in numbers:
            product *= number
        return product, True
    if name == "div" and len(numbers) == 2 and numbers[1]:
        whole = numbers[0] / numbers[1]
        return (int(whole) if whole == int(whole) else whole), True
    simple: dict[str, Callable[..., Value]] = {"add": lambda *given: sum(given), "max": max, "min": min}
    if name in simple and numbers:
        return simple[name](*numbers), True
    if name in ("multiply", "subtract", "int_div") and len(numbers) == 2:
        first, second = numbers
        if name == "int_div":
            return (first // second, True) if second else (None, False)
        return first * second if name == "multiply" else first - second, True
    return None, False


def _absolute(key: str, path: str) -> str:
    """A dotted path seen from ``key``: a leading dot is the key's own section, each further one its parent."""
    if not path.startswith("."):
        return path
    ups = len(path) - len(path.lstrip("."))
    section = key.split(".")[:-ups]
    return ".".join([*section, path.lstrip(".")])


def _literal(text: str) -> Value:
    """A YAML scalar of an interpolation's argument."""
    lowered = text.strip().lower()
    if lowered in ("null", "none", "~", ""):
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip().strip("'\"")
