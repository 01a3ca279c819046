"""How faithful a length model is to a recording: in its statistics, and in the rollout time that its lengths cause.

This compares *simulated* rollouts of recorded and of sampled lengths. It is not the 94.7 % of PolyTrace's authors:
theirs is a replay of recorded lengths on real GPUs against real seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlperf.errors import SpecError
from rlperf.workload.bootstrap import bootstrap
from rlperf.workload.lengths import Float, Int, LengthTable
from rlperf.workload.model import LengthModel
from rlperf.workload.sampling import predictive_replicates, sample_lengths, sample_rl_steps

_LEAST_STEPS = 100
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rollouts:
    """Ways to run the rollout: their names, and the seconds that the lengths of one rl_step take on each of them."""

    names: tuple[str, ...]
    seconds: Callable[[LengthTable], Float]


@dataclass(frozen=True)
class Marginal:
    """Recorded against sampled lengths of one kind; wasserstein: mean shift of sorted lengths over the mean [1]."""

    name: str
    ks: float
    wasserstein: float
    mean_recorded: float
    mean_model: float
    probabilities: tuple[float, ...]
    quantiles_recorded: tuple[float, ...]
    quantiles_model: tuple[float, ...]


@dataclass(frozen=True)
class GroupMaximum:
    """E[max of a group] / E[L], recorded and sampled, with the 5th - 95th percentile of the recording's bootstrap."""

    recorded: float
    model: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative error of the model's ratio."""
        return self.model / self.recorded - 1.0

    @property
    def tolerance(self) -> float:
        """5 % or the half width of the bootstrap interval, whichever is larger (relative)."""
        return max(0.05, 0.5 * (self.high - self.low) / self.recorded)


@dataclass(frozen=True)
class JudgedQuantity:
    """One quantity of a recorded rl_step, the recording's group bootstrap, and the model's predictive interval."""

    rl_step: int
    quantity: str
    recorded: float
    bootstrap_mean: float
    bootstrap_low: float
    bootstrap_high: float
    model_mean: float
    model_low: float
    model_high: float

    @property
    def inside(self) -> bool:
        return self.model_low <= self.recorded <= self.model_high


@dataclass(frozen=True)
class Fidelity:
    """All measures. `system_*` pool rl_steps and layouts; `totals_*` the generated tokens per rl_step.

    baseline  the rollout times again, with the prompt groups that the model was fitted on, drawn with replacement, in
              place of the model: what replaying that recording would have been worth. Empty where it was not given
    """

    task: str
    provenance: str
    rl_steps: tuple[int, ...]
    replicates: int
    marginals: tuple[Marginal, ...]
    group_maximum: GroupMaximum | None
    truncated_recorded: float
    truncated_model: float
    system: tuple[JudgedQuantity, ...]
    totals: tuple[JudgedQuantity, ...]
    known: str
    baseline: tuple[JudgedQuantity, ...] = ()
    baseline_group_max_ratio_error: float | None = None

    @property
    def system_bias(self) -> float:
        """Mean over replicates against the mean of the group bootstrap, pooled over rl_steps, averaged over layouts."""
        return bias(self.system)

    @property
    def system_bias_noise(self) -> float:
        """Bias that luck alone gives in about 9 of 10 recordings as short as the judged one: see `bias_noise`."""
        return bias_noise(self.system)

    @property
    def interval_coverage(self) -> float:
        """Share of (rl_step, layout) whose recorded rollout time lies in the model's 90 % predictive interval."""
        return coverage(self.system)

    @property
    def interval_width_ratio(self) -> float:
        """Width of the predictive interval over that of the group bootstrap, pooled over rl_steps."""
        return width_ratio(self.system)

    @property
    def group_max_ratio_error(self) -> float:
        """Relative error of E[max of a group] / E[L]."""
        return 0.0 if self.group_maximum is None else self.group_maximum.error


def bias(outcomes: Sequence[JudgedQuantity]) -> float:
    """Mean over quantities of (sum of model means over rl_steps) / (sum of bootstrap means) - 1."""
    ratios = [
        sum(o.model_mean for o in part) / sum(o.bootstrap_mean for o in part) - 1.0 for part in _by_quantity(outcomes)
    ]
    return float(np.mean(ratios))


