"""Names as people write them lead to the shape that is published so, or to a refusal: never to another model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlperf.api import predict_job
from rlperf.cli.main import app
from rlperf.errors import SpecError
from rlperf.plan.question.context import resolve
from rlperf.specs.job import Job
from rlperf.specs.labels import closed, key, labels
from rlperf.specs.profiles import (
    architecture_named,
    architecture_names,
    architecture_reading,
    load_architecture,
)

from .quick import slow_but

DATA = Path(os.environ.get("RLPERF_DATA", Path(__file__).parents[2] / "shared" / "data"))

KNOWN = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-Thinking-2507-FP8": "Qwen3-30B-A3B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-Base": "Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": "Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "Qwen3-235B-A22B",
    "nvidia/Qwen3-235B-A22B-NVFP4": "Qwen3-235B-A22B",
    "Qwen/Qwen3-32B-AWQ": "Qwen3-32B",
    "Qwen/Qwen3-8B": "Qwen3-8B",
    "Qwen3-8B-FP8": "Qwen3-8B",
    "unsloth/Qwen3-8B-unsloth-bnb-4bit": "Qwen3-8B",
    "Qwen/Qwen3-8B-MLX-4bit": "Qwen3-8B",
    "Qwen/Qwen3-4B-Thinking-2507": "Qwen3-4B",
    "Qwen/Qwen3-0.6B-Base": "Qwen3-0.6B",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "Qwen3-8B",
    "/models/Qwen2.5-7B-Instruct": "Qwen2.5-7B",
    "/models/Qwen2.5-7B-Instruct/config.json": "Qwen2.5-7B",
    "~/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/a09a3545": "Qwen2.5-7B",
    "QWEN2.5_7b": "Qwen2.5-7B",
    "Qwen/Qwen2.5-7B-Instruct-1M": "Qwen2.5-7B",
    "Qwen/Qwen2.5-Coder-7B": "Qwen2.5-7B",
    "Qwen/Qwen2.5-Coder-32B-Instruct-AWQ": "Qwen2.5-32B",
    "Qwen/Qwen2.5-Math-7B-Instruct": "Qwen2.5-Math-7B",
    "Qwen/Qwen2.5-Math-1.5B": "Qwen2.5-1.5B",
    "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen2.5-VL-7B",
    "Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8": "Qwen2.5-72B",
    "Qwen/QwQ-32B": "Qwen2.5-32B",
    "Qwen/Qwen2-72B-Instruct": "Qwen2-72B",
    "Qwen/Qwen3.5-35B-A3B-FP8": "Qwen3.5-35B-A3B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": "Llama-3.1-8B",
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16": "Llama-3.1-70B",
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": "Llama-3.1-8B",
    "amd/Llama-3.1-405B-Instruct-FP8-KV": "Llama-3.1-405B",
    "neuralmagic/Meta-Llama-3-70B-Instruct-FP8": "Llama-3-70B",
    "meta-llama/Meta-Llama-3-8B": "Llama-3-8B",
    "nvidia/Llama-3.3-70B-Instruct-FP4": "Llama-3.3-70B",
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": "Llama-3.1-70B",
    "meta-llama/Llama-2-7b-chat-hf": "Llama-2-7B",
    "TheBloke/Llama-2-70B-Chat-GPTQ": "Llama-2-70B",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": "Llama-4-Maverick",
    "meta-llama/Llama-4-Scout-17B-16E": "Llama-4-Scout",
    "CodeLlama-34b-Instruct-hf": "CodeLlama-34B",
    "codellama/CodeLlama-34b-Python-hf": "CodeLlama-34B",
    "Mixtral-8x7B-v0.1": "Mixtral-8x7B",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
    "amd/Mixtral-8x7B-Instruct-v0.1-FP8-KV": "Mixtral-8x7B",
    "mistralai/Mixtral-8x22B-v0.1": "Mixtral-8x22B",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "Mixtral-8x22B",
    "mistralai/Mistral-7B-Instruct-v0.1": "Mistral-7B-v0.1",
    "DeepSeek-R1-0528": "DeepSeek-R1",
    "nvidia/DeepSeek-R1-0528-NVFP4-v2": "DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3-0324": "DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.1-Base": "DeepSeek-V3",
    "deepseek-ai/DeepSeek-V2-Chat": "DeepSeek-V2",
    "deepseek-ai/DeepSeek-Coder-V2-Instruct": "DeepSeek-V2",
    "RedHatAI/DeepSeek-R1-Distill-Llama-70B-FP8-dynamic": "DeepSeek-R1-Distill-Llama-70B",
    "agentica-org/DeepScaleR-1.5B-Preview": "DeepSeek-R1-Distill-Qwen-1.5B",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "unsloth/gpt-oss-20b-BF16": "gpt-oss-20b",
    "moonshotai/Kimi-K2-Instruct-0905": "Kimi-K2",
    "nvidia/Kimi-K2.5-NVFP4": "Kimi-K2.5",
    "moonshotai/Moonlight-16B-A3B-Instruct": "Moonlight-16B-A3B",
    "zai-org/GLM-4.5-FP8": "GLM-4.5-355B-A32B",
    "zai-org/GLM-4.5-Air-FP8": "GLM-4.5-Air",
    "MiniMaxAI/MiniMax-M2": "MiniMax-M2.5",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "Nemotron-3-Nano-30B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": "Nemotron-3-Nano-30B-A3B",
    "nvidia/Nemotron-4-340B-Instruct": "Nemotron-340B",
    "XiaomiMiMo/MiMo-7B-Base": "MiMo-7B-RL",
    "PrimeIntellect/INTELLECT-3-FP8": "INTELLECT-3",
    "tiiuae/falcon-180B-chat": "Falcon-180B",
    "EleutherAI/gpt-j-6b": "GPT-J-6B",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "SmolLM2-1.7B", "meta-llama/Llama-3.2-1B-Instruct": "Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B": "Llama-3.2-3B", "google/gemma-2-2b-it": "gemma-2-2b",
    "google/gemma-1.1-7b-it": "gemma-7b",
    "deepseek-ai/deepseek-math-7b-rl": "deepseek-llm-7b", "mistralai/Mistral-7B-Instruct-v0.3": "Mistral-7B-v0.3",
    "Qwen/Qwen2-1.5B-Instruct": "Qwen2-1.5B", "microsoft/phi-4": "phi-4",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "Qwen3-Next-80B-A3B", "deepseek-ai/DeepSeek-V3.2": "DeepSeek-V3.2",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "Kimi-Linear-48B-A3B", "zai-org/GLM-5": "GLM-5",
    "MiniMaxAI/MiniMax-M3": "MiniMax-M3", "deepseek-ai/DeepSeek-V4-Flash": "DeepSeek-V4-Flash",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "Nemotron-3-Ultra-550B-A55B",
    "Qwen/Qwen3-VL-30B-A3B-Thinking": "Qwen3-VL-30B-A3B", "Qwen/Qwen3-Coder-Next": "Qwen3-Next-80B-A3B",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": "Qwen3-Coder-480B-A35B", "Qwen/Qwen3.6-27B": "Qwen3.5-27B",
    "CohereLabs/c4ai-command-a-03-2025": "command-a-03-2025", "google/gemma-3-27b-it": "gemma-3-27b",
    "mistralai/Magistral-Small-2509": "Mistral-Small-3.1-24B",
    "mistralai/Devstral-Small-2507": "Mistral-Small-24B-2501",
    "mistralai/Ministral-3-14B-Reasoning-2512": "Ministral-3-14B-2512", "zai-org/GLM-4.7": "GLM-4.5-355B-A32B",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1_5": "Llama-3.3-Nemotron-Super-49B",
    "allenai/Olmo-3.1-32B-Think": "Olmo-3-32B",
    "rednote-hilab/dots.llm1.inst": "dots.llm1", "tencent/Tencent-Hunyuan-Large": "Hunyuan-Large",
    "baidu/ERNIE-4.5-21B-A3B-PT": "ERNIE-4.5-21B-A3B", "ibm-granite/granite-4.0-h-small": "granite-4.0-h-small",
    "deepseek-ai/DeepSeek-V3.2-Exp": "DeepSeek-V3.2", "moonshotai/Kimi-K2.6": "Kimi-K2.5", "zai-org/GLM-5.3": "GLM-5.2",
}  # fmt: skip

REFUSED = [
    # another size, another activated size, a size left out
    "Qwen/Qwen3-30B", "Qwen3-235B", "Qwen3-32B-A3B", "Qwen3-30B-A22B", "Qwen3-80B-A3B", "Qwen2.5-8B", "Llama-3.1-7B",
    "Llama-3.1-80B", "Mixtral-8x8B", "gpt-oss-21b", "DeepSeek-R1-Distill-Qwen-8B", "DeepSeek-R1-Distill-Qwen3-32B",
    # other shapes under names that are close
    "Qwen/Qwen3-VL-14B-Instruct", "Qwen/Qwen3-Omni-8B", "Qwen/Qwen3-Coder-480B", "Qwen/Qwen3-Embedding-8B",
    "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen2-VL-3B-Instruct", "Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen1.5-7B", "Qwen/Qwen-7B",
    "Qwen/Qwen2-57B", "meta-llama/Llama-3.2-8B-Vision", "meta-llama/Llama-Guard-3-8B",
    "nvidia/Llama-3.1-Nemotron-Ultra-253B-v1", "nvidia/Llama-3.1-Minitron-4B-Width-Base", "codellama/CodeLlama-7b-hf",
    "codellama/CodeLlama-70b-hf", "mistralai/Mistral-7B-Instruct-v0.4", "mistralai/Mistral-Small-22B-2409",
    "mistralai/Mixtral-8x22B-Instruct-v0.3", "deepseek-ai/deepseek-llm-67b-base", "deepseek-ai/DeepSeek-V3.3",
    "moonshotai/Kimi-K3", "zai-org/GLM-4-9B", "zai-org/GLM-4.5V-Air", "MiniMaxAI/MiniMax-M4",
    "nvidia/NVIDIA-Nemotron-Nano-8B-v2", "tiiuae/falcon-40b", "tiiuae/Falcon3-8B-Base", "XiaomiMiMo/MiMo-VL-72B-RL",
    "google/gemma-3-9b-it", "mistralai/Ministral-3-8B-2410", "ibm-granite/granite-4.0-h-medium",
    "/ckpt/my-model", "org/mine", "instruct", "FP8", "Meta-",
]  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_name_is_its_shape(name: str) -> None:
    arch, reading = load_architecture(name), architecture_reading(name)
    assert arch.name == reading.shape == KNOWN[name]
    shape = load_architecture(KNOWN[name])
    differs = {field for field in type(arch).model_fields if getattr(arch, field) != getattr(shape, field)}
    assert differs == {field for field, value in reading.changes.items() if getattr(shape, field) != value}
    own = key(name.rsplit("/", 1)[-1]) == key(KNOWN[name])
    assert (reading.note == "") == own
    assert own or KNOWN[name] in reading.note


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(SpecError):
        load_architecture(name)


@pytest.mark.parametrize(
    ("name", "could_be"),
    [
        ("Mixtral", ("Mixtral-8x22B", "Mixtral-8x7B")),
        ("openai/gpt-oss", ("gpt-oss-120b", "gpt-oss-20b")),
        ("Llama-70B-Instruct", ("Llama-2-70B", "Llama-3.1-70B")),
        ("Qwen3-30B", ("Qwen3-30B-A3B", "Qwen3-VL-30B-A3B")),
        ("Qwen3-Coder", ("Qwen3-30B-A3B", "Qwen3-Coder-480B-A35B", "Qwen3-Next-80B-A3B")),
    ],
)
def test_a_name_that_leaves_out_what_tells_shapes_apart_is_refused_with_them(
    name: str, could_be: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as refused:
        load_architecture(name)
    suggestion = refused.value.problems[0].suggestion or ""
    assert all(shape in suggestion for shape in could_be)
    assert suggestion.startswith("it could be" if len(could_be) > 1 else "did you mean")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "Qwen3-9000B",
            r"there are Qwen3-Coder-480B-A35B, Qwen3-235B-A22B, .* or \d+ more; or give the path of its config",
        ),
        ("Mixtral-8x70B", r"there are Mixtral-8x22B, Mixtral-8x7B; or give the path"),  # experts count
        ("Qwen3-33B", r"did you mean Qwen3-32B, or the path of its config\.json\?"),
        ("my-qwen3-8b-cold-start", r"did you mean Qwen3-8B, or the path of its config\.json\?"),
        ("qwen2.5-7b-instruct-code-sft", r"did you mean Qwen2\.5-7B, or"),
        ("gpt-5", r"`rlperf profiles list architectures` names all \d+; or give the path"),  # no GPT-J is near
    ],
)
def test_a_size_that_nobody_publishes_is_told_the_sizes_that_there_are(name: str, hint: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_architecture(name)
    assert re.match(hint, refused.value.problems[0].suggestion or "")


@pytest.mark.parametrize("every", slow_but((1, 10), 10))
def test_sizes_are_never_bridged(every: int) -> None:
    """Whatever start and ending, a name with one shape's size never becomes one with another's."""
    words = [word for group in labels().endings for word in group.words]
    for name in architecture_names()[::every]:
        for word in words:
            assert architecture_reading(f"org/{name}-{word}").shape == name
            assert architecture_reading(f"Meta-{name}-{word}").shape == name


def test_every_label_is_of_a_shape_there_is_stands_once_and_has_a_source() -> None:
    known = {key(name) for name in architecture_names()}
    all_labels = [key(label) for entry in labels().equal for label in entry.labels]
    assert len(all_labels) == len(set(all_labels))
    assert not known & set(all_labels)
    for entry in labels().equal:
        assert key(entry.shape) in known, entry.shape
        assert len(entry.source) > 20
    assert all(words.source for words in (*labels().starts, *labels().endings))


def test_names_that_differ_in_a_gap_before_a_number_alone_are_one() -> None:
    """Both spellings are in use, of Llama-3.1 and Qwen3 alike; no two shapes or labels are told apart by it."""
    names = {name.split("/")[-1] for name in architecture_names()}
    names |= {label for entry in labels().equal for label in entry.labels}
    assert len({closed(key(name)) for name in names}) == len(names)
    spelt = {"llama3.1-8b": "Llama-3.1-8B", "Qwen-3-8B": "Qwen3-8B", "gemma3-27b-it": "gemma-3-27b", "phi4": "phi-4",
             "Qwen-2.5-Coder-7B-Instruct-AWQ": "Qwen2.5-7B", "llama3.3-70b-instruct": "Llama-3.3-70B"}  # fmt: skip
    for written, shape in spelt.items():
        assert load_architecture(written).name == shape
    assert not architecture_reading("llama3.1-8b").note
    with pytest.raises(SpecError, match="no architecture named"):
        load_architecture("llama31-8b")


def test_longer_positions_of_a_label_are_used() -> None:
    assert load_architecture("Qwen3-30B-A3B").max_positions == 40960
    long = load_architecture("Qwen/Qwen3-30B-A3B-Instruct-2507")
    assert long.max_positions == 262144
    assert "max_positions 262,144" in architecture_reading("Qwen/Qwen3-30B-A3B-Instruct-2507").note


def test_a_shape_trained_on_for_longer_answers_has_their_positions() -> None:
    assert load_architecture("Qwen2.5-Math-7B").max_positions == 4096
    for name in ("nvidia/AceReason-Nemotron-1.1-7B", "nvidia/OpenMath-Nemotron-7B"):
        assert load_architecture(name).max_positions == 131072
        assert architecture_reading(name).shape == "Qwen2.5-Math-7B"
    for name in ("PRIME-RL/Eurus-2-7B-PRIME", "sail/Qwen2.5-Math-7B-Oat-Zero"):
        assert load_architecture(name).max_positions == 4096


def test_a_precision_in_a_name_is_said_not_to_be_read() -> None:
    assert "precision is what the job states" in architecture_reading("Qwen3-8B-FP8").note
    assert "precision" not in architecture_reading("Qwen3-8B-Base").note


@pytest.mark.data
@pytest.mark.skipif(not (DATA / "architectures_hf").is_dir(), reason="no data")
def test_published_configurations_under_known_names_have_the_shape() -> None:
    """A config.json that is there decides: a name is refused, or its configuration is that shape."""
    files = sorted((DATA / "architectures_hf").glob("*.json"))
    assert len(files) > 20
    for file in files:
        try:
            named = load_architecture(file.stem.replace("--", "/"))
        except SpecError:
            continue
        try:
            read = load_architecture(file)
        except SpecError:
            continue  # a vision tower that is not modelled
        for field in ("hidden", "layers", "heads", "kv_heads", "head_dim", "experts", "vocab", "mixers", "latent"):
            assert getattr(read, field) == getattr(named, field), file.stem


def test_a_folder_that_is_there_states_its_shape_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen2.5-7B-Instruct"
    folder.mkdir()
    assert load_architecture(folder).hidden == 3584  # empty: the name alone
    config = (
        '{"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"vocab_size": 99, "num_key_value_heads": 2, "intermediate_size": 128}'
    )
    (folder / "config.json").write_text(config)
    assert load_architecture(str(folder)).hidden == 64
    assert architecture_reading(str(folder)).note == ""
    assert architecture_named(str(folder)) == str(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()  # a run's output folder beside the job is no model
    assert load_architecture("Qwen3-8B").hidden == 4096
    with pytest.raises(SpecError, match=r"mine\.json"):
        load_architecture(tmp_path / "mine.json")


def test_weights_packed_for_engines_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPTQ checkpoint as the model to train was read as 16 bits without a word; one in fp8 trainers take apart."""
    config = {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 99, "num_key_value_heads": 2, "intermediate_size": 128,
    }  # fmt: skip
    monkeypatch.setenv("COLUMNS", "300")
    methods = {"gptq": True, "awq": True, "quark": True, "exl2": True, "fp8": False, "mxfp4": False, "": False}
    for method, said in methods.items():
        file = tmp_path / f"small{method}" / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps({**config, **({"quantization_config": {"quant_method": method}} if method else {})}))
        assert (f"its weights are packed by {method};" in architecture_reading(file).note) is said
        shown = CliRunner().invoke(app, ["profiles", "show", str(file)])
        assert shown.exit_code == 0 and ("are packed by" in shown.output) is said
        task = {"name": "math", "workload": "math", "max_response_tokens": 99, "prompts_per_step": 8, "group_size": 4}
        data = {"name": "j", "architecture": str(file), "cluster": "dgx_h100", "nodes": 1, "tasks": [task]}
        assert any("are packed by" in text for text in resolve(Job.model_validate(data)).read_as) is said


