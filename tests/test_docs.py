"""The documentation is true: tutorials and README run as written, help fits a screen, the site's pages all exist.

A tutorial is run block by block in an empty folder: a block with ``title="FILE"`` writes a file, ``sh`` runs its lines
(``exit="N"`` states the exit code), ``python`` runs in one namespace per page. ``run="no"`` marks what needs a network.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from rlperf.api import plan_job, size_job
from rlperf.calibrate.leave_out import ALL, ErrorSummary, LeaveOutLine, LeaveOutReport
from rlperf.calibrate.validate import PredictedFigure, Report
from rlperf.cli import main as cli
from rlperf.cost.basis import serving_basis
from rlperf.errors import InfeasibleError, RlperfError
from rlperf.frameworks.audit.beside_log import Compared
from rlperf.frameworks.audit.finding import Finding
from rlperf.frameworks.audit.verdict import Verdict
from rlperf.plan.answer.plan import (
    DefaultsComparison,
    MemoryUse,
    ParetoPoint,
    Phase,
    Plan,
    PredictedNumbers,
    PredictReport,
    RunnerUp,
    RunTotals,
    ScorerUse,
    Sensitivity,
)
from rlperf.plan.sizing import Floor, SizeRow, Sizing
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.hf.families import FAMILIES, REFUSED
from rlperf.specs.job import Horizon, Job, Limits, Objective, SpotNodes, Task, WholeRun
from rlperf.specs.profiles import architecture_names, load_architecture, profile_names
from rlperf.specs.scorer import Scorer
from rlperf.techniques import Gain
from rlperf.version import __version__

from .quick import slow_but
from .scored import scored, scored_apart

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
FENCE = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"[|<>;$`*]")
LINES, COLUMNS = 45, 80


class Block(NamedTuple):
    language: str
    options: dict[str, str]
    text: str


def blocks(page: str) -> Iterator[Block]:
    for match in FENCE.finditer(page):
        yield Block(match[1] or "", dict(re.findall(r'(\w+)="([^"]*)"', match[2])), match[3])


def command(line: str) -> int:
    """Run ``rlperf ...`` in this process; its exit code."""
    words = shlex.split(line, comments=True)[1:]
    said = io.StringIO()
    before, sys.argv = sys.argv, ["rlperf", *words]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.app(words, standalone_mode=False)
    except RlperfError as error:
        said.write(str(error))
        code = error.exit_code
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    if code not in (0, None):
        print(said.getvalue())
    return int(code or 0)


def shell(text: str, expected: int) -> None:
    code = 0
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line.startswith("rlperf ") and not SHELL.search(line.partition(" #")[0].replace('"step<=300s"', "")):
            code = command(line)
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            code = subprocess.run(["bash", "-euc", line], env={**os.environ, "PATH": path}, check=False).returncode
        if code:
            assert code == expected, f"{line}: exit code {code}"
    assert code == expected, f"exit code {code}, the page says {expected}"


def run_page(text: str) -> int:
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks(text):
        if block.options.get("run") == "no":
            continue
        if "title" in block.options:
            target = Path(block.options["title"])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
        elif block.language == "sh":
            shell(block.text, int(block.options.get("exit", "0")))
            ran += 1
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, "page", "exec"), names)
            ran += 1
    return ran


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("page", slow_but(TUTORIALS, "quickstart"))
def test_a_tutorial_runs_as_written(page: Path, alone: Path, request: pytest.FixtureRequest) -> None:
    if page.stem == "quickstart":  # what its report draws is drawn in test_report_html.py
        request.getfixturevalue("undrawn")
    assert run_page(page.read_text()) >= 2


@pytest.mark.slow
def test_the_readme_s_job_and_python_run(alone: Path) -> None:
    found = list(blocks((ROOT / "README.md").read_text()))
    jobs = [block for block in found if block.language == "yaml"]
    if not jobs:
        pytest.skip("the README states no job")
    Path("job.yaml").write_text(jobs[0].text)
    names: dict[str, Any] = {}
    for block in found:
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, "README", "exec"), names)


COMMAND = re.compile(r"^(?: {4})?(rlperf .*)$|`(rlperf [^`]+)`|; do (rlperf [^|;]+)", re.MULTILINE)
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("studies/*/README.md")),
]


def test_pages_name_commands_and_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, in indented lines and in the text: the command, its subcommand, every option."""
    monkeypatch.setenv("COLUMNS", "200")
    helps: dict[tuple[str, ...], str] = {}
    asked = 0
    for page in PAGES:
        for found in COMMAND.finditer(page.read_text().replace("\\\n", " ")):
            line = " ".join((found[1] or found[2] or found[3]).split()).partition(" #")[0].partition(" |")[0]
            words = [word.rstrip(",.:)") for word in shlex.split(line)]
            if len(words) < 2 or words[1].startswith("-"):
                continue
            assert words[1] in cli.COMMANDS, f"{page.name}: {line}"
            name = tuple(words[1:3] if words[1] in ("profiles", "workload", "calibrate") else words[1:2])
            if name not in helps:
                helps[name] = help_text(*name)
            assert helps[name], f"{page.name}: {line}"
            for option in (word.partition("=")[0] for word in words[2:] if word.startswith("--")):
                assert re.search(rf"(?<![\w-]){option}\b", helps[name]), f"{page.name}: {line}"
            asked += 1
    assert asked > 100