def bias_noise(outcomes: Sequence[JudgedQuantity]) -> float:
    """Half the 90 % interval of the mean of K judged rl_steps, relative: (predictive width / 2) / sqrt(K) / mean.

    Mean over quantities. From the model's interval: where the longest response decides, the bootstrap knows no longer
    one than was recorded and makes the luck look two to four times smaller than it is.
    """
    halves = [
        0.5 * sum(o.model_high - o.model_low for o in part) / sum(o.model_mean for o in part)
        for part in _by_quantity(outcomes)
    ]
    steps = len({o.rl_step for o in outcomes})
    return float(np.mean(halves) / np.sqrt(steps))


def coverage(outcomes: Sequence[JudgedQuantity]) -> float:
    """Share of outcomes whose recorded value lies in the predictive interval."""
    return float(np.mean([o.inside for o in outcomes]))


def width_ratio(outcomes: Sequence[JudgedQuantity]) -> float:
    """Mean over quantities of (sum of predictive widths over rl_steps) / (sum of bootstrap widths)."""
    ratios = []
    for part in _by_quantity(outcomes):
        width = sum(o.bootstrap_high - o.bootstrap_low for o in part)
        ratios.append(sum(o.model_high - o.model_low for o in part) / max(width, 1e-12))
    return float(np.mean(ratios))


def _by_quantity(outcomes: Sequence[JudgedQuantity]) -> list[list[JudgedQuantity]]:
    names = dict.fromkeys(o.quantity for o in outcomes)
    return [[o for o in outcomes if o.quantity == name] for name in names]


def fidelity(
    model: LengthModel,
    recording: LengthTable,
    rollouts: Rollouts,
    *,
    replicates: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
    fitted_on: LengthTable | None = None,
) -> Fidelity:
    """Judge a model on recorded rl_steps, preferably others than those it was fitted on.

    rollouts    ways to run the rollout, such as engine layouts
    replicates  predictive replicates per rl_step, and bootstrap resamples of the recording's prompt groups
    fitted_on   what the model was fitted on: its prompt groups are judged too, drawn with replacement (`baseline`)
    """
    _comparable(model, recording, fitted_on, replicates)
    cap = recording.max_response_tokens or model.max_response_tokens
    if cap is not None and not recording.multi_turn and int(recording.response_tokens.max()) > cap:
        cap = None  # recorded under a larger maximum than the model was, which no recorded response reached
    size = int(np.median(recording.group_sizes()))
    big = _population(model, recording.steps(), size, cap, seed)
    replays = _Replays(model, recording, fitted_on, rollouts, replicates, size, cap, seed)
    system, totals, baseline = [], [], []
    steps = recording.steps()
    for k, step in enumerate(steps.tolist()):
        part = recording.step(step)
        recorded = _simulate([part], rollouts)[0]
        resampled = replays.resampled(part.n_groups)
        outcomes = _outcomes(step, rollouts, recorded, resampled, replays.drawn(step, part.n_groups))
        system += outcomes[:-1]
        totals.append(outcomes[-1])
        if fitted_on is not None:
            baseline += _outcomes(step, rollouts, recorded, resampled, replays.replayed(part.n_groups))[:-1]
        if progress is not None:
            progress(k + 1, int(steps.size))
    return Fidelity(
        task=model.task,
        provenance=model.provenance.headline(),
        rl_steps=tuple(int(s) for s in steps),
        replicates=replicates,
        marginals=_marginals(recording, big),
        group_maximum=group_maximum(recording, big, seed),
        truncated_recorded=_truncated_share(recording),
        truncated_model=_truncated_share(big),
        system=tuple(system),
        totals=tuple(totals),
        known=model.drift.what_is_known(int(steps[-1])) if model.drift.rl_steps else "",
        baseline=tuple(baseline),
        baseline_group_max_ratio_error=_replayed_group_error(recording, fitted_on),
    )


