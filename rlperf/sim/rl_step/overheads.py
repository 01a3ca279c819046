"""What a framework adds to its engine and to its trainer backend: arrays over layouts, for screen and judge alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlperf.cost.batching import Microbatches
from rlperf.cost.collectives import host_copy_s
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.layers import stack_of
from rlperf.cost.trainer.parameters import stage_parameters
from rlperf.layout import RECOMPUTE, BoolArray, FloatArray, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.engine_calibration import EngineCalibration
from rlperf.specs.hardware import Hardware
from rlperf.specs.overhead import Overhead
from rlperf.specs.pool import Settings
from rlperf.specs.rl_calibration import FrameworkCalibration
from rlperf.specs.trainer_calibration import EXPERT_TIMING, TrainerCalibration, load_trainer


def engine_in_framework(
    cost: EngineStepCost, framework: FrameworkCalibration, adapters: tuple[float, float] = (0.0, 0.0),
    schedulers: float = 1.0,
) -> EngineStepCost:  # fmt: skip
    """The engine's cost with the host time that this framework's stack adds to every engine_step.

    ``adapters``: what unmerged adapters add per engine_step and per running request (`adapter_seconds`) [s]
    ``schedulers``: of the replica, which share its requests: one a copy of the attention (`Replica.scheduled`) [1]
    """
    each = framework.engine_host_per_request.value + adapters[1]
    return replace(
        cost,
        host_s=cost.host_s + framework.engine_host.value + adapters[0],
        host_per_request_s=cost.host_per_request_s + each / schedulers,
    )


def adapter_seconds(
    framework: FrameworkCalibration, architecture: Architecture, engine: EngineCalibration
) -> tuple[float, float]:
    r"""Seconds that unmerged adapters add to an engine_step, and to it per running request.

    .. math:: t = n\,(l\,h + c\,b) \text{ eager}, \qquad t = n\, g \text{ in CUDA graphs}

    n adapted products (q, k, v as one; gate and up as one), l launches of the shrink and expand kernels, h host time of
    an eager call, b running requests, c and g of `ServedAdapters`. Nothing where the framework merges.
    """
    served = framework.adapters
    if served is None:
        return 0.0, 0.0
    products = sum(count for *_, count in stack_of(architecture).products)
    if engine.cuda_graphs or engine.eager_call is None:
        return products * served.graph.value, 0.0
    return products * served.launches * engine.eager_call, products * served.eager_row.value


def trainer_in_framework(trainer: TrainerCalibration, framework: FrameworkCalibration) -> TrainerCalibration:
    """The trainer backend with what this framework sets otherwise: dispatch to experts, gradients, model code, loss.

    A gradient that no product adds is read with the sum so far, and the sum written: 2 + 2 b bytes, b those of a sum.
    MoE layers take the seconds of ``experts_as`` where the backend is the framework's usual one: one library, but rows
    with many budgets and degrees tell launches, gaps and permutation apart where truncated models cannot.
    """
    own, storage, timing, space = framework.training, trainer.storage, trainer.timing, trainer.workspace
    switches = trainer.switches.changed(own.switches)
    if own.gradients is not None:
        width = 2.0 if own.gradients == "bf16" else 4.0
        storage = storage.model_copy(update={"gradient": width, "reduce": width})
        # an update of 16-bit gradients makes fp32 ones of its shard (Megatron-Core 0.16.1, distrib_optimizer.py:2419)
        space = space.model_copy(update={"optimizer_scratch": 4.0 if width < 4.0 else space.optimizer_scratch})
    if own.reduces is not None:
        storage = storage.model_copy(update={"reduce": 2.0 if own.reduces == "bf16" else 4.0})
    if own.experts_as is not None and trainer.id == framework.trainers[0]:
        timed = load_trainer(own.experts_as).timing
        timing = timing.model_copy(update={name: getattr(timed, name) for name in EXPERT_TIMING})
    if own.host_layer is not None:
        timing = timing.model_copy(update={"host_layer": own.host_layer.value})
    if not own.fused_gradients:
        timing = timing.model_copy(update={"accumulate_bytes": 2.0 + 2.0 * storage.gradient})
    if own.loss is not None:
        moved = {"cross_entropy_bytes": own.loss.update, "scoring_bytes": own.loss.scoring}
        timing = timing.model_copy(update=moved)
    if own.logits is not None and (not own.logits.trainers or trainer.id in own.logits.trainers):
        each = own.logits
        loss = {"logit_bytes": each.update, "scoring_logit_bytes": each.scoring, "whole_logit_bytes": each.whole}
        space = space.model_copy(update=loss)
    return trainer.model_copy(update={"storage": storage, "timing": timing, "workspace": space, "switches": switches})


def training_in_framework_s(
    framework: FrameworkCalibration,
    architecture: Architecture,
    layout: Layout,
    batch: Microbatches,
    backend_s: npt.ArrayLike,
) -> FloatArray:
    r"""One optimizer update in this framework [s]; arrays broadcast over layouts.

    .. math:: g \left(t + c_u + (m + p - 1)\, \ell_{moe} / p\, (3 + f)\, h\right)

    t ``backend_s``, seconds of `training_update` (its ``skew`` from `routing_skew`); g the stage's factor
    (`StageFactors`), of a framework that nobody fitted times its backend's pace (`TrainerPace`), c_u the framework's
    seconds per update; m microbatches, p stages, l_moe MoE layers, f = 1 under full recompute, h the framework's
    seconds per MoE layer and forward.
    """
    full = (layout.activation_recompute == RECOMPUTE.index("full")).astype(np.float64)
    own = framework.training.update.value + (3.0 + full) * _moe_s(framework, architecture, layout, batch)
    factor = framework.factors.training * (framework.pace.training.value if framework.pace else 1.0)
    return np.asarray(factor * (np.asarray(backend_s, np.float64) + own), np.float64)


def scoring_in_framework_s(
    framework: FrameworkCalibration,
    architecture: Architecture,
    layout: Layout,
    batch: Microbatches,
    backend_s: npt.ArrayLike,
    *,
    reference: npt.ArrayLike = 0.5,
) -> FloatArray:
    """One scoring pass in this framework [s]: as `training_in_framework_s`, forward only.

    ``reference`` is the share of the passes that score the reference policy [1]; half of them where the old policy is
    scored too. Those also pay `reference_swap_s`.
    """
    own = framework.training.scoring_pass.value + _moe_s(framework, architecture, layout, batch)
    own = own + np.asarray(reference, np.float64) * reference_swap_s(framework, architecture, layout)
    factor = framework.factors.scoring * (framework.pace.scoring.value if framework.pace else 1.0)
    return np.asarray(factor * (np.asarray(backend_s, np.float64) + own), np.float64)


def shared_prefix_s(
    each: Overhead | None, architecture: Architecture, layout: Layout, batch: Microbatches
) -> FloatArray:
    """What sharing prompts costs in a pass or an update: seconds per layer and microbatch of a stage [s]."""
    value = 0.0 if each is None else each.value
    stages = layout.pipeline_parallel.astype(np.float64)
    return np.asarray((batch.count + stages - 1.0) * architecture.layers / stages * value, np.float64)


def reference_swap_s(framework: FrameworkCalibration, architecture: Architecture, layout: Layout) -> FloatArray:
    r"""Seconds in which the reference policy's weights take the place of the policy's and give it back.

    .. math:: t = 3\, b\, n_{dev} / r

    n_dev parameters that a device of the fullest stage holds (its ZeRO-3 shard), b bytes each, r the rate per device
    between host and device [bytes/s]; three copies: the policy out, the reference in, the policy in again. The
    reference's own copy in host memory is never written.
    """
    training = framework.training
    if training.reference_rate is None or not training.reference_bytes:
        return np.zeros(())
    held = held_parameters(architecture, layout, layout.zero_stage >= 3)
    return np.asarray(3.0 * training.reference_bytes * held / training.reference_rate.value, np.float64)


def held_parameters(architecture: Architecture, layout: Layout, sharded: BoolArray) -> FloatArray:
    """Parameters that a device of the fullest stage holds, its shard where they are ``sharded`` [parameters]."""
    stage = stage_parameters(architecture, layout)
    both = np.where(
        layout.pipeline_parallel == 1, stage.embedding + stage.head, np.maximum(stage.embedding, stage.head)
    )
    dense = (stage.layers * stage.layer_dense + both) / np.where(sharded, layout.shards, 1)
    expert_shards = np.minimum(layout.expert_data_parallel, layout.shards)
    routed = stage.layers * stage.layer_routed / np.where(sharded, expert_shards, 1)
    return np.asarray(dense + routed, np.float64)


def parked_s(framework: FrameworkCalibration, hardware: Hardware, n_bytes: npt.ArrayLike) -> FloatArray:
    """States of a device on their way from host memory and back, for one phase [s]."""
    rate = framework.training.parking_rate
    if rate is None:
        return np.asarray(2.0 * host_copy_s(hardware, np.asarray(n_bytes, np.float64)))
    return np.asarray(2.0 * np.asarray(n_bytes, np.float64) / rate.value)


def copies_gradients(framework: FrameworkCalibration, layout: Layout) -> FloatArray:
    """1 where parked states take their gradients to the host and back; elsewhere they are freed ``[layouts]``."""
    least = framework.training.copied_gradients
    return np.zeros(()) if least is None else (layout.zero_stage >= least).astype(np.float64)


def holds_gradients_whole(framework: FrameworkCalibration, settings: Settings) -> bool:
    """Whether gradients wait unsharded for an update's last microbatch: a job or the release says so."""
    return settings.whole_gradients or framework.training.whole_gradients


