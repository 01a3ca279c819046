"""Timeline: periods and idle time by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlperf.sim.rl_step import timeline as tl


def two_ranks() -> tl.Timeline:
    build = tl.TimelineBuilder(("rollout", "trainer"), (8, 4))
    build.span(tl.ROLLOUT, 0, 0, 0.0, 4.0)
    build.span(tl.ROLLOUT, 0, 1, 0.0, 10.0)
    build.span(tl.TRAINING, 1, 0, 10.0, 13.0)
    return build.freeze()


def test_idle_device_seconds_count_the_wait_for_the_slowest() -> None:
    assert two_ranks().rl_step_s == 13.0
    # rollout pool: ranks busy 4 s and 10 s of 13 s, 8 devices; trainer: 3 s of 13 s, 4 devices
    assert two_ranks().idle_device_s() == pytest.approx([(13 - 7) * 8, 10 * 4])


def test_period_leaves_the_warm_up_out() -> None:
    build = tl.TimelineBuilder(("trainer",), (1,))
    for step, end in enumerate((50.0, 60.0, 72.0, 84.0)):
        build.span(tl.TRAINING, 0, 0, end - 5.0, end, rl_step=step)
    line = build.freeze(warmup=1)
    assert line.rl_step_s == pytest.approx((84 - 50) / 3)
    assert np.array_equal(line.rl_steps, [1, 2, 3])


def test_empty_timeline() -> None:
    line = tl.TimelineBuilder(("all",), (1,)).freeze()
    assert line.rl_step_s == 0.0


def test_ranks_of_a_stage_stand_for_all_devices_of_the_pool() -> None:
    build = tl.TimelineBuilder(("shared",), (8,))
    build.span(tl.ROLLOUT, 0, 0, 0.0, 4.0)
    build.span(tl.ROLLOUT, 0, 1, 0.0, 10.0)
    build.span(tl.TRAINING, 0, 0, 10.0, 20.0)
    # only the first replica idles, for 6 s, on half of the devices
    assert build.freeze().idle_device_s() == pytest.approx([6.0 * 4])
