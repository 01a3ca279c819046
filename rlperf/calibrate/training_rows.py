"""Timings of single operators of training, each against the term of an update that a plan is charged for it.

Columns: gpu, kernel, provider, pass, x_name, x_value, config, latency_us (Liger-Kernel's benchmark). A provider is a
way to run the operator; the trainer backend whose code runs it so lends its bytes (`_BACKENDS`). Products are bursts,
as kernel tables time them. Small passes take twice their forward in the backward, as in an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlperf.calibrate.rows_beside import HOST_FLOOR
from rlperf.calibrate.tables import Row, Table
from rlperf.calibrate.validate import Outcome, PredictedFigure, each_row
from rlperf.cost.layers.dense import activation_bytes
from rlperf.cost.moe import Dealt, ExpertShape, grouped_gemm_s
from rlperf.cost.roofline import as_float, gemm_s, small_op_s, stream_s
from rlperf.cost.trainer.layers import matrix_s
from rlperf.errors import SpecError
from rlperf.specs.hardware import Hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import Timing, load_trainer
from rlperf.units import MOST

COLUMNS = ("gpu", "kernel", "provider", "pass", "x_name", "x_value", "config", "latency_us")

_BACKENDS = {
    "huggingface": ("fsdp2", False),
    "torch": ("fsdp2", False),
    "torch_compile": ("fsdp2", True),
    "liger": ("fsdp2", True),
    "megatron": ("megatron", True),
}
"""Provider: the backend that runs such code, and whether small passes are fused."""
_PASSES = {"forward": (1.0, 0.0), "no-grad-forward": (1.0, 0.0), "backward": (0.0, 1.0), "full": (1.0, 1.0)}
"""How often a pass runs forward and backward."""
_SIZES = ("BT", "T", "B", "V", "H", "N", "ffn_local")
"""Columns that a benchmark varies with which the work of an operator grows at least in proportion."""
_ALIKE, _HOST_US = 1.3, 800.0
"""Twice the work in less than 1.3 times the time, below 800 us (the most that the launches of such a row take)."""
_OTHER_LOSSES = (
    "kl_div", "jsd", "softmax", "fused_linear_jsd", "fused_linear_cpo_loss", "fused_linear_orpo_loss",
    "fused_linear_simpo_loss", "kto_loss",
)  # fmt: skip
CAST_BYTES = 12.0
"""Of a logit that a loss in fp32 makes of 16 bits (2 read, 4 written) and back: rows of PyTorch's loss hold fp32 from
the start, as their peak memory says (20 bytes a logit: logits, log-softmax, gradients of both and of the input)."""
REFERENCE = "a reference's log-probabilities beside the policy's: four products, as timings on A100 say"
"""Of GRPO's loss, whose configuration does not state them."""
MEGATRON_BYTES = {"forward": 38.0, "backward": 14.0}
"""Of a logit that Megatron-Core's cross-entropy moves pass by pass, as `verl_megatron` counts it: cast (2 + 4), maximum
4, difference 8, exponential 8, sum 4, softmax 8; times the gradient 8, cast (4 + 2). That these rows hold 16 bits says
their peak memory: 8 bytes a logit, an input of 2, fp32 in place and a gradient of 2."""


@dataclass(frozen=True)
class TimedOperator:
    """One row: its numbers and how a trainer runs it.

    Attributes
    ----------
    numbers : of configuration and varied column together
    wide : bytes of a value
    """

    hw: Hardware
    numbers: Mapping[str, float]
    wide: float
    timing: Timing
    fused: bool
    provider: str
    model: str

    def number(self, *names: str) -> float:
        """The first of these that the row states."""
        for name in names:
            if name in self.numbers:
                return self.numbers[name]
        raise SpecError(f"states none of {', '.join(names)}")

    @property
    def tokens(self) -> float:
        """Rows of the operator's input."""
        held = self.numbers
        for name in ("BT", "M"):
            if name in held:
                return held[name]
        length = self.number("T", "seq_len", "S")
        return length * held.get("B", held.get("bsz", 1.0))

    def passed(self, values: float) -> tuple[float, float]:
        """Forward and backward of small passes of so many bytes in 16 bits, as an update is charged them."""
        moved = values * self.wide / 2.0 * self.timing.elementwise * (1.0 if self.fused else self.timing.eager)
        forward = float(small_op_s(self.hw, moved))
        return forward, 2.0 * forward


Pair = tuple[float, float]
"""Seconds of forward and backward."""