def routing_skew(framework: FrameworkCalibration, layout: Layout) -> FloatArray:
    """Tokens of the busiest expert-parallel device over the mean: expert_parallel ** exponent [1].

    Routers in training are not balanced by force as those of benchmarks are.
    """
    return np.asarray(np.power(layout.expert_parallel.astype(np.float64), framework.training.skew_exponent))


def padded_microbatches(
    framework: FrameworkCalibration, layout: Layout, batch: Microbatches, token_budget: npt.ArrayLike | None
) -> Microbatches:
    """Packed microbatches as the framework makes them: filled up to the budget where pipeline stages need equal shapes.

    ``token_budget`` per replica [tokens]; None where microbatches are cut by count.
    """
    if not framework.training.pipeline_padding or token_budget is None:
        return batch
    filled = np.maximum(batch.tokens, np.asarray(token_budget, np.float64))
    return replace(batch, tokens=np.where(layout.pipeline_parallel > 1, filled, batch.tokens))


def _moe_s(
    framework: FrameworkCalibration, architecture: Architecture, layout: Layout, batch: Microbatches
) -> FloatArray:
    """The framework's cost of the MoE layers of one forward over all microbatches and the pipeline's fill [s]."""
    stages = layout.pipeline_parallel.astype(np.float64)
    layers = float(stack_of(architecture).routes.sum()) / stages
    return np.asarray((batch.count + stages - 1.0) * layers * framework.training.moe_layer.value, np.float64)
