"""The page: a form, what rlperf answers to it, sliders around the answer, and the files to take along.

Every value shown comes from `rlperf.ui.asked` or from the parts of `rlperf report`; here are only widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import run, ui

from rlperf.errors import RlperfError
from rlperf.plan.answer.plan import Plan
from rlperf.report import html
from rlperf.report.plan_html import plan_parts
from rlperf.ui.asked import NUMBERS, Alternatives, Moved, PageForm, Slider, archive, choices, lost, summary

STYLE = f"""{html.INKS}
.report {{ width: 100%; color: var(--ink); line-height: 1.5;
{html.PARTS}
}}
.q-tab {{ padding: 0 10px; }}
"""
LABELS = {
    "model": "model (name or config.json)", "gpu": "device or cluster", "gpus": "how many devices",
    "framework": "framework", "algorithm": "algorithm", "mode": "mode", "workload": "lengths (preset or file)",
    "prompts": "prompts per rl_step", "group": "responses per prompt", "max_prompt": "longest prompt, tokens",
    "max_response": "longest response, tokens", "mini_batch": "prompts per update (empty: all)",
    "staleness": "versions behind, async (empty: 1)",
    "like": "family of an unknown model_type", "file": "or a job file (counts alone)",
}  # fmt: skip
OPEN = ("model", "gpu", "workload", "framework")
"""Fields that take what is typed as well as what is offered."""
SELDOM = ("mini_batch", "staleness", "like", "file")
"""Fields that are folded while nothing stands in them, so that the button is seen without scrolling."""


@dataclass(eq=False)
class Answer:
    """A plan and everything that the page shows of it, made away from the page's own thread."""

    plan: Plan
    parts: list[tuple[str, str]]
    lost: tuple[str, ...]
    alternatives: Alternatives

    @classmethod
    def of(cls, form: PageForm) -> Answer:
        """Plan what the form asks."""
        return cls.made(form.plan(), form.folder)

    @classmethod
    def moved(cls, asked: Alternatives, moved: dict[str, int]) -> Answer:
        """Plan what sliders say of a plan."""
        return cls.made(asked.planned(moved), asked.folder)

    @classmethod
    def made(cls, plan: Plan, folder: Path) -> Answer:
        """Everything that is shown of a plan whose job's names start in ``folder``."""
        return cls(plan, plan_parts(plan), lost(plan, folder), Alternatives(plan, folder))


