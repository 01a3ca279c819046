"""Speculative decoding: what a rollout pool may be told about it, and what is measured of acceptance.

A pool's ``speculation`` is a word: ``none``, ``mtp:3`` (three drafted tokens in every engine_step), ``mtp:0-5`` (as
many of 0 ... 5 as pay at the number of requests that run; engines take such a table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rlperf.errors import Problem, SpecError, did_you_mean

Method = Literal["mtp", "eagle3", "ngram"]
"""Who drafts: the model's own multi-token prediction layer, an EAGLE-3 head, or the text that is there already."""

NONE = "none"
MOST_DRAFTS = 16
"""More drafted tokens than any engine's recipe has; acceptance is measured up to 8."""


@dataclass(frozen=True)
class DraftSetting:
    """A pool's speculation: who drafts, and the fewest and the most tokens per engine_step.

    >>> DraftSetting.parse("mtp:3"), DraftSetting.parse("eagle3:0-5").switches, DraftSetting.parse("none")
    (DraftSetting(method='mtp', fewest=3, most=3), True, None)
    >>> str(DraftSetting.parse("eagle3:0-5"))
    'eagle3:0-5'
    """

    method: Method
    fewest: int
    most: int

    @classmethod
    def parse(cls, text: str) -> DraftSetting | None:
        """From a pool's word; None where nothing is drafted.

        Raises
        ------
        SpecError : a method or a number that is none
        """
        method, _, drafts = text.partition(":")
        if text == NONE:
            return None
        if method not in get_args(Method):
            near = did_you_mean(method, get_args(Method)) or f"methods: {', '.join(get_args(Method))}, or none"
            raise SpecError(Problem(f"speculation: nobody drafts by {method!r}", suggestion=near))
        low, dash, high = drafts.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise SpecError(Problem(f"speculation: {text!r} states no drafted tokens", suggestion=f"{method}:3"))
        fewest, most = int(low), int(high or low)
        if not fewest <= most <= MOST_DRAFTS:
            raise SpecError(Problem(f"speculation: {text!r} drafts 0 to {MOST_DRAFTS} tokens, fewest first"))
        named: Method = next(each for each in get_args(Method) if each == method)
        return cls(named, fewest, most) if most else None

    def __str__(self) -> str:
        return f"{self.method}:{self.fewest}" + (f"-{self.most}" if self.switches else "")

    @property
    def switches(self) -> bool:
        """Whether the number of drafted tokens follows the number of running requests."""
        return self.fewest != self.most


def drafting(word: str | None) -> str:
    """Who drafts by a pool's word, as rules of frameworks ask: a method, or none.

    >>> drafting("eagle3:3"), drafting("none"), drafting(None)
    ('eagle3', 'none', 'none')
    """
    wanted = DraftSetting.parse(word or NONE)
    return wanted.method if wanted else NONE


SEE_FAR = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "nemotron_h")
"""Families whose multi-token prediction layer was trained on its own drafts, so that it can be applied again:
Qwen3-Next (several steps), GLM-5 (one layer shared by three steps), Nemotron 3 (shared heads); all recalled."""


def sees_far(method: Method, family: str, prediction_layers: int) -> bool:
    """Whether what drafts was trained to draft several tokens in a row, or the model has a layer for each.

    DeepSeek's, MiMo's and GLM-4.5's single layer was trained to see one token ahead. EAGLE-3 heads are all trained on
    their own drafts (arXiv 2503.01840, section 3.1).
    """
    return method != "mtp" or family in SEE_FAR or prediction_layers > 1


def tokens_per_step(first: float, falls: float, drafts: int) -> float:
    r"""Tokens that a verification yields on average: the accepted drafts and one of the model's own.

    .. math:: m(k) = 1 + \sum_{i=1}^{k} \prod_{j=1}^{i} a\, d^{j-1}

    a (``first``) the probability that the first draft is accepted, d (``falls``) by which it falls with every further
    one [1]; d = 1 is Leviathan et al. 2023 (arXiv 2211.17192), eq. 1.

    >>> tokens_per_step(0.5, 1.0, 3), tokens_per_step(0.8, 0.9, 0)
    (1.875, 1.0)
    """
    found, accepted = 1.0, 1.0
    for depth in range(drafts):
        accepted *= first * falls**depth
        found += accepted
    return found


def first_of(tokens: float, falls: float, drafts: int, most: float = 1.0) -> float:
    """Acceptance of the first draft, up to ``most``, with which a verification yields so many tokens [1].

    The inverse of `tokens_per_step`; 0 where even none accepted yields more.

    >>> round(first_of(tokens_per_step(0.7, 0.95, 3), 0.95, 3), 6), round(first_of(0.5, 0.95, 3), 6)
    (0.7, 0.0)
    """
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if tokens_per_step(middle, falls, drafts) < tokens else (low, middle)
    return high
