"""Published speculation read into what can be predicted: who drafts, how much, on which replica, of what load."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rlperf.calibrate.assumed_lengths import AssumedLengths
from rlperf.calibrate.rl_step_rows import USUAL_DRAFTS
from rlperf.calibrate.speculation import method_of
from rlperf.calibrate.tables import Row
from rlperf.cost.parameters import parameters
from rlperf.cost.replica import Replica
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.architecture import Architecture
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.hardware import Hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.speculation import DraftSetting, Method

PRESUMED_DEVICE, PRESUMED_CONTEXT, PRESUMED_REQUESTS, PRESUMED_CAP = "h200_sxm", 1500.0, 64, 8192
"""Device, cached tokens of a served request, requests of a rollout per replica and their cap, where none is stated."""
MEAN_OF_CAP = 0.4
"""Mean response over its cap in rollouts of reasoning models; 9.7k tokens under 24k, as slime's two rates say."""
ROOM = 1.25
"""Memory of a replica over its weights, at least."""
OF_A_ROLLOUT = "rl"


@dataclass(frozen=True)
class Drafting:
    """Who drafts: ``depth`` tokens in a row, ``width`` verified together with the one before; a tree is wider."""

    method: Method
    depth: int
    width: int
    assumed: tuple[str, ...] = ()

    @property
    def setting(self) -> DraftSetting:
        """As a pool states what is verified."""
        return DraftSetting(self.method, self.width, self.width)


def drafting_of(row: Row) -> Drafting:
    """Who drafts how much by a row.

    ``k`` is a number, ``n draft tokens`` (SGLang counts the token that is verified with them), ``steps n, topk t, m
    draft tokens``, or blank.

    Raises
    ------
    SpecError : a method that rlperf does not know, a k that is no number
    """
    method, text = method_of(row.text("method")), row.text("k")
    if method is None:
        raise SpecError(f"speculation: nobody drafts by {row.text('method')!r}")
    steps, tokens = (re.search(pattern, text) for pattern in (r"steps (\d+)", r"(\d+) draft tokens"))
    if steps and tokens:
        depth, width = int(steps.group(1)), int(tokens.group(1)) - 1
        tree = (f"a tree of {width} as {depth} in a row",) if width > depth else ()
        return Drafting(method, depth, max(width, depth), tree)
    if tokens:
        return Drafting(method, int(tokens.group(1)) - 1, int(tokens.group(1)) - 1)
    if not text:
        return Drafting(method, USUAL_DRAFTS, USUAL_DRAFTS, (f"{USUAL_DRAFTS} drafts, as the scripts have",))
    k = row.count("k")
    return Drafting(method, k, k)


@dataclass(frozen=True)
class DraftedOn:
    """A replica that a row was measured on."""

    arch: Architecture
    hw: Hardware
    engine: EngineCalibration
    layout: Layout
    gemm_dtype: str
    assumed: tuple[str, ...]

    @property
    def replica(self) -> Replica:
        """The replica as cost functions take it."""
        return Replica.of(self.arch, self.hw, self.engine, self.layout, self.gemm_dtype)


def architecture_of(row: Row) -> Architecture:
    """The model of a row: shipped ones are read whole, files beside tables hold fewer fields."""
    try:
        return load_architecture(row.text("model"))
    except SpecError:
        return row.architecture("model")


def served_of(row: Row) -> DraftedOn:
    """Model, device, engine and layout of a row, what it does not print assumed."""
    software, assumed = row.text("engine"), []
    engine = next((name for name in ("sglang", "vllm") if software.lower().startswith(name)), None)
    if engine is None:
        raise SpecError(f"no engine is known by {software!r}")
    arch = architecture_of(row)
    if not row.text("gpu"):
        assumed.append(f"on {PRESUMED_DEVICE}")
    hw = row.hardware() if row.text("gpu") else Row("", "", 0, {"gpu": PRESUMED_DEVICE}).hardware()
    dtype = "fp8" if arch.checkpoint_dtype == "fp8" else "bf16"
    printed = re.search(r"TP(\d+)", software)
    if printed:
        tensor = int(printed.group(1))
    else:
        bytes_ = parameters(arch) * (1.0 if dtype == "fp8" else 2.0) * ROOM
        tensor = row.count("n_gpus", default=2 ** int(np.ceil(np.log2(max(bytes_ / hw.device.memory, 1.0)))))
        assumed.append(f"tensor parallel {tensor}")
    experts = tensor if re.search(r"\bEP\b", software) else 1
    layout = Layout.of(tensor_parallel=tensor, expert_parallel=experts)
    return DraftedOn(arch, hw, load_engine_calibration(engine), layout, dtype, tuple(assumed))


def running_of(row: Row) -> tuple[float, tuple[str, ...]]:
    """Requests that run, as a row prints them, and what of it is assumed; a low concurrency is one request.

    >>> running_of(Row("", "", 0, {"concurrency": "32"})), running_of(Row("", "", 0, {"concurrency": "low"}))[0]
    ((32.0, ()), 1.0)
    """
    text = row.text("concurrency")
    found = re.match(r"\d+", text)
    running = float(found.group()) if found else 1.0
    rate = f"{running:g} running, of {text!r}"
    return running, () if found and found.end() == len(text) else (rate,)


def rollout_of(row: Row) -> tuple[Trajectories, tuple[str, ...]]:
    """Responses of one replica's rollout: as many as are presumed, up to the cap that a row states."""
    found = re.search(r"max response (\d+)k", row.text("sampling"))
    cap = 1024 * int(found.group(1)) if found else PRESUMED_CAP
    law = AssumedLengths()
    lengths = law.draw(PRESUMED_REQUESTS // 8, 8, MEAN_OF_CAP * cap, cap).ravel().astype(np.int64)
    said = f"{PRESUMED_REQUESTS} responses of {MEAN_OF_CAP:g} of {cap} tokens per replica, {law}"
    return Trajectories.of(np.full(len(lengths), 150), lengths), (said,)
