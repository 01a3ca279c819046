"""Which frameworks rlperf knows: those with facts. Light, so that the command line names them without reading any."""

from __future__ import annotations

from pathlib import Path

FACTS = Path(__file__).resolve().parent.parent / "frameworks" / "facts"
"""Folder of what is known of each framework: ``NAME.yaml`` (`FrameworkFacts`) and ``NAME.tsv`` (its keys)."""
FRAMEWORKS = tuple(sorted(path.stem for path in FACTS.glob("*.yaml")))
LISTED = ", ".join(FRAMEWORKS)
