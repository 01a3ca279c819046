"""Gains of published speculation as rlperf tells them: over everything that a row leaves open.

Neither drafts, batch nor lengths of a rollout are printed as a rule. Every combination of what they may be is told,
each as likely as another; what is predicted is the middle of all of them, and its interval holds what is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from statistics import NormalDist

import numpy as np

from rlperf.calibrate.speculation.acceptance import TAIL, far_of
from rlperf.calibrate.speculation.rows import (
    OF_A_ROLLOUT,
    PRESUMED_CONTEXT,
    UNPRINTED_OUTPUTS,
    DraftedOn,
    Drafting,
    draftings_of,
    framework_of,
    requests_of,
    rollouts_of,
    served_of,
    slots_of,
)
from rlperf.calibrate.tables import Row, Table
from rlperf.cost.engine_step import EngineLimits, EngineStepCost
from rlperf.cost.inference import engine_step_cost
from rlperf.cost.speculation import speculating
from rlperf.errors import SpecError
from rlperf.layout import FloatArray
from rlperf.sim.rl_step.overheads import engine_in_framework
from rlperf.sim.rollout.closed_form import take_census
from rlperf.sim.rollout.trajectories import Trajectories
from rlperf.specs.calibration import Z95
from rlperf.specs.overhead import Provenance
from rlperf.specs.speculation_calibration import CostSpread, SpeculationCalibration, Yield

NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 99.0) for i in range(99)])
"""Equally likely values of a standard normal variable."""
SERVING, TIMED = "serving", "TPOT ms"
Pair = tuple[EngineStepCost, EngineStepCost]
"""Cost of an engine without and with drafts."""


@dataclass(frozen=True, eq=False)
class ToldGain:
    """Gains over all that a row leaves open ``[cases]``, seconds of a token with drafts in each, and their spread [1].

    ``spread``: standard deviation of ln m of the acceptance that was taken, 0 where the row prints it.
    """

    gains: FloatArray
    token_s: FloatArray
    spread: float
    assumed: tuple[str, ...]


def told_gain(row: Row, known: SpeculationCalibration) -> ToldGain:
    """What rlperf says of a row, at the accepted length that it prints or at the pooled one.

    Raises
    ------
    SpecError : what served it is not known
    """
    served, framework = served_of(row), framework_of(row)
    plain = engine_step_cost(served.replica)
    if framework is not None:
        plain = engine_in_framework(plain, framework, schedulers=float(np.max(served.replica.attention_data)))
    slots = slots_of(served.engine, framework)
    found, spread, assumed = [], 0.0, served.assumed
    for drafting in draftings_of(row):
        yields = _yield(row, drafting, known)
        drafted = speculating(plain, served.replica, drafting.setting, replace(yields, spread=0.0))
        seconds, said = _seconds(row, served, (plain, drafted), slots)
        found += seconds
        spread, assumed = yields.spread, (*drafting.assumed, *served.assumed, *said)
    slow, fast = np.array(found).T
    return ToldGain(slow / fast, fast, spread, assumed)


def _yield(row: Row, drafting: Drafting, known: SpeculationCalibration) -> Yield:
    """Tokens per engine_step where ``width`` tokens are verified and ``depth`` of them stand in a row."""
    stated, length = (1.0,) * drafting.width, row.number("acceptance_length")
    if length is not None:
        return Yield((*stated, length), 0.0)
    far, trained = far_of(drafting.method, row.text("model")), trains(row) or row.text("kind") != OF_A_ROLLOUT
    told = known.tokens(drafting.setting, trained=trained, far=far)
    return Yield((*stated, told.tokens[drafting.depth]), told.spread)


def trains(row: Row) -> bool:
    """Whether the head is trained with its policy."""
    return "trained" in row.text("method").lower()


def _seconds(
    row: Row, served: DraftedOn, costs: Pair, slots: Sequence[int]
) -> tuple[list[tuple[float, float]], tuple[str, ...]]:
    """Seconds without and with drafts of every case: of a replica's rollout, or of one token of a served request."""
    if row.text("kind") != OF_A_ROLLOUT:
        return _served_s(row, costs)
    works, assumed = rollouts_of(row)
    found = []
    for work in works:
        free, *bound = (
            take_census(work, EngineLimits(kv_tokens=np.inf, max_running=each))
            for each in (served.engine.max_running, *slots)
        )
        slow = float(free.makespan_s(costs[0]))
        for rest in dict.fromkeys((0.0, _unexplained_s(row, work, slow))):
            found += [(slow + rest, float(each.makespan_s(costs[1])) + rest) for each in bound]
    said = f"at most {' or '.join(map(str, slots))} running with drafts"
    return found, (*assumed, *((said,) if len(slots) > 1 else ()))


