"""What an RL framework does around its stages, and what that costs: behaviour and fitted overheads, as data.

One file per framework and trainer under ``calibrations/frameworks/``. Every constant says where it is from; what nobody
measured is marked ``assumed`` and carries a wide spread.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.calibration import Z95
from rlperf.specs.calibration_files import calibration_names, find_calibration, read_calibration
from rlperf.specs.framework import UnderWay, facts_data, trainer_facts, under_way_of
from rlperf.specs.frozen import Frozen
from rlperf.specs.modes import MODES, Form, Mode
from rlperf.specs.overhead import Overhead, Provenance, Rate, ServedAdapters, TrainerOverheads
from rlperf.specs.profiles import search_path
from rlperf.specs.releases import in_release
from rlperf.specs.stage_spread import BANDS, STAGES, StageFactors, StageSpread
from rlperf.specs.trainer_pace import TrainerPace, load_trainer_paces
from rlperf.units import Bytes, BytesPerSecond, NonNegativeFloat, PositiveFloat, PositiveInt, Seconds

Transport = Literal[
    "colocated", "reshard", "nccl", "packed_broadcast", "shard_to_shard", "rdma", "checkpoint_engine",
    "checkpoint_engine_p2p", "disk", "delta",
]  # fmt: skip
DRIFT_SEEN = 2
"""Releases over which a drift is carried on: those that it was seen over."""
UNFITTED = "verl_megatron"
"""A calibration whose intervals are those of frameworks that nobody fitted, told by leaving frameworks out."""


class WeightSyncFit(Frozen):
    """Constants of one transport; the form is `rlperf.cost.weight_sync.weight_sync_s`."""

    transport: Transport
    fixed: Seconds = Field(description="metadata, pausing and resuming engines, cache reset")
    per_tensor: Seconds = Field(0.0, description="software time per tensor of the checkpoint")
    rate: BytesPerSecond = Field(description="bytes of the policy per second that the software path passes at most")
    expert_rate: BytesPerSecond | None = Field(None, description="the same for routed experts; None = rate")
    offload_rate: BytesPerSecond | None = Field(
        None, description="per trainer device, where its weights wait in host memory; None = free"
    )
    per_node_doubling: NonNegativeFloat = Field(0.0, description="share added per doubling of the nodes")
    spread_over: Literal["rollout", "shards"] = Field("rollout", description="whose nodes count")
    hardware: PositiveFloat = Field(
        0.7, le=1.4, description="attainable share of link rates where they are the limit; of the rate between pairs"
    )
    senders: Literal["one", "stages"] = Field(
        "one", description="who sends whole tensors: one device, or one of every pipeline stage, in turn"
    )
    overlapped: bool = Field(False, description="the next bucket is made while one is sent")
    changed: NonNegativeFloat = Field(1.0, le=1.0, description="share of the bytes sent (delta transports)")
    gathers: bool = Field(False, description="whole tensors are gathered over the trainer's shards first")
    from_host: bool = Field(False, description="parked weights are sent out of host memory, a bucket at a time")
    bucket: Bytes = Field(0.0, description="of whole tensors on their way, on every device that shares with an engine")
    wide: tuple[str, ...] = Field((), description="trainers whose weights travel as they are kept, in 32 bits")
    sharded: bool = Field(False, description="every trainer device handles only its own part of the experts")
    provenance: Provenance


class TransportCalibration(Frozen):
    """Constants of a weight-transfer library on its own, beside any framework."""

    id: str
    versions: str
    fits: tuple[WeightSyncFit, ...] = Field(min_length=1)

    def fit(self, transport: Transport) -> WeightSyncFit:
        """Constants of a transport."""
        return _pick(self.fits, transport, self.id)


class FrameworkCalibration(Frozen):
    """Behaviour and overheads of one framework with one trainer, or with several that it drives alike.

    Attributes
    ----------
    trainers : backends (``calibrations/trainers``) that this file speaks of, the usual one first
    old_policy_pass : when the trainer scores the old policy: ``always``; ``off_policy`` only with several optimizer
        updates per rl_step; ``never`` where the engine's log-probabilities serve
    quantises : where weights get the engine's dtype: before they are sent, or as the engine loads them (16 bits travel)
    reward_hidden : share of the reward time that runs while other samples are still being generated [1]; `running` sets
        what facts say of a release
    scorers_wait : models that score are asked when the rollout has ended, wherever other rewards are hidden
    in_flight_updates, partial_rollout : what the asynchronous mode does by default: engines take weights while they
        generate; requests are interrupted by a weight sync, and their cache is computed again
    counts_groups : the asynchronous staleness bound counts groups, which train in the order in which they end;
        otherwise a batch waits for all that were started for it
    stream_groups : prompt groups that a streaming trainer takes at once; None: those of one optimizer update
    under_way : execution mode -> groups that its program has under way at once; set by `running`
    bounds_groups : what bounds trajectories under way counts a group until its last has ended; set by `running`
    controller : ``single`` process through which every batch passes, or ``distributed`` transfer queues
    controller_rate : bytes per second through the controller (per node where distributed)
    step : once per rl_step, in no stage: advantages, logging, data loader
    per_sample : per trained sequence: tokenising, reward bookkeeping, padding, logging
    sleep, wake : engine to sleep and back, beside the bytes moved
    engine_host : host seconds per engine_step in this stack, on top of the device's work
    engine_host_per_request : the same, per running request (detokenising, scheduling in Python)
    states_running : its own settings always tell the engine how many requests to run at once, so that what the engine
        would choose never holds
    adapters : what trained adapters cost an engine that serves them unmerged, and what a weight sync sends;
        None: they are merged, and the engine knows nothing of them
    training : what it adds to the trainer backend
    factors : what a log of one's own cluster says of its stages, beside the constants
    pace : of its trainer backend under frameworks that nobody fitted, which its own constants know nothing of; set by
        `running`, and None where they do
    capture, start_up : CUDA graph capture per engine start; processes, weights and compilation per run
    """

    id: str
    framework: str
    trainers: tuple[str, ...] = Field(min_length=1)
    versions: str = Field(description="releases that the behaviour was read from or measured on")
    old_policy_pass: Literal["always", "off_policy", "never"] = "always"
    quantises: Literal["trainer", "engine"] = "trainer"
    reward_hidden: float = Field(0.0, ge=0.0, le=1.0)
    scorers_wait: bool = False
    in_flight_updates: bool = False
    partial_rollout: bool = False
    counts_groups: bool = False
    stream_groups: PositiveInt | None = None
    under_way: dict[str, UnderWay] = Field({})
    bounds_groups: bool = False
    controller: Literal["single", "distributed"] = "single"
    controller_rate: Rate
    step: Overhead
    per_sample: Overhead
    sleep: Overhead
    wake: Overhead
    engine_host: Overhead
    engine_host_per_request: Overhead
    states_running: bool = False
    adapters: ServedAdapters | None = None
    capture: Overhead
    start_up: Overhead
    training: TrainerOverheads
    weight_sync: tuple[WeightSyncFit, ...] = Field(min_length=1)
    step_spread: Provenance = Field(description="measured over predicted rl_step on rows left out")
    stage_spread: StageSpread
    factors: StageFactors = StageFactors()
    pace: TrainerPace | None = None
    rerun_spread: float = Field(0.08, ge=0.0, description="standard deviation of ln(time) between runs of one setup")
    releases: tuple[str, ...] = Field((), description="that rl_steps were measured of, first to last; empty: none")
    release_spread: NonNegativeFloat = Field(0.0, description="standard deviation of ln(time) between two releases")
    release_drift: float = Field(
        0.0, description="mean change of ln(time) of one setup from a release to the next; carried on for two releases"
    )
    later_note: str = Field("", description="what is known to differ after the last of `releases`")
    release_note: str = Field("", description="how a release that nobody measured is predicted; set by `at_release`")
    calibrated_on: tuple[str, ...] = Field((), description="digests of the configurations that the fits saw")
    unmeasured_spread: float = Field(
        0.35, ge=0.0, description="standard deviation of ln(time) added for architectures unlike all fitted ones"
    )
    notes: tuple[str, ...] = ()

    def chunks(self, prompts: int, updates: int) -> int:
        """Pieces in which a streamed batch of ``prompts`` groups and ``updates`` optimizer updates is trained [1]."""
        return max(prompts // self.stream_groups if self.stream_groups else updates, 1)

    def at_release(self, version: str) -> FrameworkCalibration:
        """The same for one release: one that nobody measured is extrapolated, with an interval that says so.

        Setups drift by `release_spread` around `release_drift` from one release to the next: all stages of a later one
        follow the drift over as many releases as it was seen on, and intervals grow with every release from the
        nearest that was measured.

        >>> nemo = load_framework_calibration("nemo_rl_megatron")
        >>> [round(nemo.at_release(v).step_spread.high, 3) for v in ("0.6.0", "0.7.0", "0.8")]
        [1.11, 1.154, 1.25]
        >>> [round(nemo.at_release(v).factors.training, 3) for v in ("0.6.0", "0.7.0", "0.8", "1.0")]
        [1.0, 0.946, 0.896, 0.896]
        """
        found = re.match(r"v?(\d+)\.(\d+)", version.strip())
        if found is None or not self.releases or self.release_note:
            return self
        known = [tuple(int(part) for part in each.split(".")) for each in self.releases]
        asked = (int(found.group(1)), int(found.group(2)))
        apart = min(100 * abs(asked[0] - major) + abs(asked[1] - minor) for major, minor in known)
        if apart == 0:
            return self
        later = asked > max(known)
        factor = float(np.exp(self.release_drift * min(apart, DRIFT_SEEN))) if later else 1.0
        low, high = self._drifted((self.step_spread.low, self.step_spread.high), apart)
        note = (
            f"{self.framework} {asked[0]}.{asked[1]} is extrapolated: rl_steps were measured of "
            f"{self.releases[0]} to {self.releases[-1]}, and releases differ by {100 * self.release_spread:.0f} % each"
            + (f", {100 * (factor - 1.0):+.0f} % here" if factor != 1.0 else "")
            + (f"; {self.later_note}" if later and self.later_note else "")
        )
        stages = {name: self._drifted(getattr(self.stage_spread, name), apart) for name in BANDS}
        return self.model_copy(
            update={
                "step_spread": self.step_spread.model_copy(update={"low": low, "high": high}),
                "stage_spread": self.stage_spread.model_copy(update=stages),
                "factors": self.factors.scaled(dict.fromkeys(STAGES, factor)),
                "release_note": note,
            }
        )

    def _drifted(self, band: tuple[float, float], releases: int) -> tuple[float, float]:
        """A 5th and 95th percentile, this many releases away [1]."""
        drift = Z95 * releases * self.release_spread
        below, above = np.log(min(band[0], 1.0)), np.log(max(band[1], 1.0))
        return float(np.exp(-np.hypot(below, drift))), float(np.exp(np.hypot(above, drift)))

    def in_mode(self, mode: Mode) -> FrameworkCalibration:
        """The same as it behaves in a mode: what its row says of weights; where both pools meet nothing is interrupted.

        >>> verl = load_framework_calibration("verl_fsdp")
        >>> [verl.in_mode(mode).partial_rollout for mode in ("async", "one_step_off")]
        [True, False]
        """
        row = MODES[mode]
        in_flight = self.in_flight_updates if row.weights == "framework" else row.weights == "in_flight"
        interrupts = self.partial_rollout and row.form_where(in_flight) is not Form.BARRIER
        return self.model_copy(update={"in_flight_updates": in_flight, "partial_rollout": interrupts})

    def borrowed_by(self, name: str) -> FrameworkCalibration:
        """The same for a framework that nobody measured: another name, and a stranger's intervals.

        >>> load_framework_calibration("verl_fsdp").borrowed_by("mine").id
        'mine (with overheads of verl_fsdp)'
        """
        titled = {"id": f"{name} (with overheads of {self.id})", "framework": name}
        return self.as_stranger().model_copy(update={**titled, "calibrated_on": ()})

    def running(self, framework: str, trainer: str, version: str) -> FrameworkCalibration:
        """With what a framework's facts say of this trainer in a release; what they leave open stays as it is.

        >>> [load_framework_calibration(name).pace is None for name in ("nemo_rl_megatron", "slime")]
        [True, False]
        >>> [load_framework_calibration(f"verl=={version}").reward_hidden for version in ("0.8.0", "0.9.1")]
        [0.0, 0.8]
        >>> [load_framework_calibration(name, "fsdp2").sync_fit("colocated").wide
        ...  for name in ("verl==0.8", "verl", "skyrl")]
        [(), ('fsdp2',), ()]
        >>> load_framework_calibration("verl_fsdp").running("skyrl", "fsdp2", "").sync_fit("colocated").wide
        ()
        """
        said, pace = trainer_facts(framework, trainer, version), self.pace
        if (pace is None and not self.calibrated_on) or (pace is not None and pace.trainer != trainer):
            pace = load_trainer_paces().of_stranger(pace.without if pace else "", trainer)
        training, groups = self.training.model_copy(update=said), under_way_of(framework, version)
        hidden = [*in_release(facts_data(framework).get("reward_hidden", {}), version), self.reward_hidden][0]
        whole = facts_data(framework).get("states_trajectories") == "groups"
        changed = {"training": training, "pace": pace, "under_way": groups, "reward_hidden": float(hidden)}
        ways: dict[str, str] = facts_data(framework).get("sends", {})
        gone = set(ways.values()).difference(in_release(ways, version))
        sent = tuple(fit for fit in self.weight_sync if fit.transport not in gone)
        # what goes to engines elsewhere has constants of the framework's own runs, which hold how wide it is; facts say
        # it again of every framework and release that runs on these constants
        wide = any(in_release(facts_data(framework).get("wide_weights", {}).get(trainer, {}), version))
        update = {"wide": (trainer,) if wide else ()}
        sent = tuple(fit.model_copy(update=update) if fit.transport == "colocated" else fit for fit in sent)
        return self.model_copy(update={**changed, "bounds_groups": whole, "weight_sync": sent})

    def as_stranger(self) -> FrameworkCalibration:
        """With the intervals of frameworks that nobody fitted: those of a fitted one hold for itself alone."""
        bands = load_framework_calibration(UNFITTED) if self.calibrated_on else self
        return self.model_copy(update={"step_spread": bands.step_spread, "stage_spread": bands.stage_spread})

    def by_transport(self, transport: Transport | None) -> FrameworkCalibration:
        """The same with its weights sent in this way; None: in its usual one."""
        return self if transport is None else self.model_copy(update={"weight_sync": (self.sync_fit(transport),)})

    def sync_fit(self, transport: Transport) -> WeightSyncFit:
        """Constants of a transport, or a `SpecError` that names those there are."""
        return _pick(self.weight_sync, transport, self.id)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names of the constants that nobody measured."""
        names = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Overhead | Rate) and value.provenance.assumed:
                names.append(name)
        for name in type(self.training).model_fields:
            value = getattr(self.training, name)
            if isinstance(value, Overhead | Rate) and value.provenance.assumed:
                names.append(f"training.{name}")
        names += [f"weight_sync.{fit.transport}" for fit in self.weight_sync if fit.provenance.assumed]
        return tuple(names)


