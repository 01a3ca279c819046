"""Shipped hardware profiles, and how profiles are found."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import rlperf
from rlperf.cli.profiles import KINDS, _names, app, show
from rlperf.errors import SpecError
from rlperf.specs import profiles
from rlperf.specs.calibration import load_device_calibration
from rlperf.specs.cluster import Device
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware, timed_relative
from rlperf.specs.labels import product_words
from rlperf.specs.profiles import (
    _aliases,
    find_profile,
    load_cluster,
    load_device,
    load_link,
    profile_names,
    profile_root,
    search_path,
)
from rlperf.specs.rl_calibration import FrameworkCalibration, load_framework_calibration
from rlperf.specs.trainer_calibration import load_trainer

# fmt: off
REQUIRED = {
    "a100_40g_sxm", "a100_80g_sxm", "a100_40g_pcie", "a100_80g_pcie", "a800_80g_sxm", "h100_sxm", "h100_pcie",
    "h100_nvl", "h800_sxm", "h200_sxm", "h20_sxm", "b200_sxm", "b300_sxm", "gb200", "gb300", "l4", "l40s",
    "a10g", "rtx_4090", "rtx_5090", "rtx_pro_6000_server", "v100_32g_sxm", "mi250x", "mi300x", "mi325x",
    "mi350x", "mi355x", "gaudi3", "ascend_910b", "ascend_910c", "h20_3e_sxm", "vr200", "tpu_v5p", "tpu_v6e", "tpu_v7",
}
CALIBRATED = {
    "a100_80g_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "gb300", "l40s",
    "rtx_pro_6000_server",
}
TOLD = {"mi355x"}
"""Constants from served rows: no kernel was timed."""
# fmt: on
DEVICES = profile_names("devices")


@pytest.fixture(autouse=True)
def _only_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLPERF_PROFILES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


def test_devices_of_two_kinds_in_a_cluster_are_told_how_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("name: mixed\ndevice: [h100, a100]\ndevices_per_node: 8\nnetwork: ib_ndr\nhost_memory: 2 TiB\n")
    with pytest.raises(SpecError, match="devices of one kind: write a cluster's file for each, and name one as the"):
        load_cluster(path)


def test_a_device_that_has_its_hosts_memory_stands_alone_in_a_generic_node(tmp_path: Path) -> None:
    sheet = (profile_root() / "devices" / "l40s.yaml").read_text().replace("name: l40s", "name: spark")
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "spark.yaml").write_text(f"{sheet}unified_memory: true\n")
    found = load_cluster("generic:spark", folder=tmp_path)
    assert (found.devices_per_node, found.rails) == (1, 1)
    assert found.host_memory == load_device("l40s").memory


def test_every_device_of_the_list_is_shipped() -> None:
    assert set(DEVICES) >= REQUIRED


@pytest.mark.parametrize("name", DEVICES)
def test_device(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.sources["*"]
    assert set(device.sources) <= {"*", *Device.model_fields}
    assert device.peaks.bf16 or device.peaks.fp16
    assert 8e9 < device.memory < 1e12
    assert 1e11 < device.memory_bandwidth < 3e13
    assert device.network is None or load_link(device.network)
    # What has no constants of its own borrows from exactly one device that has.
    # calibrated ones name one too: it stands in where a study leaves their own constants out
    assert device.relative in CALIBRATED | TOLD and device.relative != name


@pytest.mark.parametrize("name", DEVICES)
def test_quantities_carry_units_in_the_file(name: str) -> None:
    raw = yaml.safe_load((profile_root() / "devices" / f"{name}.yaml").read_text())
    quantities = [raw["memory"], raw["memory_bandwidth"], raw["host_bandwidth"], *raw["peaks"].values()]
    assert all(isinstance(value, str) and " " in value for value in quantities)


def test_data_sheet_figures() -> None:
    h100 = load_device("h100_sxm")
    assert h100.peaks.bf16 == 989.4e12
    assert h100.memory == 80 * 2**30
    assert h100.scale_up is not None
    assert (h100.scale_up.bandwidth, h100.scale_up.domain) == (450e9, 8)
    mesh = load_device("mi300x").scale_up
    assert mesh is not None
    assert mesh.pair_bandwidth is not None
    assert mesh.pair_bandwidth * 7 == mesh.bandwidth
    assert load_device("l40s").scale_up is None
    assert load_device("h100_pcie").scale_up is not None


def test_aliases_are_unique_and_found() -> None:
    seen: dict[str, str] = {}
    for name in DEVICES:
        for alias in load_device(name).aliases:
            assert alias not in DEVICES
            assert seen.setdefault(alias, name) == name
            assert load_device(alias).name == name
    assert load_device("H100").name == "h100_sxm"
    assert load_device("a100_sxm").name == "a100_80g_sxm"
    assert load_device("RTX-4090").name == load_device("4090").name == "rtx_4090"


@pytest.mark.parametrize("name", profile_names("links"))
def test_link(name: str) -> None:
    link = load_link(name)
    assert link.name == name
    assert link.source
    assert 1e9 < link.bandwidth <= 2e11
    assert 0 < link.latency < 1e-4


@pytest.mark.parametrize("name", profile_names("clusters"))
def test_cluster(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.sources["*"]
    assert cluster.price is None
    assert cluster.devices == cluster.nodes * cluster.devices_per_node


def test_clusters_of_the_list_and_their_size() -> None:
    needed = {
        "dgx_a100", "dgx_h100", "dgx_h200", "dgx_b200", "hgx_h20", "gb200_nvl72", "generic", "mi300x_node",
        "mi325x_node", "mi350x_node", "mi355x_node", "ascend_910b_node", "ascend_a3_supernode", "gaudi3_node",
        "hgx_h20_3e", "tpu_v5p_pod", "tpu_v6e_pod", "tpu_v7_pod", "vera_rubin_nvl72",
    }  # fmt: skip
    assert needed <= set(profile_names("clusters"))
    rack = load_cluster("gb200_nvl72")
    assert (rack.devices, rack.scale_up_domain, rack.devices_per_node) == (72, 72, 4)
    pair = load_cluster("dgx_h100", nodes=2)
    assert (pair.devices, pair.scale_up_domain) == (16, 8)
    assert load_cluster("dgx_h100", nodes=1, devices_per_node=2).devices == 2


@pytest.mark.parametrize("name", DEVICES)
def test_generic_cluster_of_every_device(name: str) -> None:
    cluster = load_cluster(f"generic:{name}", nodes=3)
    assert cluster.device == name
    assert cluster.nodes == 3
    link = load_device(name).scale_up
    spans = link is not None and link.domain > 8
    assert spans == name.startswith(("gb200", "gb300", "vr200", "tpu_", "ascend_910c"))
    assert (cluster.devices_per_node, cluster.scale_up_domain) == ((4, link.domain) if link and spans else (8, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_device("h10"), "there is no device named 'h10' (did you mean h100, or the path of a profile"),
        (lambda: load_device("zzz"), "rlperf profiles list"),
        (lambda: load_link("ib_nrd"), "did you mean ib_ndr, or the path of a profile of your own?"),
        (lambda: load_cluster("dgx_h1000"), "did you mean dgx_h100?"),
        (lambda: load_cluster("hgx_h200"), "did you mean dgx_h200?"),  # not hgx_h20: another product
        (lambda: load_cluster("generic:h10"), "no device named 'h10'"),
        (lambda: load_cluster("dgx_h100", nodes=0), "nodes must be at least 1"),
        (lambda: load_device("./nowhere.yaml"), "no such file"),
    ],
)
def test_unknown_names_get_one_clear_message(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(SpecError) as caught:
        call()
    assert message in str(caught.value)


def _copy(device: str, target: Path, **changes: str) -> Path:
    """A shipped device under another name or with other lines, in a folder of the user's."""
    text = (profile_root() / "devices" / f"{device}.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("aliases:", *(f"{key}:" for key in changes)))]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join([*lines, *(f"{key}: {value}" for key, value in changes.items())]) + "\n")
    return target


def test_search_path_prefers_what_is_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, env, user = tmp_path / "job", tmp_path / "env", tmp_path / "user"
    monkeypatch.setenv("RLPERF_PROFILES", str(env))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user))
    assert search_path(job) == (job, env, user / "rlperf", profile_root())
    shipped = load_device("h100_sxm").power
    for watts, root in ((601, user / "rlperf"), (602, env), (603, job)):
        _copy("h100_sxm", root / "devices" / "h100_sxm.yaml", power=f"{watts} W")
        assert load_device("h100_sxm", job).power == watts
    assert load_device("h100_sxm").power == 602
    assert shipped == 700
    path = _copy("h100_sxm", tmp_path / "mine.yaml", name="mine", power="650 W")
    assert load_device(path).power == load_device(str(path)).power == 650
    assert load_device("./mine.yaml", folder=tmp_path).name == "mine"


