"""Answers as frames and as tables of a notebook. Layout of pages belongs to `rlperf.report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


def frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> pl.DataFrame:
    """Rows as a frame; where there may be none, ``columns`` are those that it then has."""
    import polars as pl

    return pl.DataFrame(list(rows), None if rows else list(columns), infer_schema_length=None)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as HTML.

    >>> table(["a"], [["<1>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody></table>'
    """
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
