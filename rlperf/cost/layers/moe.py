"""Mixture of experts: router, routed experts, shared experts; and experts that work in a latent width (Nemotron 3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlperf.cost.collectives import all_gather_s, dispatch_combine_s, reduce_scatter_s
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.exchange import exchange_s, has_exchange
from rlperf.cost.layers.dense import activation_bytes, activation_operator, mlp
from rlperf.cost.layers.layer import Layer, Matrix, Routing
from rlperf.cost.moe import (
    Dealt,
    busiest,
    grouped_gemm_s,
    grouped_with,
    moe_fit,
    popular_experts,
    touched_experts,
)
from rlperf.cost.replica import Operator, Replica, gemm_operator, memory_operator, network_operator
from rlperf.cost.roofline import as_float, gemm_s, sheet_flop_per_s, small_op_s, stream_s
from rlperf.cost.trainer_device import Keeping, Kept, Seconds, TrainerDevice, expert_share
from rlperf.layout import BoolArray, FloatArray, IntArray
from rlperf.specs.architecture import Experts

SHARED = "shared experts"
"""Products of experts that every token goes to."""
UNGATED = ("trtllm_nongated",)
"""Kernels of experts without a gate, whatever the engine."""


def shared_is_joined(replica: Replica) -> BoolArray:
    """Where the engine runs the shared expert in the grouped products, as one more that every token goes to.

    SGLang does so for one without a gate of the routed ones' width, unless experts are spread (its
    ``determine_num_fused_shared_experts``, from memory).
    """
    moe = replica.arch.experts
    alike = moe is not None and moe.shared_hidden == moe.hidden and not moe.shared_gate
    return np.asarray(replica.expert == 1.0 if alike and replica.engine.joins_shared_expert else False)


class Moe(Layer):
    """Every token goes to a few experts; shared experts and projections to a latent width see all of them."""

    weights = "dense"
    extra_kernels = 17
    """Counted by hand: router, grouped top-k in about ten small passes, alignment, second product, combination,
    shared expert, its sum."""

    @property
    def experts(self) -> Experts:
        """Its numbers in the architecture."""
        assert self.arch.experts is not None
        return self.arch.experts

    def matrices(self) -> tuple[Matrix, ...]:
        moe, h = self.experts, self.arch.hidden
        found: tuple[Matrix, ...] = ()
        if moe.shared_hidden:
            found += mlp(SHARED, h, moe.shared_hidden, moe.gated)
        if moe.latent_hidden:
            down = Matrix("latent experts", h, moe.latent_hidden, "copied")
            found += (down, Matrix("latent experts", moe.latent_hidden, h, "copied"))
        return found

    def divides(self, heads: IntArray, tensor: IntArray) -> BoolArray:
        """The shared experts' width; routed ones are cut by what they are not spread over."""
        return np.asarray(self.experts.shared_hidden % tensor == 0)

    @property
    def routing(self) -> Routing:
        moe = self.experts
        matrices, width = 3 if moe.gated else 2, moe.latent_hidden or self.arch.hidden
        each = matrices * width * moe.hidden + (moe.hidden * (matrices - 1) + width) * moe.bias
        return Routing(moe.count, moe.active, width, moe.hidden, matrices, each)

    def other_parameters(self) -> int:
        """Router, and the gate of the shared experts."""
        moe = self.experts
        return self.copied_parameters() + moe.count * moe.bias + self.arch.hidden * moe.shared_gate

    @property
    def scored(self) -> int:
        """Experts that the router scores, those that hand a token back included."""
        return self.experts.count + self.experts.null_count

    def copied_parameters(self) -> int:
        return self.arch.hidden * self.scored

    def tensors(self) -> int:
        return super().tensors() + 1 + self.routing.matrices * self.routing.count

    # -- an engine

    def token_operators(self, replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
        moe, own = self.experts, _by_own_kernels(replica)
        found = [
            gemm_operator(replica, "router", count, local, self.scored, self.arch.hidden, "bf16"),
            memory_operator(replica, "router", count, local * self.scored * 4.0),
            self._products(replica, count, whole, own),
            self._exchange(replica, count, whole, local, own),
        ]
        if moe.shared_hidden:
            apart = activation_operator(replica, count, local, moe.shared_hidden, moe.gated)
            found.append(apart.times(~shared_is_joined(replica)))
        return found

    def _products(self, replica: Replica, count: float, whole: FloatArray, own: BoolArray) -> Operator:
        """Grouped products of the routed experts; ``own``: where kernels of the engine's own bring the tokens."""
        route, hw, dtype = self.routing, replica.hw, replica.roles.expert
        kernels = replica.engine.moe_kernels if self.experts.gated else UNGATED
        fit, _ = moe_fit(hw, dtype, kernels)
        split, joined = np.maximum(replica.tensor / replica.expert, 1.0), shared_is_joined(replica).astype(np.float64)
        experts, active = route.count + joined, route.active + joined
        popular = popular_experts(whole, route.active, route.count) + joined
        dealt = Dealt(
            dispatched=own | (replica.engine.expert_dispatch == "deepep"),
            skew=busiest(whole * route.active / replica.expert, replica.expert),
            touched_share=popular / np.maximum(touched_experts(whole * active, experts), 1e-12),
        )
        shape = replace(route.shape, count=experts, active=active)
        seconds = grouped_with(hw.device, fit, whole, shape, replica.expert, split, dtype=dtype, dealt=dealt)
        each = route.matrices * float(route.width * route.hidden) / split
        weights = popular / replica.expert * each * dtype_of(dtype).weight_bytes
        flop = 2.0 * whole * active / replica.expert * each
        return Operator(
            "experts",
            count * seconds,
            count * flop / sheet_flop_per_s(hw, dtype),
            count * weights / hw.device.memory_bandwidth,
            np.zeros(()),
        )

    def _exchange(
        self, replica: Replica, count: float, whole: FloatArray, local: FloatArray, own: BoolArray
    ) -> Operator:
        """With copies of the attention layers, tokens are gathered before the experts and scattered behind them.

        They are gathered as the experts read them (quantised first where these are narrow) and added up in 16 bits.
        """
        hw, route = replica.hw, self.routing
        group, near = replica.tensor, replica.within(replica.tensor)
        narrow = dtype_of(replica.roles.expert).activation_bytes
        out, back = whole * route.width * narrow, whole * route.width * 2.0
        if replica.engine.expert_dispatch == "deepep":
            gathered = dispatch_combine_s(hw, local, route.width, route.active, route.count, group, near)
        else:
            gathered = all_gather_s(hw, out, group, near) + reduce_scatter_s(hw, back, group, near)
        if own.any():
            sent = exchange_s(hw, replica.engine.engine, local, route.width, route.active, narrow, group)
            gathered = np.where(own, sent, gathered)
        copies = replica.attention_data > 1.0
        moved = np.where(copies, out + back, 0.0)
        return network_operator(replica, "expert exchange", count, np.where(copies, gathered, 0.0), moved)

    def all_reduces(self, replica: Replica) -> FloatArray:
        """None where the exchange adds up."""
        return np.where(replica.attention_data > 1.0, 0.0, 1.0)

    # -- a trainer

    def training_s(self, device: TrainerDevice) -> Seconds:
        """Routed experts, their permutation, and the router."""
        route, timing, layout = self.routing, device.trainer.timing, device.layout
        ep, etp = layout.expert_parallel.astype(np.float64), layout.expert_tensor_parallel.astype(np.float64)
        own = device.work.tokens / layout.tensor_parallel
        products = grouped_gemm_s(
            device.hw, own * ep * etp, route.shape, ep, etp,
            dtype=device.dtype, dealt=Dealt(skew=device.options.skew, dispatched=True, arranged=timing.arranged),
        )  # fmt: skip
        # kernel tables have no casts of experts: what narrow dense products sustain beyond 16 bits is not theirs
        products = products * timing.moe_pass / device.generation.sustained
        pairs = own * etp * route.active * device.options.skew
        permuted = timing.permute * (timing.fused_permute if device.switches.dispatcher != "alltoall" else 1.0)
        arranged = small_op_s(device.hw, pairs * route.width * 2.0 * 4.0 * permuted)
        ahead, back = (arranged + stream_s(device.hw, pairs * moved) for moved in self._small_passes(device))
        router = gemm_s(device.hw, own, as_float(self.scored), as_float(self.arch.hidden), "bf16") / device.rate
        # a build that runs the older attention on a device has no grouped products for it either, and loops
        loops = device.generation.moe_layer if device.options.attention_kernel == "flash2" else 0.0
        each = timing.expert_gap * expert_share(device.trainer, device.dtype)
        gaps = timing.moe_layer + each * route.count / ep
        fixed = ((0.0 if device.switches.cuda_graph == "full_iteration" else gaps) + loops) / 3.0
        passes = 1.0 if device.frozen else 2.0
        forward = products + ahead + router + fixed
        return Seconds(forward, passes * products + back + 2.0 * router + 2.0 * fixed, experts=forward)

    def _small_passes(self, device: TrainerDevice) -> tuple[float, float]:
        """Bytes that a (token, expert) pair moves around the products, (forward, backward), counted in sources.

        Bias of the second product, weighed by the router in fp32 (Megatron-Core 0.16, ``TEGroupedMLP._apply_bias``):
        b p is written, added, joined and made narrow again, its gradients are summed up; the first one's is part of
        its product. Narrow inputs and gradients are cast both ways (TransformerEngine 2.20, ``GroupedLinear``), and
        padded and cut where the dispatcher has not (``Fp8Padding``; HybridEP has). Where graphs hold the whole
        iteration, recipes cast inside the products (Megatron-Bridge 0.6.2, ``use_transformer_engine_op_fuser``).
        """
        route, kind = self.routing, dtype_of(device.dtype)
        ahead, back = (28.0 * route.width, 40.0 * route.width) if self.experts.bias else (0.0, 0.0)
        if kind.narrow and device.switches.cuda_graph != "full_iteration":
            cast = 2.0 + 2.0 * kind.activation_bytes
            padded = 0.0 if device.switches.dispatcher == "hybridep" else 2.0 * 4.0 * route.width
            ahead += cast * (route.width + route.hidden) + padded
            back += cast * (route.width + (route.matrices - 1) * route.hidden) + padded
        return ahead, back

    def pass_bytes(self, tensor: FloatArray) -> FloatArray:
        return activation_bytes(self.experts.shared_hidden, self.experts.gated) / tensor

    def kept(self, keeping: Keeping) -> Kept:
        """Routed experts per token of this device, balanced; shared experts."""
        moe, route, width = self.experts, self.routing, keeping.width
        etp = keeping.layout.expert_tensor_parallel.astype(np.float64)
        hidden = ((2.0 if moe.gated else 1.0) * width + keeping.narrow) * route.hidden / etp
        # permuted inputs, expert hidden, expert outputs; a token of this device makes `active` pairs somewhere
        pairs = route.active * ((width + keeping.narrow) * route.width + hidden) * keeping.spread * etp
        return Kept(
            dense=3.0 * width * moe.shared_hidden / keeping.tensor,
            routed=pairs + 8.0 * route.count * keeping.spread,
            expert_hidden=route.active * width * route.hidden * keeping.spread,
        )


def _by_own_kernels(replica: Replica) -> BoolArray:
    """Whether tokens go to experts spread over one domain by kernels of the engine's own, and none are gathered."""
    own = replica.engine.own_exchange and has_exchange(replica.hw, replica.engine.engine)
    inside = replica.within(replica.tensor) == replica.tensor
    return np.asarray(own & inside & (replica.expert == replica.tensor) & (replica.attention_data > 1.0))
