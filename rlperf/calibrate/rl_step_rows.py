"""Rows of ``measured/rl_step.csv`` as pools, batches and lengths; what is blank is filled in and named."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlperf.calibrate.assumed_lengths import AssumedLengths
from rlperf.cost.dtypes import DTYPES
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.layout import RECOMPUTE, Layout
from rlperf.sim.rl_step.modes import ExecutionMode
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, load_hardware
from rlperf.specs.profiles import load_architecture

PROMPT_TOKENS = 120.0
"""Mean prompt of mathematics questions where a row states none: the rows that do state it have 95 to 146."""

_FRAMEWORKS = (
    (r"nemo.*dtensor", "nemo_rl_dtensor"),
    (r"nemo", "nemo_rl_megatron"),
    (r"verl.*megatron", "verl_megatron"),
    (r"verl", "verl_fsdp"),
    (r"areal", "areal"),
    (r"openrlhf", "openrlhf"),
    (r"slime", "slime"),
    (r"trl", "trl"),
)
_TRAINERS = {
    "nemo_rl_dtensor": "fsdp2",
    "nemo_rl_megatron": "megatron",
    "verl_megatron": "megatron",
    "slime": "megatron",
    "openrlhf": "deepspeed",
}


@dataclass(frozen=True, eq=False)
class StepRow:
    """One measured rl_step made ready for prediction.

    ``fits`` picks among recompute modes where the row states none: none if it fits the device, else full.
    """

    row_id: str
    group: str
    framework: str
    trainer: str
    architecture: Architecture
    hardware: Hardware
    mode: ExecutionMode
    staleness: int
    devices: int
    rollout_devices: int
    trainer_devices: int
    rollout: Layout
    trainer_layout: Layout
    prompts: int
    group_size: int
    mini_batch: int
    token_budget: float | None
    scoring_token_budget: float | None
    scoring_microbatch: int
    packing: bool
    scoring_passes: int
    prompt_tokens: float
    response_tokens: float
    cap_tokens: float
    compute_dtype: str
    rollout_dtype: str
    memory_fraction: float
    cuda_graphs: bool
    recompute_stated: bool
    measured: Mapping[str, float]
    assumed: tuple[str, ...]
    configuration: str = field(default="", repr=False)

    @property
    def sequences(self) -> int:
        """Sequences of the rl_step."""
        return self.prompts * self.group_size

    def trajectories(self, law: AssumedLengths, seed: int = 0) -> Trajectories:
        """The rl_step's trajectories under an assumed law of lengths."""
        drawn = law.draw(self.prompts, self.group_size, self.response_tokens, self.cap_tokens, seed)
        group = np.repeat(np.arange(self.prompts), self.group_size)
        return Trajectories.of(round(self.prompt_tokens), drawn.ravel(), group=group)


