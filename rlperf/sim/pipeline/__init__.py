"""Pipeline simulator: stages on devices, F / B / W operations, any order; exact times and peak memory.

profile --stage_costs--> StageCosts --schedule--> Orders --simulate--> PipelineTimeline
"""

from rlperf.sim.pipeline.schedules import (
    SCHEDULES,
    even_partition,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    round_robin,
    v_shape,
    zb_h1,
)
from rlperf.sim.pipeline.simulate import check_orders, peak_memory_bytes, simulate
from rlperf.sim.pipeline.types import (
    B,
    F,
    MicrobatchSizes,
    Op,
    Orders,
    PipelineTimeline,
    StageCosts,
    W,
    op_name,
    stage_costs,
)

__all__ = [
    "SCHEDULES",
    "B",
    "F",
    "MicrobatchSizes",
    "Op",
    "Orders",
    "PipelineTimeline",
    "StageCosts",
    "W",
    "check_orders",
    "even_partition",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "op_name",
    "peak_memory_bytes",
    "round_robin",
    "simulate",
    "stage_costs",
    "v_shape",
    "zb_h1",
]
