"""Reads what users have: YAML with bases, hydra overrides, launch scripts, argument files; into one flat `Source`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from rlperf.errors import Problem, SpecError
from rlperf.frameworks.adapter import Source, is_other_program
from rlperf.frameworks.keytable import Value, flatten, sections
from rlperf.frameworks.planned import Planned
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.frameworks.scripts.flow import commands, run
from rlperf.frameworks.scripts.launchers import ACCELERATE, COUNTS, counts, seen, shipped, started, switch
from rlperf.frameworks.scripts.manifest import launching, manifest_of
from rlperf.frameworks.scripts.python import makes_configuration, read_python
from rlperf.frameworks.scripts.shell import Command, Word
from rlperf.frameworks.scripts.typed import override_value, served, serves, word_value
from rlperf.specs.reader import Document, is_file, parse_document, read_text, reading

_OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w./@-]*)=(.*)$", re.DOTALL)
_ENTRY = re.compile(r"(?:^|/)(train\.py|train_async\.py|run_grpo\.py|\w+\.py)$")
_ENVIRONMENT = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}|\$([A-Z_][A-Z0-9_]*)")
"""What the shell would have filled in before hydra saw it: OmegaConf asks the environment by a resolver."""
_GIVEN = re.compile(r"^(\w+)=(.*)$", re.DOTALL)
_LONE = re.compile(r"^([a-z]\w*=)", re.MULTILINE)
_MODULES = tuple(f"{name}." for name in FRAMEWORKS)
_OTHERS = tuple(f"{name}." for name in FRAMEWORKS if name != "trl")
"""Modules of frameworks that start their own processes."""

_KINDS = "name a YAML file (.yaml, .yml), a launch script (.sh), TRL's program (.py), or a file of flags"


@dataclass
class _Gathered:
    """Keys as they are collected, later ones winning."""

    keys: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    entry: str = ""
    bases: list[str] = field(default_factory=list)
    additions: set[str] = field(default_factory=set)
    launcher: dict[str, Value] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    planned: Planned = field(default_factory=Planned)
    configurations: str = ""
    """Folder of the configurations that a command names."""
    written: dict[Path, str] = field(default_factory=dict)
    """Files that a launch script writes, where it says itself what they hold."""
    accelerate: str = ""
    """The configuration of accelerate that a command names and that is not here."""
    worked_out: dict[str, str] = field(default_factory=dict)
    lends: set[str] = field(default_factory=set)
    """Sections of YAML files of which aliases elsewhere repeat something."""
    _sections: set[str] = field(default_factory=set)
    _first: dict[str, Path] = field(default_factory=dict)

    def only(self, kind: str, path: Path) -> None:
        """A `SpecError` where another file before ``path`` was the one of its kind: their keys are of two runs."""
        first = self._first.setdefault(kind, path)
        if first.resolve() != path.resolve():
            told = f"is a second {kind}, after {first}: each is a configuration of its own"
            hint = "name one; `rlperf compare` holds two against each other"
            raise SpecError(Problem(told, str(path), suggestion=hint))

    def put(self, key: str, value: Value, file: str, line: int | None) -> None:
        """Set a key; a mapping that replaces a section, or a section below a value, takes the old away."""
        if key in self._sections:
            for old in [name for name in self.keys if name.startswith(key + ".")]:
                del self.keys[old]
        above = sections([key])
        for section in above:
            self.keys.pop(section, None)
        self._sections |= above
        self.keys[key] = value
        self.lines[key] = (file, line)

    def found(self, *candidates: Path) -> tuple[Path, str] | None:
        """The first of files that is there, or that the script writes, and its text."""
        for path in candidates:
            if path in self.written or is_file(path):
                return path, self.written[path] if path in self.written else read_text(path)
        return None

    def _untold(self) -> list[str]:
        """Accelerate's configuration, where it is named and nothing else says what kind it is of."""
        return [self.accelerate] if self.accelerate and "distributed_type" not in self.launcher else []

    def source(self) -> Source:
        read = {Path(file).stem for file, _ in self.lines.values()}
        return Source(
            dict(self.keys),
            dict(self.lines),
            self.entry,
            (*(base for base in self.bases if base not in read), *self._untold()),
            frozenset(self.additions),
            dict(self.words),
            dict(self.launcher),
            self.folder,
            self.planned,
            {key: where for key, where in self.worked_out.items() if key not in self.keys},
            frozenset(self.lends),
        )