def _pick(fits: tuple[WeightSyncFit, ...], transport: Transport, owner: str) -> WeightSyncFit:
    if found := next((fit for fit in fits if fit.transport == transport), None):
        return found
    known = ", ".join(fit.transport for fit in fits)
    raise SpecError(Problem(f"{owner} has no weight sync by {transport!r}", suggestion=f"it has: {known}"))


def load_framework_calibration(
    framework: str, trainer: str | None = None, folder: Path | str | None = None
) -> FrameworkCalibration:
    """Calibration of a framework: by its own name, or by framework and trainer backend.

    >>> load_framework_calibration("nemo_rl", "fsdp2").id, load_framework_calibration("slime").id
    ('nemo_rl_dtensor', 'slime')
    """
    found = _calibrations_of(framework, folder)
    chosen = next((each for each in found if trainer in each.trainers), found[0])
    release = framework.partition("==")[2]
    return chosen.at_release(release).running(chosen.framework, trainer or chosen.trainers[0], release)


def framework_trainers(framework: str, folder: Path | str | None = None) -> tuple[str, ...]:
    """Trainer backends that a framework has, the usual one first.

    >>> framework_trainers("verl"), framework_trainers("openrlhf")
    (('fsdp2', 'megatron'), ('deepspeed',))
    """
    return tuple(dict.fromkeys(trainer for each in _calibrations_of(framework, folder) for trainer in each.trainers))


