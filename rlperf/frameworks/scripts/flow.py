"""Which statements of a launch script run: ``if``, ``case``, loops and functions, decided by the values that are known.

Nothing is executed. A variable that nobody sets is empty, as it is where the script is started without it. What cannot
be decided (a test of files, a ``case`` over an argument that is not given) is not guessed: a command whose words hang
on it says so in `Command.asks`, with the branches. Branches that end the script (``exit``) are guards, and not taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise

from rlperf.frameworks.scripts.manifest import allotted
from rlperf.frameworks.scripts.shell import (
    ARGUMENTS,
    Command,
    HereDocument,
    Shell,
    Statement,
    Word,
    assign,
    assign_default,
    assignment,
    expand,
    here_documents,
    is_asked,
    statements,
)

_ALONE = {"if", "elif", "while", "until", "then", "else", "do", "{", "}", "fi", "done", "esac"}
_DECLARES = {
    "export", "local", "declare", "readonly", "typeset", "-x", "-a", "-r", "-A", "-i", "-g", "-gA", "-ga", "-rx",
}  # fmt: skip
_LOOPS = {"for", "while", "until", "select"}
_UNSET = re.compile(r"\$\{?(?:\d+|[A-Za-z_]\w*|[@*])\}?")
_COMPARED: Mapping[str, Callable[[str, str], bool]] = {
    "=": lambda a, b: a == b, "==": lambda a, b: fnmatchcase(a, b), "!=": lambda a, b: not fnmatchcase(a, b),
    "-eq": lambda a, b: int(a) == int(b), "-ne": lambda a, b: int(a) != int(b), "-gt": lambda a, b: int(a) > int(b),
    "=~": lambda a, b: re.search(b, a) is not None,
    "-ge": lambda a, b: int(a) >= int(b), "-lt": lambda a, b: int(a) < int(b), "-le": lambda a, b: int(a) <= int(b),
}  # fmt: skip
_DEPTH = 16
_RANKS = ("RANK", "NODE_RANK", "MACHINE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_NODEID", "SKYPILOT_NODE_RANK")
"""Variables by which a launcher numbers its processes or nodes: it is the first that starts the training."""
_SAYS = {"echo", "printf"}
"""Commands whose words are shown, not run."""
_OPTION = re.compile(r"^--?[\w-]+=")
"""``--wrap="..."``: what stands behind it is text by itself."""


def commands(text: str) -> list[list[Word]]:
    """Every command of a script that runs, with its words expanded, assignments taken away.

    >>> [command] = commands('N=8; A=(--tp $N)\\npython x.py "${A[@]}" --dp ${D:-2}')
    >>> [word.text for word in command]
    ['python', 'x.py', '--tp', '8', '--dp', '2']
    """
    return [command.words for command in run(text).commands]


@dataclass(frozen=True)
class Ran:
    """What a script runs.

    commands : its own
    handed_on : those in text that it gives to others: ``bash -c "..."``, ``ssh HOST "..."``, ``COMMAND="..." sbatch``
    files : name -> text of those that it writes from here-documents
    files_ask : name -> the undecided branch that one is written in
    """

    commands: list[Command] = field(default_factory=list)
    handed_on: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    files_ask: dict[str, str] = field(default_factory=dict)


def run(text: str, given: Mapping[str, str] | None = None) -> Ran:
    """A script started with ``given`` variables and arguments (``{"MODEL": "7b", "1": "train"}``).

    >>> script = 'case $1 in small) N=1;; *) N=8;; esac; python x.py --n $N'
    >>> [word.text for word in run(script, {"1": "small"}).commands[0].words], run(script).commands[0].asks
    (['python', 'x.py', '--n', '1'], ())
    >>> run(script).commands[0].words[-1].asks
    ('line 1: case $1 has the branches small, *',)
    """
    known = dict.fromkeys(_RANKS, "0") | allotted(text) | dict(given or {})
    flow = _Flow(Shell(scalars=known, given=given or {}), documents=here_documents(text))
    flow.block(_parsed(text))
    return flow.ran


def _parsed(text: str, line: int = 1) -> list[Statement]:
    return [part for statement in statements(text, line) for part in _parts(statement)]


def _parts(statement: Statement) -> list[Statement]:
    """A statement with the reserved words in front as statements of their own."""
    parts, words, before = [], list(statement.words), statement.before
    while words:
        raw, line = words[0]
        if len(words) > 1 and words[1][0] == "()":  # `name ()` for `name()`
            words[:2] = [(raw + "()", line)]
            raw = words[0][0]
        if raw == "function" and len(words) > 1:
            words[:2] = [(words[1][0].removesuffix("()") + "()", line)]
            raw = words[0][0]
        if raw not in _ALONE and not raw.endswith("()"):
            break
        parts.append(Statement((words.pop(0),), before))
        before = "\n"
    return [*parts, Statement(tuple(words), before)] if words else parts


def _visible(words: Sequence[Word], shell: Shell) -> str:
    """The devices that a command sees, as ``env NAME=...`` in it or the shell names them; empty: nothing says."""
    own = (word.text.partition("=")[2] for word in words if word.text.startswith("CUDA_VISIBLE_DEVICES="))
    return next(own, shell.scalars.get("CUDA_VISIBLE_DEVICES", ""))


@dataclass
class _Flow:
    """A script as it runs: its variables, its functions, and the commands met so far."""

    shell: Shell
    functions: dict[str, list[Statement]] = field(default_factory=dict)
    ran: Ran = field(default_factory=Ran)
    documents: Mapping[int, HereDocument] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()
    last: bool | None = None
    depth: int = 0

    def block(self, body: Sequence[Statement]) -> None:
        """Statements in their order."""
        at = 0
        while at < len(body):
            at = self._one(body, at)

    def _one(self, body: Sequence[Statement], at: int) -> int:
        """One statement, or one compound of several; the position behind it."""
        statement = body[at]
        head = statement.head
        skipped = (statement.before, self.last) in (("&&", False), ("||", True))
        if head == "if":
            end = _closing(body, at, {"if"}, "fi")
            self._if(body[at:end])
        elif head == "case":
            end = _closing(body, at, {"case"}, "esac")
            self._case(body[at:end])
        elif head in _LOOPS:
            end = _closing(body, at, _LOOPS, "done")
            self._loop(body[at:end])
        elif head.endswith("()"):
            end = _closing(body, at + 1, {"{"}, "}")
            self.functions[head[:-2]] = list(body[at + 2 : end])
        else:
            if not skipped:
                self._simple(statement)
            return at + 1
        self.last = None
        return end + 1

    def _simple(self, statement: Statement) -> None:
        """An assignment, a test, a call of a function, or a command."""
        shell, words = self.shell, statement.words
        self.last = None
        if statement.head in ("[", "[[", "test", "true", "false"):
            self.last = self._test(words)
            return
        if statement.head == ":" and sum(assign_default(shell, raw, line) for raw, line in words[1:]):
            return
        if statement.head == "let":  # arithmetic without its brackets
            words = tuple((re.sub(r"=(.*)", r"=$((\1))", raw.strip("\"'")), line) for raw, line in words[1:])
        if statement.head == "shift":
            self._shift(statement)
            return
        if statement.head in self.functions and self.depth < _DEPTH:
            self._call(statement)
            return
        others: list[Word] = []  # what another program is given to run
        before = dict(shell.scalars)
        while words and (words[0][0] in _DECLARES or assignment(words[0][0])):
            raw, line = words[0]
            if match := assignment(raw):
                assign(shell, match, line)
                asks = (shell.asks[match[1]],) if match[1] in shell.asks else ()
                others += [Word(shell.scalars[match[1]], line, asks)] if match[1] in shell.scalars else []
            words = words[1:]
        said = [word for raw, line in words for word in self._said(raw, line)]
        if said:
            self.ran.commands.append(Command(said, self.undecided, _visible(said, shell)))
            self._write(said)
        if said or statement.head == "export":
            self._hand_on([*others, *(said if said and said[0].text not in _SAYS else [])])
        if said and others:  # in front of a command a variable is that command's alone
            shell.scalars = before

    def _write(self, words: Sequence[Word]) -> None:
        """``cat > FILE <<EOF``, ``tee FILE <<EOF``, ``cat <<EOF | tee FILE``: the file is what the here-document says.

        ``>>`` and ``tee -a`` go on with a file that the script has written; what others hold is not known here.
        """
        texts = [word.text for word in words if word.text != "-a"]
        piped = words[0].line if texts[0] == "tee" else 0
        asked = next((word.line for word in words if word.text.startswith("<<")), piped)
        into = [after for text, after in pairwise(texts) if text in (">", ">>", "tee")]
        into += [text.lstrip(">") for text in texts if re.match(r">>?[^>&]", text)]
        appends = len(texts) < len(words) or any(text.startswith(">>") for text in texts)
        if into and asked in self.documents and (not appends or into[0] in self.ran.files):
            before = self.ran.files[into[0]] if appends else ""
            self._written({into[0]: before + self.documents[asked].said(self.shell)}, self.undecided[-1:])

    def _written(self, files: Mapping[str, str], asks: Sequence[str]) -> None:
        """Files that are written now, in an undecided branch or not."""
        self.ran.files.update(files)
        for name in files:
            self.ran.files_ask.pop(name, None)
            self.ran.files_ask.update(dict.fromkeys([name], asks[0]) if asks else {})

    def _hand_on(self, words: Sequence[Word]) -> None:
        """Words of several words, which may be a script of their own: it runs with what is known here."""
        for word in words if self.depth < _DEPTH else []:
            text = _OPTION.sub("", word.text)
            if re.search(r"\s", text):
                inner = _Flow(deepcopy(self.shell), self.functions, undecided=(*self.undecided, *word.asks))
                inner.documents, inner.depth = self.documents, self.depth + 1
                inner.ran.files.update(self.ran.files)
                inner.block(_parsed(text, word.line))
                asks = (*self.undecided, *word.asks)[-1:]
                self._written({n: said for n, said in inner.ran.files.items() if self.ran.files.get(n) != said}, asks)
                self.ran.handed_on.extend([*inner.ran.commands, *inner.ran.handed_on])

    def _said(self, raw: str, line: int) -> list[Word]:
        """The words that a raw word becomes, with what decides them."""
        self.shell.touched.clear()
        found = expand(raw, line, self.shell)
        asks = tuple(sorted(self.shell.touched))
        return [replace(word, asks=asks) for word in found] if asks else found

    def _call(self, statement: Statement) -> None:
        """A function with its arguments."""
        shell = self.shell
        given = [word for raw, line in statement.words[1:] for word in self._said(raw, line)]
        kept = {name: text for name, text in shell.scalars.items() if name.isdigit()}
        outer = shell.arrays.get(ARGUMENTS)
        shell.arrays[ARGUMENTS] = given
        self._positional({str(number): word.text for number, word in enumerate(given, 1)})
        self.depth += 1
        self.block(self.functions[statement.head])
        self.depth -= 1
        self._positional(kept)
        shell.arrays.pop(ARGUMENTS)
        if outer is not None:
            shell.arrays[ARGUMENTS] = outer

    def _positional(self, arguments: Mapping[str, str]) -> None:
        scalars = {name: text for name, text in self.shell.scalars.items() if not name.isdigit()}
        self.shell.scalars = {**scalars, **arguments}

    def _shift(self, statement: Statement) -> None:
        """``shift`` or ``shift 2``: the first arguments are gone, the others move up."""
        shell, said = self.shell, statement.words[1][0] if len(statement.words) > 1 else "1"
        gone = int(said) if said.isdecimal() else 1
        if ARGUMENTS in shell.arrays:
            shell.arrays[ARGUMENTS] = shell.arrays[ARGUMENTS][gone:]
        left = {int(name) - gone: text for name, text in shell.scalars.items() if name.isdigit()}
        self._positional({str(number): text for number, text in left.items() if number > 0})

    def _if(self, body: Sequence[Statement]) -> None:
        """The first branch whose condition holds; none is taken where one before it cannot be decided."""
        parts = _sections(body, "if", "fi", ("elif", "then", "else"))
        conditions = [part for word, part in parts if word in ("if", "elif")]
        bodies = [part for word, part in parts if word in ("then", "else")]
        for condition, taken in zip([*conditions, None], bodies, strict=False):
            holds = True if condition is None else self._holds(condition)
            if holds is None:
                said = " ".join(raw for statement in condition or () for raw, _ in statement.words)
                self._ask(f"line {body[0].words[0][1]}: if {said}", bodies)
                return
            if holds and not _ends(taken):
                self.block(taken)
                return

    def _case(self, body: Sequence[Statement]) -> None:
        """The branch whose pattern the word matches."""
        raw, line = body[0].words[1]
        subject = "".join(word.text for word in expand(raw, line, self.shell, split=False))
        arms = _arms(body)
        match = next((arm for patterns, arm in arms if any(fnmatchcase(subject, each) for each in patterns)), None)
        if "$" not in subject and "`" not in subject and (match is None or not _ends(match)):
            self.block(match or [])
            return
        branches = ", ".join("|".join(patterns) for patterns, arm in arms if not _ends(arm))
        word = raw.strip("\"'")
        self._ask(f"line {line}: case {word} has the branches {branches}", [arm for _, arm in arms if not _ends(arm)])

    def _loop(self, body: Sequence[Statement]) -> None:
        """A loop once: over a list, with its first item; one that takes arguments as often as there are any."""
        first = body[0]
        if first.head == "for" and len(first.words) > 3 and first.words[2][0] == "in":
            items = [word.text for raw, line in first.words[3:] for word in expand(raw, line, self.shell)]
            if items and "$" not in items[0]:
                self.shell.scalars[first.words[1][0]] = items[0]
        parts = _sections(body, first.head, "done", ("do",))
        condition, inside = parts[0][1], next((part for word, part in parts if word == "do"), [])
        takes = first.head == "while" and bool(condition)
        for _ in range(_DEPTH):
            left = self._arguments()
            if takes and self._holds(condition) is False:
                return
            self.block(inside)
            if not takes or self._arguments() == left:
                return

    def _arguments(self) -> int:
        """How many arguments are known and not shifted away."""
        return sum(name.isdigit() for name in self.shell.scalars)

    def _ask(self, question: str, bodies: Sequence[Sequence[Statement]]) -> None:
        """What undecided branches assign hangs on them; what they launch or write does, too."""
        before, texts = dict(self.ran.files), dict[str, dict[str, None]]()
        for body in bodies:
            other = _Flow(deepcopy(self.shell), self.functions, undecided=(*self.undecided, question))
            other.documents, other.depth = self.documents, self.depth + 1
            other.ran.files.update(before)
            if other.depth < _DEPTH:
                other.block(body)
                self.ran.commands.extend(other.ran.commands)
                self.ran.handed_on.extend(other.ran.handed_on)
                for file, text in other.ran.files.items():
                    texts.setdefault(file, {} if file not in before else {before[file]: None})[text] = None
            for name in {**other.shell.scalars, **other.shell.arrays}:
                was = self.shell.scalars.get(name), self.shell.arrays.get(name)
                if was != (other.shell.scalars.get(name), other.shell.arrays.get(name)):
                    self.shell.asks[name] = question
        for file, each in texts.items():  # of one text alone it is that one, or what was there: nobody knows it
            if list(each)[-1:] != [before.get(file)]:
                self._written({file: [*each][-1]}, [question] if len(each) > 1 else self.undecided[-1:])

    def _holds(self, condition: Sequence[Statement]) -> bool | None:
        """Whether a condition holds; None where that cannot be said."""
        value: bool | None = None
        for statement in condition:
            found = self._test(statement.words)
            if statement.before == "&&":
                value = False if False in (value, found) else None if None in (value, found) else True
            elif statement.before == "||":
                value = True if True in (value, found) else None if None in (value, found) else False
            else:
                value = found
        return value

    def _test(self, words: Sequence[tuple[str, int]]) -> bool | None:
        """``[ a = b ]`` and its like; an unset variable is empty, as it is in the shell."""
        texts = [self._known(raw, line) for raw, line in words if raw not in ("[", "[[", "]", "]]", "test")]
        negated = bool(texts) and texts[0] == "!"
        texts = texts[1:] if negated else texts
        if texts[:1] == ["getopts"] and not self._arguments():
            return False
        if any(text is None for text in texts):
            return None
        found = _outcome([text for text in texts if text is not None])
        return None if found is None else found != negated

    def _known(self, raw: str, line: int) -> str | None:
        """The text of a word; None where the shell would have to run something, or an undecided branch set it."""
        self.shell.touched.clear()
        expanded = expand(raw.replace("$#", str(self._arguments())), line, self.shell, split=False)
        text = "".join(word.text for word in expanded)
        return None if is_asked(text) or self.shell.touched else _UNSET.sub("", text)


def _outcome(texts: Sequence[str]) -> bool | None:
    """What a test of known texts says; None where it is none that is read."""
    if len(texts) == 1:
        return {"true": True, "false": False}.get(texts[0], bool(texts[0]))
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) == 3 and texts[1] in _COMPARED:
        try:
            return bool(_COMPARED[texts[1]](texts[0], texts[2]))
        except ValueError:
            return None
    return None


def _closing(body: Sequence[Statement], at: int, opens: set[str], closes: str) -> int:
    """Position of the word that ends the compound which opens at ``at``; the end where none does."""
    depth = 0
    for index in range(at, len(body)):
        depth += (body[index].head in opens) - (body[index].head == closes)
        if depth <= 0:
            return index
    return len(body)


def _sections(
    body: Sequence[Statement], opens: str, closes: str, between: Sequence[str]
) -> list[tuple[str, list[Statement]]]:
    """(word, statements behind it) of the outermost level of a compound."""
    sections: list[tuple[str, list[Statement]]] = [(opens, [])]
    nested = {"if": 0, "case": 0, "loop": 0}
    for statement in body[1:]:
        head = statement.head
        nested["if"] += (head == "if") - (head == "fi")
        nested["case"] += (head == "case") - (head == "esac")
        nested["loop"] += (head in _LOOPS) - (head == "done")
        if head in between and not any(nested.values()):
            sections.append((head, []))
        elif head != closes or any(nested.values()):
            sections[-1][1].append(statement)
    return sections


def _arms(body: Sequence[Statement]) -> list[tuple[list[str], list[Statement]]]:
    """Patterns and statements of every branch of a ``case``."""
    arms: list[tuple[list[str], list[Statement]]] = []
    patterns: list[str] = []
    inside, nested = False, 0
    for index, statement in enumerate(body):
        words = statement.words[3:] if index == 0 else statement.words
        if inside and statement.before == ";;" and not nested:
            inside, patterns = False, []
        if not inside:
            while words and not inside:
                raw, words = words[0][0], words[1:]
                patterns.append(raw.strip("()").strip("\"'"))
                inside = raw.endswith(")")
            if inside:
                arms.append((patterns, []))
        if inside and words:
            rest = Statement(tuple(words), "\n" if words != statement.words else statement.before)
            for part in _parts(rest):
                nested += (part.head == "case") - (part.head == "esac")
                arms[-1][1].append(part)
    return arms


def _ends(body: Sequence[Statement]) -> bool:
    """Whether a branch ends the script: a guard against a wrong call."""
    return any(statement.head in ("exit", "return") for statement in body)
