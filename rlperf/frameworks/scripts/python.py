"""TRL as most people launch it: a Python program with ``GRPOConfig(...)``, read without running it.

What stands in it as a value is read: of the configuration every key, of the trainer its model and adapter. A value that
the program works out is not: it is named, and the key keeps its default.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.keytable import Value

CONFIGURATION, TRAINER, ADAPTER, QUANTISED = "GRPOConfig", "GRPOTrainer", "LoraConfig", "BitsAndBytesConfig"


@dataclass
class PythonKeys:
    """Keys with their values and lines, and those whose value the program works out."""

    keys: dict[str, tuple[Value, int]] = field(default_factory=dict)
    worked_out: dict[str, int] = field(default_factory=dict)


def read_python(text: str, file: str, environment: Mapping[str, str] | None = None) -> PythonKeys:
    """TRL's keys in a program; variables that it asks for and no ``environment`` states have its defaults.

    Raises
    ------
    SpecError : it is no Python, or makes no ``GRPOConfig``

    >>> read = read_python("n = 8\\nargs = GRPOConfig(num_generations=n, seed=SEED, bf16=True)", "train.py")
    >>> read.keys, read.worked_out
    ({'num_generations': (8, 2), 'bf16': (True, 2)}, {'seed': 2})
    >>> asking = "args = GRPOConfig(num_generations=int(os.environ.get('N', 8)))"
    >>> read_python(asking, "train.py").keys, read_python(asking, "train.py", {"N": "16"}).keys
    ({'num_generations': (8, 1)}, {'num_generations': (16, 1)})
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SpecError(Problem(f"is no Python: {error.msg}", file, error.lineno)) from None
    if (line := _imports(tree, "unsloth")) is not None:
        what = "trains with Unsloth, whose kernels and engine stand in for TRL's: rlperf has no times of them"
        raise SpecError(Problem(what, file, line, "a file of GRPOConfig's values is read as TRL alone would run it"))
    names: dict[str, ast.expr] = {_VARIABLE + name: ast.Constant(told) for name, told in (environment or {}).items()}
    names |= _assigned(tree)
    found, calls = PythonKeys(), [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        if _called(call) == CONFIGURATION:
            _take(found, _keywords(call, names), names)
    _set_afterwards(found, tree, names)
    if not found.keys:
        made = any(_called(call) == CONFIGURATION for call in calls)
        what = f"states no value in its {CONFIGURATION}" if made else f"makes no {CONFIGURATION}"
        hint = "name what it launches: a YAML file, a script, or a file of its flags"
        raise SpecError(Problem(f"a Python program that {what}", file, suggestion=hint))
    for call in calls:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if _called(call) == TRAINER:
            model = given.get("model", call.args[0] if call.args else None)
            _take(found, {"model_name_or_path": _checkpoint(model, names)} if model is not None else {}, names)
            if (adapter := given.get("peft_config")) is not None and not _is_none(adapter):
                found.keys["use_peft"] = (True, call.lineno)
        elif _called(call) == ADAPTER:
            _take(found, {"lora_r": given["r"]} if "r" in given else {}, names)
        elif _called(call) == QUANTISED:
            _take(found, {key: given[key] for key in ("load_in_4bit", "load_in_8bit") if key in given}, names)
    return found


def _imports(tree: ast.Module, package: str) -> int | None:
    """The line where a program takes something of a package; None: nowhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(name.partition(".")[0] == package for name in named):
                return node.lineno
    return None


def makes_configuration(text: str) -> bool:
    """Whether a program is one of TRL's."""
    return f"{CONFIGURATION}(" in text


def _called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _take(found: PythonKeys, given: Mapping[str, ast.expr], names: Mapping[str, ast.expr]) -> None:
    for key, node in given.items():
        try:
            found.keys[key] = (_value(node, names), node.lineno)
        except ValueError:
            found.worked_out[key] = node.lineno


def _keywords(call: ast.Call, names: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """What a call is given by name, also by ``**`` of a dictionary that stands in the program."""
    given: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg:
            given[keyword.arg] = keyword.value
            continue
        made = names.get(keyword.value.id, keyword.value) if isinstance(keyword.value, ast.Name) else keyword.value
        if isinstance(made, ast.Dict):
            pairs = zip(made.keys, made.values, strict=True)
            given |= {
                key.value: each for key, each in pairs if isinstance(key, ast.Constant) and type(key.value) is str
            }
        elif isinstance(made, ast.Call) and _called(made) == "dict":
            given |= {each.arg: each.value for each in made.keywords if each.arg}
    return given


def _set_afterwards(found: PythonKeys, tree: ast.Module, names: Mapping[str, ast.expr]) -> None:
    """``args.num_generations = 16`` behind ``args = GRPOConfig(...)``; in a branch nobody knows whether it is."""
    made = {name for name, value in names.items() if isinstance(value, ast.Call) and _called(value) == CONFIGURATION}
    branches = (ast.If, ast.For, ast.While, ast.Try)
    inside = {node for branch in ast.walk(tree) if isinstance(branch, branches) and not _is_main(branch)
              for node in ast.walk(branch)}  # fmt: skip
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.Assign)):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in made:
                found.keys.pop(target.attr, None)
                if node in inside:
                    found.worked_out[target.attr] = node.lineno
                else:
                    _take(found, {target.attr: node.value}, names)


