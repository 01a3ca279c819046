"""The length model of one task: its laws and where they come from. Fitted by `fitting`, drawn from by `sampling`, kept
as YAML by `library`."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlperf.errors import SpecError
from rlperf.workload.dependence import Dependence, draw_law
from rlperf.workload.drift import Drift
from rlperf.workload.laws import Law
from rlperf.workload.lengths import Float
from rlperf.workload.multiturn import MultiTurn
from rlperf.workload.select import TriedLaw
from rlperf.workload.stages import Filtering, RewardLaw

_FROZEN = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False, defer_build=True)


class LengthProvenance(BaseModel):
    """Where a model comes from: fitted (from what, how much, how well) or assumed."""

    model_config = _FROZEN
    kind: Literal["fitted", "assumed"]
    source: str
    responses: int = 0
    prompts: int = 0
    rl_steps: tuple[int, ...] = ()
    ks: float | None = None
    ks_prompts: float | None = None
    cap_inferred: bool = False
    note: str = ""

    def headline(self) -> str:
        """One line for people, shown wherever the model is used."""
        size = f", n = {self.responses:,} responses" if self.responses else ""
        size += f" of {self.prompts:,} prompts" if self.prompts else ""
        fit = f", KS {self.ks:.3f}" if self.ks is not None else ""
        return f"{self.kind}: {self.source}{size}{fit}"


class Forecast(BaseModel):
    """Lengths of an rl_step: mean tokens a response and the share at the cap, each with 5th and 95th percentile."""

    model_config = _FROZEN
    rl_step: int
    mean_tokens: float
    mean_tokens_low: float
    mean_tokens_high: float
    truncated_fraction: float
    truncated_fraction_low: float
    truncated_fraction_high: float
    known: str


class Share(BaseModel):
    """One task of a mixed workload."""

    model_config = _FROZEN
    task: str
    share: float = Field(gt=0, le=1)


class LengthModel(BaseModel):
    """Joint law of prompt and response lengths of one task. Equations in docs/theory/lengths.md.

    response             law F of the *uncensored* response length [tokens]; for several turns of all generated tokens
    response_covariance  [p, p] of the law's unconstrained parameters, from the recorded groups; empty: not known
    prompt               law of the prompt length [tokens]
    dependence           icc and beta of the random effect per prompt
    drift                location over rl_steps
    max_response_tokens  cap of the recording [tokens]; None: not reached
    turns, filtering, reward, mixture   where the task has them
    candidates, alternatives   what else was tried, and what else the data leave possible (weight, law)
    """

    model_config = _FROZEN
    schema_version: Literal[1] = 1
    task: str
    provenance: LengthProvenance
    group_size: int = Field(8, ge=1)
    prompts_per_step: int = Field(128, ge=1)
    max_response_tokens: int | None = Field(None, ge=1)
    max_context_tokens: int | None = Field(None, ge=1)
    prompt: Law | None = None
    response: Law | None = None
    response_covariance: tuple[tuple[float, ...], ...] = ()
    dependence: Dependence = Dependence(0.0, 0.0, 0.0, 0.0)
    drift: Drift = Drift()
    turns: MultiTurn | None = None
    filtering: Filtering | None = None
    reward: RewardLaw | None = None
    vision_fraction: float = Field(0.0, ge=0, le=1)
    image_tokens: float = Field(1024.0, ge=1)
    mixture: tuple[Share, ...] = ()
    candidates: tuple[TriedLaw, ...] = ()
    alternatives: tuple[tuple[float, Law], ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> LengthModel:
        if self.mixture:
            if abs(sum(s.share for s in self.mixture) - 1.0) > 1e-6:
                raise ValueError("the shares of a mixture must sum to 1")
        elif self.prompt is None or self.response is None:
            raise ValueError("a length model needs a prompt and a response law, or a mixture of tasks")
        return self

    def laws(self) -> tuple[Law, Law]:
        """(prompt, response) law of a single task."""
        if self.prompt is None or self.response is None:
            raise SpecError(f"{self.task}: a mixture of tasks has no single law; ask its tasks")
        return self.prompt, self.response

    def draw(self, rng: np.random.Generator) -> LengthModel:
        """A model with parameters drawn from their error, as far as the recording leaves them open."""
        if not self.response_covariance:
            return self
        law = draw_law(self.laws()[1], np.array(self.response_covariance), rng)
        dependence = self.dependence.draw(rng)
        turns = None if self.turns is None else self.turns.draw(self.provenance.responses, self.group_size, rng)
        return self.model_copy(update={"response": law, "dependence": dependence, "turns": turns})

    def interval(self, max_response_tokens: int) -> tuple[Float, Float]:
        """5th and 95th percentile of (truncated fraction, mean tokens) over the law's own uncertainty.

        Beyond the recorded cap the family is uncertain too: `alternatives` take part with their weights.
        """
        rng, draws = np.random.default_rng(0), 200
        found = []
        beyond = self.max_response_tokens is not None and max_response_tokens > self.max_response_tokens
        others = [law for _, law in self.alternatives] if beyond else []
        weights = np.array([1.0, *(w for w, _ in self.alternatives)] if beyond else [1.0])
        for pick in rng.choice(weights.size, draws, p=weights / weights.sum()):
            drawn = self.draw(rng).laws()[1]
            law = drawn if pick == 0 else others[pick - 1]
            found.append((law.survival(max_response_tokens - 1.0), law.mean(max_response_tokens) + 0.5))
        values = np.array(found)
        return np.quantile(values, 0.05, axis=0), np.quantile(values, 0.95, axis=0)
