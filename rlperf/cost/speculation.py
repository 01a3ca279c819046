"""Speculative decoding as a cost: wider verifications, drafting, and the tokens that they yield.

What an engine_step costs with k drafted tokens is read off the same operators as without; divided by the tokens that it
yields it is again the cost of one token per request, so that events and closed form run on as they are. The number of
drafts may follow the number of running requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlperf.cost.dtypes import dtype_of
from rlperf.cost.engine_memory import kv_bytes_per_request, kv_bytes_per_token, recorded_bytes, weight_bytes
from rlperf.cost.engine_step import Drafted, EngineStepCost
from rlperf.cost.inference import TOKEN_POINTS
from rlperf.cost.layers import KINDS
from rlperf.cost.layers.softmax import Softmax
from rlperf.cost.operators import decode_operators, head_operators, recording_s, token_operators
from rlperf.cost.parameters import active_parameters, embedding_parameters
from rlperf.cost.replica import Replica, gemm_operator, total_in_engine
from rlperf.errors import Problem, SpecError
from rlperf.layout import FloatArray
from rlperf.specs.architecture import Architecture
from rlperf.specs.speculation import DraftSetting, Method
from rlperf.specs.speculation_calibration import Yield

MOST_RUNNING = 1024
"""Requests that run at once up to which costs are tabulated one by one; beyond, a request costs as much as there."""
DRAFT_KERNELS, VERIFY_KERNELS = 2.0, 1.0
"""Calls that drafts and rejection sampling make one by one, in layers' worth of kernels: a draft's layer with its
projection, head, choice and metadata; softmax, comparison and gathering of what is verified. Counted by hand."""
EAGLE_VOCAB = 32_000
"""Tokens that an EAGLE-3 head chooses from (SpecForge's configurations, and those of the published heads)."""
EAGLE_FFN = 6
"""Width of an EAGLE-3 head's feed-forward over the hidden state, for models whose own layers are experts (lmsys and
SpecForge heads of Qwen3-30B-A3B and Qwen3-235B-A22B; recalled)."""


@dataclass(frozen=True)
class DraftHead:
    """The network that drafts: one layer with a head, in front of it a projection of ``joined`` hidden states."""

    arch: Architecture
    joined: int

    @property
    def projection_parameters(self) -> int:
        """Of the projection in front of the layer."""
        return self.joined * self.arch.hidden**2

    @property
    def own_head_parameters(self) -> int:
        """Of a head of its own; one that is the model's counts with the model."""
        return EAGLE_VOCAB * self.arch.hidden if self.joined == 3 else 0

    @property
    def trained(self) -> Architecture:
        """What a trainer holds of it: its layer, and projection and head as one table."""
        beside = self.projection_parameters + self.own_head_parameters
        return self.arch.model_copy(update={"vocab": beside // self.arch.hidden, "tied_embeddings": True})


def draft_head(arch: Architecture, method: Method) -> DraftHead | None:
    """What drafts for a model by a method; None: no network does (n-grams).

    Raises
    ------
    SpecError : the model has no multi-token prediction layer
    """
    if method == "ngram":
        return None
    # what stands in front of the model, or is looked up beside it, the head takes from the model
    arch = arch.model_copy(update={"vision": None, "audio_parameters": 0, "lookup_parameters": 0})
    mixers = [name for name in arch.layer_mixers if _attends(arch, name)] or list(arch.layer_mixers)
    if method == "mtp":
        if not arch.prediction_layers:
            raise SpecError(
                Problem(
                    f"speculation: {arch.name} has no multi-token prediction layer",
                    suggestion="eagle3:3 with a head of your own",
                )
            )
        half = [name for name in arch.layer_feed_forwards if name != "none"][-1]
        return DraftHead(arch.model_copy(update={"layers": 1, "mixers": (mixers[-1],), "feed_forwards": (half,)}), 2)
    ffn = arch.ffn_hidden or EAGLE_FFN * arch.hidden
    plain = {"latent": None, "experts": None, "qk_norm": False, "attention_gate": False}
    one = {"layers": 1, "mixers": ("full",), "feed_forwards": ("dense",), "ffn_hidden": ffn, "vocab": EAGLE_VOCAB}
    return DraftHead(arch.model_copy(update={**plain, **one}), 3)


def _attends(arch: Architecture, mixer: str) -> bool:
    """Whether softmax attention is a part of a mixer: no head that drafts carries a state alone."""
    return any(issubclass(KINDS[arch.part(name)[0]], Softmax) for name in mixer.split("+"))


def speculating(cost: EngineStepCost, replica: Replica, wanted: DraftSetting, yields: Yield) -> EngineStepCost:
    r"""An engine's cost with speculation, per token of every request.

    .. math::

        t(b, K) = \frac{1}{m_k} \Big( h + m_k h_r b + L_v(b, k) + d_0 + d_s b + k b\, t_{head}
            + K \sqrt{d_k^2 + ((k + 1)^2 - 1) c^2} + k b\, t_s + t_v + \sum_{i=1}^{k} t_i(b, K) \Big)

    Parameters
    ----------
    cost : of the engine without, in its framework
    yields : tokens per engine_step for 0 ... k drafts

    Notes
    -----
    L_v: products of (k + 1) b tokens, see `_verification_s`. h_r: engine and clients handle every token of a request
    (detokenise, stop, stream), so it counts per token yielded. c: FLOP of one query on one cached token at the rate of
    the prefill kernel (what a verification adds to attention that reads the cache once); t_s: recurrent layers write
    the state behind every draft, to go back to where one is rejected (`recording_s`); t_v calls of rejection
    sampling; t_i the i-th pass of the draft's layer and head, see `_draft`.
    """
    tokens = yields.tokens
    running = np.arange(MOST_RUNNING + 1, dtype=np.float64)
    scale, padded = replica.engine.overhead.kernel_scale, cost.padded(running)
    rows = np.array([16.0, 32.0]) * float(np.max(replica.pipeline))
    few, more = total_in_engine(head_operators(replica, rows), scale)
    head_s, pair_s = float(more - few) / float(rows[1] - rows[0]), _pair_s(replica, scale)
    called = replica.engine.kernels_per_layer * call_s(replica)
    head = draft_head(replica.arch, wanted.method)
    next_s, draft_key_s = _draft(head, replica, padded, 1, DRAFT_KERNELS * called)
    plain, recorded_s = cost.linear(padded), scale * float(np.max(recording_s(replica)))
    added = np.full((wanted.most + 1, len(running)), np.nan)  # of numbers that are never drafted
    keys = added.copy()
    added[0], keys[0] = 0.0, cost.decode_per_kv_token_s
    for k in range(max(wanted.fewest, 1), wanted.most + 1):
        wider = _verification_s(cost, replica, running, k) - plain
        handled = (tokens[k] - 1.0) * max(cost.host_per_request_s - head_s, 0.0)
        drafts = _draft(head, replica, padded, k + 1, DRAFT_KERNELS * called)[0] + (k - 1) * next_s
        added[k] = wider + running * (k * (head_s + recorded_s) + handled) + drafts + VERIFY_KERNELS * called
        keys[k] = np.hypot(cost.decode_per_kv_token_s, np.sqrt(k * (k + 2.0)) * pair_s) + k * draft_key_s
    table = Drafted(np.array(tokens), added, keys, np.zeros(len(running), dtype=np.int64), yields.spread)
    return replace(cost, drafted=_chosen(cost, table, wanted.fewest, running))


def call_s(replica: Replica) -> float:
    """Seconds of one kernel that the host calls by itself: through Python where the engine says what that costs [s]."""
    call = replica.engine.eager_call
    return replica.hw.calibration.host.launch if call is None else call


def _verification_s(cost: EngineStepCost, replica: Replica, running: FloatArray, k: int) -> FloatArray:
    """Products of k + 1 tokens of every request; more of them than any CUDA graph holds are issued layer by layer [s].

    vLLM's graphs are captured by tokens, so that drafts leave them at a (k + 1)-th of the requests (its configuration:
    at most 512 tokens); SGLang captures verifications by requests, as it does decodes.
    """
    tokens, engine = (k + 1) * running, replica.engine
    if not (engine.cuda_graphs and engine.captures_prompts and engine.graph_buckets):
        return cost.linear((k + 1) * cost.padded(running))
    issued = engine.overhead.uncaptured * replica.arch.layers
    uncaptured = replica.scheduled(tokens) > engine.graph_buckets[-1]
    return np.maximum(cost.linear(cost.padded(tokens)), np.where(uncaptured, issued, 0.0))


TYPICAL_CONTEXT = 4096.0
"""Tokens of a running request, at which the number of drafts is chosen where it switches [tokens]."""


def _chosen(cost: EngineStepCost, every: Drafted, fewest: int, running: FloatArray) -> Drafted:
    """Of all numbers of drafts from ``fewest`` up the fastest at every number of running requests."""
    seconds = []
    for k in range(fewest, len(every.tokens)):
        fixed = replace(every, drafts=np.full(len(running), k, dtype=np.int64))
        seconds.append(replace(cost, drafted=fixed).decode_s(running, running * TYPICAL_CONTEXT))
    return replace(every, drafts=fewest + np.argmin(np.array(seconds), axis=0))


def _pair_s(replica: Replica, scale: float) -> float:
    """Seconds that one query on one cached token takes of the matrix units, all layers of one device [s]."""
    far, near = (decode_operators(replica, 1.0, keys) for keys in (2e6, 1e6))
    sheet = sum(float(a.compute_s - b.compute_s) for a, b in zip(far, near, strict=True)) / 1e6
    efficiency = replica.hw.calibration.prefill[0].compute if replica.hw.calibration.prefill else 1.0
    return scale * sheet / efficiency


def _draft(
    head: DraftHead | None, replica: Replica, padded: FloatArray, width: int, calls_s: float
) -> tuple[FloatArray, float]:
    """Seconds of one pass of the draft by number of running requests, and per cached token [s].

    ``width`` tokens of every request enter: the first pass caches all that were verified, each further one its last
    draft. Kernel by kernel a pass takes ``calls_s`` of the host, in which the device works: the longer of both counts.
    """
    if head is None:
        return np.zeros_like(padded), 0.0
    small = replace(replica, arch=head.arch)
    scale, rows = replica.engine.overhead.kernel_scale, TOKEN_POINTS
    projection = gemm_operator(
        small, "projection", 1.0, width * rows / small.attention_data, head.arch.hidden / small.attention_tensor,
        head.joined * head.arch.hidden, small.roles.projection,
    )  # fmt: skip
    linear = total_in_engine([*token_operators(small, width * rows, rows), projection], scale)
    share = float(np.max(small.pipeline * small.attention_data))
    near, far = (float(total_in_engine(decode_operators(small, 16.0 * share, keys), scale)) for keys in (1e5, 2e5))
    per_key = max(far - near, 0.0) / 1e5
    device = np.interp(padded, rows, np.broadcast_to(linear, rows.shape)) + max(near - 1e5 * per_key, 0.0)
    if replica.engine.eager_call is None:
        return device + calls_s, per_key
    return np.maximum(device, calls_s), per_key


@dataclass(frozen=True, eq=False)
class DraftMemory:
    """What speculation takes on a device.

    Attributes
    ----------
    weight_bytes : of the draft head [bytes]
    cache_share : its cache over the model's own [1]
    held_bytes : logits of what is verified, and recurrent states behind every draft, of all running requests [bytes]
    """

    weight_bytes: FloatArray
    cache_share: FloatArray
    held_bytes: FloatArray


def draft_memory(replica: Replica, wanted: DraftSetting, running: FloatArray) -> DraftMemory:
    """Memory of speculation on one device of a replica.

    Rejection sampling keeps logits and probabilities of every verified token in fp32 on every device (vLLM's
    v1/sample/rejection_sampler.py works on the gathered vocabulary).
    """
    head, drafted = draft_head(replica.arch, wanted.method), running * wanted.most / replica.attention_data
    held = drafted * (replica.arch.vocab * 8.0 + recorded_bytes(replica))
    if head is None:
        none = np.zeros_like(replica.tensor)
        return DraftMemory(none, none, held)
    small = replace(replica, arch=head.arch.model_copy(update={"vocab": 1}), pipeline=np.ones_like(replica.pipeline))
    width = dtype_of(replica.roles.projection).weight_bytes
    extra = head.projection_parameters * width + head.own_head_parameters * 2.0
    weights = weight_bytes(small) + extra / replica.attention_tensor
    own = kv_bytes_per_token(replica) + kv_bytes_per_request(replica) / 4096.0
    return DraftMemory(weights, kv_bytes_per_token(small) / np.maximum(own, 1e-9), held)


def training_share(arch: Architecture, method: Method) -> float:
    """Work of training a draft head over that of its model: its layer, projection and head, per token [1].

    >>> from rlperf.specs.profiles import load_architecture
    >>> round(training_share(load_architecture("MiMo-7B-RL"), "mtp"), 3)
    0.119

    A head that is the embedding is multiplied with all the same:

    >>> [round(training_share(load_architecture(name), "eagle3"), 2) for name in ("Qwen3-4B", "Qwen3-8B")]
    [0.05, 0.05]
    """
    head = draft_head(arch, method)
    if head is None:
        return 0.0
    own = _multiplied(head.arch) + head.projection_parameters
    return own / max(_multiplied(arch), 1.0)


def _multiplied(arch: Architecture) -> float:
    """Parameters that a token is multiplied with: the head, tied or not, and no table that is looked up."""
    tables = embedding_parameters(arch) - arch.lookup_parameters  # those that count as active
    return float(active_parameters(arch) - tables + arch.vocab * arch.hidden)
