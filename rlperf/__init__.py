"""rlperf: analytical performance model and parallel-strategy optimizer for RLVR."""
