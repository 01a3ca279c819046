"""A device calibration from kernel timings: every series fitted, the rest taken over from a base calibration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import yaml

from rlperf.calibrate.expert_fits import fit_moe, layers_of
from rlperf.calibrate.kernel_fits import (
    KernelFit,
    fit_collective,
    fit_decode,
    fit_dispatch,
    fit_encoder,
    fit_exchange,
    fit_gemm,
    fit_prefill,
    fit_stream,
    fit_streams,
)
from rlperf.calibrate.kernel_tables import Series, joined_series, read_series
from rlperf.calibrate.latent_fits import fit_absorption, fit_latent
from rlperf.calibrate.module_fits import fit_modules, mixer_of
from rlperf.calibrate.recurrent_fits import fit_scan
from rlperf.calibrate.rows_beside import WIDE
from rlperf.calibrate.sparse_kernels import fit_wide
from rlperf.calibrate.statistics import spread_of
from rlperf.errors import Problem, SpecError
from rlperf.specs.calibration import CollectiveFit, DeviceCalibration, GemmFit, load_device_calibration
from rlperf.specs.cluster import Device
from rlperf.specs.hardware import lent_by, load_hardware, timed_relative
from rlperf.specs.profiles import load_device

SECTIONS = {
    "gemm": "gemm",
    "prefill": "prefill",
    "decode": "decode",
    "moe": "moe",
    "collective": "collectives",
    "dispatch": "dispatch",
    "exchange": "exchange",
    "encoder": "encoder",
    "latent prompts": "latent_prefill",
    "latent decodes": "latent_decode",
    "absorption": "absorption",
    "scan": "scan",
    "sparse": "sparse",
    "streams": "streams",
    "stream": "stream",
}
MINIMUM_ROWS = 8
"""Series with fewer timings are not fitted."""

# Kernels of one dtype, first the one that stands for the dtype where nobody names another.
_ORDER = ("trtllm_cutlass", "trtllm_deepgemm", "trtllm_triton", "vllm_flashinfer_trtllm", "vllm_flashinfer_cutlass")


def read_all(files: Iterable[Path | str]) -> list[Series]:
    """Series of several files; every problem of every file in one `SpecError`."""
    problems: list[Problem] = []
    found: list[Series] = []
    for file in files:
        try:
            found += read_series(file)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return found


def merged(series: Sequence[Series]) -> list[Series]:
    """Series that differ in software version only: the newest stays, since it is what runs today.

    Of expert kernels the candidates of one release keep the layers that the newest of them does not have: they are
    timed on the models that came with them. Dispatches of one release stand in two tables, by expert counts.
    """
    newest: dict[str, Series] = {}
    for one in sorted(series, key=lambda one: _version(one.software), reverse=True):
        other = newest.get(one.name)
        if other is None:
            newest[one.name] = one
        elif one.kind == "moe" and _release(one.software) == _release(other.software):
            newest[one.name] = joined_series(other, one.take(~np.isin(layers_of(one), layers_of(other))))
        elif one.kind == "dispatch" and one.software == other.software:
            newest[one.name] = joined_series(other, one)
    return [newest[name] for name in dict.fromkeys(one.name for one in series)]


def _release(software: str) -> str:
    """Engine and release, without its candidate: trtllm-1.3.0 of trtllm-1.3.0rc20."""
    return re.split(r"rc|,", software)[0]


def _version(software: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", software))


def fit_series(
    series: Sequence[Series],
    device: Device,
    base: DeviceCalibration,
    *,
    check: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> list[KernelFit]:
    """Fit all series of one device; bf16 products first, since quantising kernels are told from their fixed time."""
    fits: list[KernelFit] = []
    usable = [one for one in merged(series) if len(one.measured_s) >= MINIMUM_ROWS and one.kind != "sparse"]
    usable.sort(key=lambda one: (one.kind, one.dtype != "bf16"))
    balanced = {(one.kernel, one.dtype) for one in usable if one.kind == "moe" and one.variant != "power_law_1.2"}
    fixed: float | None = None
    for one in usable:
        progress(one.name)
        if one.kind == "gemm":
            fits.append(fit_gemm(one, device, base_fixed=None if one.dtype == "bf16" else fixed, check=check))
            if isinstance(fits[-1].constants, GemmFit) and one.dtype == "bf16":
                fixed = fits[-1].constants.fixed
        elif one.kind == "prefill":
            fits.append(fit_prefill(one, device, base.prefill[0], check=check))
        elif one.kind == "encoder":
            fits.append(fit_encoder(one, device, base.prefill[0], check=check))
        elif one.kind == "decode":
            fits.append(fit_decode(one, device, base, check=check))
        elif one.kind == "latent":
            fits.append(fit_latent(one, device, base.prefill[0], check=check))
        elif one.kind == "absorption" and one.dtype == "bf16":
            fits.append(fit_absorption(one, device, check=check))
        elif one.kind == "moe" and (one.variant != "power_law_1.2" or (one.kernel, one.dtype) not in balanced):
            skewed = _skewed(usable, one) if one.variant != "power_law_1.2" else None
            fits.append(fit_moe(one, device, skewed, check=check))
        elif one.kind == "collective":
            fits.append(fit_collective(one, device, check=check))
        elif one.kind in ("scan", "convolution") and one.variant != "verify":
            fits.append(fit_scan(one, device, check=check))
        elif one.kind == "streams":
            fits.append(fit_streams(one, device, check=check))
        elif one.kind == "stream":
            fits.append(fit_stream(one, device, base.stream, check=check))
        elif one.kind == "exchange":
            fits.append(fit_exchange(one, device, check=check))
        elif one.kind in ("dispatch", "dispatch_normal"):
            fits.append(fit_dispatch(one, device, 4 if device.name.startswith("gb") else 8, check=check))
        elif one.kind == "chosen" and one.variant.startswith(WIDE):
            fits.append(fit_wide(one, replace(load_hardware(device.name), calibration=base), check=check))
    return fits + _modules(series, device, base, check)


def _modules(series: Sequence[Series], device: Device, base: DeviceCalibration, check: bool) -> list[KernelFit]:
    """Attention modules, all models of one engine, mixer and phase in one fit."""
    groups: dict[tuple[str, str, str], list[Series]] = {}
    for one in merged([each for each in series if each.kind == "sparse"]):
        mixer, phase = mixer_of(one)
        if mixer:
            groups.setdefault((one.kernel, mixer, phase), []).append(one)
    enough = [each for each in groups.values() if sum(len(one.measured_s) for one in each) >= MINIMUM_ROWS]
    if not enough:
        return []
    hw = replace(load_hardware(device.name), calibration=base)
    return [fit_modules(each, hw, check=check) for each in enough]


def _skewed(series: Sequence[Series], one: Series) -> Series | None:
    for other in series:
        if (other.kind, other.kernel, other.dtype, other.variant) == ("moe", one.kernel, one.dtype, "power_law_1.2"):
            return other
    return None


def calibration_from(
    fits: Sequence[KernelFit], device: Device, base: DeviceCalibration, *, source: str
) -> DeviceCalibration:
    """The base calibration with every fitted section replaced."""
    sections = _sections(fits)
    pooled = [
        (p, fit.fitted.measured) for fit in fits for p in (fit.fitted.left_out or {"": fit.fitted.predicted}).values()
    ]
    predicted = np.concatenate([p for p, _ in pooled])
    measured = np.concatenate([m for _, m in pooled])
    known = np.isfinite(predicted)
    day = date.today().isoformat()
    copied = LENT if base.extrapolated_from and not base.timed else ()
    timed = tuple(dict.fromkeys((*base.timed, *sections)))
    lender = base.extrapolated_from if {*NEEDED} - {*timed} else None
    return base.model_copy(
        update={
            **dict.fromkeys(copied, ()),
            **_held(sections),
            "id": f"{device.name}-{day}",
            "device": device.name,
            "source": source,
            "date": day,
            "software": ", ".join(sorted({fit.series.software for fit in fits if fit.series.software})),
            "n": int(sum(len(fit.fitted.measured) for fit in fits)),
            "spread": base.spread if lender else spread_of(predicted[known], measured[known]),
            "extrapolated_from": lender,
            "timed": timed if lender else (),
            "notes": _taken_over({*sections, *copied}, base),
        }
    )


def _sections(fits: Sequence[KernelFit]) -> dict[str, list[object]]:
    """Fitted constants by section, the kernels that engines choose first in front."""
    sections: dict[str, list[object]] = {}
    for fit in sorted(fits, key=_rank):
        sections.setdefault(fit.section, []).append(fit.constants)
    return sections


def _held(sections: dict[str, list[object]]) -> dict[str, object]:
    """Sections as a calibration holds them: a device has several kernels of a kind, but streams in one way."""
    return {name: values[0] if name == "stream" else tuple(values) for name, values in sections.items()}


def _rank(fit: KernelFit) -> tuple[str, bool, int]:
    kernel = fit.series.kernel
    return (fit.section, fit.series.dtype != "bf16", _ORDER.index(kernel) if kernel in _ORDER else len(_ORDER))


def _taken_over(sections: set[str], base: DeviceCalibration) -> str:
    kept = [name for name in SECTIONS.values() if name not in sections and getattr(base, name)]
    text = "host and backward attention are not in kernel tables: see their quality"
    return f"{text}; taken over from {base.extrapolated_from or base.device}: {', '.join(kept)}" if kept else text


def added(fits: Sequence[KernelFit], base: DeviceCalibration) -> DeviceCalibration:
    """The base calibration with constants of further kernels beside its own; kernels fitted again take their place."""
    sections, replaced = _sections(fits), 0
    for name, values in sections.items():
        if name == "stream":
            replaced += base.stream.quality.n
            continue
        again = {_identity(one): one for one in values}
        own = getattr(base, name)
        replaced += sum(one.quality.n for one in own if _identity(one) in again)
        sections[name] = [_again(one, again.pop(_identity(one), one)) for one in own] + list(again.values())
    software = {*base.software.split(", "), *(fit.series.software for fit in fits)}
    return base.model_copy(
        update={
            **_held(sections),
            "software": ", ".join(sorted(software)),
            "timed": tuple(dict.fromkeys((*base.timed, *sections))) if base.extrapolated_from else (),
            "n": base.n - replaced + int(sum(len(fit.fitted.measured) for fit in fits)),
        }
    )


def _again(own: object, fitted: object) -> object:
    """Constants fitted again, with what the timings of one board do not tell of a collective."""
    if isinstance(own, CollectiveFit) and isinstance(fitted, CollectiveFit):
        return fitted.model_copy(update={"across": own.across})
    return fitted


def _identity(constants: object) -> tuple[object, ...]:
    """What tells constants of one kernel from those of another: their words, and the size of their group."""
    named = ((name, value) for name, value in vars(constants).items() if name != "timed_on")
    return tuple(each for each in named if isinstance(each[1], str | int))


NEEDED = ("gemm", "prefill", "decode")
"""Kinds without whose own timings a device stands on its relative's: every model runs them."""
LENT = (
    "encoder", "latent_prefill", "latent_decode", "absorption", "moe", "scan", "sparse", "streams", "dispatch",
    "exchange",
)  # fmt: skip
"""Kinds that a relative lends kernel by kernel when a plan is made, each marked as its: no file copies them."""


