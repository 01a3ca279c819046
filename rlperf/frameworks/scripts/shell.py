"""Launch scripts read without running anything: variables, arrays, line continuations and the final command's words.

Only what a launch script needs of bash: ``NAME=value``, ``NAME=(...)``, ``NAME+=(...)``, ``export``, ``$NAME``,
``${NAME}``, ``${NAME:-default}``, ``${NAME:?}``, ``: ${NAME:=default}``, ``"${NAME[@]}"``, ``"${NAME[@]:1}"``, a
function's ``"$@"``, here-documents, and what `rlperf.frameworks.scripts.values` works out of text.
Commands are never executed; the result of any other ``$(...)`` is unknown and stays as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rlperf.frameworks.scripts.values import COMMAND, OPERATION, arithmetic, computed, operated

_ASSIGN = re.compile(r"^(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(
    r"\$\{(\d+|[A-Za-z_]\w*)(?:\[[@*]\])?\}"
    r"|\$\{(\d+|[A-Za-z_]\w*):?([-=?])((?:[^{}]|\{[^{}]*\})*)\}"
    r"|\$(\d|[A-Za-z_]\w*)"
)
_DEFAULTED = re.compile(r'^"?\$\{([A-Za-z_]\w*):?=((?:[^{}]|\{[^{}]*\})*)\}"?$', re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ARRAY_USE = re.compile(r"^\$(?:\{([A-Za-z_]\w*)\[[@*]\](?::(\d+)(?::(\d+))?)?\}|[@*]|\{[@*](?::(\d+)(?::(\d+))?)?\})$")
_ELEMENT = re.compile(r"\$\{#([A-Za-z_]\w*)(\[[@*]\])\}|\$\{([A-Za-z_]\w*)\[([^\]@*$]+)\]\}")
ARGUMENTS = "@"
"""Name of the array of a function's arguments; outside of functions nobody knows them, and ``$@`` stays as text."""


@dataclass(frozen=True)
class Word:
    """One word of a command, variables filled in, and the line it stands on; ``asks``: as `Command`'s, of it alone."""

    text: str
    line: int
    asks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command with its words; ``asks``: undecided branches of the script that decide whether it runs; ``visible``:
    its devices, as the environment names them."""

    words: list[Word]
    asks: tuple[str, ...] = ()
    visible: str = ""


@dataclass
class Shell:
    """Variables, arrays and functions as assigned so far.

    asks : variable -> the undecided branch that it is assigned in; touched : those that the last expansion asked for
    given : variables that the script is started with; where it would ask a program for one, they are what it said
    """

    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    given: Mapping[str, str] = field(default_factory=dict)

    def asked_for(self, name: str) -> None:
        """A variable is read: what decides it is remembered."""
        if name in self.asks:
            self.touched.add(self.asks[name])


@dataclass(frozen=True)
class Statement:
    """Raw words with their lines, and the operator in front: a line's end, ``;``, ``;;``, ``&&``, ``||``, ``|``."""

    words: tuple[tuple[str, int], ...]
    before: str = "\n"

    @property
    def head(self) -> str:
        """Its first raw word."""
        return self.words[0][0]


def assignment(raw: str) -> re.Match[str] | None:
    """Name, ``+`` or nothing, and value of a raw word that assigns a variable."""
    return _ASSIGN.match(raw)


def assign(shell: Shell, match: re.Match[str], line: int) -> None:
    """An assignment; a value that an undecided branch decides makes its variable undecided, too."""
    name, append, value = match.groups()
    shell.touched.clear()
    if value.startswith("(") and value.endswith(")"):
        items = [word for raw, at in _raw_words(value[1:-1], line) for word in expand(raw, at, shell)]
        shell.arrays[name] = [*shell.arrays.get(name, []), *items] if append else items
    else:
        text = "".join(word.text for word in expand(value, line, shell, split=False))
        text = shell.given.get(name, text) if is_asked(text) else text
        itself = re.compile(rf"\$(?:{name}\b|\{{{name}\}})")  # not set before: empty, unless whoever starts it sets it
        if itself.fullmatch(text):
            return
        text = itself.sub("", text)
        shell.scalars[name] = shell.scalars.get(name, "") + text if append else text
    if shell.touched:
        shell.asks[name] = min(shell.touched)
    elif not append:
        shell.asks.pop(name, None)


def is_asked(text: str) -> bool:
    """Whether a program would have to run for the shell to know the text."""
    return "$(" in text or "`" in text


def assign_default(shell: Shell, raw: str, line: int) -> bool:
    """``"${NAME:=value}"``: a variable that has no value yet takes one; whether the word is such a default."""
    match = _DEFAULTED.match(raw)
    if match and not shell.scalars.get(match[1]) and match[1] not in shell.arrays:
        shell.asks.pop(match[1], None)
        shell.scalars[match[1]] = "".join(word.text for word in expand(match[2], line, shell, split=False))
    return match is not None


