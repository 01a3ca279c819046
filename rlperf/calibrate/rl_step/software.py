"""The software of a measured rl_step, from the words of its row: framework, trainer backend, engine, data types."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlperf.cost.dtypes import DTYPES
from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.framework_names import FRAMEWORKS
from rlperf.specs.rl_calibration import framework_trainers


@dataclass(frozen=True)
class Software:
    """Names of the calibrations of framework, trainer backend and engine.

    ``stands_in``: why the framework's is a relative's, empty where it is its own; ``facts``: the framework itself, of
    which keys and defaults are known and no seconds.
    """

    framework: str
    trainer: str
    engine: str
    stands_in: str = ""
    facts: str = ""


_FRAMEWORKS = (
    (r"nemo.*(megatron|mcore)", "nemo_rl_megatron"),
    (r"nemo.*(dtensor|fsdp|automodel|pytorch)", "nemo_rl_dtensor"),
    (r"nemo", "nemo_rl_megatron"),
    (r"verl.*(megatron|mcore)", "verl_megatron"),
    (r"verl", "verl_fsdp"),
    (r"areal", "areal"),
    (r"openrlhf", "openrlhf"),
    (r"\bmiles\b", "miles"),
    (r"slime", "slime"),
    (r"\btrl\b", "trl"),
)
_RELATIVES = (
    (r"prime.?rl", "areal"),  # asynchronous by design over FSDP2
    (r"megatron|mcore", "verl_megatron"),
    (r"deepspeed", "openrlhf"),
    (r"", "verl_fsdp"),
)
"""What stands in for a framework without a calibration: the same kind of trainer, nothing of it measured."""

_TRAINERS = (
    (r"megatron|mcore", "megatron"),
    (r"deepspeed", "deepspeed"),
    (r"automodel|dtensor v2", "automodel"),
    (r"fsdp|dtensor|torchtitan|pytorch|archon", "fsdp2"),
)
_ENGINES = ((r"sglang", "sglang"), (r"trt-?llm|tensorrt", "trtllm"), (r"vllm", "vllm"))
_OWN_ENGINE = {"slime": "sglang", "miles": "sglang", "areal": "sglang"}
_DTYPES = (
    (r"bfloat16|bf16.*", "bf16"),
    (r"float16|half", "fp16"),
    (r"float32", "fp32"),
    (r"(fp8|float8).*block.*|block.*fp8|deepgemm", "fp8_block"),
    (r"float8.*|fp8.*|w8a8.*|e4m3.*", "fp8"),
    (r"awq.*|gptq.*|w4a16.*|int4", "int4_wo"),
    (r"w8a16.*", "int8_wo"),
)


def software_of(text: str) -> Software:
    """Calibrations of a row's ``framework`` cell; an unknown framework is predicted as its nearest relative.

    >>> software_of("NeMo-RL (vLLM + PyTorch DTensor)").framework, software_of("verl (SGLang+Megatron)").engine
    ('nemo_rl_dtensor', 'sglang')
    >>> software_of("NeMo-RL (Megatron-Core, PyTorch 2.8)").framework
    'nemo_rl_megatron'
    >>> software_of("SkyRL (vLLM + FSDP2)").stands_in
    'nothing of SkyRL (vLLM + FSDP2) is known: overheads of a relative'
    """
    words = text.lower().strip()
    if not words:
        raise SpecError("the row names no framework")
    framework, stands_in, facts = _first(_FRAMEWORKS, words), "", ""
    if framework is None:
        framework = _first(_RELATIVES, words) or "verl_fsdp"
        stands_in = f"nothing of {text.strip()} is known: overheads of a relative"
        facts = next((name for name in FRAMEWORKS if name in words), "")
    trainer = _first(_TRAINERS, words) or framework_trainers(framework)[0]
    own = "vllm" if stands_in else _OWN_ENGINE.get(framework, "vllm")
    engine = _first(_ENGINES, words) or own
    return Software(framework, trainer, engine, stands_in, facts)


def dtype_named(text: str, column: str) -> str:
    """The dtype that the cost model knows under a name that frameworks use.

    >>> dtype_named("bfloat16", "compute_dtype"), dtype_named("fp8 blockwise", "compute_dtype")
    ('bf16', 'fp8_block')
    """
    name = text.strip().lower()
    if name in DTYPES:
        return name
    for pattern, known in _DTYPES:
        if re.fullmatch(pattern, name):
            return known
    raise SpecError(Problem(f"{column} {name!r} is unknown", suggestion=did_you_mean(name, DTYPES)))


def _first(table: tuple[tuple[str, str], ...], words: str) -> str | None:
    return next((name for pattern, name in table if re.search(pattern, words)), None)
