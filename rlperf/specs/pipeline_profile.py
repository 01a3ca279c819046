"""Layer profiles: what every layer of an architecture costs one micro-batch, and the YAML file that states it.

A file maps names to profiles; times are in milliseconds, letters name layer kinds::

    my-hybrid:
      layers: "M-M*-"                   # or {D: 3, X: 58}; E (embedding) and L (head) are put in front and at the end
      f: {E: 0.76, M: 2.68, "-": 1.85, "*": 1.93, L: 14.2}     # forward
      b: {E: 2.87, M: 4.30, "-": 1.91, "*": 2.45, L: 15.7}     # backward for the input
      w: {E: 0, M: 1.76, "-": 1.69, "*": 0.65, L: 0.06}        # backward for the weights
      activation_bytes: {M: 300 MB, ...}     # optional: held from the start of F to the end of B
      weight_input_bytes: {M: 100 MB, ...}   # optional: the part held on until W has run, where B and W are split
      state_bytes: {M: 1.2 GB, ...}          # optional: weights, gradients and optimizer state of one layer
      output_bytes: 33 MB                    # optional: what one layer sends to the next
      quadratic: {"*": 0.3}                  # optional: share of the time that grows with the square of the length
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rlperf.errors import Problem, SpecError, did_you_mean
from rlperf.specs.frozen import Frozen
from rlperf.units import Bytes

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerProfile:
    """Costs of the L layers of an architecture for one reference micro-batch, in the order of the forward pass.

    Parameters
    ----------
    name : what the profile is called
    kinds : letter of each layer, length L
    forward_s, backward_input_s, backward_weight_s : times of F, B and W of each layer [s], shape (L,)
    activation_bytes : held from the start of F to the end of B [bytes], shape (L,)
    weight_input_bytes : the part of ``activation_bytes`` held on until W has run [bytes], shape (L,)
    state_bytes : weights, gradients and optimizer state, held always [bytes], shape (L,)
    output_bytes : sent from each layer to the next (and back as a gradient) [bytes], shape (L,)
    quadratic_share : share of the times that grows with the square of the sequence length [-], shape (L,)
    """

    name: str
    kinds: tuple[str, ...]
    forward_s: FloatArray
    backward_input_s: FloatArray
    backward_weight_s: FloatArray
    activation_bytes: FloatArray
    weight_input_bytes: FloatArray
    state_bytes: FloatArray
    output_bytes: FloatArray
    quadratic_share: FloatArray

    def __post_init__(self) -> None:
        count = len(self.kinds)
        problems = []
        for field, value in self._arrays().items():
            if value.shape != (count,):
                problems.append(Problem(f"{field} of {self.name} has shape {value.shape}, ({count},) is due"))
            elif not np.all(np.isfinite(value)) or np.any(value < 0.0):
                problems.append(Problem(f"{field} of {self.name} must be finite and not negative"))
        if count == 0:
            problems.append(Problem(f"{self.name} has no layer"))
        if not problems:
            if np.any(self.weight_input_bytes > self.activation_bytes):
                problems.append(Problem(f"weight_input_bytes of {self.name} exceed activation_bytes"))
            if np.any(self.quadratic_share > 1.0):
                problems.append(Problem(f"quadratic_share of {self.name} exceeds 1"))
        if problems:
            raise SpecError(problems)

    def _arrays(self) -> dict[str, FloatArray]:
        return {
            "forward_s": self.forward_s,
            "backward_input_s": self.backward_input_s,
            "backward_weight_s": self.backward_weight_s,
            "activation_bytes": self.activation_bytes,
            "weight_input_bytes": self.weight_input_bytes,
            "state_bytes": self.state_bytes,
            "output_bytes": self.output_bytes,
            "quadratic_share": self.quadratic_share,
        }

    @property
    def layers(self) -> int:
        """Number of layers L, embedding and head included."""
        return len(self.kinds)

    @property
    def work_s(self) -> FloatArray:
        """F + B + W of each layer [s], shape (L,)."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    @property
    def knows_memory(self) -> bool:
        """Whether any size in bytes was stated, so that a memory limit means something."""
        return bool(np.any(self.activation_bytes > 0.0) or np.any(self.state_bytes > 0.0))

    @classmethod
    def make(
        cls,
        name: str,
        kinds: str | tuple[str, ...],
        forward_s: npt.ArrayLike,
        backward_input_s: npt.ArrayLike,
        backward_weight_s: npt.ArrayLike,
        *,
        activation_bytes: npt.ArrayLike = 0.0,
        weight_input_bytes: npt.ArrayLike = 0.0,
        state_bytes: npt.ArrayLike = 0.0,
        output_bytes: npt.ArrayLike = 0.0,
        quadratic_share: npt.ArrayLike = 0.0,
    ) -> LayerProfile:
        """A profile from plain numbers or lists; numbers hold for every layer.

        Long because every quantity of a layer has an argument of its name.

        >>> LayerProfile.make("uniform", "TTTT", 1.0, 1.0, 1.0).work_s.sum()
        np.float64(12.0)
        """
        shape = (len(kinds),)

        def spread(value: npt.ArrayLike) -> FloatArray:
            array = np.asarray(value, dtype=np.float64)
            return np.full(shape, float(array)) if array.ndim == 0 else array.copy()

        return cls(
            name,
            tuple(kinds),
            spread(forward_s),
            spread(backward_input_s),
            spread(backward_weight_s),
            spread(activation_bytes),
            spread(weight_input_bytes),
            spread(state_bytes),
            spread(output_bytes),
            spread(quadratic_share),
        )


