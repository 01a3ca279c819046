"""AReaL: what of a model is trained, and in which precision: adapters, and Megatron's products of 8 bits."""

from __future__ import annotations

from rlperf.frameworks.fields import Setting
from rlperf.frameworks.keytable import Flat
from rlperf.frameworks.run import Run, ref

_FP8 = "actor.megatron.fp8_config."


def adapters(run: Run) -> list[Setting]:
    """LoRA: adapters are served unmerged, and SGLang takes them from disk (areal/engine; behaviour sheet, 5)."""
    rank, engine = run.trainer.lora_rank, run.rollout.backend
    if not rank:
        return []
    settings = [
        Setting("actor.use_lora", True),
        Setting("actor.lora_rank", rank),
        Setting("rollout.use_lora", True),
        Setting(f"{engine}.enable_lora", True),
        Setting(f"{engine}.max_lora_rank", rank),
    ]
    if engine == "sglang":
        settings.append(Setting("actor.weight_update_mode", "disk", "SGLang takes adapters from disk"))
    return settings


def in_eight_bits(run: Run, stated: Flat) -> tuple[Run, frozenset[str]]:
    """The run with Megatron's FP8 training, which its section switches on by being there, and the keys that say so.

    The checkpoint has to be of 8 bits, too, so that engines serve it: api/cli_args.py FP8EngineConfig (None: off) and
    engine/megatron_engine.py _validate_fp8_consistency of 1.0.4.
    """
    keys = frozenset(key for key in stated if key.startswith(_FP8))
    if not keys or run.trainer.backend != "megatron":
        return run, keys
    dtype = "mxfp8" if stated.get(_FP8 + "recipe") == "mxfp8" else "fp8"
    return run.having({ref("trainer.compute_dtype"): dtype, ref("rollout.rollout_dtype"): "fp8"}), keys
