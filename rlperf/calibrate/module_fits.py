"""Fits of whole attention modules: a kind of layer as an engine runs it, against timings of its module.

Products and small passes of the module are those that the layer states, at the device's own constants; what is fitted
is the rest, attention over chosen keys (`rlperf.cost.sparse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rlperf.calibrate.fitting import Bounds, fit_with_left_out
from rlperf.calibrate.kernel_fits import KernelFit, rounded
from rlperf.calibrate.kernel_tables import Series, joined_series
from rlperf.cost.dtypes import cache_bytes
from rlperf.cost.layers import stack_of
from rlperf.cost.layers.choosing import Choosing
from rlperf.cost.layers.latent import Latent
from rlperf.cost.layers.layer import fuse
from rlperf.cost.layers.softmax import Softmax
from rlperf.cost.operators import product_operator
from rlperf.cost.replica import Replica, Roles, total
from rlperf.errors import SpecError
from rlperf.layout import BoolArray, FloatArray
from rlperf.specs.calibration import SparseFit
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import BEST_READ, Hardware
from rlperf.specs.profiles import load_architecture

PULL = 0.02
"""Pull of a constant to its start, in units of the misfit: eight or ten of them, some told by few rows."""
GATHERED = ("sparse", "sparse_reusing", "compressed_sparse")
"""Mixers whose queries choose keys one by one; whole blocks, and all keys, are read as they lie."""
RANGES = {
    "fixed": (1e-7, 2e-5, 1e-3),
    "compute": (0.02, 0.5, 1.2),
    "memory": (0.03, 0.6, BEST_READ),
    "passes": (0.01, 2.0, 100.0),
    "index_compute": (0.01, 0.4, 1.2),
    "index_memory": (0.01, 0.4, BEST_READ),
    "index_fixed": (1e-7, 1e-5, 1e-3),
    "per_choice": (1e-10, 1e-7, 1e-5),
    "gather": (0.05, 1.0, 5.0),
    "padded": (0.01, 0.2, 1.0),
    "narrow": (0.05, 1.0, 2.0),
    "per_tile": (1e-12, 3e-8, 1e-6),
}
"""Lowest, first and highest value of every constant."""
IN_SECONDS = ("fixed", "index_fixed", "per_choice", "per_tile")
_TABLES = {"csa": "compressed_sparse", "hca": "compressed", "reusing": "sparse_reusing"}


def mixer_of(series: Series) -> tuple[str, str]:
    """Mixer and phase of a module's timings; no mixer where it reads all keys, or nobody describes the model."""
    layer, phase = timed_layer(series), series.variant.rsplit("/", 1)[1]
    return (layer.table if isinstance(layer, Choosing) else "", phase)


def timed_layer(series: Series) -> Softmax | None:
    """The attention of the model that was timed: one that chooses keys, where it has one, else a latent one.

    None where the model has neither, or nobody describes it. Layers of a window alone, which DeepSeek-V4-Flash begins
    with, were not timed.
    """
    model, part, _ = series.variant.rsplit("/", 2)
    try:
        layers = [half.layer for half in stack_of(load_architecture(model)).halves]
    except SpecError:
        return None
    wanted = _TABLES.get(part)
    reading = [layer for layer in layers if isinstance(layer, Choosing) and layer.ratio]
    choosing = [layer for layer in reading if wanted in (None, layer.table)]
    reading_all = [layer for layer in layers if isinstance(layer, Latent) and not part]
    return next(iter([*choosing, *reading_all]), None)


def _constants(modules: Sequence[Series], mixer: str, phase: str) -> list[str]:
    """What the timings can tell: gathers where keys are chosen one by one, conversions where both caches were timed.

    Kernels that gather keys convert them on the way: no constant of it stood apart from the others. Decodes have too
    few queries to tell what one takes beside its keys, and blocks were timed with few.
    """
    names = [name for name in RANGES if name not in ("gather", "padded", "narrow", "per_tile")]
    caches = {cache_bytes(one.dtype.split("/")[1]) < 2.0 for one in modules}
    told = ["gather", "padded"] if mixer in GATHERED else ["narrow"] if len(caches) > 1 else []
    return names + told + (["per_tile"] if phase == "context" and mixer != "block_sparse" else [])


def module_seconds(series: Series, hw: Hardware) -> Callable[[SparseFit | None], FloatArray]:
    """Seconds of every row of one model's timings, by the constants of its attention; None: the device's own.

    Raises
    ------
    SpecError : nobody describes the model
    """
    layer = timed_layer(series)
    if layer is None:
        raise SpecError("a module of a model that rlperf does not have")
    heads, batch, query, past = (series.shape[name] for name in ("num_heads", "batch", "q_len", "past_len"))
    gemm, cache = series.dtype.split("/")
    engine = load_engine_calibration(series.kernel).model_copy(update={"factors": ()})
    one, tokens = np.ones_like(heads), batch * query
    roles = Roles(gemm, gemm, gemm, gemm)
    replica = Replica(layer.arch, hw, engine, roles, cache, layer.arch.heads / heads, one, one, one, one)
    products = [product_operator(replica, matrix, roles.projection, 1.0, tokens) for matrix in fuse(layer.matrices())]
    rest = total([*products, *layer.token_operators(replica, 1.0, tokens, tokens)])
    generation = series.variant.endswith("generation")

    def seconds(fit: SparseFit | None) -> FloatArray:
        device = hw
        if fit is not None:
            device = replace(hw, calibration=hw.calibration.model_copy(update={"sparse": (fit,)}))
        here = replace(replica, hw=device)
        if generation:
            return rest + total(layer.decode_operators(here, 1.0, batch, batch * (past + query)))
        return rest + total(layer.prefill_operators(here, 1.0, batch, query, past + query))

    return seconds


def fit_modules(modules: Sequence[Series], hw: Hardware, *, check: bool) -> KernelFit:
    """Constants of one engine's modules of one mixer in one phase, all models and precisions together."""
    mixer, phase = mixer_of(modules[0])
    kernel = modules[0].kernel
    seconds = [module_seconds(one, hw) for one in modules]
    whole = modules[0]
    for one in modules[1:]:
        whole = joined_series(whole, one)
    whole = replace(whole, dtype="", variant=f"{mixer}/{phase}")
    models = np.repeat(np.arange(len(modules)), [len(one.measured_s) for one in modules]).astype(np.float64)

    names = _constants(modules, mixer, phase)

    def build(p: FloatArray) -> SparseFit:
        own = dict(zip(names, p, strict=True))
        return SparseFit.model_construct(kernel=kernel, mixer=mixer, phase=phase, **own)

    def all_seconds(fit: SparseFit, rows: BoolArray) -> FloatArray:
        return np.concatenate([each(fit) for each in seconds])[rows]

    def predict(p: FloatArray, rows: BoolArray) -> FloatArray:
        return all_seconds(build(p), rows)

    bounds = Bounds.of(*(RANGES[name] for name in names), pull=PULL)
    keys = {"batch": whole.shape["batch"], "model and precision": models}
    fitted = fit_with_left_out(predict, bounds, whole.measured_s, keys, left_out=check)
    values = rounded(names, fitted.parameters, IN_SECONDS)
    if phase != "context":
        values.pop("gather", None)
    constants = SparseFit.model_validate(
        {"kernel": kernel, "mixer": mixer, "phase": phase, **values, "quality": fitted.quality(whole.name)}
    )
    return KernelFit("sparse", constants, fitted, whole, all_seconds)