def test_a_broken_profile_lists_every_problem_with_its_line(tmp_path: Path) -> None:
    path = _copy("h100_sxm", tmp_path / "bad.yaml", memory="80", powr="700 W", memory_bandwidth="3 TFLOP/s")
    with pytest.raises(SpecError) as caught:
        load_device(path)
    text = str(caught.value)
    lines = path.read_text().splitlines()
    assert f"{path}:{lines.index('memory: 80') + 1}: memory: 80 has no unit" in text
    assert f"{path}:{lines.index('powr: 700 W') + 1}: powr: unknown field (did you mean power?)" in text
    assert "but bytes_per_s is due" in text


def test_a_device_borrows_from_the_first_relative_that_was_timed(tmp_path: Path) -> None:
    """H20 has no kernels of its own, and h100 is another name: both were refused as relatives."""
    folder = tmp_path / "devices"
    for relative, timed in {"h20_sxm": "h200_sxm", "h100": "h100_sxm", "l40s": "l40s"}.items():
        _copy("h800_sxm", folder / "mine.yaml", name="mine", relative=relative)
        assert timed_relative(load_device("mine", tmp_path), tmp_path) == timed
        assert load_hardware("mine", folder=tmp_path).calibration.extrapolated_from == timed
    for relative in ("mine", "null"):
        _copy("h800_sxm", folder / "mine.yaml", name="mine", relative=relative)
        with pytest.raises(SpecError, match=r"let its profile name a relative of: a100_80g_sxm, b200_sxm"):
            load_hardware("mine", folder=tmp_path)
    _copy("h800_sxm", folder / "mine.yaml", name="mine", relative="l40sx")
    with pytest.raises(SpecError, match=r"there is no device named 'l40sx' \(did you mean l40s, or the path of"):
        load_hardware("mine", folder=tmp_path)


