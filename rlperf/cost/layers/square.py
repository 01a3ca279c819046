"""One square matrix in place of attention or a feed-forward (Nemotron-NAS: ``replace_with_linear``)."""

from __future__ import annotations

from rlperf.cost.layers.layer import Layer, Matrix


class Square(Layer):
    """A linear map of the hidden state."""

    weights = "dense"

    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix("linear", self.arch.hidden, self.arch.hidden, "inputs"),)