class _Cells:
    """Cells of a row; a blank one gives a default that is written down."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.assumed: list[str] = []

    def text(self, name: str, default: str, why: str | None = None) -> str:
        value = (self.row.get(name) or "").strip()
        if not value and why is not None:
            self.assumed.append(f"{name}={default} ({why})")
        return value or default

    def number(self, name: str, default: float, why: str | None = None) -> float:
        text = self.text(name, f"{default:g}", why)
        try:
            return float(text)
        except ValueError:
            raise SpecError(f"{name} {text!r} is not a number") from None

    def count(self, name: str, default: int, why: str | None = None) -> int:
        return int(self.number(name, default, why))


def framework_of(text: str) -> str:
    """Name of the framework calibration of a row's ``framework`` cell.

    >>> framework_of("NeMo-RL (vLLM + PyTorch DTensor)")
    'nemo_rl_dtensor'
    """
    for pattern, name in _FRAMEWORKS:
        if re.search(pattern, text.lower()):
            return name
    raise SpecError(f"framework {text!r} is none that rlperf knows")


def mode_of(colocated: bool, staleness: float) -> ExecutionMode:
    """Execution mode of a row by its columns."""
    if colocated and staleness == 0:
        return ExecutionMode.SYNC_COLOCATED
    if staleness == 0:
        return ExecutionMode.SYNC_DISAGGREGATED
    return ExecutionMode.ONE_STEP_OFF if staleness == 1 else ExecutionMode.FULLY_ASYNC


def read_row(row: Mapping[str, str]) -> StepRow:
    """A row as pools, batch and lengths.

    Raises
    ------
    SpecError : what cannot be predicted at all: no mean length, unknown names, degrees that do not divide
    """
    cells = _Cells(row)
    framework = framework_of(row.get("framework", ""))
    if not row.get("osl_mean"):
        raise SpecError("no mean response length is published: compare such rows with each other")
    architecture, hardware = load_architecture(row["architecture"]), load_hardware(row["gpu"])
    devices = cells.count("n_gpus", 8, "one node")
    colocated = cells.count("colocated", 1, "same devices") == 1
    rollout_devices = cells.count("rollout_gpus", devices, None if colocated else "all")
    trainer_devices = cells.count("trainer_gpus", devices, None if colocated else "all")
    staleness = cells.number("max_staleness", 0.0 if colocated else 1.0, "synchronous" if colocated else "one step")
    cap_total = cells.number("seq_limit", 4096.0, "a common default")
    prompt = cells.number("isl_mean", PROMPT_TOKENS, "mathematics questions")
    response = cells.number("osl_mean", 0.0)
    prompts, group_size = cells.count("prompts_per_step", 64, "default"), cells.count("group_size", 32, "default")
    microbatch = cells.count("microbatch", 1, "default")
    packing = cells.count("sequence_packing", 1, "default of the Megatron path") == 1
    budget = cells.number("train_token_budget", cap_total * microbatch, "limit x microbatch")
    scoring_microbatch = _scoring_microbatch(row.get("note", ""), cells)
    scoring_budget = cells.number("scoring_token_budget", cap_total * scoring_microbatch, "limit x scoring microbatch")
    layout, stated = _trainer_layout(cells, framework, architecture, trainer_devices, microbatch)
    if prompt >= cap_total:
        raise SpecError(f"isl_mean {prompt:g} leaves no room for a response within seq_limit {cap_total:g}")
    return StepRow(
        row_id=row.get("row_id", ""),
        group=row.get("group", ""),
        framework=framework,
        trainer=_TRAINERS.get(framework, "fsdp2"),
        architecture=architecture,
        hardware=hardware,
        mode=mode_of(colocated, staleness),
        staleness=int(np.ceil(staleness)),
        devices=devices,
        rollout_devices=rollout_devices,
        trainer_devices=trainer_devices,
        rollout=_rollout_layout(cells, architecture, rollout_devices),
        trainer_layout=layout,
        prompts=prompts,
        group_size=group_size,
        mini_batch=cells.count("mini_batch", prompts * group_size, "one optimizer update"),
        token_budget=budget,
        scoring_token_budget=scoring_budget,
        scoring_microbatch=scoring_microbatch,
        packing=packing,
        scoring_passes=_scoring_passes(cells, framework, staleness),
        prompt_tokens=prompt,
        response_tokens=response,
        cap_tokens=max(cap_total - prompt, response),
        compute_dtype=_dtype(cells, "compute_dtype"),
        rollout_dtype=_dtype(cells, "rollout_dtype"),
        memory_fraction=cells.number("rollout_memory_fraction", 0.6, "common default"),
        cuda_graphs=cells.count("cuda_graph", 1, "engine default") == 1,
        recompute_stated=stated,
        measured={
            name: float(row[f"measured_{name}"])
            for name in ("step_s", "rollout_s", "scoring_s", "train_s", "weight_sync_s")
            if row.get(f"measured_{name}")
        },
        assumed=tuple(cells.assumed),
        configuration=configuration_key(row),
    )


def _dtype(cells: _Cells, name: str) -> str:
    """A dtype that the cost model knows."""
    found = cells.text(name, "bf16", "default").lower()
    if found not in DTYPES:
        raise SpecError(Problem(f"{name} {found!r} is unknown", suggestion=did_you_mean(found, DTYPES)))
    return found


def _scoring_passes(cells: _Cells, framework: str, staleness: float) -> int:
    """Log-probability passes; verl's asynchronous modes take the engine's log-probabilities for the old policy's."""
    if framework.startswith("verl") and staleness > 0:
        return cells.count("scoring_passes", 0, "asynchronous: the engine's log-probabilities serve")
    return cells.count("scoring_passes", 2, "old policy and reference")


