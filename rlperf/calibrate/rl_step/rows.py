"""Rows of ``measured/rl_step.csv`` as pools, batches and lengths; what is blank is filled in and named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rlperf.calibrate.columns import (
    Guess,
    Reading,
    cell,
    column,
    count,
    derived,
    devices_of,
    flag,
    number,
    one_of,
    positive,
    read,
    stated,
    text,
    tokens_of,
    whole,
)
from rlperf.calibrate.rl_step.configuration import configuration_key
from rlperf.calibrate.rl_step.software import Software, dtype_named, software_of
from rlperf.calibrate.tables import Row
from rlperf.cost.dtypes import dtype_of
from rlperf.cost.parameters import parameters, routed_parameters
from rlperf.errors import SpecError
from rlperf.layout import RECOMPUTE, Layout
from rlperf.specs.architecture import Architecture
from rlperf.specs.hardware import Hardware, in_nodes_of
from rlperf.specs.modes import Mode, mode_of_staleness
from rlperf.specs.speculation import NONE, DraftSetting, first_of, sees_far
from rlperf.specs.speculation_calibration import load_speculation
from rlperf.specs.trainer_calibration import load_trainer
from rlperf.specs.trainer_capability import Capability

PROMPT_TOKENS = 120.0
"""Mean prompt of mathematics questions where a row states none: the rows that do state it have 95 to 146."""


def mode_of(colocated: bool, staleness: float, *, shared: bool = True) -> Mode:
    """Execution mode of a row by its columns; pools that ``shared`` devices hold take turns, however stale."""
    return mode_of_staleness(staleness, shares_devices=colocated and (shared or staleness == 0))


# -- what stands in where a cell is blank -----------------------------------------------------------------------------


def _framework(row: StepRow) -> str | Guess[str]:
    return Guess(row.software.framework, row.software.stands_in) if row.software.stands_in else row.software.framework


def _prompt(row: StepRow) -> Guess[float]:
    """Mean prompt [tokens]: what the response leaves of a published sum, else that of mathematics questions."""
    rest = (row.printed_total or 0.0) - (row.printed_response or np.inf)
    return Guess(rest, "seq_mean less osl_mean") if rest > 0.0 else Guess(PROMPT_TOKENS, "mathematics questions")


def _response(row: StepRow) -> Guess[float]:
    rest = (row.printed_total or 0.0) - row.prompt_tokens
    if rest <= 0.0:
        raise SpecError("no mean response length is published: compare such rows with each other")
    return Guess(rest, "seq_mean less the prompt")


def _hardware(row: StepRow) -> Hardware:
    found = row.row.hardware()
    return in_nodes_of(found, row.devices_per_node or found.cluster.devices_per_node)


def _left(row: StepRow, other: str) -> int | Guess[int]:
    """Devices of a pool that the row does not state: all if colocated, else what the other leaves, or half."""
    if row.colocated:
        return row.devices
    printed = cell(row.row, f"{other}_gpus", whole)
    left = row.devices - printed if printed is not None else row.devices // 2
    if left < 1:
        raise SpecError(f"{row.devices} GPUs leave none for the other pool")
    return Guess(left, f"what the {other} leaves, or half")


def _staleness(row: StepRow) -> Guess[float]:
    return Guess(0.0, "synchronous") if row.colocated else Guess(1.0, "one step")


def _limit(row: StepRow) -> Guess[float]:
    return Guess(max(4096.0, 2.0 * (row.prompt_tokens + row.response_tokens)), "a common default")


def _cap(row: StepRow) -> float:
    """Most tokens of a response: frameworks cap the response alone, or prompt and response together [tokens]."""
    if row.prompt_tokens >= row.limit_tokens:
        limit = f"seq_limit {row.limit_tokens:g}"
        raise SpecError(f"isl_mean {row.prompt_tokens:g} leaves no room for a response within {limit}")
    together = max(row.limit_tokens - row.prompt_tokens, row.response_tokens)
    return max(min(row.response_limit or together, together), row.response_tokens)


def _longest(row: StepRow) -> float:
    """Longest response of an rl_step [tokens]: as the note gives it, else somebody is taken to reach the cap."""
    found = re.search(r"longest (?:response )?(\d+)", row.note)
    return min(float(found.group(1)), row.cap_tokens) if found else row.cap_tokens


def _prompt_limit(row: StepRow) -> int:
    """Most tokens of a prompt: what a stated cap of the response leaves of the limit, else the mean [tokens]."""
    left = row.limit_tokens - row.response_limit if row.response_limit else 0.0
    return round(max(row.prompt_tokens, left))


def _packing(row: StepRow) -> Guess[bool]:
    """Whether sequences are packed, where the row does not say it: TRL's trainer pads."""
    if row.of_skyrl:
        return Guess(True, "SkyRL's use_sample_packing, on unless stated")
    return Guess(False, "TRL pads") if row.framework == "trl" else Guess(True, "default of the examples")


