"""Muon: orthogonalised momentum of every weight matrix by Newton-Schulz, shared out over the data-parallel ranks."""

from __future__ import annotations

import numpy as np

from rlperf.cost.collectives import all_gather_s
from rlperf.cost.layers import stack_of
from rlperf.cost.parameters import embedding_parameters, parameters
from rlperf.cost.roofline import gemm_s
from rlperf.cost.trainer.parallel import within
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware
from rlperf.specs.trainer_calibration import TrainerCalibration

ITERATIONS = 5
"""Newton-Schulz steps (K. Jordan et al. 2024; verl's muon_num_ns_steps)."""
MOMENT_BYTES = 4.0
"""Of the second moment that Adam keeps and Muon does not, per parameter of a matrix [bytes]."""
MOVED_BYTES = 4.0
"""By which its update reads and writes less: the second moment is neither read nor written (8), the orthogonalised
momentum is read back (4) [bytes]."""
GATHERED_BYTES = 2.0
"""Per parameter that ranks gather to complete their matrices, in 16 bits [bytes]."""


def matrix_share(arch: Architecture) -> float:
    """Share of the parameters that lie in matrices of layers; tables, norms and biases stay with Adam [1].

    >>> from rlperf.specs.profiles import load_architecture
    >>> round(matrix_share(load_architecture("Qwen3-8B")), 2)
    0.85
    """
    stack = stack_of(arch)
    dense = sum(matrix.values * count for matrix, _, count in stack.matrices)
    routed = sum(route.count * route.parameters * count for route, count in stack.routed)
    return min((dense + routed) / parameters(arch), 1.0 - embedding_parameters(arch) / parameters(arch))


def with_muon(trainer: TrainerCalibration, arch: Architecture) -> TrainerCalibration:
    """The backend with Muon's states and traffic in place of Adam's: one moment a parameter of a matrix."""
    share = matrix_share(arch)
    storage = trainer.storage.model_copy(update={"optimizer": trainer.storage.optimizer - share * MOMENT_BYTES})
    timing = trainer.timing.model_copy(update={"optimizer_bytes": trainer.timing.optimizer_bytes - share * MOVED_BYTES})
    return trainer.model_copy(update={"storage": storage, "timing": timing})


def newton_schulz_s(hw: Hardware, rows: FloatArray, columns: FloatArray) -> FloatArray:
    r"""Seconds to orthogonalise one matrix of m x n, m the smaller: 5 times :math:`XX^T`, its square, and their product
    with X, :math:`4 m^2 n + 2 m^3` FLOP each.

    >>> from rlperf.specs.hardware import load_hardware
    >>> hw = load_hardware("h100_sxm")
    >>> bool(newton_schulz_s(hw, np.array(4096.0), np.array(12288.0)) > 5 * 4 * 4096.0**2 * 12288 / 989e12)
    True
    """
    m, n = np.minimum(rows, columns), np.maximum(rows, columns)
    return ITERATIONS * (gemm_s(hw, m, m, n) + gemm_s(hw, m, m, m) + gemm_s(hw, m, n, m))


def muon_s(arch: Architecture, hw: Hardware, trainer: TrainerCalibration, layout: Layout) -> FloatArray:
    """Seconds that Muon adds to an optimizer update of one device [s], beside what its bytes take.

    Every tensor-parallel rank orthogonalises its own blocks ("blockwise"), every expert by itself. Of the matrices of a
    stage a rank of the optimizer's shards takes its part, at least one whole matrix; without sharding all of them. The
    matrices that shards cut are gathered once in 16 bits (Liu et al. 2025, arXiv 2502.16982, algorithm 1).
    """
    tensor, stages = layout.tensor_parallel.astype(np.float64), layout.pipeline_parallel.astype(np.float64)
    sharded = layout.zero_stage >= 1
    shards = np.where(sharded, layout.shards, 1).astype(np.float64)
    expert_shards = np.where(sharded, np.minimum(layout.expert_data_parallel, layout.shards), 1).astype(np.float64)
    experts = (layout.expert_parallel * layout.expert_tensor_parallel).astype(np.float64)
    seconds: FloatArray = np.zeros(())
    held: FloatArray = np.zeros(())
    for matrix, _, count in stack_of(arch).matrices:
        columns, rows = matrix.on(tensor)
        seconds = seconds + np.maximum(count / stages / shards, 1.0) * newton_schulz_s(hw, rows, columns)
        held = held + count / stages * rows * columns
    gathered = all_gather_s(hw, GATHERED_BYTES * held, shards, within(hw, shards, tensor))
    held = np.zeros(())
    for route, count in stack_of(arch).routed:
        number = route.count * route.matrices * count / stages / layout.expert_parallel
        cut = route.hidden / layout.expert_tensor_parallel
        each = newton_schulz_s(hw, np.asarray(float(route.width)), np.asarray(cut, dtype=np.float64))
        seconds = seconds + np.maximum(number / expert_shards, 1.0) * each
        held = held + number * route.width * cut
    gathered = gathered + all_gather_s(hw, GATHERED_BYTES * held, expert_shards, within(hw, expert_shards, experts))
    alone = shards <= 1
    return np.asarray(seconds + np.where(alone, 0.0, gathered) * trainer.timing.collective, dtype=np.float64)