def _scoring_microbatch(note: str, cells: _Cells) -> int:
    """Sequences per scoring forward, from the note or the default of four."""
    found = re.search(r"(?:scoring microbatch|logprob batch) (\d+)", note)
    if found:
        return int(found.group(1))
    cells.assumed.append("scoring microbatch=4 (default of the examples)")
    return 4


def _rollout_layout(cells: _Cells, architecture: Architecture, devices: int) -> Layout:
    tensor = cells.count("rollout_tensor_parallel", _fitting_tensor(architecture, devices), "smallest that fits")
    pipeline = cells.count("rollout_pipeline_parallel", 1)
    expert = cells.count("rollout_expert_parallel", 1)
    if devices % (tensor * pipeline):
        raise SpecError(f"{devices} rollout GPUs do not divide into replicas of {tensor * pipeline}")
    return Layout.of(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        expert_parallel=expert,
        expert_tensor_parallel=max(tensor // expert, 1),
    )


def _fitting_tensor(architecture: Architecture, devices: int) -> int:
    """Smallest power of two whose share of bf16 weights stays below 40 GB."""
    tensor = 1
    while architecture.parameters * 2.0 / tensor > 40e9 and tensor < devices:
        tensor *= 2
    return tensor


def _holding_tensor(architecture: Architecture, devices: int) -> int:
    """Smallest power of two up to 8 at which dense weights and gradients (6 bytes each) stay below 40 GB a device."""
    dense = float(architecture.parameters - architecture.routed_parameters)
    tensor = 1
    while dense * 6.0 / tensor > 40e9 and tensor < min(8, devices):
        tensor *= 2
    return tensor


def _trainer_layout(
    cells: _Cells, framework: str, architecture: Architecture, devices: int, microbatch: int
) -> tuple[Layout, bool]:
    """The trainer's layout, and whether the row states its recompute mode."""
    least = _holding_tensor(architecture, devices) if "megatron" in framework or framework == "slime" else 1
    tensor = cells.count("trainer_tensor_parallel", least, "smallest that holds the model")
    pipeline = cells.count("trainer_pipeline_parallel", 1, "default")
    context = cells.count("trainer_context_parallel", 1, "default")
    spread = re.search(r"ulysses (\d+)", cells.row.get("note", "").lower())
    ulysses = int(spread.group(1)) if spread else 1
    replica = tensor * pipeline * context * ulysses
    if devices % replica:
        raise SpecError(f"{devices} trainer GPUs do not divide into replicas of {replica}")
    recompute = (cells.row.get("activation_recompute") or "").strip()
    zero = cells.count("zero_stage", 1 if "megatron" in framework else 3, "the backend's")
    layout = Layout.of(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline=cells.count("trainer_virtual_pipeline", 1),
        context_parallel=context,
        ulysses=ulysses,
        expert_parallel=cells.count("trainer_expert_parallel", 1),
        data_parallel=devices // replica,
        sequence_parallel=cells.count("sequence_parallel", int(tensor > 1), "on with tensor parallel"),
        zero_stage=zero,
        activation_recompute=RECOMPUTE.index(recompute) if recompute in RECOMPUTE else 0,
        offload=1 if cells.count("optimizer_offload", 0) else 0,
        microbatch=microbatch,
    )
    return layout, bool(recompute)


_CONFIGURATION = (
    "framework", "architecture", "gpu", "n_gpus", "colocated", "rollout_gpus", "max_staleness", "prompts_per_step",
    "group_size", "seq_limit", "compute_dtype", "rollout_tensor_parallel", "trainer_tensor_parallel",
    "trainer_pipeline_parallel", "trainer_context_parallel", "trainer_expert_parallel",
)  # fmt: skip


def configuration_digest(key: str) -> str:
    """Short digest of a configuration, as calibrations list those that they saw.

    >>> len(configuration_digest("verl|Qwen2.5-7B"))
    12
    """
    return hashlib.blake2s(key.encode(), digest_size=6).hexdigest()


def configuration_key(row: Mapping[str, str]) -> str:
    """Key of the configuration: equal for reruns and later releases of one setup."""
    return "|".join((row.get(name) or "").strip() for name in _CONFIGURATION)
