"""What clients of a serving engine see under a load: closed and open loops, static batches, single streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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

    def behind(self, front_s: FloatArray | float) -> Served:
        """With what a request takes outside the engine's loop (HTTP, tokeniser), all before its first token [s]."""
        return replace(self, ttft_s=self.ttft_s + front_s)


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
    arriving: Array | None = None,
) -> Served:
    r"""A closed loop of ``concurrency`` clients, each of which sends its next request when its last one is done.

    .. math::

        t_{tpot} = t_{dec}(b, K) + \frac{\phi\,(c - 1)\,\Delta_g}{g\,n_o},\quad
        g = \min\left(\frac{\lambda}{1 - e^{-\lambda}}, \lfloor B / n_i \rfloor, c\right),\quad
        \lambda = \frac{c}{n_o},\quad
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
    arriving : λ, prompts that come during an engine_step [1]; by default as many as end in one

    Notes
    -----
    While one request generates its n_o tokens, each of the others is replaced about once, so c - 1 prefills stand in
    its way. An engine_step takes all waiting prompts that its budget holds (vLLM, SGLang and TensorRT-LLM alike), and
    clients that started together drift apart: an engine_step with prompts at all has g of them. Δ_g is what a group
    adds to the engine_step that it shares, or its own engine_step where prefill is not mixed with decode (SGLang
    without ``enable_mixed_chunk``). Mean context: isl + osl / 2.
    """
    c, n_in, n_out = as_float(concurrency), as_float(isl), as_float(osl)
    steps, context, chunks = np.maximum(n_out - 1.0, 1.0), n_in + n_out / 2.0, np.ceil(n_in / token_budget)
    running = slots = np.minimum(c, max_running)
    together = _together(slots / steps if arriving is None else as_float(arriving))
    group = np.clip(np.minimum(np.floor(token_budget / n_in), together), 1.0, np.maximum(slots, 1.0))
    tpot = ttft = alone = _prompt_s(cost, n_in, token_budget, 0.0, 0.0)
    others, least = np.maximum(slots - 1.0, 0.0), np.minimum(slots, 1.0)
    for _ in range(12):
        decode = cost.decode_s(running, running * context)
        chunk_base = running if chunked else np.zeros_like(running)
        whole = _prompt_s(cost, n_in, token_budget, chunk_base, chunk_base * context, group)
        added = whole - chunks * decode if chunked else whole
        tpot = decode + interference * others * np.maximum(added, 0.0) / (group * steps)
        ttft = np.where(c <= 1.0, alone, whole if chunked else whole + decode / 2.0)
        share = steps * tpot / (steps * tpot + ttft)
        before, running = running, np.maximum(0.5 * (running + slots * share), least)
        if np.array_equal(before, running):
            break  # at rest
    cycle, queued = ttft + steps * tpot, np.maximum(c - slots, 0.0)
    return Served(ttft + queued / np.maximum(slots, 1.0) * cycle, tpot, slots * n_out / cycle, running)


