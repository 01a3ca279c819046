"""Images in prompts: the vision tower in rollout, scoring, training and memory, and pixels on their way."""

from __future__ import annotations

from random import Random

import pytest

from rlperf.api import predict_job
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.layers.vision import Images, encode_s_per_token, vision_prefill_s
from rlperf.cost.replica import Replica
from rlperf.frameworks.export import export_run
from rlperf.frameworks.keytable import key_table
from rlperf.frameworks.registry import adapter_of
from rlperf.layout import Layout
from rlperf.plan.answer.plan import Prediction
from rlperf.sim.rl_step.data_movement import BatchShape, batch_bytes, data_movement_s, pixel_bytes
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.job import Job
from rlperf.specs.profiles import load_architecture
from rlperf.specs.rl_calibration import load_framework_calibration

from .framework_samples import sample_run, with_values

H100 = load_hardware("h100_sxm", "dgx_h100")
VL = load_architecture("Qwen2.5-VL-7B")
ROLLOUT = {
    "role": "rollout",
    "layout": {"tensor_parallel": 1, "data_parallel": 8},
    "settings": {"memory_fraction": 0.5},
}
LAYOUT = {"data_parallel": 8, "zero_stage": 3, "activation_recompute": "full"}


def job(images: dict[str, object] | None, architecture: str = "Qwen2.5-VL-7B", **settings: object) -> Job:
    task: dict[str, object] = {
        "name": "look", "workload": "math", "prompts_per_step": 32, "group_size": 4, "max_prompt_tokens": 2048,
        "max_response_tokens": 1024, "images": images,
    }  # fmt: skip
    trainer = {"role": "trainer", "layout": LAYOUT, "settings": {"token_budget": 8192, "parked": False, **settings}}
    return Job.model_validate(
        {
            "architecture": architecture, "cluster": "dgx_h100", "framework": "verl", "trainer_backends": ["fsdp2"],
            "tasks": [task], "pools": [ROLLOUT, trainer],
        }
    )  # fmt: skip


def predicted(images: dict[str, object] | None, architecture: str = "Qwen2.5-VL-7B", **settings: object) -> Prediction:
    return predict_job(job(images, architecture, **settings))


SEEN = {"share": 0.9, "tokens": 256}


def test_the_tower_costs_time_in_every_stage_that_sees_a_prompt() -> None:
    text, images = predicted(None), predicted(SEEN)
    frozen = predicted(SEEN, freeze_vision=True)
    for name in ("rollout", "scoring", "training", "data_movement"):
        assert getattr(images.stages_s, name) > getattr(text.stages_s, name), name
    assert text.stages_s.training < frozen.stages_s.training < images.stages_s.training
    assert frozen.stages_s.scoring == images.stages_s.scoring
    assert images.stages_s.weight_sync == text.stages_s.weight_sync


def test_without_a_tower_images_are_text_and_that_is_said() -> None:
    plain, images = predicted(None, "Qwen2.5-7B"), predicted(SEEN, "Qwen2.5-7B")
    assert images.stages_s == plain.stages_s
    assert any("counted as text" in note for note in images.assumed)


def test_a_preset_states_its_images() -> None:
    asked = job(None)
    task = asked.tasks[0].model_copy(update={"workload": "image"})
    found = predict_job(asked.model_copy(update={"tasks": (task,)}))
    assert any("93 % of a prompt's tokens are images" in note and "1,300" in note for note in found.assumed)


def test_encoding_grows_with_the_share_and_is_paid_where_tokens_are_prefilled() -> None:
    assert VL.vision is not None
    half, whole = (encode_s_per_token(H100, VL.vision, Images(share, 256.0), 1.0) for share in (0.5, 1.0))
    assert whole == pytest.approx(2.0 * half)
    assert whole * 8192 == pytest.approx(float(vision_prefill_s(H100, VL.vision, 32, 1024, 1)))
    assert (
        encode_s_per_token(H100, None, Images(1.0, 256.0), 1.0) == 0.0 == encode_s_per_token(H100, VL.vision, None, 1.0)
    )
    engine = load_engine_calibration("vllm")
    bare, seeing = (
        engine_step_cost(Replica.of(VL, H100, engine, Layout.of()), images=i) for i in (None, Images(1.0, 256.0))
    )

    def prefill(cost: EngineStepCost) -> float:
        return float(cost.engine_step_s(4.0, 4000.0, 512.0, 0.0, 1.0))

    assert prefill(seeing) - prefill(bare) == pytest.approx(512.0 * seeing.prefill_per_token_s)
    assert float(seeing.decode_s(4.0, 4000.0)) == float(bare.decode_s(4.0, 4000.0))


def test_pixels_leave_the_controller_but_do_not_come_back_from_rollout() -> None:
    framework = load_framework_calibration("verl", "fsdp2")
    assert framework.controller == "single"
    text = BatchShape(64, 1000, 500, scoring_passes=2)
    images = BatchShape(64, 1000, 500, scoring_passes=2, image_patches=4000, patch_bytes=4704.0)
    pixels = float(pixel_bytes(images))
    assert float(batch_bytes(images) - batch_bytes(text)) == pytest.approx(pixels) == 64 * 4000 * 4704.0
    more = float(data_movement_s(framework, images) - data_movement_s(framework, text))
    assert more == pytest.approx(3.0 * pixels / framework.controller_rate.value)


def test_activations_of_the_tower_count_against_memory() -> None:
    def peak(images: dict[str, object] | None) -> float:
        return predicted(images).memory_bytes["trainer"].total

    assert peak(SEEN) > peak(None)


def test_a_frozen_tower_has_neither_gradients_nor_moments_nor_activations() -> None:
    """FSDP over eight: 4 bytes of gradient and 8 of moments; its weights stay."""
    trained, frozen = (predicted(SEEN, freeze_vision=flag).memory_bytes["trainer"].parts for flag in (False, True))
    assert VL.vision is not None
    for part, each in (("weights", 0.0), ("gradients", 4.0), ("optimizer", 8.0)):
        spared = trained[part] - frozen[part]
        assert spared == pytest.approx(each * VL.vision.parameters / 8, rel=1e-6), part
    assert frozen["activations"] == predicted(None).memory_bytes["trainer"].parts["activations"]


def test_a_frozen_tower_is_written_or_named_as_lost() -> None:
    for framework, backend, key in (
        ("verl", "fsdp2", "actor_rollout_ref.actor.freeze_vision_tower"),
        ("nemo_rl", "megatron", "policy.megatron_cfg.freeze_config.freeze_vision_model"),
        ("nemo_rl", "fsdp2", "policy.dtensor_cfg.automodel_kwargs.freeze_config.freeze_vision_tower"),
        ("trl", "deepspeed", None),
        ("slime", "megatron", None),
    ):
        run = sample_run(Random(3), framework, key_table(framework).versions[-1])
        stage = 1 if backend == "megatron" else 3
        run = with_values(run, {"trainer.backend": backend, "trainer.zero_stage": stage, "trainer.freeze_vision": True})
        emission = export_run(run, adapter_of(framework), key_table(framework).versions[-1], "config").emission
        if key:
            assert {one.key: one.value for one in emission.settings}[key] is True
        assert any("freeze_vision" in str(lost) for lost in emission.limitations) == (key is None)
