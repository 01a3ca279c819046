"""Rows of ``measured/rl_step.csv`` as pools, batches and lengths; what is blank is filled in and named."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlperf.calibrate.rl_step_stack import Stack, dtype_named, stack_of
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.parameters import parameters, routed_parameters
from rlperf.errors import SpecError
from rlperf.layout import RECOMPUTE, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, in_nodes_of, load_hardware
from rlperf.specs.modes import Mode, mode_of_staleness
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer

PROMPT_TOKENS = 120.0
"""Mean prompt of mathematics questions where a row states none: the rows that do state it have 95 to 146."""


@dataclass(frozen=True, eq=False)
class StepRow:
    """One measured rl_step made ready for prediction.

    ``critic``: PPO's second network, of the policy's size on the trainer's devices.
    """

    row_id: str
    group: str
    framework: str
    trainer: str
    engine: str
    architecture: Architecture
    hardware: Hardware
    mode: Mode
    staleness: int
    devices: int
    rollout_devices: int
    trainer_devices: int
    rollout: Layout
    trainer_layout: Layout
    prompts: int
    group_size: int
    mini_batch: int
    token_budget: float
    scoring_token_budget: float
    scoring_microbatch: int
    packing: bool
    critic: bool
    scoring_passes: int
    prompt_tokens: float
    response_tokens: float
    cap_tokens: float
    lora_rank: int | None
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


_BLANK = frozenset({"", "n/a", "na", "nan", "-", "?"})
"""How tables write that a value is not published."""


class _Cells:
    """Cells of a row; a blank one gives a default that is written down."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = {name: "" if (value or "").strip().lower() in _BLANK else value for name, value in row.items()}
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


def mode_of(colocated: bool, staleness: float, *, shared: bool = True) -> Mode:
    """Execution mode of a row by its columns; pools that ``shared`` devices hold take turns, however stale."""
    return mode_of_staleness(staleness, shares_devices=colocated and (shared or staleness == 0))