def first_token_of_run_s(
    cost: EngineStepCost,
    served: Served,
    concurrency: Array,
    isl: Array,
    osl: Array,
    *,
    each: Array,
    max_running: FloatArray | float = np.inf,
    token_budget: FloatArray | float = 8192.0,
    chunked: bool = True,
    interference: FloatArray | float = 1.0,
    look_ahead: bool = False,
) -> FloatArray:
    r"""Mean time to first token of a whole run of a `closed_loop`, which all clients begin at once [s].

    Long because each number of a load has an argument of its name.

    .. math::

        \bar t = \frac{t_w}{k} + \left(1 - \frac{1}{k}\right) t,\quad
        t_w = \frac{1}{J} \sum_{j=1}^{J} \sum_{i=1}^{j} s_i,\quad J = \lceil b_0 n_i / B \rceil

    Parameters
    ----------
    served : what `closed_loop` says of the same load
    each : k, requests that a client sends one after the other [1]; a benchmark of N requests has N / c
    concurrency ... look_ahead : as in `closed_loop` and `open_loop`

    Notes
    -----
    The first requests of all clients wait for one another: b_0 = min(c, b_max) prompts fill J engine_steps, of which
    the i-th takes s_i, linear in the prompts before it, which decode beside it (``chunked``) or wait. Beyond b_max
    they wait for places: the q-th for ceil(q / b_max) cycles. Every later request comes alone into a loop of c - 1
    others, at random (`_arrival_s`). Told from no measurement; against events: tests/test_serving_first_token.py.
    """
    c, n_in, n_out, k = as_float(concurrency), as_float(isl), as_float(osl), as_float(each)
    slots = np.minimum(c, max_running)
    cycle, queued = slots * n_out / served.output_tokens_per_s, np.maximum(c - slots, 0.0)
    others = np.maximum(slots - 1.0, 0.0)
    rate, running = interference * others / cycle, served.running * others / np.maximum(slots, 1.0)
    later = _arrival_s(cost, rate, running, n_in, n_out, token_budget, chunked, look_ahead)
    first = _start_s(cost, slots, n_in, token_budget, chunked) + queued / c * (queued / slots + 1.0) * cycle / 2.0
    return np.asarray(first / k + (1.0 - 1.0 / k) * (later + queued / slots * cycle))


def _start_s(
    cost: EngineStepCost, prompts: FloatArray, isl: FloatArray, budget: FloatArray | float, chunked: bool
) -> FloatArray:
    """Mean seconds to the first token of prompts that are all there at once: t_w of `first_token_of_run_s`."""
    if chunked:
        count = np.maximum(np.ceil(prompts * isl / budget), 1.0)
        share = prompts / count
        tokens, pairs, before = share * isl, share * isl * (isl + 1.0) / 2.0, prompts - share
        least = cost.engine_step_s(0.0, 0.0, tokens, pairs, share)
        most = cost.engine_step_s(before, before * isl, tokens, pairs, share)
    else:
        count = np.ceil(prompts / np.maximum(np.floor(budget / isl), 1.0))
        least = most = _prompt_s(cost, isl, budget, 0.0, 0.0, prompts / count)
    return np.asarray((count + 1.0) * (least / 2.0 + (most - least) / 6.0))


def _together(arriving: FloatArray) -> FloatArray:
    """Prompts of an engine_step that has any, where they come at random [1]."""
    came = np.maximum(arriving, 1e-9)
    return np.asarray(came / -np.expm1(-came))


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
    chunked: bool = True,
    look_ahead: bool = False,
    sent: FloatArray | float = 8192.0,
) -> Served:
    """Requests arrive at a rate, at random; by Little's law as many are in flight as rate x time in the system.

    Solved as the closed loop whose clients produce that rate. Of ``sent`` requests at most half are in flight on
    average (the run ramps up and drains); that bounds the loop at rates beyond capacity. Prompts that arrive while an
    engine_step runs are prefilled together; what the first token waits for stands in `_first_token_s`.

    Parameters
    ----------
    rate_per_s : λ, of one replica [1/s]
    chunked, token_budget, max_running : as in `closed_loop`
    look_ahead : an engine_step is scheduled while the one before it runs, so that arrivals miss the next one too
    """
    rate, n_in, n_out = as_float(rate_per_s), as_float(isl), as_float(osl)
    most = np.minimum(max_running, as_float(sent) / 2.0)
    loop = partial(
        closed_loop, cost, isl=isl, osl=osl,
        max_running=max_running, token_budget=token_budget, chunked=chunked,
    )  # fmt: skip
    served, clients = _in_flight(loop, rate, n_in, n_out, most)
    running = np.minimum(served.running, clients)
    first = _arrival_s(cost, rate, running, n_in, n_out, token_budget, chunked, look_ahead)
    return replace(served, ttft_s=first)