def read_source(paths: Sequence[Path | str]) -> Source:
    """All files of one configuration, in order, later keys winning.

    YAML and JSON files are nested keys, ``.sh`` files launch scripts, ``.py`` files programs of TRL, and anything else
    flags or hydra overrides. What is no file but ``NAME=value`` is a variable that the scripts are started with,
    ``1=value`` their first argument.
    """
    if not paths:
        raise SpecError("no configuration is named")
    stated = {str(path): match for path in paths if (match := _GIVEN.match(str(path))) and not Path(path).exists()}
    gathered = _Gathered(given={match[1]: match[2] for match in stated.values()})
    for path in paths:
        if str(path) in stated:
            continue
        if Path(path).is_dir():
            files = sorted(each.name for each in Path(path).iterdir() if each.suffix in (".yaml", ".yml", ".sh"))
            if not files:
                raise SpecError(Problem("is a folder without a configuration", str(path), suggestion=_KINDS))
            raise SpecError(Problem("is a folder", str(path), suggestion=f"name what runs: {', '.join(files[:6])}"))
        with reading(path):
            _read_one(Path(path), gathered)
    return gathered.source()


def _read_one(path: Path, gathered: _Gathered) -> None:
    text = read_text(path)
    _read_planned(text, path, gathered)
    if path.suffix in (".yaml", ".yml", ".json"):
        _read_header(text, path, gathered)
        _read_yaml(text, path, gathered)
    elif path.suffix == ".py":
        _read_program(text, path, gathered)
    elif path.suffix in (".sh", ".bash") or text.startswith("#!"):
        _read_commands(text, path, gathered)
    else:
        _read_arguments(text, path, gathered)


def _read_planned(text: str, path: Path, gathered: _Gathered) -> None:
    if planned := Planned.of(text):
        if gathered.planned.phase not in ("", planned.phase):
            told = f"is not of the phase of the files before it ({planned.phase}): each is a configuration, name one"
            raise SpecError(Problem(told, str(path)))
        gathered.planned = planned
        if planned.phase:  # what launches an exported file, and answers it, is written beside it
            _read_accelerate(str(path.with_name(f"{path.stem}_accelerate.yaml")), path, gathered)
            if server := gathered.found(path.with_name(f"{path.stem}_server.sh")):
                gathered.launcher |= next((served(each) for each in commands(server[1]) if serves(each)), {})


# -- YAML -------------------------------------------------------------------------------------------------------------


_LAUNCHED = frozenset({"compute_environment", "distributed_type"})
"""Keys that only a config of accelerate has."""


def _read_yaml(text: str, path: Path, gathered: _Gathered, depth: int = 0) -> None:
    """A YAML file after its bases (hydra's ``defaults`` list, NeMo-RL's ``defaults: parent.yaml``)."""
    document = parse_document(launching(text), str(path))
    data = document.data
    if not isinstance(data, dict):
        raise SpecError(Problem(f"holds a {type(data).__name__} where a mapping of keys is due", str(path), 1))
    if depth > 16:
        raise SpecError(Problem("defaults: more than 16 levels deep, or a circle", str(path)))
    if _LAUNCHED & set(data):
        gathered.launcher.update(flatten(data))
        return
    if manifest := manifest_of(data):
        gathered.given = {**manifest.variables, **gathered.given}
        _read_commands(manifest.launch, path, gathered, document.line(manifest.at))
        return
    defaults = data.get("defaults") or []
    for base in defaults if isinstance(defaults, list) else [defaults]:
        _read_base(base, path, document, gathered, depth)
    _read_planned(text, path, gathered)
    gathered.lends |= document.lends
    flat = flatten({name: value for name, value in data.items() if name not in ("defaults", "hydra")})
    for key in [key for key in flat if key.endswith("._override_")]:
        # NeMo-RL's ``_override_: true``: the section replaces the parent's instead of joining it.
        section = key.removesuffix("_override_")
        for old in [name for name in gathered.keys if name.startswith(section)]:
            del gathered.keys[old]
        del flat[key]
    # ``trl grpo`` hands what is no key of the trainer on to the launch, and the command line stands over it
    told = dict(gathered.launcher)
    launched = [f"--{name}={flat.pop(name)}" for name in (*COUNTS, "accelerate_config") if name in flat]
    _read_launcher(launched, path, gathered)
    gathered.launcher |= told
    for key, value in flat.items():
        gathered.put(key, value, str(path), document.line(tuple(key.split("."))))