def _microbatch(row: StepRow) -> Guess[int]:
    return Guess(1, "SkyRL's micro_train_batch_size_per_gpu" if row.of_skyrl else "default")


_SCORING_MICROBATCH = r"(?:scoring microbatch|logprob batch) (\d+)"


def _scoring_microbatch(row: StepRow) -> int | Guess[int]:
    """Sequences per scoring forward, from the note or the default of four."""
    found = re.search(_SCORING_MICROBATCH, row.note)
    if found is None and row.of_skyrl:
        return Guess(1, "SkyRL's micro_forward_batch_size_per_gpu")
    return int(found.group(1)) if found else Guess(4, "default of the examples")


def _scoring_budget(row: StepRow) -> Guess[float]:
    """Tokens of a scoring microbatch; frameworks let a stated training budget serve for it."""
    if stated(row.row, "train_token_budget") and not re.search(_SCORING_MICROBATCH, row.note):
        return Guess(row.token_budget, "as in training")
    return Guess(row.limit_tokens * row.scoring_microbatch, "limit x scoring microbatch")


def _scoring_passes(row: StepRow) -> Guess[int]:
    """Log-probability passes; verl's asynchronous modes take the engine's log-probabilities for the old policy's."""
    if row.framework.startswith("verl") and row.mean_staleness > 0:
        return Guess(0, "asynchronous: the engine's log-probabilities serve")
    return Guess(1, "DAPO has no reference policy") if row.algorithm == "DAPO" else Guess(2, "old policy and reference")


def _served_dtype(row: StepRow) -> Guess[str]:
    """The engine's dtype where the row states none: fp8 where stated degrees do not hold 16-bit weights."""
    degrees = [cell(row.row, f"rollout_{name}_parallel", count) for name in ("tensor", "pipeline")]
    replica = max(float(np.prod([degree or 1 for degree in degrees])), float(row.rollout_expert))
    if any(degrees) and 2.0 * parameters(row.architecture) / replica > 0.9 * row.hardware.device.memory:
        return Guess("fp8", "16-bit weights do not fit")
    return Guess("bf16", "default")


def _rollout_tensor(row: StepRow) -> Guess[int]:
    """Smallest power of two whose share of the weights stays below half of a device's memory."""
    tensor, weights = 1, parameters(row.architecture) * dtype_of(row.rollout_dtype).weight_bytes
    while weights / tensor > 0.5 * row.hardware.device.memory and tensor < row.rollout_devices:
        tensor *= 2
    return Guess(tensor if row.rollout_expert == 1 else 1, "smallest that fits")