def _comparable(model: LengthModel, recording: LengthTable, fitted_on: LengthTable | None, replicates: int) -> None:
    """Refuse what cannot be judged."""
    if not recording.n:
        raise SpecError("fidelity needs a recording with at least one complete prompt group")
    if replicates < 20:
        raise SpecError(f"fidelity needs at least 20 replicates for a 5th and 95th percentile, not {replicates}")
    if model.task != "mixed" and recording.multi_turn != (model.turns is not None):
        kinds = ("a single-turn", "a multi-turn")
        mine, theirs = kinds[model.turns is not None], kinds[recording.multi_turn]
        raise SpecError(f"{model.task} is {mine} model, but this is {theirs} recording")
    if fitted_on is not None and fitted_on.multi_turn != recording.multi_turn:
        raise SpecError("the recording fitted on and the one judged on differ: one has turns and the other has none")


@dataclass(eq=False)
class _Replays:
    """Outcomes of rl_steps that were drawn again and simulated, each kind once for all rl_steps that are alike."""

    model: LengthModel
    recording: LengthTable
    fitted_on: LengthTable | None
    rollouts: Rollouts
    replicates: int
    size: int
    cap: int | None
    seed: int
    _held: dict[tuple[str, int, float], Float] = field(default_factory=dict)

    def drawn(self, step: int, groups: int) -> Float:
        """From the model, at an rl_step."""
        tables = predictive_replicates(
            self.model, self.replicates, groups, self.size, rl_step=step, max_response_tokens=self.cap, seed=self.seed
        )
        return self._simulated(("model", groups, self.model.drift.shift(step)), lambda: tables)

    def resampled(self, groups: int) -> Float:
        """From the judged recording's own prompt groups."""
        own = (groups, self.replicates, self.seed + 1)
        return self._simulated(("recording", groups, 0.0), lambda: bootstraps(self.recording, *own))

    def replayed(self, groups: int) -> Float:
        """From the prompt groups that the model was fitted on."""
        known, own = self.fitted_on, (groups, self.replicates, self.seed + 2)
        assert known is not None
        return self._simulated(("fitted on", groups, 0.0), lambda: bootstraps(known, *own))

    def _simulated(self, key: tuple[str, int, float], tables: Callable[[], Iterable[LengthTable]]) -> Float:
        if key not in self._held:
            self._held[key] = np.array(_simulate(tables(), self.rollouts))
        return self._held[key]


def _replayed_group_error(recording: LengthTable, fitted_on: LengthTable | None) -> float | None:
    if fitted_on is None or min(int(t.group_sizes().max()) for t in (recording, fitted_on)) < 2:
        return None
    return group_max_ratio(fitted_on) / group_max_ratio(recording) - 1.0


