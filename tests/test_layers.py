"""Kinds of layers: a new one reaches every cost from one class, and what engine and trainer share they share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlperf.api import predict_job
from rlperf.cost.basis import serving_basis
from rlperf.cost.batching import Microbatches
from rlperf.cost.engine_memory import kv_bytes_per_request, kv_bytes_per_token, weight_bytes
from rlperf.cost.inference import decode_breakdown, decode_step_s, eager_s, engine_step_cost, prefill_s
from rlperf.cost.layers import KINDS, Layer, Matrix, stack_of
from rlperf.cost.moe import moe_fit
from rlperf.cost.operators import token_operators
from rlperf.cost.parameters import pair_flop, parameters
from rlperf.cost.replica import Operator, Replica, memory_operator, roles_of
from rlperf.cost.trainer.activations import layer_activations
from rlperf.cost.trainer.layers import layer_seconds
from rlperf.cost.trainer.memory import trainer_memory
from rlperf.cost.trainer.parallel import expert_traffic
from rlperf.cost.trainer.parameters import layer_parameters, lora_parameters
from rlperf.cost.trainer.update import training_update
from rlperf.cost.trainer_device import Keeping, Kept, Seconds, TrainerDevice, work_of
from rlperf.cost.weight_sync import sync_payload
from rlperf.errors import SpecError
from rlperf.layout import FloatArray, Layout
from rlperf.specs.architecture import Architecture, KindNumbers
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture
from rlperf.specs.trainer_calibration import load_trainer
from tests.recipes import copied_package, recipe, run_in
from tests.test_drift import job

H100 = load_hardware("h100_sxm", "dgx_h100")
VLLM, MEGATRON = load_engine_calibration("vllm"), load_trainer("megatron")
SUPER = load_architecture("Nemotron-3-Super-120B-A12B")
ONE = Layout.of()


class Memory(Layer):
    """A toy mixer: a table of ``slots`` per request, read in every decode, and one square projection."""

    unmeasured = "memory layers have no kernel table"
    extra_kernels = 3

    @property
    def slots(self) -> float:
        return self.arch.numbers_of("memory")["slots"]

    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix("memory projection", self.arch.hidden, self.arch.hidden),)

    def other_parameters(self) -> int:
        return 5

    def decode_operators(self, replica: Replica, count: float, requests: FloatArray, kv: FloatArray) -> list[Operator]:
        return [memory_operator(replica, "memory read", count, 1e6 * requests * self.slots)]

    def prefill_operators(
        self, replica: Replica, count: float, sequences: FloatArray, query: FloatArray, kv: FloatArray
    ) -> list[Operator]:
        return [memory_operator(replica, "memory write", count, 1e5 * sequences * query * self.slots)]

    def cache_bytes_per_token(self, replica: Replica) -> float:
        return 7.0

    def cache_bytes_per_request(self, replica: Replica) -> FloatArray:
        return self.slots * 1000.0 / replica.attention_tensor

    def training_s(self, device: TrainerDevice) -> Seconds:
        return Seconds(0.25 + 0.0 * device.work.tokens, 0.5 + 0.0 * device.work.tokens)

    def kept(self, keeping: Keeping) -> Kept:
        return Kept(dense=1e4 / keeping.tensor)


def _architecture(*mixers: str, slots: float = 16.0) -> Architecture:
    return Architecture(
        name="toy", source="hand", hidden=512, layers=len(mixers), heads=8, kv_heads=2, head_dim=64, ffn_hidden=1024,
        vocab=1000, mixers=mixers, numbers=(KindNumbers.model_validate({"kind": "memory", "slots": slots}),),
    )  # fmt: skip


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> tuple[Architecture, Architecture]:
    """Four layers, of which none or two are of the toy kind."""
    monkeypatch.setitem(KINDS, "memory", Memory)
    stack_of.cache_clear()
    return _architecture(*["full"] * 4), _architecture("full", "memory", "full", "memory")


Toys = tuple[Architecture, Architecture]


def test_a_new_kind_is_made_of_what_it_states(toys: Toys) -> None:
    plain, toy = toys
    full, own = 512 * (512 + 2 * 128) + 512 * 512, 512 * 512 + 5
    assert parameters(toy) - parameters(plain) == 2 * (own - full)
    assert pair_flop(toy) == pair_flop(plain) / 2 == 2 * 2.0 * (512 + 512)
    # adapters on every matrix: 512 + 512 in place of q, k, v and output
    changed = 4.0 * (lora_parameters(toy, 1)[0] - lora_parameters(plain, 1)[0])
    assert changed == 2 * (1024 - (3 * 512 + 512 + 256 + 1024))
    one, two = (float(layer_parameters(toy, Layout.of(tensor_parallel=t))[0]) for t in (1, 2))
    assert two < one < 2.0 * two  # norms are copied
    assert sync_payload(plain).tensors - sync_payload(toy).tensors == 2 * (4 - 1)


def test_a_new_kind_reaches_the_engine(toys: Toys) -> None:
    plain, toy = toys
    lines = {row.name: row.seconds for row in decode_breakdown(Replica.of(toy, H100, VLLM, ONE), 64, 64 * 4096.0)}
    scale = VLLM.at("h100_sxm", toy.family, toy.name, "bf16").overhead.kernel_scale
    bandwidth = H100.device.memory_bandwidth * H100.calibration.stream.small_memory
    each = H100.calibration.stream.small_fixed + 1e6 * 64 * 16 / bandwidth
    assert lines["memory read"] == pytest.approx(2 * scale * each, rel=1e-9)
    assert "memory projection" in lines
    decode = [float(decode_step_s(Replica.of(a, H100, VLLM, ONE), 64, 64 * 4096.0)) for a in toys]
    prefill = [float(prefill_s(Replica.of(a, H100, VLLM, ONE), 2, 4096)) for a in toys]
    assert decode[1] > decode[0] and prefill[1] > prefill[0]
    # only the full layers read more with a longer context; the table is read once a request
    costs = [engine_step_cost(Replica.of(a, H100, VLLM, ONE)) for a in toys]
    assert costs[1].decode_per_kv_token_s == pytest.approx(costs[0].decode_per_kv_token_s / 2.0, rel=1e-6)
    assert costs[1].decode_per_request_s > costs[0].decode_per_request_s + 2 * scale * 1e6 * 16 / bandwidth * 0.99
    eager = VLLM.model_copy(update={"cuda_graphs": False})
    assert eager.eager_call is not None
    assert eager_s(eager, toy) - eager_s(eager, plain) == pytest.approx(2 * 3 * eager.eager_call)
    assert serving_basis(toy, H100, VLLM).reasons == ("memory layers have no kernel table",)
    assert not serving_basis(plain, H100, VLLM).extrapolated


def test_a_new_kind_reaches_cache_and_weights_of_the_engine(toys: Toys) -> None:
    replicas = [Replica.of(a, H100, VLLM, Layout.of(tensor_parallel=[1, 2])) for a in toys]
    each = 2.0 * 128 * 2 / np.array([1.0, 2.0])
    assert kv_bytes_per_token(replicas[0]) == pytest.approx(4 * each)
    assert kv_bytes_per_token(replicas[1]) == pytest.approx(2 * each + 2 * 7.0)
    assert kv_bytes_per_request(replicas[0]) == pytest.approx(np.zeros(2))
    assert kv_bytes_per_request(replicas[1]) == pytest.approx(2 * 16000.0 / np.array([1.0, 2.0]))
    fewer = weight_bytes(replicas[0]) - weight_bytes(replicas[1])
    full, own = 512 * (512 + 2 * 128) + 512 * 512, 512 * 512 + 5
    assert fewer == pytest.approx(2 * 2 * (full - own) / np.array([1.0, 2.0]))


def test_a_new_kind_reaches_the_trainer(toys: Toys) -> None:
    plain, toy = toys
    batch = Microbatches.of(8192.0, 8192.0 * 2048.0, 2048.0, 4.0)
    before, after = (training_update(a, H100, MEGATRON, ONE, batch) for a in toys)
    # two layers of 0.25 s forward and 0.5 s backward in each of 4 microbatches, less two attentions (milliseconds)
    assert float(after.forward_s - before.forward_s) == pytest.approx(4 * 2 * 0.25, rel=0.02)
    assert float(after.backward_s - before.backward_s) == pytest.approx(4 * 2 * 0.5, rel=0.02)
    kept = [layer_activations(a, Keeping(ONE)) for a in (plain, toy)]
    # of a full layer: 2 x (q, output) + k, v of 2 bytes, and 4 bytes a head of softmax statistics
    full = 2.0 * (2 * 512 + 2 * 128) + 4.0 * 8
    assert float(kept[1].dense - kept[0].dense) == pytest.approx(0.5 * (1e4 - full))
    assert float(kept[1].core) == 0.5 * float(kept[0].core)
    memory = [trainer_memory(a, H100, MEGATRON, ONE, batch) for a in (plain, toy)]
    assert float(memory[1].activations) > float(memory[0].activations)


def test_arrays_of_candidates_equal_one_by_one_for_a_new_kind(toys: Toys) -> None:
    _, toy = toys
    degrees = [1, 2, 4]
    batch = Microbatches.of(8192.0, 8192.0 * 2048.0, 2048.0, 4.0)
    whole = training_update(toy, H100, MEGATRON, Layout.of(tensor_parallel=degrees), batch).total_s
    alone = [float(training_update(toy, H100, MEGATRON, Layout.of(tensor_parallel=t), batch).total_s) for t in degrees]
    np.testing.assert_allclose(whole, alone, rtol=1e-12)


def test_an_unknown_kind_is_named_with_the_nearest_one() -> None:
    with pytest.raises(SpecError, match=r"toy: .* of kind 'slidng' \(did you mean sliding\?\)"):
        parameters(_architecture("full", "slidng"))
    with pytest.raises(SpecError, match="numbers has no entry of this kind"):
        _architecture("full").numbers_of("retention")


def _without_latent(arch: Architecture) -> Architecture:
    assert arch.experts is not None
    return arch.model_copy(update={"experts": arch.experts.model_copy(update={"latent_hidden": 0})})


def test_experts_in_a_latent_width_cost_that_width_in_rollouts() -> None:
    assert SUPER.experts is not None and SUPER.hidden == 4 * SUPER.experts.latent_hidden
    found = {}
    layout = Layout.of(tensor_parallel=8, expert_parallel=8, attention_data_parallel=8)
    for arch in (SUPER, _without_latent(SUPER)):
        found[arch] = {one.name: one for one in token_operators(Replica.of(arch, H100, VLLM, layout), 16384.0, 256.0)}
    latent, plain = found.values()
    # weights and FLOP are a quarter, by the data sheet exactly, and with the expert kernel's overheads nearly
    for part in ("compute_s", "memory_s"):
        assert float(getattr(plain["experts"], part)) == pytest.approx(4.0 * float(getattr(latent["experts"], part)))
    # as the kernel was timed (kernels/moe_lowbit_nongated): 1.9 times at 64 tokens of 8 B200, 2.8 of one GB300
    assert 1.9 < float(plain["experts"].seconds) / float(latent["experts"].seconds) < 4.0
    # tokens travel in that width too
    assert float(plain["expert exchange"].network_s) == pytest.approx(4.0 * float(latent["expert exchange"].network_s))
    # and the two projections around the experts are there, on every device
    products = token_operators(Replica.of(SUPER, H100, VLLM, layout), 16384.0, 256.0)
    projected = sum(float(one.compute_s) for one in products if one.name == "latent experts")
    flop = 2 * stack_of(SUPER).routes.sum() * 2.0 * (16384 / 8) * 4096 * 1024
    assert projected == pytest.approx(flop / H100.device.peaks.bf16, rel=1e-9)


def test_vllm_runs_gpt_oss_through_the_kernels_of_the_device_and_the_release() -> None:
    for device, version, kernel in (
        ("h200_sxm", None, "vllm_triton"),
        ("h200_sxm", "0.18.0", "vllm_marlin"),
        ("l40s", None, "vllm_marlin"),
        ("b200_sxm", None, "vllm_flashinfer_trtllm"),
    ):
        hw = load_hardware(device)
        dtype = roles_of(load_architecture("gpt-oss-120b"), hw, "mxfp4").expert
        assert moe_fit(hw, dtype, load_engine_calibration("vllm", version).moe_kernels)[0].kernel == kernel


def test_tensorrt_llm_runs_experts_in_fp8_blocks_through_kernels_timed_in_vllm() -> None:
    """DeepGEMM's take DeepSeek-R1's layers on eight B200 20 to 25 ms with 64 tokens, where a whole step took 22.4."""
    for device, kernel in (("h200_sxm", "vllm_flashinfer_cutlass"), ("b200_sxm", "vllm_flashinfer_trtllm")):
        chosen, stand_in = moe_fit(load_hardware(device), "fp8_block", load_engine_calibration("trtllm").moe_kernels)
        assert chosen.kernel == kernel and not stand_in


def test_sglang_runs_the_shared_expert_as_one_more_of_the_routed() -> None:
    """Nine of 257 experts instead of eight of 256 and two products beside them, unless experts are spread."""
    arch, hw = load_architecture("DeepSeek-V3"), load_hardware("h200_sxm", "dgx_h200")
    layout = Layout.of(tensor_parallel=8, expert_parallel=[1, 8])

    def of(engine: str, name: str) -> tuple[FloatArray, FloatArray]:
        replica = Replica.of(arch, hw, load_engine_calibration(engine), layout, "fp8")
        found = [one for one in token_operators(replica, 64.0, 64.0) if one.name == name]
        sums = (sum(one.seconds for one in found), sum(one.compute_s for one in found))
        return np.broadcast_to(sums[0], 2), np.broadcast_to(sums[1], 2)

    apart, joined = of("vllm", "shared experts"), of("sglang", "shared experts")
    assert (apart[0] > 0).all() and joined[0][0] == joined[1][0] == 0.0 and joined[0][1] > 0
    alone, with_it = of("vllm", "experts"), of("sglang", "experts")
    assert with_it[1] / alone[1] == pytest.approx([9 / 8, 1.0])
    other = load_architecture("Qwen3.5-397B-A17B")  # its shared expert has a gate
    replica = Replica.of(other, hw, load_engine_calibration("sglang"), layout.take(0), "fp8")
    assert sum(float(one.seconds) for one in token_operators(replica, 64.0, 64.0) if one.name == "shared experts") > 0


def test_engine_and_trainer_agree_on_latent_experts() -> None:
    """Operators of both ask one `Routing`: traffic and products shrink alike."""
    batch = Microbatches.of(8192.0, 8192.0 * 2048.0, 2048.0, 4.0)
    layout = Layout.of(tensor_parallel=1, expert_parallel=8, data_parallel=8)
    work = work_of(layout, batch)
    seconds = [
        float(layer_seconds(a, TrainerDevice(H100, MEGATRON, layout, work)).forward)
        for a in (SUPER, _without_latent(SUPER))
    ]
    traffic = [
        float(expert_traffic(a, H100, MEGATRON, layout, work, 1.0, MEGATRON.switches).forward)
        for a in (SUPER, _without_latent(SUPER))
    ]
    assert seconds[0] < seconds[1] and 3.0 < traffic[1] / traffic[0] < 4.0
    # an expert's parameters too, and what all tokens share: 2 x 4096 x 1024 of projections a layer
    routing = stack_of(SUPER).routed[0][0]
    assert routing.parameters == 2 * 1024 * 2688


def test_biases_are_of_what_is_projected_and_not_of_the_rank_in_front() -> None:
    """By hand: queries through a rank of 512 have biases of all heads, and the rank a norm."""
    plain = load_architecture("Qwen2.5-7B").model_copy(update={"qkv_bias": False})
    for ranked in (plain, plain.model_copy(update={"query_rank": 512})):
        biased = ranked.model_copy(update={"qkv_bias": True})
        projected = (ranked.heads + 2 * ranked.kv_heads) * ranked.head_dim
        assert parameters(biased) - parameters(ranked) == ranked.layers * projected


def test_a_half_that_is_not_there_costs_nothing() -> None:
    """Layers of Nemotron-H have one half each: one norm and one all-reduce."""
    layers = SUPER.layers
    assert stack_of(SUPER).norms == layers
    replica = Replica.of(SUPER, H100, VLLM, Layout.of(tensor_parallel=8))
    halves = sum(half.count * float(half.layer.all_reduces(replica)) for half in stack_of(SUPER).halves)
    assert halves == layers
    dense = load_architecture("Qwen2.5-7B")
    assert stack_of(dense).norms == 2 * dense.layers


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_file_of_its_own_and_says_what_it_is(kind: str) -> None:
    cls = KINDS[kind]
    assert cls.__doc__
    module = cls.__module__.rsplit(".", 1)[1]
    assert module == (kind if kind != "none" else "layer")


@pytest.mark.parametrize(("name", "each"), [("DeepSeek-V3", 7), ("Moonlight-16B-A3B", 5)])
def test_tensors_of_latent_attention(name: str, each: int) -> None:
    """Down and up of queries and of the latent, a norm of each latent, output; queries of Moonlight are one matrix."""
    assert KINDS["latent"](load_architecture(name)).tensors() == each


def test_a_new_kind_in_a_file_reaches_predictions_and_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stranger does: an architecture in JSON that names the kind and its numbers, and a job."""
    monkeypatch.setitem(KINDS, "memory", Memory)
    stack_of.cache_clear()
    stages = {}
    for name, mixers in (("plain", ["full"] * 4), ("toy", ["full", "memory"] * 2)):
        written = {
            "name": name, "source": "hand", "hidden": 512, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64,
            "ffn_hidden": 1024, "vocab": 1000, "mixers": mixers, "numbers": [{"kind": "memory", "slots": 16}],
        }  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(written))
        one = job(str(tmp_path / f"{name}.json"), "dgx_h100", 1, ("math", 512, 1024))
        predicted = predict_job(one)
        stages[name] = predicted.stages_s
    plain, toy = stages["plain"], stages["toy"]
    assert toy.rollout > plain.rollout and toy.training > plain.training