def _norm(row: TimedOperator) -> Pair:
    return row.passed(4.0 * row.tokens * row.number("H", "N", "hidden_size"))


def _added_norm(row: TimedOperator) -> Pair:
    return row.passed(10.0 * row.tokens * row.number("H", "hidden_size"))


def _rope(row: TimedOperator) -> Pair:
    queries = row.number("num_q_heads", "num_attention_heads")
    width = row.number("H", "hidden_size") / queries * (queries + row.number("num_kv_heads", "num_key_value_heads"))
    return row.passed(4.0 * row.tokens * width)


def _gated(row: TimedOperator) -> Pair:
    return row.passed(activation_bytes(1, True) * row.tokens * row.number("ffn_local"))


def _squared(row: TimedOperator) -> Pair:
    return row.passed(activation_bytes(1, False) * row.tokens * row.number("N"))


def _mlp(row: TimedOperator) -> Pair:
    hidden, inner = as_float(row.number("hidden_size")), as_float(row.number("intermediate_size"))
    up = matrix_s(row.hw, as_float(row.tokens), 2.0 * inner, hidden, "bf16")
    down = matrix_s(row.hw, as_float(row.tokens), hidden, inner, "bf16")
    ahead, back = row.passed(activation_bytes(1, True) * row.tokens * float(inner))
    return float(up[0] + down[0]) + ahead, float(up[1] + down[1]) + back


def _embedding(row: TimedOperator) -> Pair:
    seconds = float(small_op_s(row.hw, row.tokens * row.number("D") * 8.0))
    return seconds, seconds


def _vocabulary(row: TimedOperator) -> float:
    if row.model:
        return float(load_architecture(row.model).vocab)
    return row.number("V", "vocab_size")


def _loss(row: TimedOperator) -> Pair:
    logits = row.tokens * _vocabulary(row)
    if row.provider not in ("huggingface", "torch"):
        raise SpecError("no framework's loss is counted of such a kernel")
    half = float(stream_s(row.hw, 0.5 * logits * (row.timing.cross_entropy_bytes - CAST_BYTES)))
    return half, half


def _split_loss(row: TimedOperator) -> Pair:
    logits = row.tokens * _vocabulary(row)
    if row.provider == "megatron-fused":
        half = float(stream_s(row.hw, 0.5 * logits * row.timing.cross_entropy_bytes))
        return half, half
    if row.provider == "megatron-unfused":
        ahead, back = (float(stream_s(row.hw, logits * MEGATRON_BYTES[each])) for each in ("forward", "backward"))
        return ahead, back
    raise SpecError("no framework's loss is counted of such a kernel")


def _head(row: TimedOperator) -> Pair:
    """The projection to the vocabulary and its loss: whole, or chunk by chunk with the projection made again."""
    columns = _vocabulary(row)
    forward, backward = matrix_s(
        row.hw, as_float(row.tokens), as_float(columns), as_float(row.number("H", "hidden_size")), "bf16"
    )
    logits, timing = row.tokens * columns, row.timing
    half = 0.5 * float(stream_s(row.hw, logits * timing.cross_entropy_bytes))
    ahead, back = float(forward) + half, float(backward) + half
    if row.provider == "liger":
        back += float(forward + stream_s(row.hw, logits * (timing.chunked_bytes - timing.cross_entropy_bytes)))
    return ahead, back


def _grpo(row: TimedOperator) -> Pair:
    """The same, and the forward of a reference beside it."""
    ahead, back = _head(row)
    return 2.0 * ahead, back


def _experts(row: TimedOperator) -> Pair:
    if row.provider == "huggingface":
        raise SpecError("a loop over experts, whose launches depend on what the router chose")
    hidden, inner = row.number("H"), row.number("intermediate_dim")
    shape = ExpertShape(hidden, inner, row.number("E"), row.number("K"))
    tokens = as_float(row.number("T"))
    products = float(grouped_gemm_s(row.hw, tokens, shape, 1.0, 1.0, dealt=Dealt(dispatched=True)))
    products *= row.timing.moe_pass
    moved = float(small_op_s(row.hw, tokens * row.number("K") * hidden * 8.0 * row.timing.permute))
    router = float(gemm_s(row.hw, tokens, row.number("E"), hidden))
    return products + moved + router, 2.0 * products + moved + 2.0 * router


