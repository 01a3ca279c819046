"""Gated short convolution (LFM2, arXiv 2511.23404, section 2)."""

from __future__ import annotations

import numpy as np

from rlperf.cost.layers.layer import Layer, Matrix
from rlperf.cost.replica import Operator, Replica, memory_operator
from rlperf.cost.trainer_device import Keeping, Kept
from rlperf.layout import BoolArray, FloatArray, IntArray


class ShortConv(Layer):
    """A convolution over a few tokens between two gates; what it remembers is as long as its kernel.

    ``numbers``: ``width`` and ``conv_kernel``.
    """

    unmeasured = "short convolutions have no kernel table"
    unmeasured_training = True

    @property
    def width(self) -> int:
        """Channels."""
        return int(self.arch.numbers_of("short_conv")["width"])

    @property
    def kernel(self) -> int:
        """Tokens that a channel sees."""
        return int(self.arch.numbers_of("short_conv")["conv_kernel"])

    def matrices(self) -> tuple[Matrix, ...]:
        h = self.arch.hidden
        return Matrix("qkv", h, 3 * self.width), Matrix("output", self.width, h, "inputs")

    def other_parameters(self) -> int:
        return self.width * self.kernel

    def divides(self, heads: IntArray, tensor: IntArray) -> BoolArray:
        return np.asarray(self.width % heads == 0)

    def token_operators(self, replica: Replica, count: float, whole: FloatArray, local: FloatArray) -> list[Operator]:
        """Both gates and the convolution: three inputs read, one output written, twice."""
        moved = local * 4.0 * self.width / replica.attention_tensor * 2.0
        return [memory_operator(replica, "convolution", 2.0 * count, moved)]

    def cache_bytes_per_request(self, replica: Replica) -> FloatArray:
        return 2.0 * self.width * (self.kernel - 1.0) / replica.attention_tensor

    def pass_bytes(self, tensor: FloatArray) -> FloatArray:
        return 16.0 * self.width / tensor

    def kept(self, keeping: Keeping) -> Kept:
        """Both gates, the convolution's input and output, the gated output."""
        return Kept(dense=5.0 * keeping.width * self.width / keeping.tensor)
