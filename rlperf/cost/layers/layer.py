"""What a kind of layer says of itself, once, for engine and trainer: `Layer`, of which every kind is a subclass.

A transformer layer has two halves, a token mixer and a feed-forward, and each half is a `Layer`. All that has a
default here means "nothing": a kind states what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from rlperf.cost.dtypes import dtype_of
from rlperf.cost.moe import ExpertShape
from rlperf.cost.replica import Operator, Replica, Roles
from rlperf.cost.roofline import Array, as_float
from rlperf.cost.trainer_device import Keeping, Kept, Seconds, TrainerDevice
from rlperf.layout import BoolArray, FloatArray, IntArray
from rlperf.specs.architecture import Architecture
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware

Cut = Literal["outputs", "inputs", "copied"]
"""How tensor parallelism cuts a matrix: by columns, by rows, or not at all."""


@dataclass(frozen=True)
class Matrix:
    """One weight matrix of a layer, whole, and how tensor parallelism cuts it.

    Attributes
    ----------
    name : of the operator in the breakdown of an engine_step
    inputs, outputs : of the whole matrix [1]
    cut : what tensor parallelism divides
    head_outputs, head_count : outputs of key/value heads and how many these are; heads are not cut, and copied where
        there are fewer than devices
    parts : matrices of the checkpoint that are one here (q, k and v: 3), each with adapters of its own
    fused : engines run matrices of one such name, which read the same input, as one product
    batched : an engine runs it as so many products per head, in 16 bits (latent attention's absorbed form); 0 = one
    """

    name: str
    inputs: int
    outputs: int
    cut: Cut = "outputs"
    head_outputs: int = 0
    head_count: int = 1
    parts: int = 1
    fused: str = ""
    batched: int = 0

    @property
    def values(self) -> int:
        """Parameters of the whole matrix."""
        return self.inputs * self.outputs

    @property
    def adapter_values(self) -> int:
        """LoRA parameters per unit of rank: inputs + outputs of each part (Hu et al. 2021, arXiv 2106.09685, 4.1)."""
        return self.parts * self.inputs + self.outputs

    def on(self, tensor: Array) -> tuple[FloatArray, FloatArray]:
        """(outputs, inputs) on one of ``tensor`` devices.

        >>> qkv = Matrix("qkv", 4096, 4096 + 2 * 256, head_outputs=2 * 256, head_count=2)
        >>> [tuple(float(n) for n in qkv.on(t)) for t in (1, 2, 4)]
        [(4608.0, 4096.0), (2304.0, 4096.0), (1280.0, 4096.0)]
        """
        t = as_float(tensor)
        rows, columns = as_float(self.inputs), as_float(self.outputs)
        if self.cut == "inputs":
            rows = rows / t
        elif self.cut == "outputs":
            columns = (self.outputs - self.head_outputs) / t
            if self.head_outputs:
                heads = np.maximum(np.ceil(self.head_count / t), 1.0)
                columns = columns + self.head_outputs / self.head_count * heads
        return columns, rows


def fuse(matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """Matrices as an engine runs them: those with one `Matrix.fused` name, which have the same inputs, as one."""
    found: dict[str, Matrix] = {}
    for index, one in enumerate(matrices):
        key = one.fused or f"{index}"
        before = found.get(key)
        outputs = one.outputs + (before.outputs if before else 0)
        found[key] = Matrix(**{**vars(one), "outputs": outputs})
    return tuple(found.values())


@dataclass(frozen=True)
class Routing:
    """Routed experts of a layer: what expert parallelism divides.

    Attributes
    ----------
    count, active : experts, and those a token passes through [1]
    width : of a token on its way to an expert and back: latent where the model projects first
    hidden : width of one expert
    matrices : of one expert: 3 gated, else 2
    parameters : of one expert
    """

    count: int
    active: int
    width: int
    hidden: int
    matrices: int
    parameters: int

    @property
    def shape(self) -> ExpertShape:
        """What grouped products read of them."""
        return ExpertShape(self.width, self.hidden, self.count, self.active, self.matrices)


@dataclass(frozen=True)
class ContextValues:
    """Values per token that context parallelism moves in one layer, whole.

    Attributes
    ----------
    ring : keys and values that travel around a ring; ``heads`` of them are cut by tensor parallelism, at most
    exchanged : queries, keys, values and output that Ulysses exchanges
    """

    ring: int
    heads: int
    exchanged: int


@dataclass(frozen=True)
class Layer:
    """One half of a layer of one architecture.

    A kind overrides what it has. Symbols: ``count`` layers of the kind run in a row; ``local`` tokens of one copy of
    the attention layers, ``whole`` those of all copies together; a `Replica` or a `TrainerDevice` knows the hardware,
    its constants and the degrees, as arrays over candidates.
    """

    arch: Architecture

    weights: ClassVar[Literal["projection", "dense"]] = "projection"
    """Which weights of a checkpoint its matrices are: `rlperf.cost.replica.Roles` tells their dtype."""
    norms: ClassVar[int] = 1
    """Norms in front of it, each with the residual sum behind it; a half that is not there has none."""
    extra_kernels: ClassVar[int] = 0
    """Kernels beyond those of a half of a dense layer with grouped queries, for engines that launch them one by one."""
    unmeasured: ClassVar[str] = ""
    """Why predictions of an engine that runs it are extrapolated, in words."""
    unmeasured_training: ClassVar[bool] = False
    """Whether predictions of a trainer that runs it are extrapolated."""
    ends_in_product: ClassVar[bool] = False
    """Whether its last operator is a product with tensor traffic, which a recompute that stops early leaves out."""

    carries_state: ClassVar[bool] = False
    """Whether it reads what it made of all tokens before, so that nobody computes a part of a sequence alone."""
    copied_cache: ClassVar[bool] = False
    """Whether tensor parallelism copies the cache, so that engines had better split requests over the devices."""

    # -- what it is made of -------------------------------------------------------------------------------------

    def matrices(self) -> tuple[Matrix, ...]:
        """Its matrices, routed experts and router apart."""
        return ()

    def other_parameters(self) -> int:
        """Parameters beside the matrices: biases, convolutions, norms inside, router."""
        return 0

    def copied_parameters(self) -> int:
        """Those of `other_parameters` that tensor parallelism copies."""
        return 0

    def divides(self, heads: IntArray, tensor: IntArray) -> BoolArray | bool:
        """Whether its heads can be cut over ``heads`` devices and its widths over ``tensor``, with nothing left."""
        return True

    @property
    def routing(self) -> Routing | None:
        """Routed experts, or none."""
        return None

    @cached_property
    def parameters(self) -> int:
        """Parameters of one layer that every token uses: all but the routed experts."""
        return sum(matrix.values for matrix in self.matrices()) + self.other_parameters()

    @cached_property
    def replicated(self) -> int:
        """Of `parameters`, those that tensor parallelism copies."""
        copied = sum(matrix.values for matrix in self.matrices() if matrix.cut == "copied")
        return copied + self.copied_parameters()

    def bytes_on(self, tensor: Array, roles: Roles) -> FloatArray:
        """Of `parameters`, those on one of ``tensor`` devices, as a checkpoint holds them [bytes].

        Norms, routers, convolutions and biases stay in 16 bits (every checkpoint's list of excluded modules).
        """
        copied = self.copied_parameters()
        held = 2.0 * (copied + (self.other_parameters() - copied) / as_float(tensor))
        for matrix in self.matrices():
            outputs, inputs = matrix.on(tensor)
            held = held + outputs * inputs * dtype_of(roles.of(self.weights, matrix.name)).weight_bytes
        return held

    @cached_property
    def readers(self) -> int:
        """Inputs fetched from its norm where matrices share none: one each, and one of experts and their router."""
        own = sum(each.parts for each in self.matrices() if each.inputs == self.arch.hidden and each.cut != "inputs")
        return max(own + (self.routing is not None), self.norms)

    def tensors(self) -> int:
        """Tensors of the checkpoint, norms in front apart; experts count one by one."""
        return sum(matrix.parts for matrix in self.matrices())

    @property
    def pair_flop(self) -> float:
        """FLOP per (query, visible key) pair of all heads: 2 x (query + value width) in softmax attention."""
        return 0.0

    def attention_flop(self, tokens: FloatArray) -> FloatArray:
        """FLOP of a forward that follow from pairs of tokens: every sequence of ``tokens`` behind its own start."""
        return np.zeros_like(tokens)

    # -- an engine ----------------------------------------------------------------------------------------------

    def token_operators(self, replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
        """Operators that depend on the number of tokens alone, matrices apart: rotations, convolutions, experts."""
        return []

    def all_reduces(self, replica: Replica) -> FloatArray:
        """All-reduces of the hidden state over the devices of one copy of the attention layers [1]."""
        return np.ones(())

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        """A decode of ``requests`` that have ``kv`` tokens behind them altogether, on one device."""
        return []

    def prefill_operators(
        self, replica: Replica, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> list[Operator]:
        """Prefill of ``sequences`` with ``query`` new of ``kv`` visible tokens each, on one device."""
        return []

    def recording_s(self, replica: Replica) -> FloatArray | float:
        """What a drafted token adds to a verification of one request beside products and the reading of keys [s]."""
        return 0.0

    def recorded_bytes(self, replica: Replica) -> FloatArray | float:
        """What a request holds in one layer for every drafted token, to go back to where one is rejected [bytes]."""
        return 0.0

    def lacks(self, hw: Hardware, engine: EngineCalibration) -> str:
        """Why predictions of an engine that runs it on a device are extrapolated, in words; empty: they are not."""
        return self.unmeasured

    def untimed_on(self, hw: Hardware) -> bool:
        """Whether constants of its kernels are judged on a device, since nobody timed them on it nor on a relative."""
        return False

    def cache_bytes_per_token(self, replica: Replica) -> FloatArray | float:
        """Cache of one token in one layer, on one device that holds its request [bytes]."""
        return 0.0

    def cache_bytes_per_request(self, replica: Replica) -> FloatArray | float:
        """What a request holds in one layer whatever its length: windows and recurrent states [bytes]."""
        return 0.0

    def cache_bytes(self, replica: Replica, tokens: FloatArray) -> FloatArray:
        """What a request of so many tokens holds in one layer, on one device that holds it [bytes]."""
        return np.asarray(tokens * self.cache_bytes_per_token(replica) + self.cache_bytes_per_request(replica))

    # -- a trainer ----------------------------------------------------------------------------------------------

    def training_s(self, device: TrainerDevice) -> Seconds | None:
        """Seconds of one layer in one microbatch beside its matrices and small passes: attention, experts."""
        return None

    def last_s(self, device: TrainerDevice) -> FloatArray | float:
        """Of its matrices, what a recompute that stops early leaves out [s]."""
        return 0.0

    def pass_bytes(self, tensor: FloatArray) -> FloatArray | float:
        """Bytes per token that small passes move on one device, norm and residual apart: rotary, activation."""
        return 0.0

    def scan_values(self, hw: Hardware) -> float:
        """Values per token that a recurrent scan moves on all devices, forward [1]."""
        return 0.0

    def kept(self, keeping: Keeping) -> Kept:
        """Activations kept for the backward, norm and residual apart."""
        return Kept()

    @property
    def context(self) -> ContextValues | None:
        """What context parallelism moves, or nothing."""
        return None


class Nothing(Layer):
    """A half that is not there: layers of Nemotron-H have one half each."""

    norms = 0

    def all_reduces(self, replica: Replica) -> FloatArray:
        return np.zeros(())
