"""Sparse latent attention that reads what an earlier layer has chosen (GLM-5.2)."""

from __future__ import annotations

from rlperf.cost.layers.latent import Latent
from rlperf.cost.layers.layer import Matrix
from rlperf.cost.layers.sparse import Sparse


class SparseReusing(Sparse):
    """As sparse, without an index of its own; ``numbers`` are those of kind ``sparse``."""

    extra_kernels = 8

    @property
    def table(self) -> str:
        return "sparse_reusing"

    @property
    def index_values(self) -> int:
        return 0

    def matrices(self) -> tuple[Matrix, ...]:
        return Latent.matrices(self)

    def tensors(self) -> int:
        return Latent.tensors(self)