def _read_base(base: Value, path: Path, document: Document, gathered: _Gathered, depth: int) -> None:
    """One entry of ``defaults``: a file beside this one, or a base that ships with the framework."""
    if isinstance(base, Mapping):
        for group, choice in base.items():
            name = str(group).removeprefix("override ").strip().lstrip("/")
            # hydra's own logging and launcher; what fills a section (``actor@actor_rollout_ref.actor: dp_actor``)
            if not name.startswith("hydra/") and "@" not in name:
                gathered.put(name, choice, str(path), document.line(("defaults",)))
        return
    text = str(base)
    if text == "_self_":
        return
    target = Path(text) if Path(text).is_absolute() else path.parent / text
    if found := gathered.found(target, target.with_name(target.name + ".yaml")):
        _read_yaml(found[1], found[0], gathered, depth + 1)
        return
    gathered.bases.append(Path(text).stem if text.endswith((".yaml", ".yml")) else text)


# -- programs ---------------------------------------------------------------------------------------------------------


def _read_program(text: str, path: Path, gathered: _Gathered) -> None:
    """A Python program with TRL's ``GRPOConfig``."""
    gathered.only("program", path)
    read = read_python(text, str(path), gathered.given)
    for key, (value, line) in read.keys.items():
        gathered.put(key, value, str(path), line)
    gathered.worked_out |= {key: f"{path}:{line}" for key, line in read.worked_out.items()}
    gathered.entry = "trl.GRPOConfig"


# -- arguments --------------------------------------------------------------------------------------------------------


def _read_commands(text: str, path: Path, gathered: _Gathered, at: int | None = None) -> None:
    """The command of a script that starts a framework: the one with the most arguments that look like settings.

    ``at``: line of another file that the script stands in
    """
    best = Command([])
    asks: dict[str, None] = {}
    score = 0
    ran = run(text, gathered.given)
    gathered.written |= {Path(name): said for name, said in ran.files.items()}
    launched = [command for command in ran.handed_on if _entries(command.words) or _module_at(command.words)]
    for command in [*ran.commands, *launched]:
        words = command.words
        if words[0].text == "cd" and len(words) == 2:
            gathered.folder = words[1].text
        if words[0].text in ("source", ".") and len(words) == 2 and "models/" in words[1].text:
            # not read: what it states beside the launch is the framework's own
            gathered.bases.append(_within_checkout(words[1].text))
        if serves(words):  # beside the trainer that it answers, which other commands launch
            gathered.launcher |= served(words)
        settings = sum(word.text.startswith("--") or bool(_OVERRIDE.match(word.text)) for word in words)
        launches = not serves(words) and bool(_entries(words))
        told = (settings + 100 * launches) * (1 if _is_other(words) else 1000)  # warm-ups beside it are left alone
        if told > score:
            best, score = command, told
            asks = dict.fromkeys([*command.asks, *(ask for word in _launched(words) for ask in word.asks)])
            named = {Path(word.text.rpartition("=")[2]).name for word in words}  # hydra names a file without its end
            asks |= {ask: None for name, ask in ran.files_ask.items() if {Path(name).name, Path(name).stem} & named}
    if score == 0:
        raise SpecError(Problem("no command in it starts a framework with settings", str(path)))
    if asks:
        hint = "say which, as NAME=value (an argument: 1=value) behind the file"
        raise SpecError([Problem(f"its settings depend on {ask}", str(path), suggestion=hint) for ask in asks])
    gathered.launcher |= seen(best.visible)
    _read_words(best.words if at is None else [replace(word, line=at) for word in best.words], path, gathered)