TRIED = """
import sys
from pathlib import Path

import numpy as np

from rlperf.api import predict_job
from rlperf.cost.basis import serving_basis
from rlperf.cost.engine_memory import kv_bytes_per_request
from rlperf.cost.inference import decode_breakdown
from rlperf.cost.layers import KINDS
from rlperf.cost.replica import Replica
from rlperf.errors import SpecError
from rlperf.layout import Layout
from rlperf.specs.engine_calibration import (load_engine_calibration)
from rlperf.specs.hardware import load_hardware
from rlperf.specs.profiles import load_architecture

folder = Path(sys.argv[1])
mine, kind = load_architecture(str(folder / "mine.json")), KINDS["retention"]
assert kind.__doc__ and kind.__module__ == "rlperf.cost.layers.retention"
assert kind(mine).parameters == 2048 * 3 * 4096 + 4096 * 2048
h100, vllm = load_hardware("h100_sxm", "dgx_h100"), load_engine_calibration("vllm")
replica = Replica.of(mine, h100, vllm, Layout.of(tensor_parallel=2))
assert float(kv_bytes_per_request(replica)) == 3 * 4.0 * 4096 * 64 / 2
rows = decode_breakdown(Replica.of(mine, h100, vllm, Layout.of()), 8, 8e3)
assert {"table", "full attention"} <= {row.name for row in rows}
assert serving_basis(mine, h100, vllm).reasons == ("retention has no kernel table",)
stages = predict_job(folder / "job.yaml").stages_s
assert stages.rollout > 0.0 and stages.training > 0.0
text = (folder / "mine.json").read_text()
(folder / "mine.json").write_text(text.replace('"width"', '"widht"'))
try:
    predict_job(folder / "job.yaml")
except SpecError as error:
    assert str(error) == "mine: numbers of kind retention lack 'width' (did you mean width where it says widht?)", error
else:
    raise AssertionError("a number that is not there")
"""


def test_the_recipe_of_the_documentation_works(tmp_path: Path) -> None:
    """The page's file, lines and JSON, as they stand, in a copy of the package; a misspelt number is named."""
    package, name = copied_package(tmp_path), "theory/layers.md"
    (package / "cost" / "layers" / "retention.py").write_text(recipe("retention.py", name))
    line, row = (part + "\n" for part in recipe("__init__.py", name).strip().split("\n\n"))
    init = package / "cost" / "layers" / "__init__.py"
    above, below = "from rlperf.cost.layers.sliding", '    "none": Nothing,\n'
    text = init.read_text()
    assert above in text and below in text
    init.write_text(text.replace(above, line + above).replace(below, below + row))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.json").write_text(recipe("mine.json", name))
    asked = job(str(tmp_path / "run" / "mine.json"), "dgx_h100", 1, ("math", 512, 1024))
    (tmp_path / "run" / "job.yaml").write_text(asked.model_dump_json(exclude_none=True))
    run_in(tmp_path, "-c", TRIED, str(tmp_path / "run"))
