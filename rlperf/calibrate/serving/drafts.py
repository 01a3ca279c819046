"""Served rows whose engine drafts tokens: which those are where no cell says so, and what a token takes then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlperf.calibrate.columns import Guess
from rlperf.calibrate.serving.versions import day_of
from rlperf.calibrate.tables import Row
from rlperf.cost.engine_step import EngineStepCost
from rlperf.cost.replica import Replica
from rlperf.cost.speculation import speculating
from rlperf.specs.speculation import NONE, DraftSetting, sees_far
from rlperf.specs.speculation_calibration import Yield, load_speculation


@dataclass(frozen=True)
class DraftedRuns:
    """Runs of `aic_silicon` that drafted without its saying so: what their cells hold, the drafts, how it shows."""

    cells: Mapping[str, tuple[str, ...]]
    word: str
    why: str

    def holds(self, row: Row) -> bool:
        """Whether a row is one of them."""
        return row.group == "aic_silicon" and all(_cell(row, name) in texts for name, texts in self.cells.items())


def _cell(row: Row, name: str) -> str:
    """A cell, or the day of the measurement, which stands in the note."""
    return day_of(row) if name == "day" else row.text(name)


DEEPSEEK = ("DeepSeek-R1", "DeepSeek-V3")
"""One shape, under two names."""
DRAFTED = (
    DraftedRuns(
        {"engine": ("trtllm",), "engine_version": ("1.2.0rc6.post3",), "architecture": DEEPSEEK},
        "mtp:3",
        "the build before takes 1.4 to 1.8 times as long",
    ),
    DraftedRuns(
        {"engine": ("trtllm",), "architecture": DEEPSEEK, "gpu": ("h200_sxm",), "day": ("2026-01-14",)},
        "mtp:3",
        "the same build takes 1.7 times as long two weeks later",
    ),
    DraftedRuns(
        {
            "engine": ("sglang",), "architecture": ("Qwen3.5-397B-A17B",), "gpu": ("b200_sxm",),
            "gemm_dtype": ("fp8",), "n_gpus": ("4",), "expert_parallel": ("1",),
        },
        "mtp:1",
        "eight devices take up to 1.5 times as long",
    ),
)  # fmt: skip
"""The table's README warns of the first. Pairs of one load: DeepSeek-R1 of rc6.post3 and post2 on eight B200 (33.4 and
18.2, 19.2 and 11.7, 21.4 and 13.0, 27.1 and 20.0 ms), of 14 and 28 January on eight H200 (19.4 and 32.2 ms; with
experts cut instead of spread 1.3 to 1.9 times as long in 14 pairs); no other pair of a build lies beyond 1.45 but one
of Kimi-K2.5, of 4.0, which is slow. Three drafts are what a recipe of TensorRT-LLM has. Qwen3.5 has no pair: four B200
take 5.1, 6.1 and 8.6 ms with 4, 8 and 16 clients where eight take 7.8, 8.9 and 10.6, and four with experts spread
10.8 and 12.6, alike from 128 clients on, as where drafts stop paying, and first tokens come twice as many of their own
times per token later; one draft is nearest."""


def speculation_of(row: Row) -> str | Guess[str]:
    """What a row's engine drafts, where no cell says it."""
    found = next((one for one in DRAFTED if one.holds(row)), None)
    return NONE if found is None else Guess(found.word, found.why)


def per_token(cost: EngineStepCost, replica: Replica, word: str) -> EngineStepCost:
    """The engine's cost with what it drafts, per token of every request; as it is where it drafts nothing."""
    wanted = DraftSetting.parse(word)
    if wanted is None:
        return cost
    if wanted.method == "mtp" and not replica.arch.prediction_layers:  # a table's shape may lack the layer that drafts
        replica = replace(replica, arch=replica.arch.model_copy(update={"prediction_layers": 1}))
    return speculating(cost, replica, wanted, _yield(replica, wanted))


def _yield(replica: Replica, wanted: DraftSetting) -> Yield:
    """Tokens of an engine_step, by heads made for their model."""
    far = sees_far(wanted.method, replica.arch.family, replica.arch.prediction_layers)
    return load_speculation().tokens(wanted, trained=True, far=far)


def sigma_of(word: str) -> float:
    """Standard deviation of ln seconds by what is not known of drafts; 0 where nothing is drafted [1].

    >>> sigma_of("none")
    0.0
    """
    wanted, known = DraftSetting.parse(word), load_speculation()
    fit = None if wanted is None else known.of(wanted.method)
    return 0.0 if wanted is None else known.sigma(fit.spread if fit else 0.0)