def _unexplained_s(row: Row, work: Trajectories, told_s: float) -> float:
    """Seconds of a rollout without drafts that its printed rate tells of beyond those that are told [s].

    They may be the engine's, which drafts shorten as all of it, or spent beside it (rewards, filtered groups that are
    rolled out again): whether they are no row says.
    """
    rate, tokens = row.number("without_spec"), work.response_tokens
    if not rate:
        return 0.0
    return max(float(tokens.max() if row.text("metric") == TAIL else tokens.sum()) / rate - told_s, 0.0)


def _served_s(row: Row, costs: Pair) -> tuple[list[tuple[float, float]], tuple[str, ...]]:
    asked, printed = requests_of(row), row.number("without_spec")
    if asked.per_second:
        if row.text("metric") != TIMED or not printed:
            raise SpecError("requests a second tell how many run only beside the milliseconds of a token")
        sent = [asked.per_second * output for output in UNPRINTED_OUTPUTS]
        found = [_at_rate(costs, each, 1e-3 * printed) for each in sent]
    else:
        found = [(_token_s(costs[0], running), _token_s(costs[1], running)) for running in asked.running]
    return found, (*asked.assumed, f"{PRESUMED_CONTEXT:g} cached tokens a request")


def _token_s(cost: EngineStepCost, running: float) -> float:
    return float(cost.decode_s(running, running * PRESUMED_CONTEXT))


def _at_rate(costs: Pair, tokens_per_s: float, printed_s: float) -> tuple[float, float]:
    r"""Seconds of a token without and with drafts where so many tokens are asked for every second.

    .. math:: b_0 = r\, t_0, \qquad b = r\, \frac{t_0}{t(b_0)}\, t_d(b)

    Little's law: r tokens a second, t_0 seconds of a token as printed (told: t(b_0)), t_d those with drafts, at b
    requests that then run; found by bisection.
    """
    slow = _token_s(costs[0], max(tokens_per_s * printed_s, 1.0))
    low, high = 1.0, 4096.0
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        more = tokens_per_s * printed_s / slow * _token_s(costs[1], middle)
        low, high = (middle, high) if middle < more else (low, middle)
    return slow, _token_s(costs[1], high)


def mixed(values: FloatArray, sd: float) -> tuple[float, float, float]:
    """(middle, 5th, 95th percentile) of equally likely cases, each spread by ``sd`` [1].

    >>> [round(each, 2) for each in mixed(np.array([1.0, 1.0, 4.0]), 0.0)]
    [1.0, 1.0, 4.0]
    """
    middle = float(np.median(values))
    low, high = np.exp(np.quantile(np.add.outer(np.log(values), sd * NORMAL), (0.05, 0.95)))
    return middle, min(float(low), middle), max(float(high), middle)


def cost_spread(table: Table, known: SpeculationCalibration, *, without: str = "") -> CostSpread | None:
    """How far told gains lie off published ones at the accepted length that these print, by source of the rows.

    ``without``: a source that is left out. Sources count alike. None: no other source prints both.
    """
    off: dict[str, list[float]] = {}
    for row in (each for each in table if each.text("kind") == SERVING):
        if without and source_of(row) == without:
            continue
        with suppress(SpecError):  # a bound such as <=1.3, or what cannot be told, says nothing of the spread
            gain, length = row.number("speedup"), row.number("acceptance_length")
            if gain and length:
                off.setdefault(source_of(row), []).append(float(np.log(gain / np.median(told_gain(row, known).gains))))
    if not off:
        return None
    value = float(np.sqrt(np.mean([np.mean(np.square(each)) for each in off.values()])))
    rows = sum(map(len, off.values()))
    said = (
        f"{rows} published gains of serving that print their accepted length, from {len(off)} sources that count alike"
    )
    low, high = (float(np.exp(side * Z95 * value)) for side in (-1.0, 1.0))
    provenance = Provenance(source=said, date=date.today().isoformat(), n=rows, low=low, high=high)
    return CostSpread(value=value, provenance=provenance)


def source_of(row: Row) -> str:
    """Where a row is from, without the comment or section of the page."""
    return row.text("source").split(" (")[0].split("#")[0]
