"""What clients of a serving engine see under a load: closed and open loops, static batches, single streams."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.roofline import Array, as_float
from rlperf.layout import FloatArray


@dataclass(frozen=True)
class Served:
    """What clients of an engine see; arrays broadcast.

    ``running`` is the mean number of requests that decode, ``output_tokens_per_s`` is of the whole replica.
    """

    ttft_s: FloatArray
    tpot_s: FloatArray
    output_tokens_per_s: FloatArray
    running: FloatArray


def closed_loop(
    cost: EngineStepCost,
    concurrency: Array,
    isl: Array,
    osl: Array,
    *,
    max_running: FloatArray | float = np.inf,
    token_budget: FloatArray | float = 8192.0,
    chunked: bool = True,
    interference: FloatArray | float = 1.0,
    arriving: Array = np.inf,
) -> Served:
    r"""A closed loop of ``concurrency`` clients, each of which sends its next request when its last one is done.

    .. math::

        t_{tpot} = t_{dec}(b, K) + \frac{\phi\,(c - 1)\,\Delta_g}{g\,n_o},\quad
        g = \min\left(c, \lfloor B / n_i \rfloor\right),\quad
        b = \min\left(c \frac{n_o t_{tpot}}{n_o t_{tpot} + t_{ttft}},\ b_{max}\right)

    Parameters
    ----------
    cost : of one engine_step (linear in context)
    concurrency : c, requests in flight [1]; those beyond ``max_running`` queue
    isl, osl : prompt and generated tokens of every request [tokens]; n_o = osl - 1
    max_running : b_max, from the cache capacity and the engine's own limit [1]
    token_budget : B, tokens of one engine_step; longer prompts take several chunks
    chunked : prefills share engine_steps with decodes; otherwise decodes wait while prompts run
    interference : φ, share of the prefills that stands in a decode's way [1]; 0 where they run elsewhere
    arriving : prompts that wait when an engine_step starts [1], at most; by default as many as its budget takes

    Notes
    -----
    While one request generates its n_o tokens, each of the others is replaced about once, so c - 1 prefills stand in
    its way. An engine_step takes all waiting prompts that its budget holds (vLLM, SGLang and TensorRT-LLM alike), and
    clients that start together with equal lengths end together, so prompts come in groups of g. Δ_g is what a group
    adds to the engine_step that it shares, or its own engine_step where prefill is not mixed with decode (SGLang
    without ``enable_mixed_chunk``). Mean context: isl + osl / 2.
    """
    c, n_in, n_out = as_float(concurrency), as_float(isl), as_float(osl)
    steps, context = np.maximum(n_out - 1.0, 1.0), n_in + n_out / 2.0
    running = slots = np.minimum(c, max_running)
    chunks = np.ceil(n_in / token_budget)
    group = np.clip(np.minimum(np.floor(token_budget / n_in), as_float(arriving)), 1.0, np.maximum(slots, 1.0))
    alone = _prompt_s(cost, n_in, token_budget, 0.0, 0.0)
    tpot, ttft = cost.decode_s(slots, slots * context), alone
    for _ in range(12):
        decode = cost.decode_s(running, running * context)
        chunk_base = running if chunked else np.zeros_like(running)
        added = _prompt_s(cost, n_in, token_budget, chunk_base, chunk_base * context, group)
        if chunked:
            added = added - chunks * decode
        others = np.maximum(slots - 1.0, 0.0)
        tpot = decode + interference * others * np.maximum(added, 0.0) / (group * steps)
        ttft = np.where(c <= 1.0, alone, added + (chunks * decode if chunked else decode / 2.0))
        share = steps * tpot / (steps * tpot + ttft)
        running = np.maximum(0.5 * (running + slots * share), np.minimum(slots, 1.0))
    waiting = np.maximum(c - slots, 0.0) / np.maximum(slots, 1.0) * (ttft + steps * tpot)
    cycle = ttft + steps * tpot
    return Served(ttft + waiting, tpot, slots * n_out / cycle, running)


def _prompt_s(
    cost: EngineStepCost,
    isl: FloatArray,
    budget: FloatArray | float,
    running: FloatArray | float,
    kv_tokens: FloatArray | float,
    prompts: FloatArray | float = 1.0,
) -> FloatArray:
    """Seconds of the engine_steps that prefill ``prompts`` prompts together beside ``running`` decodes."""
    chunks = np.maximum(np.ceil(isl / budget), 1.0)
    share = prompts / chunks
    return chunks * cost.engine_step_s(running, kv_tokens, share * isl, share * isl * (isl + 1.0) / 2.0, share)


def static_batch(
    cost: EngineStepCost, batch: Array, isl: Array, osl: Array, *, token_budget: FloatArray | float = 8192.0
) -> Served:
    """All requests start together: prompts first, then decode in step until all are done (equal lengths)."""
    b, n_in, n_out = as_float(batch), as_float(isl), as_float(osl)
    steps = np.maximum(n_out - 1.0, 0.0)
    tokens = b * n_in
    chunks = np.maximum(np.ceil(tokens / token_budget), 1.0)
    pairs = b * n_in * (n_in + 1.0) / 2.0
    ttft = chunks * cost.engine_step_s(0.0, 0.0, tokens / chunks, pairs / chunks, b / chunks)
    # linear between contexts: the mean engine_step is the one at the mean context
    tpot = cost.decode_s(b, b * (n_in + n_out / 2.0))
    return Served(ttft, tpot, b * n_out / (ttft + steps * tpot), b)


def open_loop(
    cost: EngineStepCost,
    rate_per_s: Array,
    isl: Array,
    osl: Array,
    *,
    max_running: FloatArray | float = np.inf,
    token_budget: FloatArray | float = 8192.0,
    sent: FloatArray | float = 8192.0,
) -> Served:
    """Requests arrive at a rate; by Little's law as many are in flight as rate x time in the system.

    Solved as the closed loop whose clients produce that rate. Of ``sent`` requests at most half are in flight on
    average (the run ramps up and drains); that bounds the loop at rates beyond capacity. Prompts that arrive while an
    engine_step runs are prefilled together.
    """
    rate, n_out = as_float(rate_per_s), as_float(osl)
    clients = np.ones(np.broadcast_shapes(rate.shape, n_out.shape, as_float(isl).shape))
    most = np.minimum(max_running, as_float(sent) / 2.0)
    loop = partial(closed_loop, cost, isl=isl, osl=osl, max_running=max_running, token_budget=token_budget)
    served = loop(clients, arriving=1.0)
    for _ in range(40):
        served = loop(clients, arriving=rate * served.tpot_s)
        time_s = served.ttft_s + np.maximum(n_out - 1.0, 0.0) * served.tpot_s
        clients = np.clip(0.5 * (clients + rate * time_s), 1e-3, most)
    return served


def offline(
    cost: EngineStepCost, isl: Array, osl: Array, *, max_running: Array, token_budget: float = 8192.0
) -> Served:
    """Maximum load: the engine always runs as many requests as fit."""
    return closed_loop(cost, max_running, isl, osl, token_budget=token_budget)


def single_stream(cost: EngineStepCost, isl: Array, osl: Array, *, token_budget: float = 8192.0) -> Served:
    """One request at a time."""
    return closed_loop(cost, 1.0, isl, osl, token_budget=token_budget)
