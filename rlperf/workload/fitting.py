"""From a recording to a length model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from rlperf.errors import Problem, SpecError
from rlperf.units import human_share
from rlperf.workload.dependence import Dependence, Grouped, fit_dependence, law_covariance
from rlperf.workload.drift import fit_drift
from rlperf.workload.laws import Law, kolmogorov_smirnov
from rlperf.workload.lengths import Float, Int, LengthTable, Mask
from rlperf.workload.model import LengthModel, LengthProvenance
from rlperf.workload.multiturn import anova_icc, fit_multi_turn
from rlperf.workload.readers import read_recording
from rlperf.workload.records import Recording
from rlperf.workload.select import MUCH_CENSORED, PROMPTS, Choice, choose_law
from rlperf.workload.stages import Filtering, RewardLaw

_MOST_RESPONSES = 40_000
FEW = 10
"""Responses of which the standard deviation is known to a quarter, 1 / sqrt(2 (n - 1)): below, a note says so."""


def fit_model(
    recorded: LengthTable | Recording | Path | str,
    *,
    task: str = "",
    families: Sequence[tuple[str, ...]] | None = None,
    like: LengthModel | None = None,
) -> LengthModel:
    """The length model of a recording: the uncensored law first, then prompts, dependence and drift.

    recorded  the recording, its table, or the path of one
    families  mixtures to try for the response, such as [("gamma",), ("gamma", "gamma")]; None: all that suit
    like      fit the parameters of the same laws as this model's
    """
    if not isinstance(recorded, Recording | LengthTable):
        recorded = read_recording(recorded)
    recording = recorded if isinstance(recorded, Recording) else Recording(recorded)
    table = recording.lengths
    if not table.n:
        raise SpecError("no lengths to fit: the recording holds no complete prompt group")
    turns, turn_candidates = fit_multi_turn(table) if table.multi_turn else (None, ())
    seen = _Responses.of(table)
    choice = seen.choice(families, like)
    law, rows, cap = choice.law, seen.rows, seen.cap
    prompts, prompt_law = _prompts(seen, like)
    score = prompt_law.score(prompts)
    least = None if cap is None else rows.least_cut
    data = Grouped.build(seen.x, seen.censored, seen.group, score, None if least is None else least - 1.0)
    same = None if like is None else like.dependence.effects
    dependence = fit_dependence(law, data, same) if rows.n > seen.count else Dependence(0.0, 0.0, 1.0, 1.0)
    per_step = [table.step(int(s)).n_groups for s in table.steps()]
    sizes = table.group_sizes()
    note = _note(float(seen.censored.mean()), recording, table, rows)
    return LengthModel(
        task=task or table.task or "unnamed",
        provenance=LengthProvenance(
            kind="fitted",
            source=_source(recording),
            responses=table.n_trajectories,
            prompts=table.n_groups,
            rl_steps=tuple(int(s) for s in table.steps()),
            ks=round(kolmogorov_smirnov(law, rows.response_tokens.astype(np.float64), cap), 4),
            ks_prompts=round(kolmogorov_smirnov(prompt_law, np.ceil(prompts)), 4),
            cap_inferred=recording.cap_inferred,
            note=note,
        ),
        group_size=int(np.median(sizes)),
        prompts_per_step=int(np.median(per_step)),
        max_response_tokens=table.max_response_tokens,
        max_context_tokens=recording.max_context_tokens,
        prompt=prompt_law,
        response=law,
        response_covariance=_rows(law_covariance(law, data)),
        dependence=dependence,
        drift=fit_drift(law, rows),
        turns=turns,
        filtering=Filtering.fit(recording.filters) if recording.filters else None,
        reward=RewardLaw.fit(recording.rewards) if len(recording.rewards) > 1 else None,
        candidates=turn_candidates or choice.candidates,
        alternatives=choice.alternatives if seen.censored.any() else (),
    )


@dataclass(frozen=True, eq=False)
class _Responses:
    """Responses (of several turns: whole trajectories) as a law is fitted to them.

    ``x`` : lengths, half a token back, and the cap where ``censored`` [tokens]; ``group`` of ``count`` prompts
    """

    rows: LengthTable
    x: Float
    censored: Mask
    cap: int | None
    group: Int
    count: int

    @classmethod
    def of(cls, table: LengthTable) -> _Responses:
        """The responses of a recording."""
        rows = thinned(table.trajectories() if table.multi_turn else table)
        censored = np.zeros(rows.n, bool) if table.multi_turn else rows.truncated
        cap = None if table.multi_turn else rows.max_response_tokens
        if censored.all():
            told = f"all {rows.n} responses reached the maximum of {cap} tokens: how long they are is not recorded"
            hint = "if they ended by themselves, state the maximum that they had as max_response_tokens"
            raise SpecError(Problem(told, suggestion=hint))
        x, least = np.maximum(rows.response_tokens - 0.5, 0.5), None if cap is None else rows.least_cut
        return cls(rows, x if least is None else np.where(censored, least - 1.0, x), censored, cap, *rows.group_index())

    def choice(self, families: Sequence[tuple[str, ...]] | None, like: LengthModel | None) -> Choice:
        """The law that suits, responses of one prompt counted for less than independent ones."""
        per_prompt = self.x.size / self.count
        return choose_law(
            self.x,
            self.censored,
            families=families,
            reference=reference_law(),
            design_effect=1.0 + max(anova_icc(np.log(self.x), self.group), 0.0) * (per_prompt - 1.0),
            like=None if like is None else like.laws()[1],
        )


def _prompts(seen: _Responses, like: LengthModel | None) -> tuple[Float, Law]:
    """Lengths of the prompts, half a token back [tokens], and their law."""
    _, first = np.unique(seen.group, return_index=True)
    prompts = np.asarray(seen.rows.prompt_tokens[first] - 0.5, np.float64)
    # Prompts pile up on few values (frames of a video, a fixed template): a component may be half a token narrow.
    floor = float(np.clip(0.5 / np.median(np.maximum(prompts, 0.5)), 1e-3, 0.05))
    wanted = PROMPTS if like is None else [like.laws()[0].families]
    whole = np.zeros(seen.count, bool)
    return prompts, choose_law(prompts, whole, families=wanted, smallest_sigma=floor, piled=True).law


def _rows(matrix: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(v) for v in row) for row in matrix)


def thinned(table: LengthTable) -> LengthTable:
    """Every k-th prompt group of a large recording: 40,000 responses settle a law."""
    if table.n <= _MOST_RESPONSES:
        return table
    index, count = table.group_index()
    stride = -(-table.n // _MOST_RESPONSES)
    return table.where(np.isin(index, np.arange(0, count, stride)))


@cache
def reference_law() -> Law | None:
    """Shape of the largest uncensored public sample, for recordings of which the cap hides the shape."""
    from dataclasses import replace

    from rlperf.workload.library import load_model

    law = load_model("math").response
    return None if law is None else replace(law, shape_fixed=True)


def _source(recording: Recording) -> str:
    names = [Path(f).name for f in recording.files]
    if not names:
        return recording.lengths.source or "a length table"
    parent = Path(recording.files[0]).resolve().parent.name
    return f"{parent}: {names[0]}" + (f" and {len(names) - 1} more files" if len(names) > 1 else "")


def _note(censored: float, recording: Recording, table: LengthTable, rows: LengthTable) -> str:
    notes = []
    if rows.n < FEW:
        few = "1 response is" if rows.n == 1 else f"{rows.n} responses are"
        notes.append(f"{few} too few to tell how lengths spread and how long the longest of a batch are")
    if censored > MUCH_CENSORED:
        notes.append(
            f"{human_share(censored)} of the responses reached the cap: "
            "only the scale is fitted, the shape is that of the math preset"
        )
    elif censored > 0.02:
        notes.append(f"{human_share(censored, 1)} of the responses reached the cap: beyond it the law is extrapolated")
    if recording.cap_inferred:
        notes.append(f"the cap of {table.max_response_tokens} tokens is inferred from the pile of responses at it")
    if recording.skipped:
        notes.append(f"{len(recording.skipped)} damaged records or incomplete groups were left out")
    if recording.unread:
        notes.append(f"columns that are not read: {', '.join(recording.unread[:8])}")
    if rows.n < table.n_trajectories:
        notes.append(f"fitted on {rows.n:,} responses, every k-th prompt group")
    if table.group_size is None:
        notes.append("groups differ in size")
    return "; ".join(notes)
