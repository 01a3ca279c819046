"""What a job asks of speculative decoding: whether it can be had, and whose head is trained."""

from __future__ import annotations

from rlperf.cost.speculation import draft_head
from rlperf.errors import SpecError
from rlperf.specs.architecture import Architecture
from rlperf.specs.job import Job
from rlperf.specs.speculation import DraftSetting, Method
from rlperf.specs.speculation_calibration import load_speculation


def trained_draft(job: Job) -> Method | None:
    """Who drafts where the head is trained with the policy: the first method that the rollout pool names."""
    settings = job.pool("rollout").settings
    found = (DraftSetting.parse(word) for word in settings.speculation or ())
    return next((each.method for each in found if each), None) if settings.draft_training else None


def check_drafts(job: Job, architecture: Architecture) -> None:
    """Refuse what nobody can draft: by a layer that the model lacks, or a method whose acceptance is not known.

    Raises
    ------
    SpecError : which of both
    """
    settings = job.pool("rollout").settings
    for wanted in filter(None, (DraftSetting.parse(word) for word in settings.speculation or ())):
        draft_head(architecture, wanted.method)
        load_speculation().tokens(wanted, settings.draft_acceptance)
        if settings.draft_training and wanted.method == "ngram":
            raise SpecError("draft_training: n-grams have no head to train")
