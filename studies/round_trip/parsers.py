"""Exports held against the parsers of TRL and AReaL: each script is run with a stub, and what it starts is parsed.

In an environment of the framework's own, without rlperf; what else they import is stubbed.
TRL: `pip install trl peft torch requests`; the parser of its launcher, then its own.
AReaL: that, `pip install hydra-core lark uvloop colorlog attrs`, and `pip download --no-deps areal`, unpacked; its
loader, its allocations, and what its trainer validates before it starts anything.

Run: python studies/round_trip/parsers.py trl FOLDER...
     python studies/round_trip/parsers.py areal --package UNPACKED FOLDER...
FOLDER: an export (`exports.py`); one line for each that is refused, then how many of how many are taken
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

Check = Callable[[list[str]], None]
"""Raises where the framework refuses what a script starts: a program and its words."""
PROGRAMS = ("accelerate", "trl", "python3")
STUB = """#!{0}
import json, os, sys
_, *words = sys.argv
print(json.dumps(["{1}", *words]), file=open(os.environ["STUB_LOG"], "a"))
"""
GIVEN = {"NODE_RANK": "1", "MASTER_ADDR": "node0", "AREAL": "/"}
REAL = ("areal", "attr", "pydantic", "colorlog", "interegular", "atomicwrites", "regex")
"""Not stubbed: those that are there, or that are asked for in vain by what handles their absence."""
OLD = ("weave", "latex2sympy2_extended", "math_verify", "fastapi", "uvicorn")
"""What TRL 0.27 and 0.28 import without asking whether it is there."""
HEAVY = (
    "areal.infra", "areal.engine.fsdp_engine", "areal.engine.megatron_engine", "areal.engine.sglang_remote",
    "areal.engine.vllm_remote", "areal.utils.hf_utils", "areal.utils.dataloader",
)  # fmt: skip
"""Parts of AReaL that compute, and take no part in reading a configuration."""


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that have every attribute: of some names alone, or of all that are not there."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = name.partition(".")[0]
        known = root in sys.stdlib_module_names or root in REAL
        asked = any(f"{name}.".startswith(f"{each}.") for each in self.names) if self.names else not known
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if asked else None

    def create_module(self, spec: Any) -> Any:
        made = MagicMock(__version__="99.0.0")
        made.__path__, made.__spec__, made.__name__ = [], spec, spec.name
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def trl() -> Check:
    """The parsers of ``accelerate launch``, ``trl.scripts.grpo`` and ``trl vllm-serve``."""
    import accelerate.utils.launch as launcher
    import transformers.training_args as own
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    sys.meta_path.append(Stubs(OLD))
    from trl.scripts import grpo, vllm_serve

    own.is_torch_bf16_gpu_available = lambda: True
    launcher.is_port_in_use = lambda *_: False

    def check(words: list[str]) -> None:
        if words[1] == "vllm-serve":
            vllm_serve.make_parser().parse_args(words[2:])
            return
        args, told, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ",".join(told.deepspeed_config)
            launcher.prepare_deepspeed_cmd_env(args)
        else:
            launcher.prepare_multi_gpu_env(args)
        where = str(getattr(args, "master_addr", None) or getattr(args, "rdzv_endpoint", None))
        assert args.num_machines == 1 or not where.startswith("None"), "no host of the first node"
        own.TrainingArguments.world_size = property(lambda _: args.num_processes)
        grpo.make_parser().parse_args_and_config(list(args.training_script_args), fail_with_unknown_args=True)

    return check


def areal(package: Path) -> Check:
    """``load_expr_config`` up to its logging, the allocations, and ``PPOTrainer._validate_cfg``."""
    sys.path.insert(0, str(package))
    bare = types.ModuleType("areal")  # its own __init__ starts everything
    bare.__path__ = [str(package / "areal")]
    sys.modules["areal"] = bare
    importlib.import_module("transformers.integrations.hub_kernels")
    sys.meta_path[:] = [Stubs(HEAVY), *sys.meta_path, Stubs()]
    from areal.api.alloc_mode import ModelAllocation
    from areal.api.cli_args import GRPOConfig, parse_cli_args, to_structured_cfg
    from areal.trainer.rl_trainer import PPOTrainer
    from omegaconf import OmegaConf

    def check(words: list[str]) -> None:
        config: Any = OmegaConf.to_object(to_structured_cfg(parse_cli_args(words[1:])[0], GRPOConfig))
        trainer = PPOTrainer.__new__(PPOTrainer)
        trainer.config = config
        trainer.actor_alloc = ModelAllocation.from_str(config.actor.backend, name="actor")
        trainer.rollout_alloc = ModelAllocation.from_str(config.rollout.backend, name="rollout")
        together = trainer._should_offload_rollout = trainer._is_actor_rollout_colocated(config)
        trainer._should_offload_actor = together or config.actor.offload
        trainer._should_offload_critic = config.critic is not None and config.critic.offload
        trainer._should_offload_ref = config.ref is not None and config.ref.offload
        trainer._should_offload_teacher = False
        trainer._validate_cfg()
        for role in (config.critic, config.ref):
            if role is not None:
                ModelAllocation.from_str(role.backend)
        pools = [trainer.actor_alloc, *([] if together else [trainer.rollout_alloc])]
        devices = sum(pool.parallel.world_size for pool in pools)
        there = config.cluster.n_nodes * config.cluster.n_gpus_per_node
        assert devices == there, f"{devices} GPUs of allocations, {there} of the cluster"

    return check


def started(script: Path, stubs: Path) -> list[list[str]]:
    """The programs that a script starts, each with its words."""
    log = stubs / "log"
    log.write_text("")
    given = {"PATH": f"{stubs}:/usr/bin:/bin", "STUB_LOG": str(log), **GIVEN}
    subprocess.run(["bash", str(script)], env=given, check=True, cwd=script.parent)
    return [json.loads(line) for line in log.read_text().splitlines()]


def refusal(folder: Path, stubs: Path, check: Check) -> str:
    """Why what an export starts is refused; empty where all of it is taken."""
    os.chdir(folder)  # launches name files beside them
    for script in sorted(path for path in folder.glob("*.sh") if path.name != "run_all.sh"):
        try:
            for words in started(script, stubs):
                check(words)
        except (Exception, SystemExit) as error:
            return f"{script.name}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def main() -> None:
    """What is refused, and how many are taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["trl", "areal"])
    parser.add_argument("--package", type=Path, help="AReaL's, unpacked")
    parser.add_argument("folders", type=Path, nargs="+")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    folders = [folder.resolve() for folder in asked.folders]
    check = trl() if asked.framework == "trl" else areal(asked.package.resolve())
    with tempfile.TemporaryDirectory() as name:
        for program in PROGRAMS:
            (Path(name) / program).write_text(STUB.format(sys.executable, program))
            (Path(name) / program).chmod(0o755)
        refused = {folder: why for folder in folders if (why := refusal(folder, Path(name), check))}
    for folder, why in refused.items():
        print(folder.name, why)
    print(f"{len(folders) - len(refused)} of {len(folders)} taken")


if __name__ == "__main__":
    main()