def fit_device(
    files: Sequence[Path | str],
    device_name: str | None = None,
    base_file: Path | str | None = None,
    *,
    source: str | None = None,
    check: bool = True,
    add: bool = False,
    folder: Path | str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[DeviceCalibration, list[KernelFit]]:
    """Fit one device's constants from kernel timing files.

    Parameters
    ----------
    device_name : may be left out when the files hold one device
    base_file : calibration whose sections stand where the files have no timings; default: the device's own or its
        relative's
    check : also compute left-out errors (slower)
    add : leave what the base holds of other kernels, its identity and its spread as they are
    folder : searched for profiles first

    Raises
    ------
    SpecError : unreadable files, several devices and none chosen, a device that the files do not hold
    """
    series = read_all(files)
    names = sorted({one.device for one in series})
    if device_name is None and len(names) > 1:
        raise SpecError(
            Problem(f"the files hold {len(names)} devices ({', '.join(names)})", suggestion="choose with --device")
        )
    device = load_device(device_name or names[0], folder)
    mine = [one for one in series if one.device in (device.name, device_name)] or (series if len(names) == 1 else [])
    if not mine:
        raise SpecError(Problem(f"the files hold no timings of {device.name!r}, only of {', '.join(names)}"))
    related = timed_relative(device, folder) or "h100_sxm"
    base = load_device_calibration(device.name, relative=related, file=base_file, folder=folder)
    if base.extrapolated_from and not base.timed and base_file is None:
        base = lent_by(base, load_device(related, folder), device, folder)
    fits = fit_series(mine, device, base, check=check, progress=progress)
    if not fits:
        raise SpecError(Problem(f"no series of {device.name!r} has at least {MINIMUM_ROWS} timings"))
    if add:
        return added(fits, base), fits
    label = source or "; ".join(Path(file).name for file in files)
    return calibration_from(fits, device, base, source=label), fits


def calibration_text(calibration: DeviceCalibration) -> str:
    """YAML of a calibration, times in microseconds."""
    data = calibration.model_dump(mode="json", exclude_none=True)
    if not calibration.told:
        del data["served_rows"]
    if not calibration.timed:
        del data["timed"]
    body = yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True)
    body = re.sub(
        r"(?<=: )([\d.e-]+) s$", lambda match: f"{float(match.group(1)) * 1e6:.4g} us", body, flags=re.MULTILINE
    )
    command = "device" if calibration.told else "kernels"
    return f"# Constants of {calibration.device}, written by `rlperf calibrate {command}`.\n{body}"