@pytest.mark.parametrize("name", [*cli.COMMANDS])
def test_every_help_fits_a_screen_and_has_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(sys, "argv", ["rlperf", name, "--help"])
    whole = help_text(name)
    below = re.findall(r"^│ (\w+) ", whole.partition("─ Commands")[2], re.MULTILINE)
    for words in ((name,), *((name, one) for one in below)):
        text = help_text(*words)
        assert "Example: rlperf" in " ".join(text.split()), words
        assert len(text.splitlines()) <= LINES, words
        assert max(map(len, text.splitlines())) <= COLUMNS
    assert cli.COMMANDS[name].help.endswith(".")
    assert len(below) >= 2 or name not in ("profiles", "workload", "calibrate")


def help_text(*words: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.app([*words, "--help"], standalone_mode=False)
    return re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())


def test_the_list_of_commands_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(sys, "argv", ["rlperf", "--help"])
    text = help_text()
    assert len(text.splitlines()) <= LINES
    for name in cli.COMMANDS:
        assert f" {name} " in text


def site() -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        pass

    return dict(yaml.load((DOCS / "website" / "mkdocs.yml").read_text(), Loader=Loader))


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for entry in nav:
            yield from pages(entry)
    else:
        for entry in nav.values():
            yield from pages(entry)


def test_every_page_is_in_the_site_and_every_entry_is_a_page() -> None:
    listed = list(pages(site()["nav"]))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == there


LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def test_links_inside_the_documentation_lead_somewhere() -> None:
    links = [
        (page, match[1])
        for page in sorted(DOCS.rglob("*.md"))
        for match in LINK.finditer(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        if not match[1].startswith(("http", "mailto:"))
    ]
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []
    assert len(links) > 100


@functools.cache
def _script(name: str) -> Any:
    """A generator of the website as a module."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, DOCS / "website" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["sweep_reference", "pool_reference", "support_matrix"])
def test_a_generated_reference_is_what_the_code_says(script: str) -> None:
    module = _script(script)
    assert module.TARGET.read_text() == module.text(), f"run docs/website/{script}.py"


def minimum_devices(module: Any) -> dict[str, dict[tuple[str, str, str], str]]:
    """Cells of the page by kind, and by model, length and cluster."""
    tables: dict[str, dict[tuple[str, str, str], str]] = {kind: {} for kind in module.KINDS}
    kind = ""
    for line in module.TARGET.read_text().splitlines():
        kind = line[3:] if line.startswith("## ") else kind
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(module.CLUSTERS) and cells[0] in module.MODELS:
            tables[kind] |= dict(zip(((*cells[:2], name) for name in module.CLUSTERS.values()), cells[2:], strict=True))
    keys = list(itertools.product(module.MODELS, module.LENGTHS, module.CLUSTERS.values()))
    assert all(list(table) == keys for table in tables.values())
    return tables


@pytest.mark.parametrize(
    ("model", "length", "of", "cluster"),
    [
        ("Qwen2.5-1.5B", "4k", 0, "dgx_a100"),
        pytest.param("Qwen3-8B", "16k", 1, "dgx_h100", marks=pytest.mark.slow),
        pytest.param("Qwen3-14B", "4k", 0, "dgx_h100", marks=pytest.mark.slow),
    ],
)
def test_minimum_devices_are_planned_as_the_page_says(model: str, length: str, of: int, cluster: str) -> None:
    module = _script("minimum_devices")
    kind = list(module.KINDS)[of]
    said = minimum_devices(module)[kind][model, length, cluster]
    assert said == module.cell(model, length, kind, cluster).words()


@pytest.mark.slow
def test_minimum_devices_are_what_size_says() -> None:
    """None of fewer nodes meets any target."""
    module = _script("minimum_devices")
    tables, full = minimum_devices(module), next(iter(module.KINDS))
    page = tables[full]["Qwen3-235B-A22B", "4k", "dgx_h200"]
    devices, tried = int(page.split("**")[1]), module.counts("dgx_h200")
    nodes = devices // 8
    with pytest.raises(InfeasibleError):
        plan_job(module.job("Qwen3-235B-A22B", "4k", full, "dgx_h200", tried[tried.index(devices) - 1]))
    sized = size_job(
        module.job("Qwen3-235B-A22B", "4k", full, "dgx_h200", 8 * nodes), "step<=100h", most_nodes=2 * nodes
    )
    assert min(row.nodes for row in sized.rows if row.meets) == nodes
    assert sized.best is not None and (sized.best.nodes == nodes or sized.passed_over.startswith(f"{nodes} x dgx_h200"))


def toy_report() -> Report:
    figures = [
        PredictedFigure(f"r{k}", "verl", "step_s", measured, 10.0, 8.0, 12.0, used_in_calibration=k == 3)
        for k, measured in enumerate((10.0, 13.0, 40.0, 99.0))
    ]
    return Report("rl_step", "f.csv", 5, 4, 1, {"no seconds": 1}, (), tuple(figures), {"no seconds": (7,)})


def test_failed_rows_are_listed_and_seen_ones_are_not() -> None:
    module = _script("nightly")
    text = "\n".join(module.failed("Whole rl_steps", toy_report()))
    assert "2 of 3 figures fail (67 %)" in text and "Refused, 1: no seconds (lines 7)" in text
    assert text.index("| r2 |") < text.index("| r1 |") and "r0" not in text and "r3" not in text


def test_frameworks_of_the_readme_are_replaced_between_their_marks() -> None:
    module = _script("nightly")
    errors = ErrorSummary(10.0, 12.0, 20.0, 1.0, 0.9, 30.0)
    line = LeaveOutLine("step_s", "verl_fsdp", 3, 2, errors, replace(errors, median=15.0), errors, "trl")
    others = (replace(line, metric="rollout_s"), replace(line, group="mean over groups"))
    table = module.by_framework(LeaveOutReport("rl_step", "f.csv", "framework", (line, *others)))
    assert table[2:] == ["| verl fsdp | 3 | 10.0 / 12.0 % | 90 % | 15.0 / 12.0 % | 90 % | trl |"]
    readme = module.README.read_text()
    replaced = module.with_frameworks(readme, table)
    assert table[2] in replaced and replaced.split(module.END)[1] == readme.split(module.END)[1]
    assert "| verl megatron |" in readme, "verl is among the frameworks that README scores"


def test_the_support_matrix_calls_nothing_measured_that_a_prediction_says_is_borrowed() -> None:
    module = _script("support_matrix")
    engine, families = load_engine_calibration(module.ENGINE), module.families()
    machines = {device: load_hardware(device) for device in profile_names("devices")}
    standings = set()
    for family, by_device in module.cells().items():
        for device, words in by_device.items():
            for precision, cell in zip(module.PRECISIONS, words, strict=True):
                standings.add(cell.partition(":")[0])
                told = families[family], machines[device], engine
                assert cell != "measured" or not serving_basis(*told, gemm_dtype=precision).extrapolated
    assert standings == {"measured", "inferred", "borrowed"}
    llama, mixtral = load_architecture("Llama-3.1-8B"), load_architecture("Mixtral-8x7B")
    h100, a100 = load_hardware("h100_sxm"), load_hardware("a100_80g_sxm")
    assert module.cell(llama, h100, "fp8") == module.cell(llama, a100, "bf16") == "measured"
    assert module.cell(llama, a100, "fp8") == "borrowed: bf16 *"
    assert module.cell(mixtral, a100, "int8") == "borrowed: bf16 experts"
    latent = load_architecture("DeepSeek-V3")
    assert module.cell(latent, h100, "fp8") == "measured"
    assert module.cell(latent, load_hardware("h200_sxm"), "bf16") == "borrowed: h100_sxm latent attention"
    assert module.cell(llama, load_hardware("h800_sxm"), "bf16") == "borrowed: h100_sxm"


def test_the_support_matrix_names_every_device_and_family_and_refusal() -> None:
    page = (DOCS / "reference" / "support.md").read_text()
    words = {word.rstrip(".") for word in re.findall(r"[\w.-]+", page)}
    families = {load_architecture(name).family for name in architecture_names()}
    assert {*profile_names("devices"), *families, *FAMILIES, *REFUSED} <= words
    profiles = (DOCS / "reference" / "profiles.md").read_text()
    assert set(FAMILIES) <= set(re.findall(r"`([\w.-]+)`", profiles))


STABLE = (
    *(Job, Task, Objective, Limits, Horizon, WholeRun, SpotNodes, Scorer),
    *(Plan, Phase, PredictReport, PredictedNumbers, RunnerUp, Sensitivity, ParetoPoint, RunTotals),
    *(DefaultsComparison, ScorerUse, MemoryUse, Finding, Compared, Verdict, SizeRow, Sizing, Floor, Report),
    *(PredictedFigure, Gain),
)
"""What ``--json`` prints and files state, by field."""


@pytest.mark.parametrize("kind", STABLE, ids=lambda kind: kind.__name__)
def test_stable_interfaces_name_every_field(kind: Any) -> None:
    said = set(re.findall(r"\w+", (DOCS / "interfaces.md").read_text()))
    names = set(getattr(kind, "model_fields", None) or {each.name for each in fields(kind)})
    assert names <= said, f"docs/interfaces.md: {kind.__name__}"


def test_every_room_is_listed() -> None:
    """Packages of rlperf, and the parts of those that have parts, stand in the table of rooms."""
    page = (DOCS / "theory" / "road.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `rlperf/(\w+)` \| (.+) \|$", page, re.MULTILINE))
    inside = sorted(path.parent.relative_to(ROOT / "rlperf").parts for path in (ROOT / "rlperf").rglob("__init__.py"))
    packages = [parts for parts in inside if parts]
    assert {parts[0] for parts in packages} == set(listed)
    assert [parts for parts in packages if len(parts) == 2 and f"`{parts[1]}`" not in listed[parts[0]]] == []


@pytest.mark.data
@pytest.mark.slow
def test_printed_accuracies_are_what_validate_measures(measured_data: Path) -> None:
    """README's tables, those of the guide, the page of all groups: the same words, figures within a point."""
    module = _script("accuracy")
    number = re.compile(r"[+-]?\d[\d,]*\.?\d*")
    for path, found in module.texts(module.reports_of(measured_data, scored, scored_apart)).items():
        printed = path.read_text()
        assert number.split(printed) == number.split(found), "run docs/website/accuracy.py"
        pairs = zip(number.findall(printed), number.findall(found), strict=True)
        for before, now in ((float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs):
            assert now == pytest.approx(before, abs=1.01, rel=0.002), "run docs/website/accuracy.py"


def test_readme_says_of_groups_left_out_what_the_guide_says() -> None:
    """Training by framework, release, device and family: errors of all rows, as each page of the two has them."""
    module = _script("training_left_out")
    guide = module.PAGE.read_text()
    of_readme = (ROOT / "README.md").read_text().partition(module.README_HEAD)[2].split("\n")[2:6]
    for (by, label), said in zip(module.BY.items(), of_readme, strict=True):
        whole = guide.partition(f"**{module.TITLES[by]}.**")[2].partition("| **all rows** | ")[2].split("\n")[0]
        rows, _, median, mean, _, inside, _, *left_out = whole.split(" | ")
        errors = (
            f"{a.removesuffix(' %')} / {b} | {c}" for a, b, c in ((median, mean, inside), [*left_out[:2], left_out[3]])
        )
        assert said == f"| {label} | {rows} | {' | '.join(errors)} |", "python docs/website/training_left_out.py"


def test_training_rows_of_readme_are_replaced_one_grouping_at_a_time() -> None:
    module = _script("training_left_out")
    seen, left = (
        ErrorSummary(*figures, 9.0, 0.0, inside, 50.0) for figures, inside in (((1.0, 2.0), 0.5), ((3.0, 4.0), 0.25))
    )
    report = LeaveOutReport("training", "t.csv", "device", (LeaveOutLine("step_s", ALL, 7, 8, seen, left, left, ""),))
    text = (ROOT / "README.md").read_text()
    written = module.readme_with(text, {"device": report})
    changed = [line for line in written.split("\n") if line not in text.split("\n")]
    assert changed == ["| device | 7 | 1.0 / 2.0 % | 50 % | 3.0 / 4.0 % | 25 % |"]
    assert written.count("\n") == text.count("\n")


def test_changelog_citation_and_package_are_of_one_version() -> None:
    import tomllib

    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    releases = re.findall(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert package["version"] == __version__ == releases[0][0] == cited["version"]
    assert all(when == "unreleased" or re.fullmatch(r"\d{4}-\d{2}-\d{2}", when) for _, when in releases)
    command = "mkdocs gh-deploy --strict -f docs/website/mkdocs.yml"
    assert command in (ROOT / "README.md").read_text(), "one command publishes the pages"


def test_ten_lines_size_a_cluster() -> None:
    first = next(
        block for block in blocks((DOCS / "tutorials" / "capacity.md").read_text()) if block.language == "python"
    )
    assert "size_job" in first.text and len([line for line in first.text.splitlines() if line.strip()]) <= 10


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    config = str(DOCS / "website" / "mkdocs.yml")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", str(tmp_path / "site")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