def test_a_job_says_which_shape_it_used() -> None:
    task = {"name": "math", "workload": "math", "max_response_tokens": 2048, "prompts_per_step": 32, "group_size": 4}
    data = {
        "name": "j", "architecture": "Qwen/Qwen2.5-Coder-7B-Instruct", "cluster": "dgx_h100", "nodes": 1,
        "tasks": [task],
    }  # fmt: skip
    named = predict_job(Job.model_validate(data))
    plain = predict_job(Job.model_validate({**data, "architecture": "Qwen2.5-7B"}))
    assert named.rl_step_s == plain.rl_step_s
    assert "Qwen2.5-Coder-7B-Instruct: shape of Qwen2.5-7B" in named.assumed
    assert not any("shape of" in text for text in plain.assumed)
    with pytest.raises(SpecError, match="say which"):
        resolve(Job.model_validate({**data, "architecture": "Mixtral"}))


def test_imports_and_profiles_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("run.sh").write_text(
        "trl grpo --model_name_or_path Qwen/Qwen3-30B-A3B-Instruct-2507 --use_vllm true --num_generations 8\n"
    )
    said = CliRunner().invoke(app, ["import", "run.sh", "--framework", "trl"])
    assert said.exit_code == 0, said.output
    assert "assumed: Qwen3-30B-A3B-Instruct-2507: shape of Qwen3-30B-A3B" in said.output
    assert "architecture: Qwen/Qwen3-30B-A3B-Instruct-2507" in Path("job.yaml").read_text()
    job = (
        "{name: j, architecture: Qwen/Qwen2.5-Coder-7B, cluster: dgx_h100, nodes: 1, tasks: [{name: math, "
        "workload: math, max_response_tokens: 1024, prompts_per_step: 32, group_size: 4}]}"
    )
    Path("plan.yaml").write_text(job)
    planned = CliRunner().invoke(app, ["plan", "plan.yaml"])
    assert "assumed: Qwen2.5-Coder-7B: shape of Qwen2.5-7B" in planned.output
    shown = CliRunner().invoke(app, ["profiles", "show", "mistralai/Mixtral-8x7B-v0.1"])
    assert "shape of Mixtral-8x7B" in shown.output
