"""What clients of a serving engine see under a load: closed and open loops, static batches, single streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.roofline import Array, as_float
from rlperf.layout import FloatArray


@dataclass(frozen=True)
class Load:
    """Requests that are alike, and how the engine lets them in; numbers are scalars or arrays that broadcast.

    Attributes
    ----------
    isl, osl : n_i, n_o + 1, prompt and generated tokens of every request [tokens]
    max_running : b_max, from the cache capacity and the engine's own limit [1]; requests beyond it queue
    token_budget : B, tokens of one engine_step; longer prompts take several chunks
    chunked : prefills share engine_steps with decodes; otherwise decodes wait while prompts run
    look_ahead : an engine_step is scheduled while the one before it runs, so that arrivals miss the next one too
    interference : φ, share of the prefills that stands in a decode's way [1]; 0 where they run elsewhere
    """

    isl: FloatArray | float
    osl: FloatArray | float
    max_running: FloatArray | float = np.inf
    token_budget: FloatArray | float = 8192.0
    chunked: bool = True
    look_ahead: bool = False
    interference: FloatArray | float = 1.0

    @cached_property
    def steps(self) -> FloatArray:
        """Engine_steps of a request after its first token [1]."""
        return np.maximum(as_float(self.osl) - 1.0, 0.0)

    @cached_property
    def context(self) -> FloatArray:
        """Mean tokens in the cache of a request that decodes: isl + osl / 2."""
        return as_float(self.isl + self.osl / 2.0)

    @cached_property
    def chunks(self) -> FloatArray:
        """Engine_steps that one prompt takes [1]."""
        return np.maximum(np.ceil(as_float(self.isl) / self.token_budget), 1.0)

    @cached_property
    def pairs(self) -> FloatArray:
        """Pairs of tokens that meet in the attention of a prompt [1]."""
        return as_float(self.isl * (self.isl + 1.0) / 2.0)

    def prompts_s(self, cost: EngineStepCost, running: FloatArray | float = 0.0, prompts: Array = 1.0) -> FloatArray:
        """Seconds of the engine_steps that prefill ``prompts`` together; ``running`` decode beside them if chunked."""
        beside = running if self.chunked else np.zeros_like(running)
        share = as_float(prompts) / self.chunks
        cached = beside * self.context
        return self.chunks * cost.engine_step_s(beside, cached, share * self.isl, share * self.pairs, share)

    @cached_property
    def room(self) -> FloatArray:
        """Prompts that an engine_step holds [1], each with its decodes; any number where they go first."""
        held = self.token_budget / (as_float(self.isl) + self.steps)
        return np.where(self.chunked | (self.steps < 1.0), held, np.inf)

    def added_s(self, whole: FloatArray, decode: FloatArray) -> FloatArray:
        """Seconds that decodes wait for prompts: Δ, added to ``decode``, or ``whole`` steps of their own."""
        return np.maximum(whole - self.chunks * decode, 0.0) if self.chunked else whole


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


def closed_loop(cost: EngineStepCost, concurrency: Array, load: Load, *, arriving: Array | None = None) -> Served:
    r"""A closed loop of ``concurrency`` clients, each of which sends its next request when its last one is done.

    .. math::

        t_{tpot} = t_{dec}(b, K) + \min\left(\frac{\phi\,(c - 1)}{n_o}, r\right) \frac{\Delta_g}{g},\quad
        r = \frac{B}{n_i + n_o},\quad
        g = \min\left(\frac{\lambda}{1 - e^{-\lambda}}, \lfloor B / n_i \rfloor, c\right),\quad
        \lambda = \frac{c}{n_o},\quad
        b = \min\left(c \frac{n_o t_{tpot}}{n_o t_{tpot} + t_{ttft}},\ b_{max}\right)

    Parameters
    ----------
    cost : of one engine_step (linear in context)
    concurrency : c, requests in flight [1]
    arriving : λ, prompts that come during an engine_step, of an open loop [1]; by default as many as end in one

    Notes
    -----
    While one request generates its n_o tokens, each of the others is replaced about once, so c - 1 prefills stand in
    its way; in an open loop all that come meanwhile, n_o λ, whoever is there. An engine_step takes all waiting prompts
    that its budget holds (vLLM, SGLang and TensorRT-LLM alike), and clients of a closed loop that started together
    drift apart: an engine_step with prompts at all has g of them. Δ_g is what a group adds to the engine_step that it
    shares, or its own engine_step where prefill is not mixed with decode (SGLang without ``enable_mixed_chunk``).
    Where more prompts come than r, all that an engine_step holds, they wait before their first token: t_ttft then has
    max(φ (c - g) / r - n_o, 0) more engine_steps.
    """
    c, steps, later = as_float(concurrency), load.steps, np.maximum(load.steps, 1.0)
    running = slots = np.minimum(c, load.max_running)
    together = _together(slots / later if arriving is None else as_float(arriving))
    fit = np.floor(load.token_budget / as_float(load.isl))
    group = np.clip(np.minimum(fit, together), 1.0, np.maximum(slots, 1.0))
    tpot = ttft = alone = load.prompts_s(cost)
    come = np.maximum(slots - 1.0, 0.0) / later if arriving is None else np.minimum(as_float(arriving), slots / later)
    ahead = load.interference * np.maximum(slots - group, 0.0)
    least = np.minimum(slots, np.minimum(steps, 1.0))
    for _ in range(12):
        decode = cost.decode_s(running, running * load.context)
        whole, beside = load.prompts_s(cost, running, group), decode * np.minimum(steps, 1.0)
        delay = np.minimum(load.interference * come, load.room) * load.added_s(whole, beside) / group
        tpot = decode + delay
        ttft = np.where(c <= 1.0, alone, whole if load.chunked else whole + beside / 2.0)
        ttft = ttft + np.maximum(ahead / load.room - steps, 0.0) * (beside + delay)
        share = steps * tpot / (steps * tpot + ttft)
        before, running = running, np.maximum(0.5 * (running + slots * share), least)
        if np.array_equal(before, running):
            break  # at rest
    cycle, queued = ttft + steps * tpot, np.maximum(c - slots, 0.0)
    return Served(ttft + queued / np.maximum(slots, 1.0) * cycle, tpot, slots * load.osl / cycle, running)


def first_token_of_run_s(
    cost: EngineStepCost, served: Served, concurrency: Array, load: Load, *, each: Array
) -> FloatArray:
    r"""Mean time to first token of a whole run of a `closed_loop`, which all clients begin at once [s].

    .. math::

        \bar t = \frac{t_w}{k} + \left(1 - \frac{1}{k}\right) t,\quad
        t_w = \frac{1}{J} \sum_{j=1}^{J} \sum_{i=1}^{j} s_i,\quad J = \lceil b_0 n_i / B \rceil

    Parameters
    ----------
    served : what `closed_loop` says of the same load
    each : k, requests that a client sends one after the other [1]; a benchmark of N requests has N / c
    concurrency : c, as in `closed_loop`

    Notes
    -----
    The first requests of all clients wait for one another: b_0 = min(c, b_max) prompts fill J engine_steps, of which
    the i-th takes s_i, linear in the prompts before it, which decode beside it (``chunked``) or wait. Beyond b_max
    they wait for places: the q-th for ceil(q / b_max) cycles. Every later request comes alone into a loop of c - 1
    others, at random (`_arrival_s`). Told from no measurement; against events: tests/test_serving_first_token.py.
    """
    c, k = as_float(concurrency), as_float(each)
    slots = np.minimum(c, load.max_running)
    cycle, queued = slots * load.osl / served.output_tokens_per_s, np.maximum(c - slots, 0.0)
    others = np.maximum(slots - 1.0, 0.0)
    rate, running = load.interference * others / cycle, served.running * others / np.maximum(slots, 1.0)
    later = np.maximum(_arrival_s(cost, rate, running, load), cycle - load.steps * served.tpot_s)
    first = _start_s(cost, slots, load) + queued / c * (queued / slots + 1.0) * cycle / 2.0
    return np.asarray(first / k + (1.0 - 1.0 / k) * (later + queued / slots * cycle))


def _start_s(cost: EngineStepCost, prompts: FloatArray, load: Load) -> FloatArray:
    """Mean seconds to the first token of prompts that are all there at once: t_w of `first_token_of_run_s`."""
    if load.chunked:
        count = np.maximum(np.ceil(prompts * load.isl / load.token_budget), 1.0)
        share = prompts / count
        tokens, pairs, before = share * load.isl, share * load.pairs, prompts - share
        least = cost.engine_step_s(0.0, 0.0, tokens, pairs, share)
        most = cost.engine_step_s(before, before * load.isl, tokens, pairs, share)
    else:
        count = np.ceil(prompts / np.maximum(np.floor(load.token_budget / as_float(load.isl)), 1.0))
        least = most = load.prompts_s(cost, prompts=prompts / count)
    return np.asarray((count + 1.0) * (least / 2.0 + (most - least) / 6.0))


def _together(arriving: FloatArray) -> FloatArray:
    """Prompts of an engine_step that has any, where they come at random [1]."""
    came = np.maximum(arriving, 1e-9)
    return np.asarray(came / -np.expm1(-came))


def static_batch(cost: EngineStepCost, batch: Array, load: Load) -> Served:
    """All requests start together: prompts first, then decode in step until all are done (equal lengths)."""
    b = as_float(batch)
    tokens = b * load.isl
    chunks = np.maximum(np.ceil(tokens / load.token_budget), 1.0)
    ttft = chunks * cost.engine_step_s(0.0, 0.0, tokens / chunks, b * load.pairs / chunks, b / chunks)
    # linear between contexts: the mean engine_step is the one at the mean context
    tpot = cost.decode_s(b, b * load.context)
    return Served(ttft, tpot, b * load.osl / (ttft + load.steps * tpot), b)


COUNTED = 8192.0
"""Requests of a run of which nobody says how many it has [1]; what waits beyond capacity grows with them."""


def open_loop(cost: EngineStepCost, rate_per_s: Array, load: Load, *, sent: FloatArray | float = COUNTED) -> Served:
    """Requests arrive at a rate, at random; by Little's law as many are in flight as rate x time in the system.

    Solved as the closed loop whose clients produce that rate. Of ``sent`` requests at most half are in flight on
    average (the run ramps up and drains); that bounds the loop at rates beyond capacity. Prompts that arrive while an
    engine_step runs are prefilled together; what the first token waits for stands in `_first_token_s`.

    Parameters
    ----------
    rate_per_s : λ, of one replica [1/s]
    """
    rate = as_float(rate_per_s)
    most = np.minimum(load.max_running, as_float(sent) / 2.0)
    served, clients = _in_flight(partial(closed_loop, cost, load=load), rate, load, most)
    # those that decode; scheduled ahead, an engine_step holds those that the one before it ended, too
    decoding = rate * (load.steps + float(load.look_ahead)) * served.tpot_s
    running = np.minimum(np.minimum(served.running, clients), decoding)
    first, capacity = _arrival_s(cost, rate, running, load), served.output_tokens_per_s / load.osl
    # beyond capacity, those behind the first that fill all places: half of what comes faster than it goes
    number = np.where(np.isfinite(sent), sent, COUNTED)
    behind = np.maximum(number - load.max_running, 0.0) ** 2 / (2.0 * number)
    late = np.maximum(first, served.ttft_s) + behind * np.maximum(1.0 / capacity - 1.0 / rate, 0.0)
    return replace(served, ttft_s=np.where(clients < most, first, late))


def _arrival_s(cost: EngineStepCost, rate: FloatArray, running: FloatArray, load: Load) -> FloatArray:
    """Seconds to the first token of a random arrival at an engine that decodes ``running``, others come at ``rate``."""
    decode, alone = cost.decode_s(running, running * load.context), load.prompts_s(cost)
    one, two = (load.prompts_s(cost, running, prompts) for prompts in (1.0, 2.0))
    added, more = load.added_s(one, decode), np.maximum(two - one, 0.0)
    return _first_token_s(rate, running, decode, added, more, alone, load.chunked, load.look_ahead)


TURNS = 16
"""Secants followed: 60 measured loads, two of them beyond capacity, then stand within 3e-6 of where they rest."""
STEEPEST = 0.97
"""Largest slope that a secant is believed to have; beyond capacity it is 1, and the bound ends the climb."""


def _in_flight(
    loop: Callable[..., Served], rate: FloatArray, load: Load, most: FloatArray
) -> tuple[Served, FloatArray]:
    """The closed ``loop`` whose clients c produce a rate, and c: the rest of c = F(c), F the rate x time of a request.

    Followed by secants: where a load nearly fills the engine F has a slope near 1, and plain turns hardly move.
    """
    clients = np.ones(np.broadcast_shapes(rate.shape, np.shape(load.osl), np.shape(load.isl)))
    before = wanted_before = np.zeros_like(clients)
    served = loop(clients, arriving=1.0)
    for _ in range(TURNS):
        served = loop(clients, arriving=rate * served.tpot_s)
        wanted = rate * (served.ttft_s + load.steps * served.tpot_s)
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


def queue_of(cost: EngineStepCost, sent: Array, load: Load) -> Served:
    r"""N equal requests that are all there from the start: throughput of the whole run, its emptying batch included.

    .. math::

        T = n_o (W d(b) + d(r)) + N \delta + J (2 d(b / 2) - d(b)),\quad
        b = \min(N, b_{max}),\quad N = W b + r,\quad J = \lceil b n_i / B \rceil

    Parameters
    ----------
    sent : N, requests of the run [1], finite

    Notes
    -----
    W full waves of b requests decode, and one of the r that are left, whose engine_steps d(r) hardly take less than
    d(b) while weights are what they read. Every prompt adds δ, shared by as many as the budget holds: equal requests
    stay together. The first wave fills J engine_steps one after the other and the last one ends so, half full in the
    mean. A request decodes beside half of its own wave's prompts and half of the next one's.
    """
    n, osl = as_float(sent), as_float(load.osl)
    b = np.minimum(n, load.max_running)
    waves = np.floor(n / b)
    rest = n - waves * b
    full, last, half = (cost.decode_s(some, some * load.context) for some in (b, rest, b / 2.0))
    group = np.clip(np.floor(load.token_budget / as_float(load.isl)), 1.0, b)
    prompt = load.added_s(load.prompts_s(cost, b, group), full) / group
    fill = np.ceil(b * load.isl / load.token_budget) * np.maximum(2.0 * half - full, 0.0)
    seconds = osl * (waves * full + (rest > 0.0) * last) + n * prompt + fill
    beside = np.minimum((1.0 - 0.5 * b / n) * (b - 1.0) / np.maximum(load.steps, 1.0), load.room)
    tpot = (waves * b * full + rest * last) / n + beside * prompt
    before = waves * (b * (waves - 1.0) / 2.0 + rest) / n  # waves that a request waits for
    first = _start_s(cost, b, load) + before * (osl * full + b * prompt)
    return Served(first, tpot, n * osl / seconds, n * osl * tpot / seconds)