def _arrival_s(
    cost: EngineStepCost,
    rate: FloatArray,
    running: FloatArray,
    isl: FloatArray,
    osl: FloatArray,
    budget: FloatArray | float,
    chunked: bool,
    look_ahead: bool,
) -> FloatArray:
    """Seconds to the first token of a random arrival at an engine that decodes ``running``, others come at ``rate``."""
    kv_tokens = running * (isl + osl / 2.0)
    decode, alone = cost.decode_s(running, kv_tokens), _prompt_s(cost, isl, budget, 0.0, 0.0)
    beside, cached = (running, kv_tokens) if chunked else (np.zeros_like(running), np.zeros_like(running))
    one, two = (_prompt_s(cost, isl, budget, beside, cached, prompts) for prompts in (1.0, 2.0))
    added = np.maximum(one - np.ceil(isl / budget) * decode, 0.0) if chunked else one
    return _first_token_s(rate, running, decode, added, np.maximum(two - one, 0.0), alone, chunked, look_ahead)


TURNS = 16
"""Secants followed: 60 measured loads, two of them beyond capacity, then stand within 3e-6 of where they rest."""
STEEPEST = 0.97
"""Largest slope that a secant is believed to have; beyond capacity it is 1, and the bound ends the climb."""


def _in_flight(
    loop: Callable[..., Served], rate: FloatArray, n_in: FloatArray, n_out: FloatArray, most: FloatArray
) -> tuple[Served, FloatArray]:
    """The closed ``loop`` whose clients c produce a rate, and c: the rest of c = F(c), F the rate x time of a request.

    Followed by secants: where a load nearly fills the engine F has a slope near 1, and plain turns hardly move.
    """
    clients = np.ones(np.broadcast_shapes(rate.shape, n_out.shape, n_in.shape))
    before = wanted_before = np.zeros_like(clients)
    served = loop(clients, arriving=1.0)
    for _ in range(TURNS):
        served = loop(clients, arriving=rate * served.tpot_s)
        wanted = rate * (served.ttft_s + np.maximum(n_out - 1.0, 0.0) * served.tpot_s)
        wanted = np.where(np.isfinite(wanted), wanted, 2.0 * most)
        apart = np.where(clients == before, np.inf, clients - before)
        slope = np.clip((wanted - wanted_before) / apart, 0.0, STEEPEST)
        before, wanted_before = clients, wanted
        clients = np.clip(clients + (wanted - clients) / (1.0 - slope), 1e-3, most)
    return served, clients


FULL = 0.9
"""Share of the time in prefills beyond which no steady state is spoken of: the queue of a short run is bounded."""


def _first_token_s(
    rate: FloatArray,
    running: FloatArray,
    decode: FloatArray,
    added: FloatArray,
    more: FloatArray,
    alone: FloatArray,
    chunked: bool,
    look_ahead: bool,
) -> FloatArray:
    r"""Seconds from a random arrival to its first token: the engine_step that runs, then one with its prompt.

    .. math::

        t = \frac{E[s^2]}{2 E[s]} + a\,E[s] + d + \Delta_1 + \lambda \Delta_2 \frac{E[s^2]}{E[s]},\quad
        E[s] = \frac{d}{1 - \rho},\quad E[s^2] = E[s]^2 + \frac{\lambda \Delta^2}{1 - \rho^2} E[s],\quad
        \rho = \lambda \Delta

    Parameters
    ----------
    rate, running : λ, arrivals [1/s]; b, requests that decode on average [1]
    decode : d, an engine_step without prompts [s]
    added, more : Δ_1, what a prompt adds to it (its own engine_step if not ``chunked``), and Δ_2, what each further one
        does; Δ is their mean over those of an engine_step [s]
    alone : an engine_step with one prompt and nothing else [s]
    look_ahead : a

    Notes
    -----
    Each engine_step holds the prompts that came during the one before, s' = d + Δ N(λ s) with N Poisson: its moments
    are those of the recursion, exactly. A random arrival falls into an engine_step with the chance of its length; it
    waits for the rest of it, and those who came beside it share its own. Prefill first, s' = d without arrivals
    (probability e^{-λ s}) and Δ N otherwise. Without decodes, e^{-b} of the time, only other prompts are in the way
    (Pollaczek-Khinchine).
    """
    mean = decode
    for _ in range(8):
        came = np.maximum(rate * mean, 1e-12)
        quiet = np.exp(-came)
        each = more + (added - more) * (1.0 - quiet) / came
        load = np.minimum(rate * each, FULL)
        mean = decode * (1.0 if chunked else quiet) / (1.0 - load)
    if chunked:
        square = mean**2 + rate * each**2 / (1.0 - load**2) * mean
    else:
        square = (decode**2 * quiet + rate * each**2 * mean) / (1.0 - load**2)
    own = decode + added if chunked else added
    busy = (0.5 + rate * more) * square / mean + look_ahead * mean + own
    lone = np.minimum(rate * alone, FULL)
    idle = alone * (1.0 + lone / (2.0 * (1.0 - lone)))
    empty = np.exp(-running)
    return np.asarray((1.0 - empty) * busy + empty * idle)


