"""Published speculation read into what can be predicted: who drafts, how much, on which replica, of what load."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rlperf.calibrate.rl_step.assumed_lengths import AssumedLengths
from rlperf.calibrate.speculation.acceptance import method_of
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
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration
from rlperf.specs.speculation import DraftSetting, Method

PRESUMED_DEVICE, PRESUMED_CONTEXT, PRESUMED_PROMPT = "h200_sxm", 1500.0, 150
"""Device, cached tokens of a served request, prompt of a rollout [tokens], where none is stated."""
UNPRINTED_DRAFTS = (1, 2, 3)
"""Drafts of the gains that do print them (rows of serving, 2026-08): any of them, where a row prints none."""
UNPRINTED_REQUESTS, UNPRINTED_RESPONSES = (64, 128, 256), (392.0, 744.0, 1128.0, 3206.0, 5709.0)
"""Requests of a replica and their mean response [tokens]: 10th, 30th ... 90th percentile (64 and 256 twice) over the 71
published rl_steps of ``measured/rl_step.csv`` (2026-08)."""
MEAN_OF_CAP = 0.48
"""Mean response over its cap: the median of the same rows [1]."""
OF_LONGEST = 25.9
"""Tokens of a device's responses over those of the longest: slime's rollout tokens per second over those of its longest
sample (1219 / 47; 25.6 and 25.7 with drafts), which is all that its page tells of batch and lengths [1]."""
UNPRINTED_OUTPUTS = (128.0, 1000.0, 1024.0)
"""Tokens that a request asks for where a row states requests a second: 10th, 30th, 50th percentile over the rows of
``measured/inference.csv`` (2026-08), the longer ones being of full batches."""
LOW_CONCURRENCY = (1.0, 2.0, 4.0, 8.0)
"""Requests that run where a row says no more than that they are few."""
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


def draftings_of(row: Row) -> tuple[Drafting, ...]:
    """Who drafts how much by a row: one, or as many as may be where it prints no number.

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
        return (Drafting(method, depth, max(width, depth), tree),)
    if tokens:
        return (Drafting(method, int(tokens.group(1)) - 1, int(tokens.group(1)) - 1),)
    if not text:
        said = (f"any of {', '.join(map(str, UNPRINTED_DRAFTS))} drafts",)
        return tuple(Drafting(method, k, k, said) for k in UNPRINTED_DRAFTS)
    k = row.count("k")
    return (Drafting(method, k, k),)


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


@dataclass(frozen=True)
class Requests:
    """What is known of the requests that a row served: how many ran, or how many were sent a second."""

    running: tuple[float, ...] = ()
    per_second: float = 0.0
    assumed: tuple[str, ...] = ()


def requests_of(row: Row) -> Requests:
    """Requests that run, as a row prints them; several where it says no more than that they are few.

    >>> requests_of(Row("", "", 0, {"concurrency": "32"})), requests_of(Row("", "", 0, {"concurrency": "low"})).running
    (Requests(running=(32.0,), per_second=0.0, assumed=()), (1.0, 2.0, 4.0, 8.0))
    >>> requests_of(Row("", "", 0, {"concurrency": "2 requests/s"})).per_second
    2.0
    """
    text = row.text("concurrency")
    found = re.match(r"[\d.]+", text)
    if not found:
        few = f"{LOW_CONCURRENCY[0]:g} to {LOW_CONCURRENCY[-1]:g} running, of {text!r}"
        return Requests(LOW_CONCURRENCY, assumed=(few,))
    number = float(found.group())
    if text.endswith("/s"):
        asked = f"requests of {UNPRINTED_OUTPUTS[0]:g} to {UNPRINTED_OUTPUTS[-1]:g} tokens"
        return Requests(per_second=number, assumed=(asked,))
    rate = f"{number:g} running, of {text!r}"
    return Requests((number,), assumed=() if found.end() == len(text) else (rate,))


def rollouts_of(row: Row) -> tuple[tuple[Trajectories, ...], tuple[str, ...]]:
    """Responses of one replica's rollout, as many as may be; under the cap that a row states, where it states one."""
    found = re.search(r"max response (\d+)k", row.text("sampling"))
    law, requests = AssumedLengths(), np.repeat(UNPRINTED_REQUESTS, (2, 1, 2)).tolist()
    if found:
        cap = 1024.0 * int(found.group(1))
        loads = [(n, min(OF_LONGEST / n, 0.9) * cap, cap) for n in requests]
    else:
        loads = [(n, mean, mean / MEAN_OF_CAP) for n in requests for mean in UNPRINTED_RESPONSES]
    works = []
    for n, mean, cap in loads:
        lengths = law.draw(n // 8, 8, mean, cap).ravel().astype(np.int64)
        works.append(Trajectories.of(np.full(len(lengths), PRESUMED_PROMPT), lengths))
    means = [mean for _, mean, _ in loads]
    said = (
        f"{requests[0]} to {requests[-1]} responses of {min(means):.0f} to {max(means):.0f} tokens per replica, {law}"
    )
    return tuple(works), (said,)


def framework_of(row: Row) -> FrameworkCalibration | None:
    """The framework that a row's source names; None where it names none."""
    words = re.split(r"[^a-z]+", row.text("source").lower())
    named = next((name for name in ("verl", "slime", "areal", "openrlhf") if name in words), None)
    return load_framework_calibration(named) if named else None


def slots_of(engine: EngineCalibration, framework: FrameworkCalibration | None) -> tuple[int, ...]:
    """Requests that run at once with drafts: as without, or what the engine sets itself where nobody states it.

    Whether a run stated it no row prints; a framework that always does leaves no choice.
    """
    if framework is not None and framework.states_running:
        return (engine.max_running,)
    return tuple(dict.fromkeys((engine.max_running, engine.drafting().max_running)))