def _is_main(branch: ast.stmt) -> bool:
    """``if __name__ == "__main__":``, under which a program runs as a whole."""
    return isinstance(branch, ast.If) and ast.unparse(branch.test).startswith("__name__ ==")


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """What names stand for that are assigned once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target, *([node.target] if isinstance(node, ast.AugAssign) else [])]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                found.setdefault(target.id, []).append(value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _checkpoint(node: ast.expr, names: Mapping[str, ast.expr]) -> ast.expr:
    """The name of a model, also where it has been loaded: ``AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")``."""
    made = names.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(made, ast.Call) and _called(made) == "from_pretrained" and made.args:
        return made.args[0]
    return node


_SIGNS: Mapping[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


_VARIABLE = "$"
"""In front of the variables of the environment among the names of a program."""
_MADE: Mapping[str, Callable[[Value], Value]] = {"int": int, "float": float, "str": str}


def _called_value(call: ast.Call, names: Mapping[str, ast.expr]) -> Value:
    """``int(...)`` of what has a value, ``os.environ.get("N", 8)`` and ``os.getenv("N", 8)``."""
    what, arguments = _called(call), call.args
    if what in _MADE and len(arguments) == 1:
        try:
            return _MADE[what](_value(arguments[0], names))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"no {what}") from error
    if ast.unparse(call.func) not in ("os.environ.get", "environ.get", "os.getenv", "getenv") or not arguments:
        raise ValueError("worked out where it runs")
    return _of_environment(arguments, names)


def _of_environment(asked: Sequence[ast.expr], names: Mapping[str, ast.expr]) -> Value:
    """A variable of the environment, and behind it what a program takes where nobody sets it."""
    stated = names.get(f"{_VARIABLE}{_value(asked[0], names)}")
    if stated is None and len(asked) < 2:
        raise ValueError("asked of the environment")
    return _value(asked[1] if stated is None else stated, names)


def _value(node: ast.expr, names: Mapping[str, ast.expr]) -> Value:
    """A literal, a name of one, arithmetic over them, or what the environment is asked; else a `ValueError`."""
    if isinstance(node, ast.Call):
        return _called_value(node, names)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ"):
        return _of_environment([node.slice], names)
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], {name: value for name, value in names.items() if name != node.id})
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        left, right = _value(node.left, names), _value(node.right, names)
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            raise ValueError("not numbers")
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise ValueError("divides by nothing")
        return _SIGNS[type(node.op)](left, right)
    try:
        value: Value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError) as error:
        raise ValueError("worked out where it runs") from error
    return value
