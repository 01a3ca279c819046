"""A critic is its policy's layers under a head of one value: no logits, no cross-entropy; by hand, and never dearer."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.cost.batching import Microbatches
from rlperf.cost.engine_memory import weight_bytes
from rlperf.cost.operators import head_operators
from rlperf.cost.parameters import parameters
from rlperf.cost.replica import Replica, total
from rlperf.cost.trainer.layers import head_seconds
from rlperf.cost.trainer.memory import trainer_memory
from rlperf.cost.trainer.scoring import scoring_pass
from rlperf.cost.trainer.update import training_update
from rlperf.cost.trainer_device import TrainerDevice, work_of
from rlperf.layout import RECOMPUTE, Layout
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer

HW = load_hardware("h100_sxm")
BATCHES = Microbatches.of(np.array(8192.0), np.array(8192.0 * 4096.0), np.array(4096.0), np.array(4.0))


@pytest.mark.parametrize(
    ("model", "policy", "critic"),
    [
        # 151,936 words x 896: the table stays for the input, a vector of 896 is the head
        ("Qwen2.5-0.5B", 494_032_768, 494_032_768 + 896),
        # the head has a table of its own, 152,064 words x 3,584
        ("Qwen2.5-7B", 7_615_616_512, 7_615_616_512 - 152_064 * 3_584 + 3_584),
    ],
)
def test_parameters_by_hand(model: str, policy: int, critic: int) -> None:
    arch = load_architecture(model)
    assert (parameters(arch), parameters(arch.critic)) == (policy, critic)


def test_head_seconds_by_hand() -> None:
    """Of Qwen2.5-0.5B: 6 FLOP per weight of 136 M and token, and what its loss moves, at the data sheet's at best."""
    arch, trainer = load_architecture("Qwen2.5-0.5B"), load_trainer("fsdp2")
    layout = Layout.of(zero_stage=3)
    device = TrainerDevice(HW, trainer, layout, work_of(layout, BATCHES))
    policy, critic = (head_seconds(each, device) for each in (arch, arch.critic))
    least = 6.0 * 8192 * 151_936 * 896 / 989e12 + 8192 * 151_936 * trainer.timing.cross_entropy_bytes / 3.35e12
    taken = float(np.ravel(policy.forward + policy.backward - critic.forward - critic.backward)[0])
    assert least < taken < 2.0 * least
    # 8,192 tokens x 896 values x 2 bytes are 14.7 MB: 4.4 us at 3.35 TB/s, four times forwards and backwards
    assert float(np.ravel(critic.forward + critic.backward)[0]) < 30.0 * 14.7e6 / 3.35e12


def test_no_logits_stand_in_memory() -> None:
    arch, trainer = load_architecture("Qwen2.5-0.5B"), load_trainer("fsdp2")
    layout = Layout.of(zero_stage=3, activation_recompute=RECOMPUTE.index("full"))
    policy, critic = (trainer_memory(each, HW, trainer, layout, BATCHES) for each in (arch, arch.critic))
    each = trainer.workspace.logit_bytes
    assert float(policy.logits) == pytest.approx(8192 * 151_936 * each)
    assert float(critic.logits) <= 8192 * each
    assert float(critic.total) < float(policy.total) - 8192 * 151_936 * 2.0


@pytest.mark.parametrize("model", ["Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_critic_is_never_dearer_than_its_policy(model: str, backend: str) -> None:
    arch, trainer = load_architecture(model), load_trainer(backend)
    degrees = [(1, 1, "full"), (2, 1, "none"), (1, 2, "full"), (2, 2, "selective"), (4, 2, "none")]
    for tensor, stages, recompute in degrees:
        layout = Layout.of(
            data_parallel=8 // tensor // stages, tensor_parallel=tensor, pipeline_parallel=stages,
            zero_stage=3 if backend == "fsdp2" else 1, activation_recompute=RECOMPUTE.index(recompute),
        )  # fmt: skip
        for seconds in (training_update, scoring_pass):
            policy, critic = (seconds(each, HW, trainer, layout, BATCHES).total_s for each in (arch, arch.critic))
            assert np.all(critic <= policy)
        for forward_only in (False, True):
            policy, critic = (
                trainer_memory(each, HW, trainer, layout, BATCHES, forward_only=forward_only).total
                for each in (arch, arch.critic)
            )
            # where the policy's head is its table, the vector of the critic's is one more
            assert np.all(critic <= policy + 32.0 * arch.hidden)


def test_a_reward_model_on_an_engine_has_one_output_too() -> None:
    """Of Qwen2.5-7B 152,064 words less 1, of 3,584 values of 2 bytes, and no row of logits to sample from."""
    arch = load_architecture("Qwen2.5-7B")
    policy, scores = (
        Replica.of(each, HW, load_engine_calibration("vllm"), Layout.of()) for each in (arch, arch.critic)
    )
    saved = float(weight_bytes(policy)) - float(weight_bytes(scores))
    assert saved == pytest.approx(152_063 * 3_584 * 2.0)
    seconds = [float(total(head_operators(each, np.array(1024.0)))) for each in (policy, scores)]
    assert seconds[0] - seconds[1] > 2.0 * 1024 * 152_063 * 3_584 / 989e12