_TERMS: dict[str, Callable[[TimedOperator], Pair]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "megatron_rms_norm": _norm,
    "fused_add_rms_norm": _added_norm,
    "rope": _rope,
    "llama4_rope": _rope,
    "megatron_swiglu": _gated,
    "relu_squared": _squared,
    "swiglu": _mlp,
    "geglu": _mlp,
    "tiled_swiglu": _mlp,
    "embedding": _embedding,
    "cross_entropy": _loss,
    "megatron_cross_entropy": _split_loss,
    "fused_linear_cross_entropy": _head,
    "fused_linear_grpo_loss_token": _grpo,
    "fused_linear_grpo_loss_sequence": _grpo,
    "fused_moe": _experts,
}


def outcome(table: Table) -> Outcome:
    """All rows of a table, but for those that show the host."""
    waited = _host_bound(table)

    def figures(row: Row) -> list[PredictedFigure]:
        if row.row_id in waited:
            raise SpecError(HOST_FLOOR)
        return [figure(row)]

    return each_row(table, figures)


def _host_bound(table: Table) -> frozenset[str]:
    """Rows that take hardly longer or shorter (`_ALIKE`) than one of twice or half their size: the host's launches."""
    alike: dict[tuple[str, ...], list[tuple[float, float, str]]] = {}
    for row in table:
        size = _size(row)
        if size and row.text("x_name") in _SIZES and row.text("kernel") != "embedding":
            key = ("gpu", "src", "kernel", "provider", "pass", "config")
            alike.setdefault(tuple(row.text(name) for name in key), []).append((*size, row.row_id))
    found: set[str] = set()
    for rows in alike.values():
        for small, short, first in rows:
            for large, long, second in rows:
                if large >= 2.0 * small and long < _ALIKE * short and short < _HOST_US:
                    found |= {first, second}
    return frozenset(found)


def _size(row: Row) -> tuple[float, float] | None:
    """What a row varies, and its time [us]; None where one of them is no number, which the row's reader says."""
    try:
        return row.measured("x_value"), row.measured("latency_us")
    except SpecError:
        return None


def figure(row: Row) -> PredictedFigure:
    """Microseconds of one pass of one operator."""
    kernel, provider, passed = row.text("kernel"), row.text("provider"), row.text("pass")
    if kernel in _OTHER_LOSSES:
        raise SpecError("a distillation or preference loss, or a bare softmax, which no update of a plan has")
    if kernel not in _TERMS:
        raise SpecError(f"{kernel!r} is no operator that rlperf knows; known: {', '.join(_TERMS)}")
    if passed not in _PASSES:
        raise SpecError(f"{passed!r} is no pass; known: {', '.join(_PASSES)}")
    if "tiled" in provider:
        raise SpecError("tiles of tokens one after the other, which no trainer of a plan runs")
    timed = _operator_of(row)
    forward, backward = _TERMS[kernel](timed)
    ahead, back = _PASSES[passed]
    if _way(provider) == "liger" and kernel.startswith("fused_linear") and passed != "full":
        raise SpecError("gradients are made in the forward: only both passes together are a term")
    seconds, spread = ahead * forward + back * backward, timed.hw.calibration.stream.quality.spread
    return PredictedFigure.of_kernel(
        row, timed.hw, seconds, spread, group=f"{kernel}, {_way(provider)}, {passed}",
        stratum=f"{_way(provider)}, {timed.hw.device.name}", assumed=(REFERENCE,) if "grpo" in kernel else (),
    )  # fmt: skip


def _way(provider: str) -> str:
    """Liger's kernels, in whatever language they are written, are one way."""
    return "liger" if provider.startswith("liger") else provider


def _operator_of(row: Row) -> TimedOperator:
    """The numbers of a row.

    Raises
    ------
    SpecError : an unknown device or provider, or a number that is none
    """
    texts = dict(part.split("=", 1) for part in row.text("config").split(";") if "=" in part)
    texts[row.text("x_name")] = row.text("x_value")
    model, numbers = texts.pop("model_config", ""), {}
    for name, text in texts.items():
        try:
            value = float(text)
        except ValueError:
            continue  # a name of a function or a dtype
        if not 0.0 < value <= MOST:
            raise SpecError(f"{name} {text!r} is no positive number")
        numbers[name] = value
    way = _way(row.text("provider"))
    backend, fused = _BACKENDS.get(way, _BACKENDS.get(way.split("-")[0], ("", False)))
    if not backend:
        raise SpecError(f"provider {row.text('provider')!r} is none that rlperf knows; known: {', '.join(_BACKENDS)}")
    wide = 4.0 if texts.get("dtype") == "float32" else 2.0
    return TimedOperator(row.hardware(), numbers, wide, load_trainer(backend).timing, fused, way, model)
