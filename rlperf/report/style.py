"""What all figures share: a palette that colour-blind readers can tell apart, marks that print can, and saving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#666666", "#F0E442")
"""Okabe and Ito's palette."""
MANY = (*PALETTE, "#882255", "#44AA99", "#332288", "#DDCC77")
"""With four of Tol's muted ones, where a figure has more parts."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
STAGE_COLOURS = {
    "rollout": "#0072B2", "reward": "#56B4E9", "scoring": "#009E73", "training": "#D55E00", "weight_sync": "#E69F00",
    "data_movement": "#CC79A7", "offload": "#999999", "other": "#666666",
}  # fmt: skip
STAGE_HATCHES = {"rollout": "", "reward": "//", "scoring": "..", "training": "", "weight_sync": "xx",
                 "data_movement": "\\\\", "offload": "--", "other": "++"}  # fmt: skip
"""Colour and hatch of a stage in every figure."""
WIDE, NARROW = 9.0, 4.6
"""Widths of a figure for a page and for a phone [inch]."""


@dataclass(frozen=True)
class Drawing:
    """A figure: its name (also its file's), a caption that says what is to be seen, and how it is drawn at a width.

    Forms are drawn when they are first asked for.
    """

    name: str
    caption: str
    draw: Callable[[float], Figure]

    @cached_property
    def svg(self) -> bytes:
        """For a page."""
        return saved(self.draw(WIDE))

    @cached_property
    def narrow(self) -> bytes:
        """For a phone."""
        return saved(self.draw(NARROW))

    @cached_property
    def png(self) -> bytes:
        """For a page, as pixels."""
        return saved(self.draw(WIDE), "png")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure [inch] that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def saved(figure: Figure, form: str = "svg") -> bytes:
    """A figure as SVG (the same bytes every time, text as text), PNG or PDF; names are text, never formulas."""
    import warnings

    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if isinstance(text, Text) and "$" in text.get_text():  # powers of ten on an axis are written later
            text.set_parse_math(False)
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    stream = BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "rlperf", "svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", message="Glyph")  # a name may have letters that the font lacks
        figure.savefig(stream, format=form, dpi=150, metadata=date)
    return stream.getvalue()


def tidy(axes: Axes, *, grid: bool = True) -> None:
    """No frame above and on the right, a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(visible=True, alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)


def short(path: str) -> str:
    """A dotted path for an axis of a figure.

    >>> short("pools.trainer.layout.tensor_parallel"), short("tasks.math.max_response_tokens"), short("pools")
    ('trainer tensor parallel', 'max response tokens', 'pools')
    """
    parts = path.split(".")
    role = f"{parts[1]} " if parts[0] == "pools" and len(parts) > 2 else ""
    return role + parts[-1].replace("_", " ")
