"""A measured rl_step as the job that was run: the question that a user would ask, with the row's lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pydantic import ValidationError

from rlperf.calibrate.rl_step.assumed_lengths import AssumedLengths
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.plan.question.context import Context, TaskContext, counting, keys_of
from rlperf.plan.question.demand import LengthSource, batches
from rlperf.sim.rl_step.overheads import trainer_in_framework
from rlperf.sim.rl_step.site import TrainerStack
from rlperf.specs.engine_calibration import EngineCalibration, load_engine_calibration
from rlperf.specs.job import Job
from rlperf.specs.modes import MODES
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer
from rlperf.workload import LengthTable, Recording
from rlperf.workload.fitting import fit_model


def job_of(row: StepRow, workload: str = "recording") -> Job:
    """The job that a row ran, with everything pinned that it says or that was assumed.

    ``workload``: where its lengths are, a preset or the path of a recording
    """
    framework, engine = load_framework_calibration(row.framework), load_engine_calibration(row.engine)
    mode = row.mode
    if MODES[mode].shares_devices and row.rollout_devices != row.trainer_devices:
        mode = "disaggregated"  # pools that take turns on devices that they share in part: serial, without parking
    colocated = MODES[mode].shares_devices
    devices = row.devices if colocated else max(row.rollout_devices + row.trainer_devices, row.devices)
    task = {
        "name": "measured",
        "workload": workload,
        "prompts_per_step": row.prompts,
        "group_size": row.group_size,
        "mini_batch": _mini_batch(row),
        "max_prompt_tokens": row.prompt_limit,
        "max_response_tokens": round(row.cap_tokens),
        "reward_s": "0 s",
        "max_trajectories": row.max_trajectories,
    }
    pools = [
        {
            "role": "rollout",
            "devices": row.rollout_devices,
            "layout": _engine_layout(row.rollout),
            "settings": _engine_settings(row, engine),
        },
        {
            "role": "trainer",
            "devices": row.trainer_devices,
            "layout": row.trainer_layout.values().stated(),
            "settings": _trainer_settings(row),
        },
    ]
    stated = {
        "name": row.row_id or "measured",
        "architecture": row.architecture.name,
        "cluster": row.hardware.cluster.name,
        "nodes": -(-devices // row.hardware.cluster.devices_per_node),
        "algorithm": "ppo" if row.critic else "grpo",
        "reference": row.scoring_passes > 1,
        "old_policy": row.scoring_passes > 0,
        "in_flight_updates": row.in_flight_updates,
        "framework": row.software.facts or framework.framework,
        "engine": row.engine,
        "trainer_backends": [row.trainer],
        "modes": [mode],
        "limits": {"staleness": max(row.staleness, 0 if colocated else 1)},
        "tasks": [task],
        "pools": pools,
    }
    try:
        return Job.model_validate(stated)
    except ValidationError as error:
        raise SpecError(f"cannot be asked as a job: {error.errors()[0]['msg']}") from error


def _mini_batch(row: StepRow) -> int:
    """Prompts per optimizer update: the divisor of the batch with which its updates come nearest to the row's."""
    wanted = row.prompts * row.group_size / row.mini_batch
    divisors = [n for n in range(1, row.prompts + 1) if row.prompts % n == 0]
    return min(divisors, key=lambda n: (abs(row.prompts / n - wanted), -n))


def _engine_layout(layout: Layout) -> dict[str, int]:
    names = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "attention_data_parallel")
    return {name: int(getattr(layout, name)) for name in names}


def _engine_settings(row: StepRow, engine: EngineCalibration) -> dict[str, object]:
    return {
        "rollout_dtype": row.rollout_dtype,
        "kv_dtype": "bf16",
        "memory_fraction": row.memory_fraction,
        "cuda_graphs": row.cuda_graphs,
        "max_running": engine.max_running,
        "engine_token_budget": engine.token_budget,
        "chunked_prefill": engine.chunked_prefill,
        "prefix_caching": engine.prefix_caching,
        "speculation": row.speculation,
        "draft_acceptance": row.draft_acceptance,
    }


def _trainer_settings(row: StepRow) -> dict[str, object]:
    """What the row says; a colocated trainer parks its states: the rows' frameworks do so, or say what it costs."""
    return {
        "backend": row.trainer,
        "compute_dtype": row.compute_dtype,
        "packing": row.packing,
        "token_budget": None if row.counted else round(row.token_budget),
        "scoring_token_budget": None if row.counted else round(row.scoring_token_budget),
        "scoring_microbatch": row.scoring_microbatch,
        "lora_rank": row.lora_rank,
        "parked": True if MODES[row.mode].shares_devices and row.rollout_devices == row.trainer_devices else None,
    }


def lengths_of(row: StepRow, law: AssumedLengths, seed: int = 0) -> LengthTable:
    """One rl_step of the row's mean lengths under an assumed law."""
    drawn = law.draw(row.prompts, row.group_size, row.response_tokens, row.longest_response, seed).ravel()
    rows = np.zeros(drawn.size, dtype=np.int64)
    return LengthTable(
        prompt_tokens=np.full(drawn.size, round(row.prompt_tokens)),
        response_tokens=drawn.astype(np.int64),
        group=np.repeat(np.arange(row.prompts), row.group_size),
        rl_step=rows,
        turn=rows,
        max_response_tokens=round(row.cap_tokens),
    )


def context_of(row: StepRow, law: AssumedLengths, framework: FrameworkCalibration | None = None) -> Context:
    """The row's job with everything that its names stand for, as `rlperf.plan.question.context.resolve` would find it.

    ``framework`` replaces the shipped calibration (fits use it).
    """
    job, facts = job_of(row), framework or load_framework_calibration(row.framework).at_release(row.release)
    cluster = row.hardware.cluster.model_copy(update={"nodes": job.nodes})
    hardware = replace(row.hardware, cluster=cluster)
    recording, task = Recording(lengths_of(row, law)), job.tasks[0]
    source = LengthSource(task, recording, lambda: fit_model(recording), row.architecture.vision is not None)
    if row.in_flight_updates is not None:
        facts = facts.model_copy(update={"in_flight_updates": row.in_flight_updates})
    facts = counting(facts.running(job.framework, row.trainer, row.release), job.pool("trainer"))
    own = load_trainer(row.trainer)
    stack = TrainerStack(row.trainer, trainer_in_framework(own, facts), facts, keys_of(own, facts.framework))
    return Context(
        job=job,
        hardware=hardware,
        rollout_hardware=hardware,
        engine_profile=load_engine_calibration(row.engine),
        trainers=(stack,),
        tasks=(TaskContext(task, row.architecture, source, tuple(batches(task))),),
    )