def test_the_reference_names_the_fields_that_a_device_needs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "profiles.md").read_text()
    said = page.partition("Needed are ")[2].partition("; without")[0]
    needed = set(re.findall(r"`(\w+)`", said))
    assert needed == {name for name, field in Device.model_fields.items() if field.is_required()}


def test_show_says_what_is_wrong_with_the_file_of_a_device(tmp_path: Path) -> None:
    path = _copy("h100_sxm", tmp_path / "devices" / "mine.yaml", name="mine", memory="80")
    with pytest.raises(SpecError, match="memory: 80 has no unit"):
        show(str(path))


def test_a_cluster_of_an_unknown_device_is_refused(tmp_path: Path) -> None:
    text = (profile_root() / "clusters" / "dgx_h100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("device: h100_sxm", "device: h100_sxn"))
    with pytest.raises(SpecError, match=r"mine.yaml:3: device: .*did you mean h100_sxm"):
        load_cluster(path)
    path.write_text(text.replace("ib_ndr", "ib_ndx"))
    with pytest.raises(SpecError, match=r"mine.yaml:5: network: .*did you mean ib_"):
        load_cluster(path)
    path.write_text(text.replace("ib_ndr", "100 Gb/s"))
    with pytest.raises(SpecError, match=r"profiles list links` names all \d+; or give the path of a profile"):
        load_cluster(path)


@pytest.mark.parametrize("place", ["", "clusters"])
def test_a_device_beside_a_cluster_that_lies_elsewhere_is_said_to_lie_there(place: str, tmp_path: Path) -> None:
    sheet = find_profile("devices", "l40s").read_text().replace("name: l40s", "name: mine")
    cluster = find_profile("clusters", "dgx_h100").read_text().replace("device: h100_sxm", "device: mine")
    (tmp_path / "far" / "devices").mkdir(parents=True)
    (tmp_path / "far" / "devices" / "mine.yaml").write_text(re.sub("^aliases.*$", "", sheet, flags=re.MULTILINE))
    file = tmp_path / "far" / place / "own.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(cluster)
    with pytest.raises(SpecError, match=f"set RLPERF_PROFILES={tmp_path / 'far'}"):
        load_cluster(file, folder=tmp_path)
    assert load_cluster(file, folder=tmp_path / "far").device == "mine"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "architectures"])
