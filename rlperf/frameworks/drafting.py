"""Speculative decoding under the keys of engines: vLLM's ``speculative_config``, SGLang's ``speculative_*`` arguments.

Sources: vllm@0.33.0 config/speculative.py (method, model, num_speculative_tokens, prompt_lookup_max); sglang@0.5.23
server_args.py (what it calls EAGLE is a model's own layer, too; with one branch k steps verify k + 1 tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from rlperf.errors import ExportError
from rlperf.frameworks.fields import Setting, Unit
from rlperf.frameworks.run import Run
from rlperf.specs.engine_calibration import load_engine_calibration
from rlperf.specs.speculation import MOST_DRAFTS, NONE, DraftSetting, Method


def drafts_by(*methods: Method) -> Unit:
    """A pool's word as the number of drafts, which no key has follow the running requests; method and everything beside
    it are the adapter's to write and to read."""
    words = (f"{method}:{count}" for method in methods for count in range(MOST_DRAFTS + 1))
    return Unit(lambda _value, _run: None, lambda value, _run: _drafts(value), takes=frozenset({NONE, *words}))


DRAFTS = drafts_by(*get_args(Method))
HEAD = "/ckpt/draft_head"
_TRAINED = ("mtp.enable_train", "policy.draft.enabled", "enable-mtp-training")
_SGLANG: Mapping[Method, str] = {"mtp": "EAGLE", "eagle3": "EAGLE3", "ngram": "NGRAM"}


def _drafts(word: str) -> int:
    wanted = DraftSetting.parse(word)
    return wanted.most if wanted else 0


def drafting_of(run: Run, framework: str) -> DraftSetting | None:
    """What a run drafts; None: nothing.

    Raises
    ------
    ExportError : the number of drafts follows the running requests, which no framework's key states
    """
    wanted = DraftSetting.parse(run.rollout.speculation or NONE)
    if wanted and wanted.switches:
        nearest = {"nearest": f"rollout settings: {{speculation: {wanted.method}:{wanted.most}}}, and plan again"}
        raise ExportError(f"speculation {wanted} switches with the number of requests", framework, nearest)
    return wanted


def with_drafts(
    settings: Mapping[str, Setting], count_key: str, drafts: list[Setting], has: Callable[[str], bool]
) -> dict[str, Setting]:
    """Settings with ``drafts`` in place of the bare number under ``count_key``; keys of other versions left out.

    That no head is trained is what runs where nothing is said.
    """
    untrained = (key for key, setting in settings.items() if key.endswith(_TRAINED) and not setting.value)
    left_out = {count_key, *untrained}
    kept = {key: setting for key, setting in settings.items() if key not in left_out}
    return kept | {setting.key: setting for setting in drafts if has(setting.key)}


def vllm_drafts(prefix: str, wanted: DraftSetting | None) -> list[Setting]:
    """``speculative_config`` below a prefix."""
    if wanted is None:
        return []
    found = [Setting(prefix + "method", wanted.method, "who drafts"),
             Setting(prefix + "num_speculative_tokens", wanted.most, "per engine step")]  # fmt: skip
    if wanted.method == "eagle3":
        found.append(Setting(prefix + "model", HEAD, "yours: the draft head"))
    if wanted.method == "ngram":
        found.append(Setting(prefix + "prompt_lookup_max", wanted.most, "tokens that must agree"))
    return found


def sglang_drafts(name: Callable[[str], str], wanted: DraftSetting | None) -> list[Setting]:
    """SGLang's arguments by a framework's spelling of them."""
    if wanted is None:
        return []
    found = [Setting(name("speculative_algorithm"), _SGLANG[wanted.method], "who drafts"),
             Setting(name("speculative_num_steps"), wanted.most, "drafted tokens per engine step"),
             Setting(name("speculative_eagle_topk"), 1, "one branch"),
             Setting(name("speculative_num_draft_tokens"), wanted.most + 1, "verified together")]  # fmt: skip
    if wanted.method == "eagle3":
        found.append(Setting(name("speculative_draft_model_path"), HEAD, "yours: the draft head"))
    return found


def read_vllm(flat: Mapping[str, Any], prefix: str) -> str | None:
    """The pool's word of a ``speculative_config``; None: nothing is drafted, or by what rlperf does not know."""
    drafts = flat.get(prefix + "num_speculative_tokens")
    if not isinstance(drafts, int) or drafts < 1:
        return None
    method = str(flat.get(prefix + "method") or "eagle3")
    return _word("mtp" if method.endswith("mtp") else method, drafts)


def read_sglang(flat: Mapping[str, Any], name: Callable[[str], str], own_layer: bool) -> str | None:
    """The same of SGLang's arguments; ``own_layer``: EAGLE without a head of its own is the model's."""
    algorithm = str(flat.get(name("speculative_algorithm")) or "").upper()
    if not algorithm:
        return None
    drafts = flat.get(name("speculative_num_steps")) or int(flat.get(name("speculative_num_draft_tokens")) or 4) - 1
    by = {"EAGLE": "mtp" if own_layer else "eagle3", "NEXTN": "mtp", "EAGLE3": "eagle3", "NGRAM": "ngram"}
    return _word(by.get(algorithm, algorithm.lower()), int(drafts))


def sglang_running(stated: int | None, drafted: str | None) -> int | None:
    """Requests that SGLang runs at once: as stated, or its own limit where tokens are drafted; None: its usual one."""
    return load_engine_calibration("sglang").max_drafting if stated is None and drafted else stated


def _word(method: str, drafts: int) -> str | None:
    return f"{method}:{drafts}" if method in ("mtp", "eagle3", "ngram") else None