def _launched(words: Sequence[Word]) -> Sequence[Word]:
    """The words behind ``ray job submit ... --``: those before it say where a job runs, and with which environment."""
    texts = [word.text for word in words]
    return words[texts.index("--") + 1 :] if texts[:3] == ["ray", "job", "submit"] and "--" in texts else words


def _within_checkout(text: str) -> str:
    """A path below a checkout, without the variables that say where the checkout is.

    >>> _within_checkout("${SCRIPT_DIR}/../scripts/models/qwen3-4B.sh")
    'scripts/models/qwen3-4B.sh'
    """
    return "scripts/models/" + text.rpartition("models/")[2]


def _read_arguments(text: str, path: Path, gathered: _Gathered) -> None:
    """One or more arguments a line: hydra overrides or flags, with or without the program in front."""
    words: list[Word] = []
    # `model_engine=megatron` on a line of its own is hydra's, not a variable of the shell
    text = _LONE.sub(r": \1", text.replace("\\\n", " \n"))
    for command in commands(text):
        words += command
    if not any(word.text.startswith("--") or _OVERRIDE.match(word.text) for word in words):
        raise SpecError(Problem("holds neither YAML, nor key=value overrides, nor --flags", str(path), 1))
    _read_words(words, path, gathered)


def _module_at(words: Sequence[Word]) -> int | None:
    """Position of the module in ``python -m some.module`` or ``uv run --extra fsdp -m some.module``."""
    by_uv = any(first.text == "uv" and after.text == "run" for first, after in pairwise(words))
    for index, word in enumerate(words[:-1]):
        module = by_uv and "." in words[index + 1].text
        if word.text == "-m" and index and (module or "python" in words[index - 1].text):
            return index + 1
    return None


def _is_other(words: Sequence[Word]) -> bool:
    """Whether a command runs a program that does not train on what it rolls out."""
    named = [after.text for first, after in pairwise(words) if first.text in ("trl", "-m", "--loss-type")]
    return any(map(is_other_program, [*named, *(words[index].text for index in _entries(words)[:1])]))


def _entries(words: Sequence[Word]) -> list[int]:
    """Positions of programs; a filter or a reward that a setting names (``slime.rollout.filter_hub...``) is none."""
    return [
        index
        for index, word in enumerate(words)
        if _is_entry(word.text) and not _is_value(words, index) and not _OVERRIDE.match(word.text)
    ]


def _is_entry(text: str) -> bool:
    return text.startswith(_MODULES) or bool(_ENTRY.search(text))


def _read_header(text: str, path: Path, gathered: _Gathered) -> None:
    """The launch command that people leave in the comments above a YAML file: only what its launcher is told."""
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        _read_launcher(line.split(), path, gathered)


def _read_launcher(words: Sequence[str], path: Path, gathered: _Gathered) -> None:
    """``--num_processes 8`` and its like, wherever they stand on the line, over what accelerate's config says."""
    for word, after in pairwise([*words, ""]):
        name, equals, inline = word.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") in ACCELERATE:
            _read_accelerate(inline if equals else after, path, gathered, named=True)
    gathered.launcher |= counts(words)


def _read_accelerate(name: str, path: Path, gathered: _Gathered, *, named: bool = False) -> None:
    """The config that ``accelerate launch`` is told of: its file, or where that is not here TRL's own of its name."""
    found = gathered.found(Path(name), path.parent / name, path.parent / Path(name).name)
    if found and found[0].suffix in (".yaml", ".yml"):
        data = parse_document(found[1], str(found[0])).data
        if isinstance(data, dict) and _LAUNCHED & set(data):
            gathered.launcher.update(flatten(data))
    elif named:
        gathered.launcher.update(shipped(Path(name).stem))
        gathered.accelerate = Path(name).stem