def _calibrations_of(framework: str, folder: Path | str | None) -> list[FrameworkCalibration]:
    """The file of this name, or those that begin with it (one for each kind of trainer)."""
    base = framework.split("==")[0].strip().lower().replace("-", "_")
    files: dict[str, Path] = {}
    for root in search_path(folder):
        for path in sorted((root / "calibrations" / "frameworks").glob("*.yaml")):
            files.setdefault(path.stem, path)
    names = [base] if base in files else sorted(name for name in files if name.startswith(f"{base}_"))
    if names:
        return [read_calibration(files[name], FrameworkCalibration) for name in names]
    if relative := facts_data(base).get("relative"):
        return [each.borrowed_by(base) for each in _calibrations_of(relative, folder)]
    hint = did_you_mean(base, sorted(files))
    raise SpecError(Problem(f"there is no framework calibration named {framework!r}", suggestion=hint))


def load_transport(name: str) -> TransportCalibration:
    """Calibration of a weight-transfer library.

    >>> load_transport("checkpoint_engine").fits[0].transport
    'checkpoint_engine'
    """
    if (path := find_calibration(name, "transports")) is not None:
        return read_calibration(path, TransportCalibration)
    known = calibration_names("transports")
    raise SpecError(Problem(f"there is no transport named {name!r}", suggestion=did_you_mean(name, known)))
