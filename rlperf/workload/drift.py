"""How lengths move over rl_steps: location per step, trend, change points, runaways, and what a forecast can know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlperf.units import human_share
from rlperf.workload.laws import Law
from rlperf.workload.lengths import Float, Int, LengthTable

_RUNAWAY_RATIO = 10.0


@dataclass(frozen=True)
class Drift:
    """Drift of the law's location over rl_steps, in normal scores [1] (0: the pooled law).

    location[k], location_se[k]   mean normal score of rl_step k and its error from the prompts drawn
    step_sd                       spread of rl_steps beyond that error, where it shows (Cochran's Q, 5 %)
    slope, slope_se, centre       weighted trend per rl_step around rl_step `centre`; `trend` says whether it is used
    change_points                 rl_steps at which the location jumps (binary segmentation, BIC)
    runaway_*                     responses longer than 10 medians: rates before and from `runaway_change` on
    """

    rl_steps: tuple[int, ...] = ()
    location: tuple[float, ...] = ()
    location_se: tuple[float, ...] = ()
    step_sd: float = 0.0
    slope: float = 0.0
    slope_se: float = 0.0
    centre: float = 0.0
    trend: bool = False
    change_points: tuple[int, ...] = ()
    runaway_rate: float = 0.0
    runaway_change: int | None = None
    runaway_rate_after: float | None = None
    runaway_p_value: float = 1.0

    def shift(self, rl_step: float) -> float:
        """Expected location [normal score] of an rl_step: the trend where one was found, 0 otherwise.

        A trend is not continued further than the recording was long: nothing recorded speaks for it.
        """
        if not self.trend:
            return 0.0
        return self.slope * float(np.clip(rl_step, *self._reach) - self.centre)

    @property
    def _reach(self) -> tuple[int, int]:
        long = self.rl_steps[-1] - self.rl_steps[0]
        return self.rl_steps[0] - long, self.rl_steps[-1] + long

    @property
    def spread(self) -> float:
        """Variance [1] of the location over the recorded rl_steps: it is part of the pooled law."""
        moved = self.slope**2 * float(np.var(self.rl_steps)) if self.trend else 0.0
        return self.step_sd**2 + moved

    def what_is_known(self, rl_step: float) -> str:
        """What a forecast for this rl_step can and cannot know, in words."""
        k = len(self.rl_steps)
        notes = []
        if k < 3:
            steps = "1 rl_step" if k == 1 else f"{k} rl_steps"
            notes.append(f"{steps} recorded: a trend cannot be told from the luck of the prompts")
        elif self.trend:
            words = f"trend of {self.slope:+.3g} +- {self.slope_se:.2g} normal scores per rl_step is continued"
            kept = float(np.clip(rl_step, *self._reach))
            beyond = f" to rl_step {kept:g}, as far as the recording is long, and held there"
            notes.append(words + (beyond if kept != rl_step else ""))
        else:
            notes.append(f"no trend shows in {k} rl_steps ({self.slope:+.2g} +- {self.slope_se:.2g} a step)")
        if k and not self.rl_steps[0] <= rl_step <= self.rl_steps[-1]:
            away = max(self.rl_steps[0] - rl_step, rl_step - self.rl_steps[-1])
            steps = "rl_step" if away == 1 else "rl_steps"
            notes.append(f"{away:g} {steps} outside the recording: a later change of policy cannot be foreseen")
        if self.change_points:
            notes.append(f"location jumps at rl_step {', '.join(map(str, self.change_points))}")
        if self.runaway_change is not None:
            before, after = (human_share(each or 0.0, 2) for each in (self.runaway_rate, self.runaway_rate_after))
            notes.append(
                f"runaways (longer than {_RUNAWAY_RATIO:g} medians) change from {before} to {after} "
                f"at rl_step {self.runaway_change}: whether they come back cannot be known"
            )
        elif self.runaway_rate > 0:
            rate = human_share(self.runaway_rate, 2)
            notes.append(f"runaways in {rate} of responses: a single one decides an rl_step's makespan")
        return "; ".join(notes)


def fit_drift(law: Law, table: LengthTable) -> Drift:
    """Drift of a table (one entry per trajectory) around its pooled law."""
    steps = table.steps()
    scores = censored_scores(law, table)
    location, error = _locations(scores, table, steps)
    weight = 1.0 / error**2
    centre = float(np.average(steps, weights=weight)) if steps.size else 0.0
    slope, slope_se, trend = _trend(steps, location, weight, centre)
    step_sd = _excess_spread(location - slope * (steps - centre) if trend else location, error, table.n_groups)
    before, change, after, p_value = runaway_change(table)
    return Drift(
        rl_steps=tuple(int(s) for s in steps),
        location=tuple(float(v) for v in location),
        location_se=tuple(float(v) for v in error),
        step_sd=step_sd,
        slope=slope,
        slope_se=slope_se,
        centre=centre,
        trend=trend,
        change_points=change_points(steps, location, error),
        runaway_rate=before,
        runaway_change=change,
        runaway_rate_after=after,
        runaway_p_value=p_value,
    )


def censored_scores(law: Law, table: LengthTable) -> Float:
    """Normal scores [n]; a response at the cap gets the mean of the scores above it, phi(c) / (1 - Phi(c))."""
    from scipy.special import log_ndtr

    z = law.score(np.maximum(table.response_tokens - 0.5, 0.5))
    if (least := table.least_cut) is not None and not table.multi_turn:
        cut = float(law.score(np.array([least - 1.0]))[0])
        beyond = np.exp(-0.5 * cut**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(-cut))
        z = np.where(table.truncated, beyond, z)
    return np.asarray(z)


def _locations(scores: Float, table: LengthTable, steps: Int) -> tuple[Float, Float]:
    """Mean normal score per rl_step and its standard error over prompts."""
    location, error = np.zeros(steps.size), np.ones(steps.size)
    for k, step in enumerate(steps):
        rows = table.rl_step == step
        _, group = np.unique(table.group[rows], return_inverse=True)
        means = np.bincount(group.reshape(-1), scores[rows]) / np.bincount(group.reshape(-1))
        location[k] = means.mean()
        error[k] = means.std(ddof=1) / np.sqrt(means.size) if means.size > 1 else 1.0
    return location, np.maximum(error, 1e-6)


def _excess_spread(location: Float, error: Float, prompts: int) -> float:
    """Between-step standard deviation beyond the errors (method of moments, DerSimonian and Laird 1986).

    0 where Cochran's Q / (K - 1) does not exceed the 95th percentile of F(K - 1, prompts - K), as the errors come from
    the prompts themselves: few rl_steps of few prompts would else pass their own luck for drift.
    """
    from scipy.special import fdtri

    if location.size < 2 or prompts <= location.size:
        return 0.0
    w = 1.0 / error**2
    mean = np.average(location, weights=w)
    q = float(np.sum(w * (location - mean) ** 2))
    if q < (location.size - 1) * float(fdtri(location.size - 1, prompts - location.size, 0.95)):
        return 0.0
    return float(np.sqrt(max(0.0, (q - (location.size - 1)) / (w.sum() - (w**2).sum() / w.sum()))))


def _trend(steps: Int, location: Float, weight: Float, centre: float) -> tuple[float, float, bool]:
    """Weighted slope, its error (with the scatter around it, if larger than the prompts' luck), and whether it is used:
    at least 4 rl_steps and a two-sided t test at 1 %."""
    from scipy.special import stdtrit

    if steps.size < 3:
        return 0.0, 0.0, False
    x = steps - centre
    spread = float(np.sum(weight * x * x))
    slope = float(np.sum(weight * x * location) / spread)
    rest = location - np.average(location, weights=weight) - slope * x
    chi = float(np.sum(weight * rest**2)) / (steps.size - 2)
    error = float(np.sqrt(max(1.0, chi) / spread))
    used = steps.size >= 4 and abs(slope) > float(stdtrit(steps.size - 2, 0.995)) * error
    return slope, error, bool(used)


def change_points(steps: Int, location: Float, error: Float) -> tuple[int, ...]:
    """rl_steps that start a new level: binary segmentation of a piecewise constant mean, each cut paid by 2 log K."""
    found: list[int] = []

    def cost(a: int, b: int) -> float:
        w = 1.0 / error[a:b] ** 2
        return float(np.sum(w * (location[a:b] - np.average(location[a:b], weights=w)) ** 2))

    def split(a: int, b: int) -> None:
        if b - a < 4:
            return
        gains = [(cost(a, b) - cost(a, c) - cost(c, b), c) for c in range(a + 2, b - 1)]
        gain, cut = max(gains)
        if gain > 4.0 * np.log(location.size) + 4.0:
            found.append(cut)
            split(a, cut)
            split(cut, b)

    split(0, location.size)
    return tuple(int(steps[c]) for c in sorted(found))


def runaway_change(table: LengthTable) -> tuple[float, int | None, float | None, float]:
    """(rate of runaways, rl_step where it changes, rate from there on, p value) by a binomial likelihood ratio.

    The p value is that of the largest ratio over all cuts, over 499 permutations of the rl_steps' counts; a change is
    reported at p < 0.05.
    """
    steps = table.steps()
    median = float(np.median(table.response_tokens)) if table.n else 0.0
    long = table.response_tokens > _RUNAWAY_RATIO * median
    index = np.searchsorted(steps, table.rl_step)
    hits = np.asarray(np.bincount(index, long, steps.size), np.float64)
    totals = np.asarray(np.bincount(index, minlength=steps.size), np.float64)
    rate = float(hits.sum() / max(totals.sum(), 1.0))
    if steps.size < 6 or hits.sum() < 4:
        return rate, None, None, 1.0
    rng = np.random.default_rng(0)
    best, cut = _largest_ratio(hits, totals)
    # Runaways of one rl_step come together (a prompt, a bad update): whole rl_steps are permuted, not responses.
    above = sum(
        _largest_ratio(hits[order], totals[order])[0] >= best for order in map(rng.permutation, [steps.size] * 499)
    )
    p_value = (1 + above) / 500
    if p_value >= 0.05:
        return rate, None, None, p_value
    return (
        float(hits[:cut].sum() / totals[:cut].sum()),
        int(steps[cut]),
        float(hits[cut:].sum() / totals[cut:].sum()),
        p_value,
    )


def _largest_ratio(hits: Float, totals: Float) -> tuple[float, int]:
    """Largest binomial log likelihood ratio over the cuts, and where."""
    cuts = np.arange(1, hits.size)
    h, n = np.cumsum(hits)[:-1], np.cumsum(totals)[:-1]
    ratio = _binomial(h, n) + _binomial(hits.sum() - h, totals.sum() - n) - _binomial(hits.sum(), totals.sum())
    k = int(np.argmax(ratio))
    return float(ratio[k]), int(cuts[k])


def _binomial(hits: Float | float, n: Float | float) -> Float:
    from scipy.special import xlogy

    p = np.asarray(hits) / np.asarray(n)
    return np.asarray(xlogy(hits, p) + xlogy(np.asarray(n) - hits, 1.0 - p))