def queue_of(
    cost: EngineStepCost,
    sent: Array,
    isl: Array,
    osl: Array,
    *,
    max_running: FloatArray | float = np.inf,
    token_budget: FloatArray | float = 8192.0,
    chunked: bool = True,
) -> Served:
    r"""N equal requests that are all there from the start: throughput of the whole run, its emptying batch included.

    .. math::

        T = n_o (W d(b) + d(r)) + N \delta + J (2 d(b / 2) - d(b)),\quad
        b = \min(N, b_{max}),\quad N = W b + r,\quad J = \lceil b n_i / B \rceil

    Parameters
    ----------
    sent : N, requests of the run [1], finite
    isl ... chunked : as in `closed_loop`

    Notes
    -----
    W full waves of b requests decode, and one of the r that are left, whose engine_steps d(r) hardly take less than
    d(b) while weights are what they read. Every prompt adds δ, shared by as many as the budget holds: equal requests
    stay together. The first wave fills J engine_steps one after the other and the last one ends so, half full in the
    mean. A request decodes beside half of its own wave's prompts and half of the next one's.
    """
    n, n_in, n_out = as_float(sent), as_float(isl), as_float(osl)
    b = np.minimum(n, max_running)
    waves = np.floor(n / b)
    rest = n - waves * b
    full, last, half = (cost.decode_s(some, some * (n_in + n_out / 2.0)) for some in (b, rest, b / 2.0))
    group = np.clip(np.floor(token_budget / n_in), 1.0, b)
    beside = b if chunked else np.zeros_like(b)
    whole = _prompt_s(cost, n_in, token_budget, beside, beside * (n_in + n_out / 2.0), group)
    prompt = np.maximum(whole - np.ceil(n_in / token_budget) * full, 0.0) / group if chunked else whole / group
    fill = np.ceil(b * n_in / token_budget) * np.maximum(2.0 * half - full, 0.0)
    seconds = n_out * (waves * full + (rest > 0.0) * last) + n * prompt + fill
    tpot = (waves * b * full + rest * last) / n + (1.0 - 0.5 * b / n) * (b - 1.0) * prompt / np.maximum(
        n_out - 1.0, 1.0
    )
    before = waves * (b * (waves - 1.0) / 2.0 + rest) / n  # waves that a request waits for
    first = _start_s(cost, b, n_in, token_budget, chunked) + before * (n_out * full + b * prompt)
    return Served(first, tpot, n * n_out / seconds, n * n_out * tpot / seconds)


def offline(
    cost: EngineStepCost, isl: Array, osl: Array, *, max_running: Array, token_budget: float = 8192.0
) -> Served:
    """Maximum load: the engine always runs as many requests as fit."""
    return closed_loop(cost, max_running, isl, osl, token_budget=token_budget)


def single_stream(cost: EngineStepCost, isl: Array, osl: Array, *, token_budget: float = 8192.0) -> Served:
    """One request at a time."""
    return closed_loop(cost, 1.0, isl, osl, token_budget=token_budget)
