"""The page in a browser: what it asks and shows, as NiceGUI's simulated user and as a real headless browser see it."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlperf.api import plan_job
from rlperf.cli import main as cli
from rlperf.errors import SpecError
from rlperf.plan.answer.plan import Plan
from rlperf.report.plan_text import best_rows
from rlperf.specs.profiles import profile_root
from rlperf.units import human_seconds

NICEGUI = importlib.util.find_spec("nicegui") is not None
needs_nicegui = pytest.mark.skipif(not NICEGUI, reason="NiceGUI is not installed (pip install 'rlperf[ui]')")
BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
SHORT: dict[str, Any] = {"model": "Qwen3-0.6B", "gpus": 8, "max_response": "4k", "prompts": 32}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_job(gpu="dgx_h100", **SHORT)


def test_the_form_asks_what_the_function_is_asked(plan: Plan, tmp_path: Path) -> None:
    from rlperf.ui.asked import PageForm

    assert PageForm(**SHORT).plan() == plan
    emptied = PageForm(model="Qwen3-8B", prompts=None, workload=None, max_prompt="").values()  # type: ignore[arg-type]
    assert {"prompts", "workload", "max_prompt"}.isdisjoint(emptied)
    with pytest.raises(SpecError, match="no model"):
        PageForm(model="").plan()
    with pytest.raises(SpecError, match=r"nowhere\.yaml"):
        PageForm(file=str(tmp_path / "nowhere.yaml")).plan()


@needs_nicegui
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--model", "Qwen3-8B", "--mini-batch", "64"], {"model": "Qwen3-8B", "mini_batch": 64}),
        (["--model", "mine/config.json", "--like", "llama"], {"like": "llama"}),
        (["qwen2.5-7b-8xa100"], {"model": "Qwen2.5-7B", "gpus": 8, "mini_batch": 256, "file": ""}),
        (["job.yaml"], {"file": "job.yaml"}),
    ],
)
def test_options_and_shipped_jobs_fill_the_form(
    given: list[str], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: list[Any] = []
    monkeypatch.setattr("rlperf.ui.server.serve", lambda form, port, show: forms.append(form))
    cli.app(["ui", *given], standalone_mode=False)
    assert wanted.items() <= vars(forms[0]).items()


def test_the_form_holds_whatever_a_job_without_a_file_can_say() -> None:
    from rlperf.specs import short_job
    from rlperf.ui.asked import PageForm

    assert {*short_job.SHORT, "file"} == set(vars(PageForm()))


@needs_nicegui
def test_options_beside_a_file_are_refused_and_not_forgotten() -> None:
    with pytest.raises(SpecError, match="--framework fill the form"):
        cli.app(["ui", "job.yaml", "--framework", "slime"], standalone_mode=False)


def test_ten_choices_are_listed_best_first(plan: Plan) -> None:
    rows = best_rows(plan.phases[0])
    phase = plan.phases[0]
    assert phase.runner_up is not None and len(rows) >= 10
    priced = [phase.runner_up.priced, *(other.priced for other in phase.next_best)][:9]
    assert priced == sorted(priced)


def test_sliders_ask_what_if_and_stay_within_a_second(plan: Plan) -> None:
    from rlperf.alternatives import what_if
    from rlperf.plan.compare import job_of_plan
    from rlperf.ui.asked import DRAWS, Alternatives

    asked = Alternatives(plan, Path())
    start = asked.start
    assert [cells[0] for cells in asked.moved(start).kept] == ["the plan"]
    moved = {**start, "max_response": 2048, "group": 12}
    began = time.process_time()
    said = asked.moved(moved)
    assert time.process_time() - began < 2.0  # half a second of processor; a full machine's clock says nothing
    fields = {"tasks.0.max_response_tokens": 2048, "tasks.0.group_size": 12}
    direct = what_if(job_of_plan(plan), {"x": fields}, plan=False, draws=DRAWS)
    assert [cells[3:] for cells in said.kept] == [cells[3:] for cells in direct.cells()]
    step_s, ratio = plan.phases[0].predicted.rl_step_s, direct.rows[1].ratio
    assert ratio is not None  # one rl_step of the plan, one time: that of its heading
    assert [cells[2] for cells in said.kept] == [human_seconds(step_s), human_seconds(step_s * ratio)]
    assert asked.moved(start).anew == "" and said.anew
    faster = asked.moved({**moved, "nodes": 2})
    assert not faster.kept and "on 16 devices" in faster.anew
    with pytest.raises(SpecError, match="group_size"):
        asked.moved({**start, "group": 0})


@pytest.mark.slow
def test_a_batch_of_several_tasks_has_no_slider_of_one() -> None:
    from rlperf.ui.asked import Alternatives

    math = {"name": "math", "workload": "math", "prompts_per_step": 32, "group_size": 4, "max_response_tokens": 2048}
    code = {**math, "name": "code", "prompts_per_step": 16}
    asked = {"architecture": "Qwen3-0.6B", "cluster": "dgx_h100", "nodes": 1, "sharing": "mixed", "tasks": [math, code]}
    mix = plan_job(asked)
    found = Alternatives(mix, Path())
    assert list(found.start) == ["nodes"] and [cells[0] for cells in found.moved({"nodes": 1}).kept] == ["the plan"]
    moved = found.moved({"nodes": 2})
    assert not moved.kept and "on 16 devices" in moved.anew
    assert found.planned({"nodes": 2}).phases[0].settings == mix.phases[0].settings


def test_the_archive_is_what_plan_out_writes(plan: Plan, tmp_path: Path) -> None:
    from rlperf.frameworks.export import plan_texts
    from rlperf.report.plan_files import write_plan_files
    from rlperf.ui.asked import archive

    written = write_plan_files(plan, tmp_path / "plan", plan_texts(plan))
    with zipfile.ZipFile(io.BytesIO(archive(plan, Path()))) as packed:
        assert sorted(packed.namelist()) == sorted(str(file.relative_to(tmp_path / "plan")) for file in written)
        for file in written:
            assert packed.read(str(file.relative_to(tmp_path / "plan"))) == file.read_bytes()


def test_a_port_that_is_taken_is_an_error() -> None:
    from rlperf.ui.server import HOST, free_port

    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(SpecError, match="taken"):
            free_port(taken.getsockname()[1])


def test_without_nicegui_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlperf.cli.ui.find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"pip install 'rlperf\[ui\]'"):
        cli.app(["ui"], standalone_mode=False)


def test_no_other_command_loads_nicegui() -> None:
    code = (
        "import sys, rlperf.cli.main as m; m.app(['--help'], standalone_mode=False); sys.exit('nicegui' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- with NiceGUI's simulated user ------------------------------------------------------------------------------------


def as_user(visit: Callable[[Any, Any], Awaitable[None]], **form: Any) -> None:
    """A visit to the page by a simulated user; ``visit`` gets the user and the page."""
    from nicegui.testing import user_simulation

    from rlperf.ui.asked import PageForm
    from rlperf.ui.page import Page

    pages: list[Page] = []

    def root() -> None:
        pages.append(Page(PageForm(**form)))
        pages[-1].build()

    async def run() -> None:
        async with user_simulation(root) as user:
            await user.open("/")
            await visit(user, pages[-1])

    asyncio.run(run())


async def until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < ends, "waited in vain"
        await asyncio.sleep(0.05)


@needs_nicegui
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_shows_the_plan_and_moves(plan: Plan, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    """That the form makes this plan is another test's, and what the page draws is the report's."""

    async def visit(user: Any, page: Any) -> None:
        await user.should_see("Press Plan")
        with monkeypatch.context() as ready:
            ready.setattr("rlperf.ui.asked.PageForm.plan", lambda form: plan)
            user.find(marker="plan").click()
            await until(lambda: page.said is not None)
        assert page.answer.plan.phases == plan.phases
        await user.should_see(human_seconds(plan.phases[0].predicted.rl_step_s))
        await user.should_see(marker="kept")
        slider = next(iter(user.find(marker="move_max_response").elements))
        slider.value = 2048
        await until(lambda: [cells[4] for cells in page.said.kept] == ["", "faster"])
        user.find(marker="download").click()
        response = await user.download.next(timeout=PATIENCE_S)
        assert zipfile.ZipFile(io.BytesIO(response.content)).testzip() is None
        user.find(marker="take_over").click()
        await until(lambda: page.answer.plan.job.tasks[0].max_response_tokens == (2048,))
        assert page.form.max_response == "2048"

    as_user(visit, **SHORT)


@pytest.mark.slow
@needs_nicegui
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sliders_are_planned_of_a_file_too(tmp_path: Path) -> None:
    """The form has no say beside a job's file, and its folder's own profiles stay in force."""
    task = {"name": "math", "workload": "math", "prompts_per_step": 32, "mini_batch": 16, "max_response_tokens": 4096}
    trainer = {"role": "trainer", "layout": {"tensor_parallel": 1, "context_parallel": 1, "ulysses": 1}}
    asked = {"architecture": "Qwen3-0.6B", "cluster": "mine", "tasks": [task], "trainer_backends": "fsdp2",
             "pools": [trainer]}  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(asked))
    (tmp_path / "clusters").mkdir()
    shipped = (profile_root() / "clusters" / "dgx_h100.yaml").read_text()
    (tmp_path / "clusters" / "mine.yaml").write_text(shipped.replace("name: dgx_h100", "name: mine"))

    async def visit(user: Any, page: Any) -> None:
        user.find(marker="plan").click()
        await until(lambda: page.said is not None)
        assert page.said.kept and not page.said.anew
        next(iter(user.find(marker="move_prompts").elements)).value = 48
        await until(lambda: len(page.said.kept) == 2)
        assert "devices" in page.said.anew
        user.find(marker="take_over").click()
        await until(lambda: page.answer.plan.job.tasks[0].prompts_per_step == (48,))
        assert page.answer.plan.job.tasks[0].mini_batch == (24,)

    as_user(visit, file=str(tmp_path / "job.yaml"))


@needs_nicegui
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_says_what_is_wrong() -> None:
    async def visit(user: Any, page: Any) -> None:
        user.find(marker="plan").click()
        await until(lambda: bool(user.find(marker="words").elements) and page.answer is None)
        await user.should_see("Qwen3-0.6B", retries=100)
        await user.should_see("did you mean", retries=100)

    as_user(visit, **{**SHORT, "model": "Qwen3-0.6C"})


@needs_nicegui
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("broken", "words"), [(SpecError("wrong input"), "wrong input"), (KeyError("x"), "a defect of rlperf")]
)
def test_no_error_leaves_the_page_waiting(broken: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: Any) -> Plan:
        raise broken

    monkeypatch.setattr("rlperf.ui.asked.PageForm.plan", raises)

    async def visit(user: Any, page: Any) -> None:
        user.find(marker="plan").click()
        await user.should_see(words, retries=100)

    as_user(visit, **SHORT)


# --- in a real browser ------------------------------------------------------------------------------------------------


def missing() -> str:
    """Why no browser can be driven here; empty where one can."""
    if not NICEGUI:
        return "NiceGUI is not installed (pip install 'rlperf[ui]')"
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install 'rlperf[test]')"
    if BROWSER is None or DRIVER is None:
        return "no chromium with chromedriver on this machine (Debian: apt-get install chromium chromium-driver)"
    return ""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The command as a user runs it."""
    from rlperf.ui.server import HOST, free_port

    port = free_port(None, first=18765)
    words = ["ui", "--no-show", "--port", str(port), "--model", SHORT["model"], "--gpus", "8", "--max-response", "4k",
             "--prompts", "32"]  # fmt: skip
    where = f"http://{HOST}:{port}"
    server = subprocess.Popen([sys.executable, "-m", "rlperf", *words], cwd=tmp_path, env=plain_environment())
    try:
        for _ in range(int(PATIENCE_S * 4)):
            try:
                urllib.request.urlopen(where, timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        yield where
    finally:
        server.terminate()
        server.wait(timeout=20)


def plain_environment() -> dict[str, str]:
    """Without what pytest adds: NiceGUI looks for it to tell whether it is under test."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "NICEGUI"))}


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_in_a_real_browser(address: str, plan: Plan, tmp_path: Path) -> None:
    from selenium import webdriver
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,1100",
        f"--user-data-dir={tmp_path}/c",
    ):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(tmp_path)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=str(DRIVER)))
    try:
        wait = WebDriverWait(browser, PATIENCE_S)
        browser.get(address)

        def text(_: Any = None) -> str:
            return browser.find_element(By.TAG_NAME, "body").text

        wait.until(lambda _: "Press Plan" in text())
        browser.find_element(By.XPATH, "//button[contains(., 'Plan')]").click()
        wait.until(lambda _: human_seconds(plan.phases[0].predicted.rl_step_s) in text())
        wait.until(lambda _: "against unchanged" in text())
        browser.execute_script("document.querySelector('.q-slider__track-container').focus()")
        ActionChains(browser).send_keys(Keys.ARROW_LEFT * 4).perform()
        wait.until(lambda _: "faster" in text())
        picture("first", browser)
        for heading in ("Timeline", "Memory", "The ten best"):
            browser.find_element(By.XPATH, f"//div[@role='tab'][contains(., '{heading}')]").click()
            time.sleep(0.6)  # Quasar slides the panels
            picture(heading.lower().replace(" ", "_"), browser)
        assert "10" in text()
        browser.find_element(By.XPATH, "//button[contains(., 'Download')]").click()
        wait.until(lambda _: list(tmp_path.glob("*.zip")))
        with zipfile.ZipFile(next(tmp_path.glob("*.zip"))) as packed:
            assert "plan.yaml" in packed.namelist() and "config/config.yaml" in packed.namelist()
        errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert not errors, errors
        asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        sent = [each["params"] for each in asked if each["method"] == "Network.requestWillBeSent"]
        urls = [each["request"]["url"] for each in sent if each["documentURL"].startswith(address)]
        assert urls and all(url.startswith((address, "data:", "blob:")) for url in urls), urls
    finally:
        browser.quit()


def picture(name: str, browser: Any) -> None:
    """Keep what the browser shows where RLPERF_SCREENSHOTS says, for the documentation."""
    if folder := os.environ.get("RLPERF_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"ui_{name}.png"))
