"""Dense feed-forward: up (and gate) projection, activation, down projection."""

from __future__ import annotations

import numpy as np

from rlperf.cost.layers.layer import Layer, Matrix
from rlperf.cost.replica import Operator, Replica, memory_operator
from rlperf.cost.roofline import gemm_s
from rlperf.cost.trainer_device import Keeping, Kept, TrainerDevice
from rlperf.layout import BoolArray, FloatArray, IntArray


class Dense(Layer):
    """The multilayer perceptron of a layer."""

    weights = "dense"
    ends_in_product = True

    def matrices(self) -> tuple[Matrix, ...]:
        return mlp("ffn", self.arch.hidden, self.arch.ffn_hidden, self.arch.ffn_gated)

    def other_parameters(self) -> int:
        """Biases."""
        up = self.matrices()[0].outputs
        return (up + self.arch.hidden) * self.arch.ffn_bias

    def divides(self, heads: IntArray, tensor: IntArray) -> BoolArray:
        return np.asarray(self.arch.ffn_hidden % tensor == 0)

    def token_operators(self, replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
        return [activation_operator(replica, count, local, self.arch.ffn_hidden, self.arch.ffn_gated)]

    def last_s(self, device: TrainerDevice) -> FloatArray:
        outputs, inputs = self.matrices()[-1].on(device.tensor)
        return gemm_s(device.hw, device.work.tokens, outputs, inputs, device.dtype) / device.rate

    def pass_bytes(self, tensor: FloatArray) -> FloatArray:
        return activation_bytes(self.arch.ffn_hidden, self.arch.ffn_gated) / tensor

    def kept(self, keeping: Keeping) -> Kept:
        """Gate, up and the activation's output, which is the input of the down projection."""
        up = 2.0 if self.arch.ffn_gated else 1.0
        hidden = self.arch.ffn_hidden / keeping.tensor
        # by operator: the fifth product of a layer, and the seventh, which no backward reads
        last = self.arch.hidden if self.arch.ffn_gated and not keeping.compiled else 0.0
        kept = (up * keeping.width + keeping.narrow) * hidden
        return Kept(dense=kept, products=keeping.width * (hidden + last), feed_forward=kept)


def mlp(name: str, inputs: int, hidden: int, gated: bool) -> tuple[Matrix, Matrix]:
    """Up projection (with the gate) and down projection of a feed-forward."""
    up = 2 if gated else 1
    return Matrix(name, inputs, up * hidden, parts=up), Matrix(name, hidden, inputs, "inputs")


def activation_bytes(hidden: int, gated: bool) -> float:
    """Bytes per token of an activation function: reads gate and up, writes one, at 2 bytes a value."""
    return (6.0 if gated else 4.0) * hidden


def activation_operator(replica: Replica, count: float, tokens: FloatArray, hidden: int, gated: bool) -> Operator:
    """The activation function of ``count`` feed-forwards in an engine."""
    moved = tokens * activation_bytes(hidden, gated) / replica.attention_tensor
    return memory_operator(replica, "activation", count, moved)
