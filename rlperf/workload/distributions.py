"""Length models from PolyTrace's files of fitted production distributions.

`(enhanced_)task_distribution_parameters.json` hold Gaussian mixtures of 385,024 math samples and 241,546 tool sessions.
Their univariate log-normal fits are not used: they miss the data (KS .11 - .20) and contradict the mixtures' means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlperf.errors import SpecError
from rlperf.workload.dependence import Dependence
from rlperf.workload.laws import Component, Law
from rlperf.workload.lengths import Float
from rlperf.workload.model import LengthModel, LengthProvenance
from rlperf.workload.multiturn import MultiTurn

# The files say nothing about groups: these are assumptions and are named as such in the model's provenance.
ASSUMED_ICC = 0.5
_GROUP_NOTE = (
    "assumed: icc 0.5, between the two public recordings (0.09 of a base model, 0.89 of a distilled reasoning model)"
)


def models_from_distributions(content: Mapping[str, Any], source: str) -> dict[str, LengthModel]:
    """Models of the tasks that a distribution-parameter file holds: "math" and "tool_use"."""
    models = {}
    try:
        if "math_task" in content:
            models["math"] = _math(content, source)
        if "tool_calling_task" in content:
            models["tool_use"] = _tool_use(content, source)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SpecError(f"{source or 'distribution parameters'}: not as expected ({error!r})") from error
    return models


def _math(content: Mapping[str, Any], source: str) -> LengthModel:
    task = content["math_task"]
    mixture = task["gmm_parameters"]
    weights = np.array(mixture["weights"]) / np.sum(mixture["weights"])
    means, covariances = np.array(mixture["means"]), np.array(mixture["covariances"])
    laws = [
        Law(
            tuple(
                Component("normal", round(float(np.log(m)), 6), round(float(0.5 * np.log(v)), 6), round(float(w), 9))
                for m, v, w in zip(means[:, axis], covariances[:, axis, axis], weights, strict=True)
            )
        ).sorted()
        for axis in (0, 1)
    ]
    correlation = float(task["joint_distribution"]["correlation"])
    count = int(content["extraction_info"]["total_math_samples"])
    return LengthModel(
        task="math",
        provenance=LengthProvenance(
            kind="fitted",
            source=source or "PolyTrace distribution parameters, math (Gaussian mixture with 4 components)",
            responses=count,
            note=(
                "marginals of the published joint mixture, truncated at 0; response p50 / p95 / p99 of this law "
                f"8,202 / 21,568 / 26,481 against 8,164 / 21,553 / 26,477 recorded; {_GROUP_NOTE}"
            ),
        ),
        prompt=laws[0],
        response=laws[1],
        dependence=Dependence(ASSUMED_ICC, round(correlation / float(np.sqrt(ASSUMED_ICC)), 4), 0.2, 0.1),
    )


def _tool_use(content: Mapping[str, Any], source: str) -> LengthModel:
    task = content["tool_calling_task"]
    counts = {int(k): int(v) for k, v in task["call_count_distribution"].items()}
    sequences = {int(k): v for k, v in task["sequence_models"].items()}
    largest = max(counts)
    probability = np.array([counts.get(k, 0) for k in range(1, largest + 1)], np.float64)
    parts: dict[str, list[tuple[float, float, float]]] = {
        n: [] for n in ("prompt", "first", "middle", "last", "append", "total")
    }
    for calls, sequence in sequences.items():
        weight = float(counts[calls])
        mean, variance = _moments(sequence)
        outputs = [mean[f"output_{k}"] for k in range(1, calls + 1)]
        parts["prompt"].append((weight, mean["input_1"], variance["input_1"]))
        parts["last"].append((weight, outputs[-1], variance[f"output_{calls}"]))
        total = (sum(outputs), _total_variance(sequence, calls))
        parts["total"].append((weight, *total))
        if calls > 1:
            parts["first"].append((weight, outputs[0], variance["output_1"]))
        for k in range(2, calls + 1):
            parts["append"].append((weight, mean[f"input_{k}"], variance[f"input_{k}"]))
            if k < calls:
                parts["middle"].append((weight, outputs[k - 1], variance[f"output_{k}"]))
    laws = {name: _gamma_mixture(values) for name, values in parts.items()}
    sessions = int(content["extraction_info"]["total_tool_calling_samples"])
    return LengthModel(
        task="tool_use",
        provenance=LengthProvenance(
            kind="fitted",
            source=source or "PolyTrace distribution parameters, tool calling (moments of the published mixtures)",
            responses=sessions,
            note=(
                "gamma laws with the published mean and variance of each call, the calls of a session independent; "
                "assumed: tool latency (log-normal, median 0.3 s), icc 0.2 of turns and tokens as in the search trace"
            ),
        ),
        prompt=laws["prompt"],
        response=laws["total"],
        dependence=Dependence(0.2, 0.0, 0.1, 0.1),
        turns=MultiTurn(
            turn_probability=tuple(round(float(p), 6) for p in _normalised(probability)),
            turn_icc=0.2,
            first=laws["first"],
            middle=laws["middle"],
            last=laws["last"],
            generation_icc=(0.2, 0.2, 0.2),
            append=laws["append"],
            latency_s=(Law.single("lognormal", round(float(np.log(0.3)), 4), round(float(np.log(0.8)), 4)),),
            cached_start=0.0,
        ),
    )


def _normalised(values: Float) -> Float:
    shares = np.round(values / values.sum(), 6)
    shares[int(np.argmax(shares))] += 1.0 - shares.sum()
    return np.asarray(shares)


def _moments(sequence: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    names = sequence["feature_names"]
    covariance = np.array(sequence["covariance_matrix"], np.float64)
    mean = {n: float(v) for n, v in zip(names, sequence["mean_vector"], strict=True)}
    return mean, {n: float(v) for n, v in zip(names, np.diag(covariance), strict=True)}


def _total_variance(sequence: Mapping[str, Any], calls: int) -> float:
    """Variance of the sum of all outputs of a session."""
    names = sequence["feature_names"]
    rows = [names.index(f"output_{k}") for k in range(1, calls + 1)]
    return float(np.array(sequence["covariance_matrix"], np.float64)[np.ix_(rows, rows)].sum())


def _gamma_mixture(parts: Sequence[tuple[float, float, float]]) -> Law:
    """Gamma laws with given (weight, mean, variance); parts below 1 % are merged into the largest."""
    if not parts:
        return Law.single("lognormal", 0.0, -1.0)
    weights = np.array([p[0] for p in parts])
    weights /= weights.sum()
    kept = np.flatnonzero(weights >= 0.01)
    weights = weights[kept] / weights[kept].sum()
    components = []
    for i, weight in zip(kept, weights, strict=True):
        _, mean, variance = parts[int(i)]
        shape = float(np.clip(mean**2 / max(variance, 1e-6), 0.05, 2000.0))
        components.append(
            Component("gamma", round(float(np.log(shape)), 5), round(float(np.log(mean / shape)), 5), float(weight))
        )
    return Law(tuple(components)).sorted()