def _is_value(words: Sequence[Word], index: int) -> bool:
    """Whether a word that looks like a program is the value of a flag, as in ``--reward.remote_url reward.py``."""
    before = words[index - 1].text if index else ""
    return before.startswith("--") and before not in ("--", "--module") and not switch(before)


def _read_words(words: Sequence[Word], path: Path, gathered: _Gathered) -> None:
    """Everything after the entry point; before it, launchers (ray, accelerate, torchrun) have flags of their own."""
    entries = _entries(words)
    if serves(words):
        gathered.launcher |= served(words)
        return
    begin, module = 0, _module_at(words)
    if not entries and module is not None:
        entries = [module]
    if entries:
        begin = entries[0] + 1
        gathered.entry = words[entries[0]].text
        program = gathered.found(Path(gathered.entry), path.parent / gathered.entry)
        if program and program[0].suffix == ".py" and makes_configuration(program[1]):
            _read_program(program[1], program[0], gathered)
    elif any(word.text == "trl" for word in words):
        begin = next(index for index, word in enumerate(words) if word.text == "trl") + 2
        gathered.entry = "trl." + words[begin - 1].text if begin <= len(words) else "trl"
    if begin:
        gathered.only("launch", path)
    _read_launcher([word.text for word in words], path, gathered)
    if entries and not gathered.entry.startswith(_OTHERS):
        gathered.launcher |= started([word.text for word in words[: entries[0]]])
    rest = [word for word in words[begin:] if word.text not in ("$@", "$*", "${@}")]
    index = 0
    while index < len(rest):
        word = rest[index]
        index += 1
        override = _OVERRIDE.match(word.text)
        if word.text.startswith("--"):
            index += _read_flag(word, rest[index:], path, gathered)
        elif override:
            _read_override(override, word, path, gathered)


def _read_flag(word: Word, following: Sequence[Word], path: Path, gathered: _Gathered) -> int:
    """One flag with its values; how many further words it took. Config files named on the line are read as well."""
    name, equals, inline = word.text[2:].partition("=")
    values = [inline] if equals else []
    taken = 0
    if not equals:
        for after in following:
            if after.text.startswith("--") or _OVERRIDE.match(after.text):
                break
            values.append(after.text)
            taken += 1
    if name in COUNTS or name == "accelerate_config":
        return taken
    if name in ("config", "config-path", "config-name", "config-dir") and values:
        _read_named(name, values[0], path, gathered)
        return taken
    value: Value = (
        True if not values else word_value(values[0]) if len(values) == 1 else [word_value(v) for v in values]
    )
    gathered.put(name, value, str(path), word.line)
    if len(values) == 1:
        gathered.words[name] = values[0]
    return taken


def _read_named(option: str, value: str, path: Path, gathered: _Gathered) -> None:
    """``--config X.yaml``, or hydra's ``--config-name X``: read where the file is there, else remembered as a base."""
    if option in ("config-path", "config-dir"):
        gathered.configurations = value
        return
    name = value if value.endswith((".yaml", ".yml")) else value + ".yaml"
    inside = path.parent / gathered.configurations / name
    if found := gathered.found(Path(name), path.parent / name, inside, path.parent / Path(name).name):
        _read_yaml(found[1], found[0], gathered)
        return
    gathered.bases.append(Path(value).stem if value.endswith((".yaml", ".yml")) else value)


def _read_override(match: re.Match[str], word: Word, path: Path, gathered: _Gathered) -> None:
    sign, key, text = match.groups()
    key = key.replace("/", ".")
    if sign == "~":
        gathered.keys.pop(key, None)
        return
    if sign:
        gathered.additions.add(key)
    value = override_value(_ENVIRONMENT.sub(r"${oc.env:\1\2}", text))
    for name, part in flatten({key: value}).items() if isinstance(value, dict) and value else [(key, value)]:
        gathered.put(name, part, str(path), word.line)