def _population(model: LengthModel, rl_steps: Int, size: int, cap: int | None, seed: int) -> LengthTable:
    """A large sample for the statistics; of a model that drifts, at the judged rl_steps and over many draws of them."""
    prompts = max(2000, 20_000 // size)
    if not (model.drift.step_sd or model.drift.trend):
        return sample_lengths(model, prompts, size, max_response_tokens=cap, seed=seed)
    drawn = np.resize(rl_steps, max(_LEAST_STEPS, rl_steps.size))
    each = -(-prompts // drawn.size)
    return sample_rl_steps(model, map(int, drawn), each, size, max_response_tokens=cap, seed=seed)


def _simulate(tables: Iterable[LengthTable], rollouts: Rollouts) -> list[Float]:
    """Seconds on every layout, and the generated tokens, of every table."""
    return [np.append(rollouts.seconds(t), float(t.response_tokens.sum())) for t in tables]


def _outcomes(
    step: int, rollouts: Rollouts, recorded: Float, resampled: Float, replicas: Float
) -> list[JudgedQuantity]:
    names = [*rollouts.names, "generated_tokens"]
    edges = (0.05, 0.95)
    boot, pred = np.quantile(resampled, edges, axis=0), np.quantile(replicas, edges, axis=0)
    return [
        JudgedQuantity(
            step,
            name,
            float(recorded[i]),
            float(resampled[:, i].mean()),
            float(boot[0, i]),
            float(boot[1, i]),
            float(replicas[:, i].mean()),
            float(pred[0, i]),
            float(pred[1, i]),
        )
        for i, name in enumerate(names)
    ]


def bootstraps(table: LengthTable, prompts: int, count: int, seed: int) -> list[LengthTable]:
    """``count`` bootstrapped rl_steps of ``prompts`` groups from all of a recording."""
    random = np.random.default_rng(seed)
    return [bootstrap(table, random, prompts) for _ in range(count)]


def _marginals(recording: LengthTable, sampled: LengthTable) -> tuple[Marginal, ...]:
    """Prompts and responses; for several turns also turns per trajectory, appended tokens and tool latency."""
    recorded, model = recording.trajectories(), sampled.trajectories()
    pairs: list[tuple[str, Float, Float]] = [
        ("prompt_tokens", _first_of_group(recorded), _first_of_group(model)),
        ("response_tokens", recorded.response_tokens.astype(float), model.response_tokens.astype(float)),
    ]
    if recording.trajectory is not None and sampled.trajectory is not None:
        turns = [np.bincount(t._trajectory_index()[1]).astype(float) for t in (recording, sampled)]
        pairs.append(("turns", turns[0], turns[1]))
        for name in ("append_tokens", "tool_latency_s"):
            values = [np.asarray(getattr(t, name), float) for t in (recording, sampled)]
            kept = [v[v > 0] for v in values]
            if all(v.size for v in kept):
                pairs.append((name, kept[0], kept[1]))
    return tuple(_marginal(*pair) for pair in pairs)


def _first_of_group(table: LengthTable) -> Float:
    index, _ = table.group_index()
    return np.asarray(table.prompt_tokens[np.unique(index, return_index=True)[1]], np.float64)


def _marginal(name: str, recorded: Float, model: Float) -> Marginal:
    p = (np.arange(2000) + 0.5) / 2000
    shift = float(np.mean(np.abs(np.quantile(recorded, p) - np.quantile(model, p))))
    return Marginal(
        name,
        ks_two_samples(recorded, model),
        shift / max(float(recorded.mean()), 1e-12),
        float(recorded.mean()),
        float(model.mean()),
        QUANTILES,
        tuple(float(v) for v in np.quantile(recorded, QUANTILES)),
        tuple(float(v) for v in np.quantile(model, QUANTILES)),
    )


def ks_two_samples(a: Float, b: Float) -> float:
    """Two-sample Kolmogorov-Smirnov distance sup |F_a - F_b|."""
    points = np.union1d(a, b)
    below = [np.searchsorted(np.sort(v), points, side="right") / v.size for v in (a, b)]
    return float(np.max(np.abs(below[0] - below[1])))


RESAMPLES = 400
"""Of the groups of a recording, for the interval of what their longest responses are."""


def group_maximum(recording: LengthTable, sampled: LengthTable, seed: int = 0) -> GroupMaximum | None:
    """E[max of a group] / E[L] of recording and sample; None where groups hold one response."""
    maxima, sums, sizes = _group_sums(recording)
    if sizes.max() < 2:
        return None
    model_max, model_sum, model_size = _group_sums(sampled)
    rng = np.random.default_rng(seed)
    ratios = np.empty(RESAMPLES)
    for k in range(RESAMPLES):
        chosen = rng.integers(0, maxima.size, maxima.size)
        ratios[k] = maxima[chosen].mean() / (sums[chosen].sum() / sizes[chosen].sum())
    return GroupMaximum(
        recorded=float(maxima.mean() / (sums.sum() / sizes.sum())),
        model=float(model_max.mean() / (model_sum.sum() / model_size.sum())),
        low=float(np.quantile(ratios, 0.05)),
        high=float(np.quantile(ratios, 0.95)),
    )


def group_max_ratio(table: LengthTable) -> float:
    """E[max of a group] / E[L] of a table."""
    maxima, sums, sizes = _group_sums(table)
    return float(maxima.mean() / (sums.sum() / sizes.sum()))


def _group_sums(table: LengthTable) -> tuple[Float, Float, Float]:
    rows = table.trajectories()
    index, count = rows.group_index()
    largest = np.zeros(count)
    np.maximum.at(largest, index, rows.response_tokens.astype(float))
    return (
        largest,
        np.asarray(np.bincount(index, rows.response_tokens, count)),
        np.asarray(np.bincount(index, minlength=count), np.float64),
    )


def _truncated_share(table: LengthTable) -> float:
    return float(table.truncated.sum() / max(table.n_trajectories, 1))