_DOCUMENT = re.compile(
    r"^(?P<asks>[^\n]*(?<!<)<<(?P<dash>-?)[ \t]*(?P<quote>['\"\\]?)(?P<end>[A-Za-z_]\w*)(?P=quote)?[^\n]*\n)"
    r"(?P<text>.*?)^[ \t]*(?P=end)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_INTO_FILE = re.compile(r"(?:>|\btee\s(?:\s*-a\s)?)\s*['\"]?[^\s'\"<>]+\.(?:ya?ml|json|py)\b")
"""A here-document that becomes a file which is no script."""


@dataclass(frozen=True)
class HereDocument:
    """A here-document's text; ``filled``: the shell fills in its variables."""

    text: str
    filled: bool

    def said(self, shell: Shell) -> str:
        """What a program reads of it."""
        return "$".join(_substitute(part, shell) for part in self.text.split("\\$")) if self.filled else self.text


def here_documents(text: str) -> dict[int, HereDocument]:
    """The here-documents of a script, by the line that asks for each."""
    found = {}
    for match in _DOCUMENT.finditer(text):
        said = re.sub(r"^\t+", "", match["text"], flags=re.MULTILINE) if match["dash"] else match["text"]
        found[text.count("\n", 0, match.start()) + 1] = HereDocument(said, filled=not match["quote"])
    return found


def _without_prose(text: str) -> str:
    """A script with its here-documents, which may hold the launch, but for other files and quotes that do not close."""

    def blank(match: re.Match[str]) -> str:
        text = match["text"]
        prose = any(text.count(quote) % 2 for quote in "'\"`") or _INTO_FILE.search(match["asks"])
        return match["asks"] + "\n" * text.count("\n") + match["end"] if prose else match[0]

    return _DOCUMENT.sub(blank, text)


def statements(text: str, first: int = 1) -> Iterator[Statement]:
    """Statements; they end at a line's end, ``;``, ``;;``, ``&&``, ``||``, ``|``, ``&`` outside of brackets."""
    words: list[tuple[str, int]] = []
    before = "\n"
    for raw, line in _raw_words(_without_prose(text), first, operators=True):
        if raw not in ("\n", ";", ";;", "&&", "||", "|", "&"):
            words.append((raw, line))
            continue
        if words:
            yield Statement(tuple(words), before)
            words, before = [], raw
        elif raw == ";;":
            before = raw
    if words:
        yield Statement(tuple(words), before)


def _raw_words(text: str, line: int, *, operators: bool = False) -> Iterator[tuple[str, int]]:
    """Words with their quotes, comments dropped, continuations joined; brackets of an array stay in one word."""
    position, word, started = 0, "", line
    length = len(text)
    while position < length:
        char = text[position]
        if char == "\\" and text[position + 1 : position + 2] == "\n":
            line, position = line + 1, position + 2
            continue
        if char == "\\":
            word, position = word + text[position : position + 2], position + 2
            continue
        if char in "'\"(`" or text.startswith(("$(", "${"), position):
            if not word:
                started = line
            end = _closing(text, position)
            piece = text[position:end]
            line += piece.count("\n")
            word, position = word + piece, end
            continue
        if char == "#" and not word:
            end = text.find("\n", position)
            position = length if end < 0 else end
            continue
        if char.isspace() or (operators and char in ";|&"):
            if word:
                yield word, started
                word = ""
            token = text[position : position + 2] if text[position : position + 2] in ("&&", "||", ";;") else char
            if operators and (char == "\n" or not char.isspace()):
                yield token, line
            line += char == "\n"
            position += len(token)
            continue
        if not word:
            started = line
        word, position = word + char, position + 1
    if word:
        yield word, started


def _closing(text: str, start: int) -> int:
    """Position after the bracket or quote that opens at ``start``."""
    opened = text[start]
    if opened == "$":
        start += 1
        opened = text[start]
    closes = {"'": "'", '"': '"', "(": ")", "{": "}", "`": "`"}[opened]
    position = start + 1
    while position < len(text):
        char = text[position]
        if char == "\\" and opened != "'":
            position += 2
            continue
        if char == closes:
            return position + 1
        if opened in "({" and char == "#" and text[position - 1].isspace():
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
            continue
        nested = char in "'\"(" if opened in "({" else False
        if nested or (opened != "'" and text.startswith(("$(", "${"), position)):
            position = _closing(text, position)
            continue
        position += 1
    return len(text)


def expand(raw: str, line: int, shell: Shell, *, split: bool = True) -> list[Word]:
    """A raw word with its quotes removed and variables filled in; an array is all its words."""
    bare = raw[1:-1] if len(raw) > 1 and raw[0] == raw[-1] == '"' else raw
    match = _ARRAY_USE.match(bare)
    if match and (match[1] or ARGUMENTS in shell.arrays):
        shell.asked_for(match[1] or ARGUMENTS)
        items = list(shell.arrays.get(match[1] or ARGUMENTS, []))
        first, count = match[2] or match[4], match[3] or match[5]
        # arguments are counted from 1, items of an array from 0
        start = max(int(first or 0) - (match[1] is None), 0)
        return items[start : start + int(count) if count else None]
    if raw[:1] == raw[-1:] == "'" and len(raw) > 1 and "'" not in raw[1:-1]:
        return [Word(raw[1:-1], line)]
    text, quoted = _unquote(raw, lambda part: _substitute(part, shell))
    if split and not quoted and re.search(r"\s", text) and "$" in raw and "$(" not in text:
        return [Word(part, line) for part in text.split()]
    return [Word(text, line)] if text or quoted else []


def _unquote(raw: str, substitute: Callable[[str], str]) -> tuple[str, bool]:
    """Text of a word and whether any part of it was quoted."""
    out, quoted, position = "", False, 0
    while position < len(raw):
        char = raw[position]
        if char in "'\"":
            end = _closing(raw, position)
            inside = raw[position + 1 : end - 1]
            out += inside if char == "'" else substitute(re.sub(r'\\(["\\$`])', r"\1", inside))
            quoted, position = True, end
        elif char == "\\":
            out, position = out + raw[position + 1 : position + 2], position + 2
        else:
            end = position
            while end < len(raw) and raw[end] not in "'\"\\":
                end = _closing(raw, end) if raw.startswith(("$(", "${", "`"), end) else end + 1
            out, position = out + substitute(raw[position:end]), end
    return out, quoted


_WHERE_SET = re.compile(r"\$\{([A-Za-z_]\w*):?\+((?:[^{}]|\{[^{}]*\})*)\}")


def _substitute(text: str, shell: Shell) -> str:
    """``text`` with known variables and arithmetic filled in."""

    def where_set(match: re.Match[str]) -> str:
        return _unquote(match[2], lambda part: part)[0] if shell.scalars.get(match[1]) else ""

    text = _WHERE_SET.sub(where_set, text)

    def fill(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[5]
        shell.asked_for(name)
        if name in shell.arrays:
            return " ".join(word.text for word in shell.arrays[name])
        if match[2] is not None and not shell.scalars.get(name):
            # ``${NAME:?what to do}`` ends the script: somebody starts it with the name set
            return f"${{{name}}}" if match[3] == "?" else _unquote(match[4], lambda part: _substitute(part, shell))[0]
        return shell.scalars.get(name, match[0])

    for _ in range(8):
        filled = OPERATION.sub(lambda match: _operated(match, shell), _VARIABLE.sub(fill, text))
        filled = _ELEMENT.sub(lambda match: _element(match, shell), filled)
        filled = COMMAND.sub(_computed, _ARITHMETIC.sub(lambda match: _arithmetic(match, shell), filled))
        if filled == text:
            break
        text = filled
    return text


def _arithmetic(match: re.Match[str], shell: Shell) -> str:
    """``$((a * 2))`` over whole numbers; anything else stays."""

    def value(name: re.Match[str]) -> str:
        shell.asked_for(name[0])
        return shell.scalars.get(name[0], name[0])

    found = arithmetic(re.sub(r"[A-Za-z_]\w*", value, match[1]))
    return match[0] if found is None else found


def _element(match: re.Match[str], shell: Shell) -> str:
    """``${NAME[1]}`` or ``${NAME[key]}`` of an array that is known, ``${#NAME[@]}`` its size; else it stays."""
    name = match[1] or match[3]
    items = shell.arrays.get(name)
    shell.asked_for(name)
    if items is None:
        return match[0]
    if match[1]:
        return str(len(items))
    key = shell.scalars.get(match[4], match[4]).strip("\"'")
    keyed = (item.text.removeprefix(f"[{key}]=") for item in items if item.text.startswith(f"[{key}]="))
    at = int(key) if re.fullmatch(r"-?\d+", key) else None
    plain = items[at].text if at is not None and -len(items) <= at < len(items) else match[0]
    return next(keyed, plain)


def _operated(match: re.Match[str], shell: Shell) -> str:
    """``${NAME##*/}`` and its like of a variable that is known; else it stays."""
    shell.asked_for(match[1])
    value = shell.scalars.get(match[1], "")
    return operated(value, match[2], match[3]) if value and not is_asked(value) else match[0]


def _computed(match: re.Match[str]) -> str:
    found = computed((match[1] or match[2]).strip())
    return match[0] if found is None else found
