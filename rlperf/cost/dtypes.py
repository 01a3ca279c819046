"""Data types of matrix products and caches: what a value weighs and which peak its products run at."""

from __future__ import annotations

from dataclasses import dataclass

from rlperf.errors import SpecError


@dataclass(frozen=True)
class Dtype:
    """Bytes of one value as weight, as activation and as output, and the peak its matrix products run at.

    ``stand_ins`` are the dtypes whose fitted constants serve where this one has none, nearest first; ``unit`` is the
    peak that a device has to have beside, where its own says nothing of it.
    """

    name: str
    weight_bytes: float
    activation_bytes: float
    peak: str
    stand_ins: tuple[str, ...] = ()
    output_bytes: float = 2.0
    unit: str = ""

    @property
    def weights_alone(self) -> bool:
        """Whether it is a type of weights, widened as they are read: nothing is computed or cached in it."""
        return self.weight_bytes < 2.0 <= self.activation_bytes

    @property
    def narrow(self) -> bool:
        """Whether activations are cast before a product."""
        return self.activation_bytes < 2.0


# Block-scaled types carry one scale per block: fp8_block 4 bytes per 128 x 128 weights (per 128 activations),
# nvfp4 1 byte per 16 values, mxfp4 and mxfp8 1 byte per 32 values (OCP Microscaling Formats 1.0, table 1). Products of
# mxfp8 need a unit that applies such scales (PTX: tcgen05.mma kind::mxf8f6f4, sm_100; CDNA 4: V_MFMA_SCALE), which
# devices have together with that for four bits.
DTYPES: dict[str, Dtype] = {
    entry.name: entry
    for entry in (
        Dtype("bf16", 2.0, 2.0, "bf16"),
        Dtype("fp16", 2.0, 2.0, "fp16", ("bf16",)),
        Dtype("fp32", 4.0, 4.0, "fp32", ("bf16",), 4.0),
        Dtype("tf32", 4.0, 4.0, "tf32", ("bf16",), 4.0),
        Dtype("fp8", 1.0, 1.0, "fp8", ("fp8_block", "bf16")),
        Dtype("mxfp8", 1.0 + 1 / 32, 1.0 + 1 / 32, "fp8", ("fp8", "fp8_block", "bf16"), unit="fp4"),
        Dtype("fp8_block", 1.0 + 4 / 128**2, 1.0 + 4 / 128, "fp8", ("fp8", "bf16")),
        Dtype("nvfp4", 0.5 + 1 / 16, 0.5 + 1 / 16, "fp4", ("fp8", "bf16")),
        Dtype("mxfp4", 0.5 + 1 / 32, 2.0, "bf16", ("int4_wo", "nvfp4", "bf16")),
        Dtype("w4a8_mxfp4", 0.5 + 1 / 32, 1.0 + 1 / 32, "fp8", ("nvfp4", "fp8", "bf16")),
        Dtype("w4a4_mxfp4", 0.5 + 1 / 32, 0.5 + 1 / 32, "fp4", ("nvfp4", "fp8", "bf16")),
        Dtype("int8", 1.0, 1.0, "int8", ("fp8", "bf16")),
        Dtype("int8_wo", 1.0, 2.0, "bf16", ("bf16",)),
        Dtype("int4_wo", 0.5 + 2 / 128, 2.0, "bf16", ("mxfp4", "bf16")),
    )
}


def dtype_of(name: str) -> Dtype:
    """The dtype by name; raises `SpecError` with the known names.

    >>> dtype_of("nvfp4").weight_bytes
    0.5625
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise SpecError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}") from None


def cache_bytes(dtype: str) -> float:
    """Bytes of one cached key or value.

    >>> cache_bytes("fp8"), cache_bytes("bf16")
    (1.0, 2.0)
    """
    return dtype_of(dtype).weight_bytes
