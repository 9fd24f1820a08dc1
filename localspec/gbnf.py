"""Grammars in GBNF, llama.cpp's notation: read and judged before llama.cpp sees them.

llama.cpp itself ends the process, or never comes back, on some of what a person can write: on left recursion through a rule
that may be empty without saying so, on nesting deeper than its stack, on rules that stand for each other in more ways than
can be tried. It prints the whole grammar on what it does refuse. So everything is checked here, in time linear in the size.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator

from localspec.errors import UsageError

MAX_CHARS = 1 << 18
MAX_ELEMENTS = 20_000  # characters, classes and references once repetitions are written out
MAX_DEPTH = 64  # parentheses
MAX_REPEATS = 2000  # llama.cpp reads more than these as "without end"
MAX_STARTS = 2000  # ways in which a rule can begin
MAX_STEPS = 500  # rules that begin with each other, for llama.cpp's stack

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_OR_LINE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_TIMES = re.compile(r"\{[ \t]*([0-9]{1,9})[ \t]*(,?)[ \t]*([0-9]{0,9})[ \t]*\}")
_ESCAPE = re.compile(r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])')
_BEYOND = re.compile(r"\\u|\\U|\\x[89a-fA-F]")  # escapes of what is not ASCII

Symbol = str | int  # a rule's name, or so many characters and classes that must be there
Sequence = list[Symbol]


def check(text: str) -> bool:
    """Raise UsageError, with the line, for a grammar that llama.cpp can't work with.

    Returns whether a character's first byte tells enough of it: of a class such as [^é], llama.cpp refuses the first byte of
    é alone, which è has, too.
    """
    if len(text) > MAX_CHARS:
        raise UsageError(f"the grammar has {len(text):,} characters; at most {MAX_CHARS:,} are taken")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise UsageError("the grammar is not text: it holds a zero byte or half a character")
    reader = _Reader(text)
    rules = reader.read()
    if "root" not in rules:
        raise UsageError("the grammar has no rule 'root', with which a text begins")
    for name, alternatives in rules.items():
        for symbol in _references(alternatives):
            if symbol not in rules:
                raise UsageError(f"the grammar's rule {_said(name)} names '{symbol}', which is not defined")
    _check_starts(rules)
    return reader.bytes_tell


def _references(alternatives: list[Sequence]) -> Iterator[str]:
    return (symbol for sequence in alternatives for symbol in sequence if isinstance(symbol, str))


def _said(name: str) -> str:
    """A rule by the name that its writer gave it; of a part of it, the whole."""
    return f"'{name.partition('_')[0]}'"


def _check_starts(rules: dict[str, list[Sequence]]) -> None:
    """No rule may begin with itself, nor in too many ways."""
    empty = _may_be_empty(rules)
    begins: dict[str, list[str]] = {}
    for name, alternatives in rules.items():
        begins[name] = []
        for sequence in alternatives:
            for symbol in sequence:
                if isinstance(symbol, int):
                    break
                begins[name].append(symbol)
                if symbol not in empty:
                    break
    try:
        order = list(graphlib.TopologicalSorter(begins).static_order())
    except graphlib.CycleError as error:
        name = error.args[1][0]
        raise UsageError(
            f"the grammar's rule {_said(name)} can begin with itself: left recursion, or a repetition of what may be empty"
        ) from None
    ways: dict[str, int] = {}
    steps: dict[str, int] = {}
    for name in order:
        steps[name] = 1 + max((steps[first] for first in begins[name]), default=0)
        if steps[name] > MAX_STEPS:
            raise UsageError(f"the grammar's rule {_said(name)} begins with a chain of more than {MAX_STEPS} rules")
        ways[name] = 1 + len(rules[name]) + sum(ways[first] for first in begins[name])
        if ways[name] > MAX_STARTS:
            raise UsageError(f"the grammar's rule {_said(name)} can begin in more than {MAX_STARTS} ways: make it simpler")


def _may_be_empty(rules: dict[str, list[Sequence]]) -> set[str]:
    empty: set[str] = set()
    missing: list[int] = []  # of each sequence without characters: references not known to be empty
    owner: list[str] = []
    users: dict[str, list[int]] = {}
    for name, alternatives in rules.items():
        for sequence in alternatives:
            if any(isinstance(symbol, int) for symbol in sequence):
                continue
            for symbol in _references([sequence]):
                users.setdefault(symbol, []).append(len(missing))
            missing.append(len(sequence))
            owner.append(name)
    todo = [owner[i] for i, n in enumerate(missing) if n == 0]
    while todo:
        name = todo.pop()
        if name in empty:
            continue
        empty.add(name)
        for i in users.get(name, ()):
            missing[i] -= 1
            if missing[i] == 0:
                todo.append(owner[i])
    return empty


class _Reader:
    """Reads a grammar into rules; groups and repetitions become rules of their own, as llama.cpp makes them."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._rules: dict[str, list[Sequence]] = {}
        self._seen: set[str] = set()  # names, and rules made
        self._n_made = self._n_elements = self._depth = 0
        self.bytes_tell = True

    def read(self) -> dict[str, list[Sequence]]:
        """name -> alternatives."""
        self._skip(True)
        while self._at < len(self._text):
            name = self._name()
            if name in self._rules:
                raise self._wrong(f"the rule '{name}' is defined twice")
            self._skip(False)
            if not self._text.startswith("::=", self._at):
                raise self._wrong("'::=' is missing after a rule's name")
            self._at += 3
            self._skip(True)
            self._rules[name] = self._alternatives(name, False)
            if self._here() not in ("", "\r", "\n"):
                raise self._wrong(f"{self._here()!r} is not expected here")
            self._skip(True)
        return self._rules

    def _alternatives(self, rule: str, nested: bool) -> list[Sequence]:
        found = [self._sequence(rule, nested)]
        while self._here() == "|":
            self._at += 1
            self._skip(True)
            found.append(self._sequence(rule, nested))
        return found

    def _sequence(self, rule: str, nested: bool) -> Sequence:
        sequence: Sequence = []
        last: Sequence = []  # what a repetition repeats
        weight = 1  # rules that stand behind it, for llama.cpp's own limit
        while c := self._here():
            if c in "*+?{":
                low, high = self._times()
                if not last:
                    raise self._wrong("there is nothing to repeat before this")
                weight *= max(1, high or low)
                if weight > MAX_REPEATS:
                    raise self._wrong(f"repetitions that make more than {MAX_REPEATS} rules are not possible")
                del sequence[len(sequence) - len(last) :]
                last = self._repeated(rule, last, low, high)
                sequence += last
            else:
                before = len(self._seen)
                taken = self._item(c, rule)
                if taken is None:
                    break
                last, weight = taken, max(1, len(self._seen) - before) if c == "(" else 1
                self._count(last)
                sequence += last
            self._skip(nested)
        return sequence

    def _item(self, c: str, rule: str) -> Sequence | None:
        if c == '"':
            return self._literal()
        if c == "[":
            return self._class()
        if c == "(":
            return self._group(rule)
        if c == ".":
            self._at += 1
            return [1]
        if c in "<!":
            raise self._wrong("tokens (<...>, !<...>) are not supported: write the characters")
        return [self._name()] if _NAME.match(c) else None

    def _group(self, rule: str) -> Sequence:
        opened = self._at
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"parentheses are nested more than {MAX_DEPTH} deep")
        self._at += 1
        self._skip(True)
        name = self._make(rule)
        self._rules[name] = self._alternatives(rule, True)
        if self._here() != ")":
            self._at = opened
            raise self._wrong("a parenthesis is not closed")
        self._at += 1
        self._depth -= 1
        return [name]

    def _repeated(self, rule: str, what: Sequence, low: int, high: int | None) -> Sequence:
        made: Sequence = []
        self._count(what, max(0, low - 1) + (1 if high is None else high - low))
        if high is None:
            name = self._make(rule)
            self._rules[name] = [[*what, name], []]
            made = [name]
        else:
            for _ in range(high - low):
                name = self._make(rule)
                self._rules[name] = [[*what, *made], []]
                made = [name]
        return what * low + made

    def _times(self) -> tuple[int, int | None]:
        simple: tuple[int, int | None] | None = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._here())
        if simple is not None:
            self._at += 1
            return simple
        found = _TIMES.match(self._text, self._at)
        if found is None or (found[3] and not found[2]):
            raise self._wrong("a repetition is written {m}, {m,} or {m,n}")
        low = int(found[1])
        high = int(found[3]) if found[3] else None if found[2] else low
        if low > MAX_REPEATS or (high is not None and not low <= high <= MAX_REPEATS):
            raise self._wrong(f"{found[0]} is no repetition: 0 <= m <= n <= {MAX_REPEATS}")
        self._at = found.end()
        return low, high

    def _literal(self) -> Sequence:
        opened, n = self._at, 0
        self._at += 1
        while self._here() != '"':
            self._character(opened)
            n += 1
        self._at += 1
        return [1] * n

    def _class(self) -> Sequence:
        opened, n = self._at, 0
        self._at += 2 if self._text.startswith("[^", self._at) else 1
        while self._here() != "]":
            self._character(opened)
            n += 1
            if self._here() == "-" and not self._text.startswith("-]", self._at):
                self._at += 1
                self._character(opened)
                n += 1
        self._at += 1
        written = self._text[opened : self._at]
        self.bytes_tell &= not (written.startswith("[^") and (not written.isascii() or _BEYOND.search(written)))
        self._n_elements += max(0, n - 1)
        return [1] if n else []

    def _character(self, opened: int) -> None:
        c = self._here()
        if not c:
            self._at = opened
            raise self._wrong("a text or a class is not closed")
        found = _ESCAPE.match(self._text, self._at) if c == "\\" else None
        if c == "\\" and found is None:
            raise self._wrong(f"{self._text[self._at : self._at + 2]!r} is no escape")
        self._at = self._at + 1 if found is None else found.end()

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._wrong(f"a rule's name is expected, not {self._here()!r}")
        self._at = found.end()
        self._seen.add(found[0])
        return found[0]

    def _make(self, rule: str) -> str:
        self._n_made += 1
        name = f"{rule}_{self._n_made}"  # no name that a person can write
        self._seen.add(name)
        return name

    def _count(self, what: Sequence, times: int = 1) -> None:
        self._n_elements += (len(what) + 2) * times
        if self._n_elements > MAX_ELEMENTS:
            raise self._wrong(f"the grammar has more than {MAX_ELEMENTS:,} elements, repetitions written out")

    def _skip(self, lines: bool) -> None:
        found = (_SPACE_OR_LINE if lines else _SPACE).match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _here(self) -> str:
        return self._text[self._at : self._at + 1]

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"grammar, line {self._text.count(chr(10), 0, self._at) + 1}: {what}")