_Ms = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _ProfileSpec(Frozen):
    """One entry of a profile file."""

    layers: str | dict[str, Annotated[int, Field(ge=1, le=10_000)]]
    f: dict[str, _Ms]
    b: dict[str, _Ms]
    w: dict[str, _Ms]
    activation_bytes: dict[str, Bytes] = Field(default_factory=dict)
    weight_input_bytes: dict[str, Bytes] = Field(default_factory=dict)
    state_bytes: dict[str, Bytes] = Field(default_factory=dict)
    output_bytes: Bytes | None = None
    quadratic: dict[str, _Share] = Field(default_factory=dict)


def profile_names(path: Path | str) -> tuple[str, ...]:
    """Names of the profiles in a file."""
    from rlperf.specs.reader import read_document

    return tuple(_entries(read_document(path)))


def read_profile(path: Path | str, name: str | None = None, resolution_s: float = 1e-5) -> LayerProfile:
    """Read one profile; every layer time is rounded to ``resolution_s`` [s] (0: left as it stands).

    Measured times are stated to more digits than they repeat to; rounding each layer to 0.01 ms before anything is
    summed is what the authors of the published nemotron-nano-v2-9b oracle do (arXiv 2509.23722, public simulator).
    ``name`` may be left out where the file holds one profile only.

    Raises
    ------
    SpecError : unreadable file, unknown name, letters without a time, wrong values; all problems at once
    """
    from rlperf.specs.reader import Document, problems_of, read_document

    document = read_document(path)
    entries = _entries(document)
    if name is None and len(entries) == 1:
        name = next(iter(entries))
    if name is None or name not in entries:
        known = ", ".join(entries)
        message = f"holds several profiles, name one of: {known}" if name is None else f"no profile {name!r}"
        hint = None if name is None else did_you_mean(name, entries) or f"known: {known}"
        raise SpecError(Problem(message, str(path), suggestion=hint))
    part = Document(entries[name], {k[1:]: v for k, v in document.lines.items() if k[:1] == (name,)}, document.file)
    from pydantic import ValidationError

    try:
        spec = _ProfileSpec.model_validate(part.data)
    except ValidationError as error:
        raise SpecError(problems_of(error, part, _ProfileSpec)) from error
    return _profile(name, spec, part, resolution_s)


def _entries(document: Any) -> dict[str, Any]:
    data = document.data
    if not isinstance(data, dict) or not all(isinstance(value, dict) for value in data.values()):
        raise SpecError(Problem("a profile file maps names to profiles (layers, f, b, w)", document.file, 1))
    return {str(key): value for key, value in data.items()}


def _profile(name: str, spec: _ProfileSpec, part: Any, resolution_s: float) -> LayerProfile:
    middle = (
        list(spec.layers) if isinstance(spec.layers, str) else [k for k, n in spec.layers.items() for _ in range(n)]
    )
    kinds = (["E"] if "E" in spec.f and "E" not in middle else []) + middle
    kinds += ["L"] if "L" in spec.f and "L" not in middle else []
    problems = []
    for field in ("f", "b", "w"):
        table: dict[str, float] = getattr(spec, field)
        for letter in sorted(set(kinds) - set(table)):
            problems.append(part.problem((field,), f"no time for layer kind {letter!r}"))
    for field in ("f", "b", "w", "activation_bytes", "weight_input_bytes", "state_bytes", "quadratic"):
        for letter in sorted(set(getattr(spec, field)) - set(kinds)):
            problems.append(part.problem((field, letter), f"layer kind {letter!r} is not in layers"))
    if not kinds:
        problems.append(part.problem(("layers",), "no layer"))
    if problems:
        raise SpecError(problems)

    def times(table: dict[str, float]) -> list[float]:
        rounded = {k: _rounded(v * 1e-3, resolution_s) for k, v in table.items()}
        return [rounded[kind] for kind in kinds]

    def sizes(table: dict[str, float]) -> list[float]:
        return [table.get(kind, 0.0) for kind in kinds]

    return LayerProfile.make(
        name,
        tuple(kinds),
        times(spec.f),
        times(spec.b),
        times(spec.w),
        activation_bytes=sizes(spec.activation_bytes),
        weight_input_bytes=sizes(spec.weight_input_bytes),
        state_bytes=sizes(spec.state_bytes),
        output_bytes=spec.output_bytes or 0.0,
        quadratic_share=sizes(spec.quadratic),
    )


def _rounded(value_s: float, resolution_s: float) -> float:
    return value_s if resolution_s <= 0.0 else round(value_s / resolution_s) * resolution_s