@dataclass(eq=False)
class Page:
    """One visitor's page."""

    form: PageForm
    answer: Answer | None = None
    moved: dict[str, int] = field(default_factory=dict)
    said: Moved | None = None
    _asking: bool = False
    _again: bool = False

    def __post_init__(self) -> None:
        self.form_part = ui.refreshable(self.fields)
        self.answer_part = ui.refreshable(self.shown)
        self.moved_part = ui.refreshable(self.consequences)

    def build(self) -> None:
        """Lay the page out."""
        ui.add_css(STYLE)
        with ui.row().classes("w-full no-wrap items-start"):
            with ui.card().classes("w-80 shrink-0"):
                self.form_part()
            with ui.column().classes("grow min-w-0"):
                self.answer_part()

    def fields(self) -> None:
        """The form."""
        offered = choices()
        ui.label("rlperf").classes("text-h5")
        for name in LABELS:
            if name not in SELDOM:
                self._field(name, offered)
        with (
            ui.expansion("more", value=any(getattr(self.form, name) for name in SELDOM))
            .classes("w-full")
            .props("dense")
        ):
            for name in SELDOM:
                self._field(name, offered)
        ui.button("Plan", on_click=self.plan).classes("w-full").mark("plan")

    def _field(self, name: str, offered: Mapping[str, Sequence[str]]) -> None:
        value, words = getattr(self.form, name), LABELS[name]
        if name in offered:
            names = list(offered[name])
            options = names if value in names else [value, *names]
            added: Any = {"with_input": True, "new_value_mode": "add-unique"} if name in OPEN else {}
            made: Any = ui.select(options, label=words, value=value, **added)
        elif name in NUMBERS:
            made = ui.number(words, value=value, min=1, precision=0)
        else:
            made = ui.input(words, value=value)
        made.on_value_change(partial(self._typed, name)).classes("w-full").props("dense").mark(name)

    def _typed(self, name: str, event: Any) -> None:
        setattr(self.form, name, event.value)

    async def plan(self) -> None:
        """Ask rlperf for a plan of what the form says."""
        await self._answer(partial(Answer.of, replace(self.form)))

    async def _answer(self, ask: Callable[[], Answer]) -> None:
        """Show an answer; what is wrong with the question is said where it would stand."""
        self.answer_part.refresh("planning ...")
        try:
            found = await run.io_bound(ask)
        except Exception as error:
            self.answer = None
            self.answer_part.refresh(_said(error))
            if not isinstance(error, RlperfError):
                raise
            return
        if found is None:  # the server is ending
            return
        self.answer, self.moved = found, found.alternatives.start
        self.said = None
        self.answer_part.refresh("")
        await self.move()

    def shown(self, words: str = "Press Plan. Nothing that you type leaves this machine.") -> None:
        """The answer, or words that stand for it."""
        if words or self.answer is None:
            ui.label(words).classes("whitespace-pre-wrap text-body1").mark("words")
            return
        answer = self.answer
        (_, whole), *parts = answer.parts
        with ui.row().classes("w-full no-wrap items-center justify-between"):
            ui.label(f"{answer.plan.job.name}: {summary(answer.plan)}").classes("text-h6").mark("summary")
            ui.button("Download plan and config", on_click=self.download).props("outline no-wrap").mark("download")
        for loss in answer.lost:
            ui.label(f"not in the files of {answer.plan.job.framework}: {loss}").classes("text-caption")
        ui.html(whole, sanitize=False).classes("report")  # rlperf's own HTML, every name in it escaped
        with ui.tabs().classes("w-full").props("dense no-caps inline-label outside-arrows mobile-arrows") as tabs:
            heads = [ui.tab(f"part{number}", heading) for number, (heading, _) in enumerate(parts)]
        with ui.tab_panels(tabs, value=heads[0]).classes("w-full"):
            for head, (_, content) in zip(heads, parts, strict=True):
                with ui.tab_panel(head):
                    ui.html(content, sanitize=False).classes("report")
        self.what_if()

    def what_if(self) -> None:
        """Sliders, and what rlperf says to them."""
        assert self.answer is not None
        with ui.expansion("What if", value=True).classes("w-full rounded").style("border: 1px solid var(--line)"):
            with ui.row().classes("w-full gap-8"):
                for slider in self.answer.alternatives.sliders:
                    self._slider(slider)
            self.moved_part()
            ui.button("Plan this", on_click=self.take_over).props("flat dense").mark("take_over")

    def _slider(self, slider: Slider) -> None:
        async def moved(event: Any) -> None:
            self.moved[slider.name] = int(event.value)
            words.text = f"{slider.words}: {event.value:,.0f}"
            await self.move()

        with ui.column().classes("w-52 gap-0"):
            words = ui.label(f"{slider.words}: {slider.start:,}").classes("text-caption")
            made = ui.slider(min=slider.low, max=slider.high, step=slider.step, value=slider.start, on_change=moved)
            made.mark(f"move_{slider.name}")

    def consequences(self) -> None:
        """The table below the sliders."""
        if self.said is None:
            ui.label("asking ...").mark("asking")
            return
        if self.said.kept:
            ui.html(html.table(self.said.head, self.said.kept), sanitize=False).classes("report").mark("kept")
        if self.said.anew:
            ui.label(f"rl_step with the best layouts for it, by {self.said.by}: {self.said.anew}").mark("anew")

    async def move(self) -> None:
        """Ask for what the sliders say; while an answer is under way only the last position is asked next."""
        self._again = True
        if self._asking:
            return
        self._asking = True
        try:
            while self._again and self.answer is not None:
                self._again = False
                try:
                    self.said = await run.io_bound(self.answer.alternatives.moved, dict(self.moved))
                except Exception as error:
                    self.said = Moved([], _said(error))
                    if not isinstance(error, RlperfError):
                        raise
                finally:
                    self.moved_part.refresh()
        finally:
            self._asking = False

    async def take_over(self) -> None:
        """Write the sliders into the form and plan it; beside a job's file, which counts alone, plan its job so."""
        assert self.answer is not None
        asked = self.answer.alternatives
        if self.form.file:
            await self._answer(partial(Answer.moved, asked, dict(self.moved)))
            return
        self.form.having(self.moved, asked)
        self.form_part.refresh()
        await self.plan()

    async def download(self) -> None:
        """Hand the files over."""
        assert self.answer is not None
        plan = self.answer.plan
        packed = await run.io_bound(archive, plan, self.answer.alternatives.folder)
        if packed is not None:
            ui.download.content(packed, f"{plan.job.name}.zip")


def _said(error: Exception) -> str:
    """An error in words: what is wrong with the input, or that rlperf itself is wrong."""
    if isinstance(error, RlperfError):
        return str(error)
    return f"a defect of rlperf, please report it with what the terminal says: {type(error).__name__}: {error}"