def test_what_the_command_lists_it_shows(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines, frameworks and jobs were listed, and refused with "see rlperf profiles list"."""
    for name in _names(kind):
        show(name, as_json=True)
        assert f"{json.loads(capsys.readouterr().out)['kind']}s" == kind.rpartition("/")[2]


def test_profiles_are_shown_in_four_digits_and_printed_exactly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of an H100 stood there as 85.01887762432001 GB, and lists of fields as Python prints them."""
    monkeypatch.setenv("COLUMNS", "200")
    show("h100_sxm")
    said = capsys.readouterr().out
    assert "85.02 GB" in said and "52.43 MB" in said and "1.979 PFLOP/s" in said and "450 GB/s" in said
    assert not re.search(r"\d\.\d{4,} ", said)
    show("math")  # lengths, whose laws are lists
    said = capsys.readouterr().out
    assert "family: normal, first: 8.509, second: 7.692, weight: 0.3585" in said and "{'" not in said
    show("h100_sxm", as_json=True)
    assert json.loads(capsys.readouterr().out)["memory_usable"] == "85.01887762432001 GB"


def test_a_wheel_keeps_profiles_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "rlperf"
    (package / "hwprofiles").mkdir(parents=True)
    monkeypatch.setattr(profiles, "PACKAGE", package)
    assert profile_root() == package / "hwprofiles"
    monkeypatch.setattr(profiles, "PACKAGE", tmp_path / "half" / "of" / "a" / "package")
    with pytest.raises(SpecError, match="reinstall rlperf"):
        profile_root()


def test_find_profile_gives_the_file() -> None:
    assert find_profile("links", "IB NDR").name == "ib_ndr.yaml"


@pytest.mark.data
def test_devices_agree_with_the_collected_data_sheets(measured_data: Path) -> None:
    with (measured_data / "gpus.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) >= 30
    for row in rows:
        device = load_device(row["name"])
        assert device.name == row["name"]
        assert device.memory == int(row["mem_bytes"])
        assert device.memory_bandwidth == pytest.approx(float(row["mem_bw_Bps"]))
        for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4"):
            text = row[f"{dtype}_tflops"]
            assert getattr(device.peaks, dtype) == (pytest.approx(float(text) * 1e12) if text else None)
        assert device.peaks.int8 == (pytest.approx(float(row["int8_tops"]) * 1e12) if row["int8_tops"] else None)
        if row["boost_mhz"]:
            assert device.boost_clock == float(row["boost_mhz"]) * 1e6


@pytest.mark.data
def test_an_h100_is_as_large_as_engines_found_it(measured_data: Path) -> None:
    """What vLLM shares out at start-up is its fraction of what the process sees, not of the data sheet [GiB]."""
    parts = ("weights_gib", "activation_gib", "non_torch_gib", "kv_cache_gib")
    with (measured_data / "memory" / "vllm_engine_memory.csv").open() as stream:
        seen = sorted(
            sum(float(row[name]) for name in parts) / float(row["gpu_mem_util"]) for row in csv.DictReader(stream)
        )
    assert seen[:-1] == pytest.approx([load_device("h100").usable_memory / 2**30] * 7, abs=0.012)
    assert load_device("h100").usable_memory < 81559 * 2**20 < load_device("h100").memory  # nvidia-smi's lies between


@pytest.mark.data
def test_devices_are_as_large_as_runs_recorded(measured_data: Path) -> None:
    names = {"NVIDIA L4": "l4", "NVIDIA A100-SXM4-40GB": "a100_40g_sxm"}
    with (measured_data / "memory" / "rl_lora_phases.csv").open() as stream:
        seen = {(names[row["device"]], float(row["device_total_bytes"])) for row in csv.DictReader(stream)}
    assert seen == {(name, load_device(name).usable_memory) for name in names.values()}


def test_limits_keep_to_what_a_process_sees_and_say_where_nobody_recorded_it() -> None:
    known, assumed, unknown = (
        rlperf.predict_job(model="Qwen2.5-1.5B", gpus=8, gpu=gpu, max_response="1k", prompts=16)
        for gpu in ("h100", "a100", "h20")
    )
    for use in known.memory_bytes.values():
        assert use.limit == pytest.approx(79.18 * 2**30) and use.total < use.limit
    assert assumed.memory_bytes["trainer"].limit == 79.5 * 2**30
    assert unknown.memory_bytes["trainer"].limit == load_device("h20").memory
    said = [[note for note in each.assumed if "data sheet" in note or "a process sees" in note]
            for each in (known, assumed, unknown)]  # fmt: skip
    assert not said[0] and [len(each) for each in said[1:]] == [1, 1]
    assert said[1][0].startswith("a100_80g_sxm: a process sees 85.4 GB of it, assumed: ")
    assert said[2][0].startswith("h20_sxm: memory as on its data sheet")


@pytest.mark.data
def test_an_h200_is_as_large_as_a_process_that_ran_out_said(measured_data: Path) -> None:
    lines = (measured_data / "memory" / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()
    said = next(line for line in lines if '"slime_1951"' in line)
    assert '"gpu": "h200_sxm"' in said and "free of 139.81" in said
    assert load_device("h200").usable_memory == 139.81 * 2**30


def test_a_process_sees_no_more_memory_than_a_device_has() -> None:
    device = load_device("h100_sxm")
    assert device.usable_memory < device.memory
    with pytest.raises(ValueError, match="memory_usable is above memory"):
        Device(**{**device.model_dump(), "memory_usable": "81 GiB"})


@pytest.mark.parametrize(
    ("kind", "name", "load"),
    [
        ("frameworks", "slime", load_framework_calibration),
        ("devices", "h100_sxm", load_device_calibration),
        ("engines", "vllm", load_engine_calibration),
        ("trainers", "fsdp2", load_trainer),
    ],
)
def test_a_calibration_that_was_written_again_is_read_again(
    tmp_path: Path, kind: str, name: str, load: Callable[..., FrameworkCalibration]
) -> None:
    shipped = yaml.safe_load((profile_root() / "calibrations" / kind / f"{name}.yaml").read_text(encoding="utf-8"))
    target = tmp_path / "calibrations" / kind / f"{name}.yaml"
    target.parent.mkdir(parents=True)
    for word in ("before", "afterwards"):
        notes = [word] if isinstance(shipped.get("notes"), list) else word
        target.write_text(yaml.safe_dump({**shipped, "notes": notes}), encoding="utf-8")
        assert word in load(name, folder=tmp_path).notes


@pytest.mark.parametrize(
    ("printed", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_80g_sxm"), ("NVIDIA A100-SXM4-40GB", "a100_40g_sxm"),
        ("NVIDIA A100 80GB PCIe", "a100_80g_pcie"), ("NVIDIA A800-SXM4-80GB", "a800_80g_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("H100-SXM5-80GB", "h100_sxm"), ("NVIDIA H20", "h20_sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"), ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000_server"), ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-32GB", "v100_32g_sxm"), ("NVIDIA GH200 480GB", "gh200_96g"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)  # fmt: skip
def test_a_device_is_found_by_the_name_that_its_driver_prints(printed: str, device: str) -> None:
    """What nvidia-smi says led nowhere, or to another device: A100 for an H100-SXM5-80GB and for an A800."""
    assert load_device(printed).name == device


def test_no_two_devices_share_a_drivers_name() -> None:
    files = [find_profile("devices", name) for name in profile_names("devices")]
    words = [(product_words(name), file) for file in files for name in {file.stem, *_aliases(file)}]
    assert len({each for each, _ in words}) == len(set(words))


@pytest.mark.parametrize("words", [["list", "links"], ["show", "h100"]])
def test_every_json_form_has_the_version_of_its_schema(words: list[str]) -> None:
    """docs/interfaces.md says so; those of profiles, calibrations and converted lengths had none."""
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["schema_version"] == 1
