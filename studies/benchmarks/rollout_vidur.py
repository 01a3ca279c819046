"""One rollout in Vidur (pip install vidur==0.0.26; Agrawal et al. 2024, arXiv 2405.05465), for `rollout.py --vidur`.

Runs in a Python where Vidur is installed, without rlperf. Reads a JSON request on stdin, prints a JSON answer. Vidur's
own latency predictor needs profiles that its package does not ship, so it gets the same linear cost of an engine_step
as rlperf; what is compared is the scheduling of requests: Vidur's vLLM scheduler (prefill first, no prefix caching).
"""

import json
import sys
import tempfile
import time

from vidur._native.entities import ExecutionTime
from vidur.config import (
    CacheConfig,
    ClusterConfig,
    LinearRegressionExecutionTimePredictorConfig,
    MetricsConfig,
    ReplicaConfig,
    SimulationConfig,
    TraceRequestGeneratorConfig,
    VllmSchedulerConfig,
)
from vidur.entities import Request
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.execution_time_predictor.base_execution_time_predictor import BaseExecutionTimePredictor
from vidur.request_generator import RequestGeneratorRegistry
from vidur.request_generator.base_request_generator import BaseRequestGenerator
from vidur.simulator import Simulator
from vidur.types import ExecutionTimePredictorType, RequestGeneratorType

asked = json.load(sys.stdin)
cost = asked["cost"]


class LinearCost(BaseExecutionTimePredictor):
    """Seconds of a batch: host_s + per_token_s tokens + per_request_s decodes + per_key_s cached tokens."""

    def get_execution_time(self, batch, pipeline_stage):
        queries, keys = batch.num_q_tokens, batch.num_kv_tokens
        decoding = [k for q, k, r in zip(queries, keys, batch.requests, strict=True) if r.is_prefill_complete]
        seconds = cost["host_s"] + cost["per_token_s"] * sum(queries)
        seconds += cost["per_request_s"] * len(decoding) + cost["per_key_s"] * sum(decoding)
        times = [0.0] * 14
        times[6] = 1e3 * seconds  # one layer, all of it in the up projection [ms]
        return ExecutionTime(1, *times)


LinearCost.__abstractmethods__ = frozenset()


class Given(BaseRequestGenerator):
    """The requests of the rollout, all at t = 0."""

    def generate_requests(self):
        return [Request(0.0, p, r) for p, r in zip(asked["prompt"], asked["response"], strict=True)]


for registry, key, made in (
    (ExecutionTimePredictorRegistry, ExecutionTimePredictorType.LINEAR_REGRESSION, LinearCost),
    (RequestGeneratorRegistry, RequestGeneratorType.TRACE_REPLAY, Given),
):
    registry.unregister(key)
    registry.register(key, made)

with tempfile.TemporaryDirectory() as folder:
    config = SimulationConfig(
        log_level="error",
        cluster_config=ClusterConfig(
            num_replicas=1,
            replica_config=ReplicaConfig(
                model_name="meta-llama/Llama-3-8B", device="h100", network_device="h100_dgx", num_pipeline_stages=1,
                tensor_parallel_size=1,
            ),
            cache_config=CacheConfig(num_blocks=asked["blocks"], block_size=16, watermark_blocks_fraction=0.01),
            replica_scheduler_config=VllmSchedulerConfig(
                batch_size_cap=asked["max_running"], max_tokens_in_batch=asked["token_budget"]
            ),
        ),
        request_generator_config=TraceRequestGeneratorConfig(),
        execution_time_predictor_config=LinearRegressionExecutionTimePredictorConfig(
            use_native_execution_time_predictor=False
        ),
        metrics_config=MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, store_plots=False, store_request_metrics=False,
            store_batch_metrics=False, store_utilization_metrics=False, output_dir=folder,
        ),
    )  # fmt: skip
    simulator = Simulator(config)
    simulator._write_output = lambda: None
    began = time.process_time()
    simulator.run()
    took = time.process_time() - began
print(json.dumps({"makespan_s": simulator._time, "cpu_s": took}))
