"""The parser of miles' own package, with what it imports and is not installed stubbed: what tests hold exports against.

    pip download --no-deps miles-rl==0.0.2 && unzip miles_rl-*.whl -d FOLDER
    python tests/miles_package.py FOLDER --keys > rlperf/frameworks/facts/miles.tsv    the key table
    python tests/miles_package.py FOLDER < COMMANDS.json    "" for each list of arguments that is taken, else why not

Runs in a process of its own: stubs stand in for every module that is not there. Only the parsers are the package's.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import logging
import os
import sys
import types
from typing import Any

_WHOLE = (
    "megatron.rl", "megatron.core.inference", "megatron.core.models", "megatron.legacy", "megatron.post_training",
    "numpy", "pydantic", "transformers", "sglang.srt.connector", "sglang.srt.configs", "sglang.srt.distributed",
    "sglang.srt.function_call", "sglang.srt.layers", "sglang.srt.lora", "sglang.srt.managers",
    "sglang.srt.model_executor", "sglang.srt.models", "sglang.srt.utils.hf_transformers_utils",
)  # fmt: skip
"""What would compute at import: nothing of an argument stands there."""
_MAIN = (
    ("allow-partial-train-step", "false", "main-", "", "flag"),
    ("fully-async", "false", "main-", "", "flag"),
    ("skip-actor-forward-only", "false", "main-", "", "flag"),
    ("update-weight-transfer-mode", '"broadcast"', "main-", "", "str:broadcast|p2p|disk-delta"),
)
"""What the behaviour sheet of slime and miles names of miles@31f1ca9 beside the package's keys."""


class _Meta(abc.ABCMeta):
    """A class that has every attribute, may be subclassed, called, indexed and compared, and is no value."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if cls is not Stub:
            return super().__call__(*given, **named)
        decorated = len(given) == 1 and not named and isinstance(given[0], types.FunctionType | type)
        return given[0] if decorated else Stub

    def __getitem__(cls, _: Any) -> Any:
        return Stub

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, _: Any) -> Any:
        return Stub

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return cls is not Stub

    def __lt__(cls, _: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__


class Stub(metaclass=_Meta):
    def __init__(self, *given: Any, **named: Any) -> None:
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return "99.0.0" if name == "__version__" else Stub


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, whole: tuple[str, ...] = ()) -> None:
        self.whole = whole

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        asked = any(f"{name}.".startswith(f"{each}.") for each in self.whole) if self.whole else True
        if not asked or name.partition(".")[0] in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        made = _Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def parser_of(folder: str) -> argparse.ArgumentParser:
    """The parser that ``miles.utils.arguments.parse_args`` builds for its Megatron backend."""
    sys.path.insert(0, folder)
    sys.meta_path[:] = [_Finder(_WHOLE), *sys.meta_path, _Finder()]
    from megatron.training.arguments import add_megatron_arguments
    from miles.utils.arguments import get_miles_extra_args_provider

    sys.argv = ["train.py"]
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return get_miles_extra_args_provider()(add_megatron_arguments(parser))  # type: ignore[no-any-return]


def table(parser: argparse.ArgumentParser) -> str:
    """Every long option with its default, and its type where it takes one value."""
    moved = {row[0] for row in _MAIN}
    rows = list(_MAIN)
    for action in parser._actions:
        negated = isinstance(action, argparse._StoreFalseAction)
        for option in action.option_strings:
            if option.startswith("--") and option != "--help":
                off = negated or (isinstance(action, argparse.BooleanOptionalAction) and option.startswith("--no-"))
                kind, key = _kind(action), option.removeprefix("--")
                span = "-0.0" if key in moved else ""
                rows.append((key, _json(None if off else action.default), span, "", kind))
    head = [
        "# miles: keys, defaults, first and last version; 0.0 is miles-rl 0.0.2 of the package index (2026-05-28), as",
        "# its own parser lists them (tests/miles_package.py); main adds what is known of radixark/miles@31f1ca9.",
        "# versions: 0.0 main",
        "# partial: main",
        "# free: router-",  # sglang_router's own (RouterArgs.add_cli_args), which is no part of the package
        "[]",
    ]
    return "\n".join([*head, *("\t".join(row).rstrip("\t") for row in sorted(rows))]) + "\n"


def _kind(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "flag"
    name = getattr(action.type or str, "__name__", "")
    if name not in ("int", "float", "str") or action.nargs is not None:
        return ""
    return "str:" + "|".join(sorted(map(str, action.choices))) if action.choices and name == "str" else name


def _json(default: Any) -> str:
    try:
        return json.dumps(None if default is argparse.SUPPRESS else default)
    except TypeError:
        return "null"


def refusal(parser: argparse.ArgumentParser, given: list[str]) -> str:
    """Why the parser, or a validator, does not take some arguments; empty: all do, in the order of ``parse_args``."""
    import miles.utils.arguments as own
    from megatron.training.arguments import validate_args as trainer
    from miles.backends.megatron_utils.arguments import set_default_megatron_args
    from miles.backends.sglang_utils.arguments import validate_args as engines

    try:
        args = parser.parse_args(given)
        args.rank, args.world_size = 0, args.actor_num_nodes * args.actor_num_gpus_per_node
        own.miles_validate_args(set_default_megatron_args(args))
        trainer(args)
        if args.pipeline_model_parallel_size == 1:
            assert args.decoder_first_pipeline_num_layers is None and args.decoder_last_pipeline_num_layers is None
        engines(args)
    except (argparse.ArgumentError, SystemExit, AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    where, listed = sys.argv[1], "--keys" in sys.argv
    built = parser_of(where)
    if listed:
        sys.stdout.write(table(built))
    else:
        logging.disable()
        os.path.exists = lambda _: True  # checkpoints are the user's
        importlib.import_module("torch").cuda.get_device_capability = lambda *_: (9, 0)
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints every argument
            answers = [refusal(built, each) for each in json.load(sys.stdin)]
        json.dump(answers, sys.stdout)
