"""What a measured training row says of its stack's switches, and its framework's recipes where it says nothing.

Tables print switches in their notes, in the words of the framework. A recipe that is not published is taken to be the
newest one known of the same model on the same device (``calibrations/trainer_recipes.yaml``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from rlperf.specs.profiles import profile_root
from rlperf.specs.reader import read_document
from rlperf.specs.trainer_switches import Graph, Switches

FILE = "trainer_recipes.yaml"


@dataclass(frozen=True)
class Recipe:
    """Switches of a framework's recipe for some architectures and devices, from one release up to another."""

    framework: str
    since: tuple[int, ...]
    before: tuple[int, ...]
    architectures: tuple[str, ...]
    devices: tuple[str, ...]
    switches: Switches

    def serves(self, framework: str, version: str, architecture: str, device: str) -> bool:
        """Whether the recipe is that of a row."""
        return (
            self.framework == framework
            and self.since <= release(version) < self.before
            and architecture in self.architectures
            and device in self.devices
        )


def release(version: str) -> tuple[int, ...]:
    """Numbers of a release, for comparison; none where it is not one.

    >>> release("26.04.01") > release("26.04"), release("main")
    (True, ())
    """
    return tuple(map(int, re.findall(r"\d+", version)))


@cache
def recipes() -> tuple[Recipe, ...]:
    """All known recipes."""
    data = read_document(profile_root() / "calibrations" / FILE).data
    return tuple(
        Recipe(
            each["framework"], release(each["since"]), release(each.get("before", "9999")),
            tuple(each["architectures"]), tuple(each["devices"]), Switches(**each["switches"]),
        )
        for each in data["recipes"]
    )  # fmt: skip


def of_recipe(framework: str, version: str, architecture: str, device: str) -> Switches:
    """Switches of a row whose recipe nobody published; nothing stated where none is known."""
    found = (each for each in recipes() if each.serves(framework, version, architecture, device))
    return next((each.switches for each in found), Switches())


def of_note(note: str, source: str) -> Switches:
    """Switches that a row's note and source state, nothing else.

    MLPerf's "TP overlap" is not read: two submissions that differ in it alone take the same time (4.14 and 4.12 s), and
    NeMo's share was fitted to rows that do not say.

    >>> sorted(of_note("dispatcher: hybridep; all-to-all overlap: False", "").model_fields_set)
    ['dispatcher', 'expert_overlap']
    """
    stated: dict[str, object] = {}
    if "torchtitan" in source:
        stated["ring"] = "unbalanced"
    if (graph := _graph(note)) is not None:
        stated["cuda_graph"] = graph
    if re.search(r"dispatcher: hybridep|HybridEP dispatcher", note):
        stated["dispatcher"] = "hybridep"
    elif re.search(r"dispatcher: deepep|kernels: .*DeepEP", note):
        stated["dispatcher"] = "deepep"
    if re.search(r"all-to-all overlap: True|EP overlap on|\(EP overlap", note):
        stated["expert_overlap"] = True
    elif re.search(r"all-to-all overlap: False|EP overlap off", note):
        stated["expert_overlap"] = False
    if re.search(r"tokendrop", source) or "pad-to-capa" in note:
        stated["drops_tokens"] = True
    if "grad/param overlap off" in note:
        stated["data_overlap"] = False
    elif "overlap-grad-reduce" in note:
        stated["data_overlap"] = True
    if "P2P overlap off" in note:
        stated["pipeline_overlap"] = False
    if re.search(r"tp-comm-overlap on|async TP True", note):
        stated["tensor_overlap"] = True
    elif re.search(r"TP comm overlap off|async TP False", note):
        stated["tensor_overlap"] = False
    if "torch.compile" in note:
        stated["fused"] = "torch.compile True" in note
    if "fp8(linear) rowwise" in note:
        stated["rowwise"] = True
    return Switches(**stated)


def _graph(note: str) -> Graph | None:
    """What the graphs of a recipe capture; its scope counts only where an implementation is named."""
    kind = re.search(r"CUDA graph: (\w+)", note)
    if kind is None:
        partial = "CUDA graphs moe_router" in note or "CUDA graph 1" in note
        return "partial" if partial else None
    if kind[1] == "none":
        return "none"
    return "full_iteration" if kind[1] == "full_iteration" or "scope: full_iteration" in note else "partial"


def recomputed(note: str) -> tuple[str, ...]:
    """Modules that selective recompute repeats, by Megatron's names; attention where none is named."""
    found = re.search(r"recomputed modules: (?:selective\()?([\w;]+)", note)
    return tuple(filter(None, found[1].split(";"))) if found else ("core_attn",)