def _rollout_layout(row: StepRow) -> Layout:
    """One replica; experts over more devices than a tensor group hold as many copies of its attention."""
    tensor, expert = row.rollout_tensor, row.rollout_expert
    copies = max(expert // tensor, 1)
    replica = tensor * copies * row.rollout_pipeline
    if row.rollout_devices % replica:
        raise SpecError(f"{row.rollout_devices} rollout GPUs do not divide into replicas of {replica}")
    return Layout.of(
        tensor_parallel=tensor * copies,
        pipeline_parallel=row.rollout_pipeline,
        expert_parallel=expert,
        expert_tensor_parallel=max(tensor // expert, 1),
        attention_data_parallel=copies,
    )


def _memory_fraction(row: StepRow) -> Guess[float]:
    """Share of a device that the engine may use: what recipes set, more where the weights leave no cache in it."""
    usual = 0.6 if row.colocated else 0.8
    replica = float(row.rollout.tensor_parallel * row.rollout.pipeline_parallel)
    routed = float(routed_parameters(row.architecture))
    dense = (float(parameters(row.architecture)) - routed) * float(row.rollout.attention_data_parallel)
    weights = (dense + routed) / replica * dtype_of(row.rollout_dtype).weight_bytes / row.hardware.device.memory
    if weights + 0.15 <= usual:
        return Guess(usual, "common default")
    return Guess(min(round(weights + 0.25, 2), 0.9), "holds the weights and a cache")


def _trainer_tensor(row: StepRow) -> Guess[int]:
    """Smallest power of two up to 8 at which dense weights and gradients (6 bytes each) take below half of a device."""
    tensor = 1
    if row.capability.usual_zero_stage < 3 and row.capability.has("tensor_parallel"):
        dense = float(parameters(row.architecture) - routed_parameters(row.architecture))
        while dense * 6.0 / tensor > 0.5 * row.hardware.device.memory and tensor < min(8, row.trainer_devices):
            tensor *= 2
    return Guess(tensor, "smallest that holds the model")


def _ulysses(row: StepRow) -> int:
    spread = re.search(r"ulysses (\d+)", row.note.lower())
    return int(spread.group(1)) if spread else 1


def _recompute(row: StepRow) -> str | Guess[str]:
    """What is recomputed, where the row's note or its framework says it: most layers in full count as all."""
    if row.of_skyrl:
        return Guess("full", "SkyRL's gradient_checkpointing and recompute_granularity, on unless stated")
    if row.framework == "nemo_rl_dtensor" and row.trainer_tensor > 1:
        return Guess("full", "NeMo-RL's recipes of DTensor with tensor parallel (fsdp2tp8sp-actckpt)")
    found = re.search(r"full recomputation of (\d+) of (\d+) layers", row.note)
    return "full" if found and 2 * int(found.group(1)) >= int(found.group(2)) else "none"


def _updated_on_host(row: StepRow) -> bool:
    """Whether offloaded optimizer states are the layout's; verl's Megatron parks them, unless its CPU Adam is named."""
    parks = row.framework == "verl_megatron" and not row.software.stands_in
    return row.optimizer_offload and not (parks and "OFFLOAD_FRACTION=1" not in row.note)


def _trainer_layout(row: StepRow) -> Layout:
    devices, pipeline, expert = row.trainer_devices, row.trainer_pipeline, row.trainer_expert
    replica = row.trainer_tensor * pipeline * row.trainer_context * row.ulysses
    if devices % replica:
        raise SpecError(f"{devices} trainer GPUs do not divide into replicas of {replica}")
    if devices // pipeline % expert:
        raise SpecError(f"the {devices // pipeline} trainer GPUs of a stage do not divide into groups of {expert}")
    return Layout.of(
        tensor_parallel=row.trainer_tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline=row.trainer_virtual,
        context_parallel=row.trainer_context,
        ulysses=row.ulysses,
        expert_parallel=expert,
        data_parallel=devices // replica,
        sequence_parallel=row.sequence_parallel,
        zero_stage=row.zero_stage,
        activation_recompute=RECOMPUTE.index(row.activation_recompute),
        offload=int(_updated_on_host(row)),
        microbatch=row.microbatch,
    )


def _mode(row: StepRow) -> Mode:
    shared = row.rollout_devices + row.trainer_devices > row.devices
    return mode_of(row.colocated, row.mean_staleness, shared=shared)


def _measured(row: StepRow) -> Mapping[str, float]:
    names = ("step_s", "rollout_s", "scoring_s", "train_s", "weight_sync_s")
    cells = {name: cell(row.row, f"measured_{name}", positive if name == "step_s" else number) for name in names}
    found = {name: seconds for name, seconds in cells.items() if seconds is not None}
    rest = 2.0 * found.get("step_s", 0.0) - sum(found.values())
    if len(found) == len(names) and rest > 0.0 and row.colocated:
        found["rest_s"] = rest
    return found


def _environment(row: StepRow) -> int | None:
    """Trajectories that the environment has under way at once, where the note says so."""
    found = re.search(r"environment concurrency capped at (\d+)", row.note)
    return int(found.group(1)) if found else None


def _in_flight(row: StepRow) -> bool | None:
    """Whether engines take weights while they generate, where the note says so."""
    found = re.search(r"in_flight_weight_updates (true|false)", row.note.lower())
    return None if found is None else found.group(1) == "true"


USUAL_DRAFTS = 3
"""Drafted tokens per engine_step where a row states none: those of slime's and miles' scripts and of SGLang's own
examples (``--sglang-speculative-num-steps 3``)."""


def _speculation(row: StepRow) -> str | Guess[str]:
    """The column's ``method:k`` as a pool says it; SGLang calls the model's own layer EAGLE, too."""
    stated_word = row.row.text("speculation").lower()
    if not stated_word or stated_word == NONE:
        return NONE
    name, _, drafts = stated_word.partition(":")
    own = name == "mtp" or (name in ("eagle", "nextn") and row.architecture.prediction_layers > 0)
    method = "mtp" if own else "ngram" if name == "ngram" else "eagle3"
    if drafts.isdecimal():
        return f"{method}:{drafts}"
    return Guess(f"{method}:{USUAL_DRAFTS}", "the drafts of the frameworks' scripts")


def _draft_acceptance(row: StepRow) -> float | None:
    """Share of first drafts accepted that yields the accept length of the note (SGLang logs it), None without one."""
    found = re.search(r"accept length (\d+(?:\.\d+)?)", row.note.lower())
    wanted = DraftSetting.parse(row.speculation)
    if found is None or wanted is None:
        return None
    fit, arch = load_speculation().of(wanted.method), row.architecture
    falls = fit.fall(sees_far(wanted.method, arch.family, arch.prediction_layers)) if fit else 1.0
    return first_of(float(found.group(1)), falls, wanted.most)


def _rank(cell: str) -> int | None:
    return whole(cell) or None


@dataclass(frozen=True, eq=False)
class StepRow(Reading):
    """One measured rl_step made ready for prediction; fields stand in the order in which they are found."""

    software: Software = derived(lambda row: software_of(row.row.text("framework")))
    framework: str = derived(_framework)
    architecture: Architecture = derived(lambda row: row.row.architecture())
    devices_per_node: int | None = column(count, None, name="gpus_per_node")
    hardware: Hardware = derived(_hardware)
    note: str = column(text, "")
    release: str = column(text, "", name="framework_version")
    algorithm: str = column(str.upper, "")

    printed_total: float | None = column(tokens_of, None, name="seq_mean")
    printed_response: float | None = column(tokens_of, None, name="osl_mean")
    prompt_tokens: float = column(number, _prompt, name="isl_mean")
    response_tokens: float = column(tokens_of, _response, name="osl_mean")
    limit_tokens: float = column(tokens_of, _limit, name="seq_limit")
    response_limit: float | None = column(tokens_of, None)
    cap_tokens: float = derived(_cap)
    longest_response: float = derived(_longest)
    prompt_limit: int = derived(_prompt_limit)

    colocated: bool = column(flag, Guess(True, "same devices"))
    devices: int = column(devices_of, Guess(8, "one node"), name="n_gpus")
    rollout_devices: int = column(devices_of, lambda row: _left(row, "trainer"), name="rollout_gpus")
    trainer_devices: int = column(devices_of, lambda row: _left(row, "rollout"), name="trainer_gpus")
    mean_staleness: float = column(number, _staleness, name="max_staleness")
    mode: Mode = derived(_mode)

    prompts: int = column(count, Guess(64, "default"), name="prompts_per_step")
    group_size: int = column(count, Guess(32, "default"))
    mini_batch: int = column(count, lambda row: Guess(row.sequences, "one optimizer update"))
    microbatch: int = column(count, _microbatch)
    packing: bool = column(flag, _packing, name="sequence_packing")
    token_budget: float = column(
        positive, lambda row: Guess(row.limit_tokens * row.microbatch, "limit x microbatch"), name="train_token_budget"
    )
    scoring_microbatch: int = derived(_scoring_microbatch, name="scoring microbatch")
    scoring_token_budget: float = column(positive, _scoring_budget)
    scoring_passes: int = column(whole, _scoring_passes)

    capability: Capability = derived(lambda row: load_trainer(row.trainer).capability)
    trainer_tensor: int = column(count, _trainer_tensor, name="trainer_tensor_parallel")
    trainer_pipeline: int = column(count, Guess(1, "default"), name="trainer_pipeline_parallel")
    trainer_virtual: int = column(count, 1, name="trainer_virtual_pipeline")
    trainer_context: int = column(count, Guess(1, "default"), name="trainer_context_parallel")
    trainer_expert: int = column(count, 1, name="trainer_expert_parallel")
    ulysses: int = derived(_ulysses)
    sequence_parallel: int = column(whole, lambda row: Guess(int(row.trainer_tensor > 1), "on with tensor parallel"))
    zero_stage: int = column(whole, lambda row: Guess(row.capability.usual_zero_stage, "the backend's"))
    activation_recompute: str = column(one_of(RECOMPUTE), _recompute)
    optimizer_offload: bool = column(flag, False)
    trainer_layout: Layout = derived(_trainer_layout)
    lora_rank: int | None = column(_rank, None)
    compute_dtype: str = column(partial(dtype_named, column="compute_dtype"), Guess("bf16", "default"))

    rollout_pipeline: int = column(count, 1, name="rollout_pipeline_parallel")
    rollout_expert: int = column(count, 1, name="rollout_expert_parallel")
    rollout_dtype: str = column(partial(dtype_named, column="rollout_dtype"), _served_dtype)
    rollout_tensor: int = column(count, _rollout_tensor, name="rollout_tensor_parallel")
    rollout: Layout = derived(_rollout_layout)
    memory_fraction: float = column(number, _memory_fraction, name="rollout_memory_fraction")
    cuda_graphs: bool = column(flag, Guess(True, "engine default"), name="cuda_graph")

    speculation: str = derived(_speculation)
    draft_acceptance: float | None = derived(_draft_acceptance)
    max_trajectories: int | None = derived(_environment)
    in_flight_updates: bool | None = derived(_in_flight)
    measured: Mapping[str, float] = derived(_measured)

    @property
    def trainer(self) -> str:
        """Name of the trainer's backend."""
        return self.software.trainer

    @property
    def engine(self) -> str:
        """Name of the rollout's engine."""
        return self.software.engine

    @property
    def staleness(self) -> int:
        """Policy versions that a rollout may be behind."""
        return int(np.ceil(self.mean_staleness))

    @property
    def sequences(self) -> int:
        """Sequences of the rl_step."""
        return self.prompts * self.group_size

    @property
    def critic(self) -> bool:
        """Whether PPO's critic is trained on the trainer's devices, too."""
        return self.algorithm == "PPO"

    @property
    def of_skyrl(self) -> bool:
        """Whether SkyRL ran it, of whose keys and defaults more is known than of its seconds."""
        return self.software.facts == "skyrl"

    @property
    def counted(self) -> bool:
        """Whether packed microbatches hold a number of sequences, however short: that is stated, and no tokens are.

        SkyRL has no other way; NeMo-RL's number is one of longest sequences, its token budget.
        """
        said = self.of_skyrl or (not self.framework.startswith("nemo_rl") and bool(stated(self.row, "microbatch")))
        return said and self.packing and not stated(self.row, "train_token_budget")

    @property
    def recompute_stated(self) -> bool:
        """Whether the row says what is recomputed."""
        return bool(stated(self.row, "activation_recompute")) or self.activation_recompute != "none"

    @property
    def configuration(self) -> str:
        """Key of the configuration, see `configuration_key`."""
        return configuration_key(self.row.cells)


def read_row(cells: Mapping[str, str], architectures: Path | None = None) -> StepRow:
    """A row given as plain cells; ``architectures`` is a folder whose files go before the shipped architectures.

    Raises
    ------
    SpecError : what cannot be predicted at all: no mean length, unknown names, degrees that do not divide
    """
    return read(StepRow, Row(cells.get("row_id", ""), cells.get("group", ""), 0, cells, architectures))