def read_row(row: Mapping[str, str], architectures: Path | None = None) -> StepRow:
    """A row as pools, batch and lengths.

    ``architectures`` : folder whose files go before the shipped architectures

    Raises
    ------
    SpecError : what cannot be predicted at all: no mean length, unknown names, degrees that do not divide
    """
    cells = _Cells(row)
    row = cells.row
    stack = stack_of(row.get("framework", ""))
    cells.assumed += stack.assumed
    prompt, response = _mean_lengths(cells)
    architecture, hardware = _architecture(row["architecture"], architectures), load_hardware(row["gpu"])
    hardware = in_nodes_of(hardware, cells.count("gpus_per_node", hardware.cluster.devices_per_node))
    colocated = cells.count("colocated", 1, "same devices") == 1
    devices, rollout_devices, trainer_devices = _pools(cells, colocated)
    staleness = cells.number("max_staleness", 0.0 if colocated else 1.0, "synchronous" if colocated else "one step")
    cap_total = cells.number("seq_limit", max(4096.0, 2.0 * (prompt + response)), "a common default")
    prompts, group_size = cells.count("prompts_per_step", 64, "default"), cells.count("group_size", 32, "default")
    microbatch = cells.count("microbatch", 1, "default")
    packing = _packing(cells, stack)
    budget = cells.number("train_token_budget", cap_total * microbatch, "limit x microbatch")
    scoring_microbatch = _scoring_microbatch(row.get("note", ""), cells)
    scoring_budget = _scoring_budget(cells, budget, cap_total * scoring_microbatch)
    layout, stated = _trainer_layout(cells, stack, architecture, hardware, trainer_devices, microbatch)
    rollout_dtype = dtype_named(cells.text("rollout_dtype", *_served(cells, architecture, hardware)), "rollout_dtype")
    rollout = _rollout_layout(cells, architecture, hardware, rollout_devices, rollout_dtype)
    algorithm = (row.get("algorithm") or "").strip().upper()
    if prompt >= cap_total:
        raise SpecError(f"isl_mean {prompt:g} leaves no room for a response within seq_limit {cap_total:g}")
    return StepRow(
        row_id=row.get("row_id", ""),
        group=row.get("group", ""),
        framework=stack.framework,
        trainer=stack.trainer,
        engine=stack.engine,
        architecture=architecture,
        hardware=hardware,
        mode=mode_of(colocated, staleness, shared=rollout_devices + trainer_devices > devices),
        staleness=int(np.ceil(staleness)),
        devices=devices,
        rollout_devices=rollout_devices,
        trainer_devices=trainer_devices,
        rollout=rollout,
        trainer_layout=layout,
        prompts=prompts,
        group_size=group_size,
        mini_batch=cells.count("mini_batch", prompts * group_size, "one optimizer update"),
        token_budget=budget,
        scoring_token_budget=scoring_budget,
        scoring_microbatch=scoring_microbatch,
        packing=packing,
        critic=algorithm == "PPO",
        scoring_passes=_scoring_passes(cells, stack.framework, staleness, algorithm),
        prompt_tokens=prompt,
        response_tokens=response,
        cap_tokens=_cap(cells, cap_total, prompt, response),
        lora_rank=cells.count("lora_rank", 0) or None,
        compute_dtype=dtype_named(cells.text("compute_dtype", "bf16", "default"), "compute_dtype"),
        rollout_dtype=rollout_dtype,
        memory_fraction=_memory_fraction(cells, architecture, hardware, rollout, rollout_dtype, colocated),
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


def _cap(cells: _Cells, total: float, prompt: float, response: float) -> float:
    """Most tokens of a response: frameworks cap the response alone, or prompt and response together [tokens]."""
    whole = max(total - prompt, response)
    return max(min(cells.number("response_limit", whole), whole), response)


def _architecture(name: str, folder: Path | None) -> Architecture:
    """The architecture of that name, the folder's own first."""
    file = folder / f"{name}.json" if folder else None
    return load_architecture(file if file and file.is_file() else name)


def _mean_lengths(cells: _Cells) -> tuple[float, float]:
    """Mean prompt and response [tokens]; one that is blank is what the other leaves of a published sum."""
    row = cells.row
    prompt, response, total = (row.get(name) or "" for name in ("isl_mean", "osl_mean", "seq_mean"))
    if response and total and not prompt:
        found = cells.number("seq_mean", 0.0) - cells.number("osl_mean", 0.0)
        if found > 0.0:
            cells.assumed.append(f"isl_mean={found:g} (seq_mean less osl_mean)")
            return found, cells.number("osl_mean", 0.0)
    before = cells.number("isl_mean", PROMPT_TOKENS, "mathematics questions")
    if response:
        return before, cells.number("osl_mean", 0.0)
    rest = cells.number("seq_mean", 0.0) - before
    if rest <= 0.0:
        raise SpecError("no mean response length is published: compare such rows with each other")
    cells.assumed.append(f"osl_mean={rest:g} (seq_mean less the prompt)")
    return before, rest


def _pools(cells: _Cells, colocated: bool) -> tuple[int, int, int]:
    """GPUs in all, of the rollout and of the trainer; of two pools an unstated one has what the other leaves."""
    devices = cells.count("n_gpus", 8, "one node")
    if colocated:
        return devices, cells.count("rollout_gpus", devices), cells.count("trainer_gpus", devices)
    left = {
        name: devices - cells.count(name, 0) if cells.row.get(name) else devices // 2
        for name in ("rollout_gpus", "trainer_gpus")
    }
    if not all(cells.row.get(name) for name in left) and min(left.values()) < 1:
        raise SpecError(f"{devices} GPUs leave none for the other pool")
    return (
        devices,
        cells.count("rollout_gpus", left["trainer_gpus"], "what the trainer leaves, or half"),
        cells.count("trainer_gpus", left["rollout_gpus"], "what the rollout leaves, or half"),
    )


def _served(cells: _Cells, architecture: Architecture, hardware: Hardware) -> tuple[str, str]:
    """The engine's dtype where the row states none, and why: fp8 where stated degrees do not hold 16-bit weights."""
    degrees = ("rollout_tensor_parallel", "rollout_pipeline_parallel")
    replica = float(np.prod([cells.count(name, 1) for name in degrees]))
    replica = max(replica, cells.number("rollout_expert_parallel", 1.0))
    stated = any(cells.row.get(name) for name in degrees)
    if stated and 2.0 * parameters(architecture) / replica > 0.9 * hardware.device.memory:
        return "fp8", "16-bit weights do not fit"
    return "bf16", "default"


def _packing(cells: _Cells, stack: Stack) -> bool:
    """Whether sequences are packed, where the row does not say it: TRL's trainer pads, the others pack."""
    if stack.framework == "trl":
        return cells.count("sequence_packing", 0, "TRL pads") == 1
    return cells.count("sequence_packing", 1, "default of the examples") == 1


def _scoring_passes(cells: _Cells, framework: str, staleness: float, algorithm: str) -> int:
    """Log-probability passes; verl's asynchronous modes take the engine's log-probabilities for the old policy's."""
    if algorithm == "DAPO" and not (framework.startswith("verl") and staleness > 0):
        return cells.count("scoring_passes", 1, "DAPO has no reference policy")
    if framework.startswith("verl") and staleness > 0:
        return cells.count("scoring_passes", 0, "asynchronous: the engine's log-probabilities serve")
    return cells.count("scoring_passes", 2, "old policy and reference")


_SCORING_MICROBATCH = r"(?:scoring microbatch|logprob batch) (\d+)"


def _scoring_microbatch(note: str, cells: _Cells) -> int:
    """Sequences per scoring forward, from the note or the default of four."""
    found = re.search(_SCORING_MICROBATCH, note)
    if found:
        return int(found.group(1))
    cells.assumed.append("scoring microbatch=4 (default of the examples)")
    return 4


def _scoring_budget(cells: _Cells, budget: float, usual: float) -> float:
    """Tokens of a scoring microbatch; frameworks let a stated training budget serve for it."""
    if cells.row.get("train_token_budget") and not re.search(_SCORING_MICROBATCH, cells.row.get("note", "")):
        return cells.number("scoring_token_budget", budget, "as in training")
    return cells.number("scoring_token_budget", usual, "limit x scoring microbatch")


def _rollout_layout(cells: _Cells, architecture: Architecture, hardware: Hardware, devices: int, dtype: str) -> Layout:
    """One replica; experts over more devices than a tensor group hold as many copies of its attention."""
    least = _fitting_tensor(architecture, hardware, devices, dtype)
    stated = cells.count("rollout_expert_parallel", 1)
    tensor = cells.count("rollout_tensor_parallel", least if stated == 1 else 1, "smallest that fits")
    pipeline, expert = cells.count("rollout_pipeline_parallel", 1), stated
    copies = max(expert // tensor, 1)
    if devices % (tensor * copies * pipeline):
        raise SpecError(f"{devices} rollout GPUs do not divide into replicas of {tensor * copies * pipeline}")
    return Layout.of(
        tensor_parallel=tensor * copies,
        pipeline_parallel=pipeline,
        expert_parallel=expert,
        expert_tensor_parallel=max(tensor // expert, 1),
        attention_data_parallel=copies,
    )


def _fitting_tensor(architecture: Architecture, hardware: Hardware, devices: int, dtype: str) -> int:
    """Smallest power of two whose share of the weights stays below half of a device's memory."""
    tensor, weights = 1, parameters(architecture) * dtype_of(dtype).weight_bytes
    while weights / tensor > 0.5 * hardware.device.memory and tensor < devices:
        tensor *= 2
    return tensor


def _memory_fraction(
    cells: _Cells, architecture: Architecture, hardware: Hardware, layout: Layout, dtype: str, colocated: bool
) -> float:
    """Share of a device that the engine may use: what recipes set, more where the weights leave no cache in it."""
    usual = 0.6 if colocated else 0.8
    replica = float(layout.tensor_parallel * layout.pipeline_parallel)
    routed = float(routed_parameters(architecture))
    dense = (float(parameters(architecture)) - routed) * float(layout.attention_data_parallel)
    weights = (dense + routed) / replica * dtype_of(dtype).weight_bytes / hardware.device.memory
    if weights + 0.15 <= usual:
        return cells.number("rollout_memory_fraction", usual, "common default")
    return cells.number("rollout_memory_fraction", min(round(weights + 0.25, 2), 0.9), "holds the weights and a cache")


def _holding_tensor(architecture: Architecture, hardware: Hardware, devices: int) -> int:
    """Smallest power of two up to 8 at which dense weights and gradients (6 bytes each) take below half of a device."""
    dense = float(parameters(architecture) - routed_parameters(architecture))
    tensor = 1
    while dense * 6.0 / tensor > 0.5 * hardware.device.memory and tensor < min(8, devices):
        tensor *= 2
    return tensor


def _trainer_layout(
    cells: _Cells, stack: Stack, architecture: Architecture, hardware: Hardware, devices: int, microbatch: int
) -> tuple[Layout, bool]:
    """The trainer's layout, and whether the row states its recompute mode."""
    capability = load_trainer(stack.trainer).capability
    whole = capability.usual_zero_stage < 3
    least = _holding_tensor(architecture, hardware, devices) if whole and capability.has("tensor_parallel") else 1
    tensor = cells.count("trainer_tensor_parallel", least, "smallest that holds the model")
    pipeline = cells.count("trainer_pipeline_parallel", 1, "default")
    context = cells.count("trainer_context_parallel", 1, "default")
    expert = cells.count("trainer_expert_parallel", 1)
    spread = re.search(r"ulysses (\d+)", cells.row.get("note", "").lower())
    ulysses = int(spread.group(1)) if spread else 1
    replica = tensor * pipeline * context * ulysses
    if devices % replica:
        raise SpecError(f"{devices} trainer GPUs do not divide into replicas of {replica}")
    if devices // pipeline % expert:
        raise SpecError(f"the {devices // pipeline} trainer GPUs of a stage do not divide into groups of {expert}")
    recompute = (cells.row.get("activation_recompute") or "").strip()
    zero = cells.count("zero_stage", capability.usual_zero_stage, "the backend's")
    layout = Layout.of(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline=cells.count("trainer_virtual_pipeline", 1),
        context_parallel=context,
        ulysses=ulysses,
        expert_parallel=expert,
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
