"""Tables of text for a terminal: no word is cut where the screen has room for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

WORD = 24
"""Letters of a word that a table does not cut where it fits the screen."""
WHOLE = (11, 0)
"""Letters of a cell that stays on one line ("13 min 24 s") where all columns fit the screen; 0: none."""


def text_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], width: int, *, title: str | None = None, right: int = 0
) -> Table:
    """Rows under their heads; words are cut (and go on below) only where ``width`` letters have no room for them.

    ``right`` : columns from the end that are numbers, set to the right
    """
    from rich.table import Table

    cells = list(rows)
    table = Table(title=title)
    columns = [[head, *(row[k] for row in cells)] for k, head in enumerate(heads)]
    widths = column_widths(columns, width - 3 * len(heads) - 1)
    for k, (head, letters) in enumerate(zip(heads, widths, strict=True)):
        justify: Literal["left", "right"] = "right" if k >= len(heads) - right else "left"
        table.add_column(head, overflow="fold", width=letters, justify=justify)
    for row in cells:
        table.add_row(*row)
    return table


def column_widths(columns: Sequence[Sequence[str]], room: int) -> list[int | None]:
    """Letters a column of a table of so many: short cells and words first, then a letter at a time to the one that has
    most lines.

    Where words alone do not fit, the longest of them are cut.

    >>> column_widths([["a", "9 min 5 s"], ["of many more words", ""]], 19)
    [9, 10]
    >>> column_widths([["nodes", "8"], ["longest"]], 9), column_widths([["nodes"], ["8"]], 1)
    ([4, 5], [None, None])
    """
    from rich.cells import cell_len

    longest = [max(map(cell_len, column)) for column in columns]

    def least(column: Sequence[str], whole: int) -> int:
        words = (word for cell in column for word in ([cell] if cell_len(cell) <= whole else cell.split()))
        return min(max(map(cell_len, words), default=1), WORD)

    tried = ([least(column, whole) for column in columns] for whole in WHOLE)
    widths = next((found for found in tried if sum(found) <= room), None)
    if widths is None and room < len(columns):
        return [None] * len(columns)
    if widths is None:
        widths = [least(column, 0) for column in columns]
        while sum(widths) > room:
            widths[widths.index(max(widths))] -= 1
        return list(widths)
    for _ in range(room - sum(widths)):
        lines, k = max((longest[k] / width, k) for k, width in enumerate(widths))
        if lines <= 1.0:
            break
        widths[k] += 1
    return list(widths)
