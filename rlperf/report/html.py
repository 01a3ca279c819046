"""One self-contained HTML page: parts, tables and figures; nothing is loaded from anywhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

from rlperf.report.style import Drawing
from rlperf.version import __version__

SHORT = 16
"""Letters of a table's cell that is not cut."""
PARTS = """
p { margin: .4rem 0; } .soft, figcaption { color: var(--soft); font-size: .88rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.facts div { background: var(--back); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.25rem; line-height: 1.3; }
.facts span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .88rem; min-width: 22rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
td { font-variant-numeric: tabular-nums; } td.s { white-space: nowrap; }
figure { margin: 1rem 0; } figure img { width: 100%; height: auto; display: block; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--mark); }
ul { padding-left: 1.2rem; margin: .4rem 0; list-style: disc; } li { margin: .2rem 0; overflow-wrap: anywhere; }
.tag { border: 1px solid var(--line); border-radius: 4px; padding: 0 .35rem; font-size: .8rem; white-space: nowrap; }
.warn { border-left: 4px solid #d55e00; padding: .3rem .8rem; background: #fdf3ec; }
code { font-size: .85em; overflow-wrap: anywhere; }
"""
"""How parts of a page look."""
INKS = (
    ":root { color-scheme: light; --ink: #1d2430; --soft: #5a6472; --line: #d9dee5; --mark: #0b5c9e; --back: #f6f8fa; }"
)
STYLE = f"""
{INKS}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 64rem; padding: 1rem 1.2rem 4rem; color: var(--ink); background: #fff;
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 1.2rem 0 .3rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-top: .6rem; border-top: 1px solid var(--line); }}
h3 {{ font-size: 1rem; margin: 1.2rem 0 .3rem; }}
nav {{ display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: .9rem; margin: .6rem 0 0; }}
a {{ color: var(--mark); }}
{PARTS}
@media print {{ nav, summary {{ display: none; }} details > * {{ display: block; }} h2 {{ break-after: avoid; }}
               figure, table {{ break-inside: avoid; }} body {{ max-width: none; }} }}
"""


def page(title: str, lead: str, parts: Sequence[tuple[str, str]]) -> str:
    """A whole page: title, a line below it, and (heading, HTML) parts with a contents line."""
    names = [(f"part{number}", heading) for number, (heading, _) in enumerate(parts)]
    contents = "".join(f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading in names)
    body = "".join(
        f'<h2 id="{anchor}">{escape(heading)}</h2>{content}'
        for (anchor, heading), (_, content) in zip(names, parts, strict=True)
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>'
        f'<h1>{escape(title)}</h1><p class="soft">{escape(lead)}</p><nav>{contents}</nav>{body}'
        f'<p class="soft">rlperf {__version__}. Intervals are the 5th and 95th percentile.</p></main></body></html>\n'
    )


def facts(items: Iterable[tuple[str, str]]) -> str:
    """Large numbers: (value, what it is)."""
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in items)
    return f'<div class="facts">{boxes}</div>'


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table that scrolls sideways on a narrow screen."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(text: str) -> str:
    """A cell; a short one ("13 min 24 s") stays on one line."""
    return f"<td{' class=s' if len(text) <= SHORT else ''}>{escape(text)}</td>"


def listing(items: Iterable[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; ``kind`` is soft or warn."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def folded(summary: str, content: str) -> str:
    """Content that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def figure(drawing: Drawing) -> str:
    """A figure with its caption; a phone gets the narrow form."""
    return picture(drawing.caption, drawing.svg, drawing.narrow)


def picture(caption: str, svg: bytes, narrow: bytes | None = None) -> str:
    """An SVG with its caption; with ``narrow``, that one for phones."""
    phone = "" if narrow is None else f'<source media="(max-width: 640px)" srcset="{_data(narrow)}">'
    image = f'<picture>{phone}<img src="{_data(svg)}" alt="{escape(caption, quote=True)}"></picture>'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _data(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + b64encode(svg).decode()
