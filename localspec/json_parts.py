"""What grammars of JSON are put together from: literals, ranges of integers, strings but for some, regular expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localspec.errors import UsageError

_MAX_DIGITS = 15  # beyond that, a JSON number is no longer exact everywhere

#: name -> (rule, names of the parts it needs)
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ws": ('(" " | "\\n" [ \\t]{0,16})?', ()),
    "value": ('object | array | string | number | "true" | "false" | "null"', ("object", "array", "string", "number")),
    "object": ('"{" ws (string ":" ws value ("," ws string ":" ws value)* ws)? "}"', ("ws", "string", "value")),
    "array": ('"[" ws (value ("," ws value)* ws)? "]"', ("ws", "value")),
    "string": ('"\\"" char* "\\""', ("char",)),
    "char": ('plain | "\\\\" (["\\\\/bfnrt] | "u" unit)', ("plain", "unit")),
    "plain": ('[^"\\\\\\x00-\\x1F\\x7F]', ()),
    # a character, or both halves of one: never half a character alone
    "unit": (
        '[0-9abcefABCEF] hex hex hex | [dD] [0-7] hex hex | [dD] [89abAB] hex hex "\\\\u" [dD] [c-fC-F] hex hex',
        ("hex",),
    ),
    "hex": ("[0-9a-fA-F]", ()),
    "number": ('integer ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?', ("integer",)),
    "integer": (f'"-"? ("0" | [1-9] [0-9]{{0,{_MAX_DIGITS - 1}}})', ()),
}

_DATE = (
    '[0-9]{4} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01]) | '
    '("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8]))'
)
_TIME = (
    '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? '
    '("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
)
_OCTET = '("25" [0-5] | "2" [0-4] [0-9] | "1" [0-9] [0-9] | [1-9]? [0-9])'
_LABEL = "[a-z0-9] ([a-z0-9-]{0,30} [a-z0-9])?"
#: `format` of a string -> rule
FORMATS = {
    name: f'"\\"" {rule} "\\""'
    for name, rule in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f'{_DATE} "T" {_TIME}',
        "uuid": '[0-9a-f]{8} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{12}',
        "ipv4": f'{_OCTET} "." {_OCTET} "." {_OCTET} "." {_OCTET}',
        "email": f'[a-zA-Z0-9_+-]{{1,32}} ("." [a-zA-Z0-9_+-]{{1,32}}){{0,3}} "@" {_LABEL} ("." {_LABEL}){{1,4}}',
    }.items()
}


def literal(text: str) -> str:
    """GBNF for exactly this text."""
    return '"' + "".join(_escaped(c, '"\\') for c in text) + '"'


def _escaped(c: str, special: str) -> str:
    if c in special:
        return "\\" + c
    return c if " " <= c != "\x7f" else f"\\x{ord(c):02X}"


def other_strings(names: list[str], rule: Callable[[str], str]) -> str:
    """GBNF for a JSON string that is none of `names`; `rule` makes a rule and returns its name.

    As far as it goes like one of them it has no escapes, so no name can hide behind one.
    """
    tree: dict[str, Any] = {}
    for name in names:
        at = tree
        for c in name:
            at = at.setdefault(c, {})
        at[""] = {}
    return f'"\\"" {_others(tree, rule)} "\\""'


def _others(tree: dict[str, Any], rule: Callable[[str], str]) -> str:
    nexts = [c for c in tree if c]
    # A character that JSON escapes can only be left, never followed.
    without = "".join(_escaped(c, "]\\-[") for c in nexts if c not in '"\\' and " " <= c != "\x7f")
    away = f'[^"\\\\\\x00-\\x1F\\x7F{without}] char*'
    on = [f"{literal(c)} {rule(_others(tree[c], rule))}" for c in nexts if c not in '"\\' and " " <= c != "\x7f"]
    end = [] if "" in tree else [""]
    return "(" + " | ".join([away, *on, *end]) + ")"


# -- ranges of integers -----------------------------------------------------------------------------------------------------


def integers(low: int | None, high: int | None, where: str) -> str:
    """GBNF for the integers from `low` to `high`, both included; None: as far as 15 digits go."""
    most = 10**_MAX_DIGITS - 1
    low, high = -most if low is None else low, most if high is None else high
    if max(abs(low), abs(high)) > most:
        raise UsageError(f"{where}: bounds beyond {_MAX_DIGITS} digits are not supported")
    if low > high:
        raise UsageError(f"{where}: no whole number is at least {low} and at most {high}")
    parts = []
    if low < 0:
        parts.append(f'"-" ({_between(max(1, -high), -low)})')
    if high >= 0:
        parts.append(_between(max(0, low), high))
    return " | ".join(parts)


def numbers(low: int | None, high: int | None, without_low: bool, without_high: bool, where: str) -> str:
    """GBNF for the numbers, with or without decimals, between two whole ones, which may themselves be left out."""
    most = 10**_MAX_DIGITS - 1
    low, high = -most if low is None else low, most if high is None else high
    if max(abs(low), abs(high)) > most:
        raise UsageError(f"{where}: bounds beyond {_MAX_DIGITS} digits are not supported")
    if low > high or (low == high and (without_low or without_high)):
        raise UsageError(f"{where}: no number is between {low} and {high}, bounds left out")
    parts = []
    if low < 0:
        parts.append(f'"-" ({_decimals(max(0, -high), -low, without_high and high <= 0, without_low)})')
    if high > 0 or (high == 0 and not without_high):
        parts.append(_decimals(max(0, low), high, without_low and low >= 0, without_high))
    return " | ".join(parts)


def _decimals(low: int, high: int, without_low: bool, without_high: bool) -> str:
    """0 <= low <= high."""
    parts = []
    if high - low > 1:
        parts.append(f'({_between(low + 1, high - 1)}) ("." [0-9]{{1,15}})?')
    if high > low:
        parts.append(f'"{low}" "." [0-9]{{0,14}} [1-9]' if without_low else f'"{low}" ("." [0-9]{{1,15}})?')
    if not (without_high or (high == low and without_low)):
        parts.append(f'"{high}" ("." "0"{{1,15}})?')
    return " | ".join(parts) if parts else "[\\x01-\\x00]"


def _between(low: int, high: int) -> str:
    """0 <= low <= high, without leading zeros."""
    parts = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (digits - 1) if digits > 1 else 0), min(high, 10**digits - 1)
        parts.append(_same_length(str(first), str(last)))
    return " | ".join(parts)


def _same_length(low: str, high: str) -> str:
    """From low to high, both of one length."""
    n = len(low) - 1
    rest = f" [0-9]{{{n}}}" if n else ""
    if low[1:] == "0" * n and high[1:] == "9" * n:
        return f"[{low[0]}-{high[0]}]{rest}"
    if low[0] == high[0]:
        return f'"{low[0]}" ({_same_length(low[1:], high[1:])})'
    parts = [f'"{low[0]}" ({_same_length(low[1:], "9" * n)})']
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]{rest}")
    parts.append(f'"{high[0]}" ({_same_length("0" * n, high[1:])})')
    return " | ".join(parts)


# -- regular expressions ----------------------------------------------------------------------------------------------------

Ranges = list[tuple[int, int]]
_DIGIT: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_BLANK: Ranges = [(9, 10), (13, 13), (32, 32)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _BLANK}
#: whatever JavaScript or Python takes for a blank (\s), and what ends a line (which . is not)
_ANY_BLANK: Ranges = [(9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                      (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]  # fmt: skip
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_NAMED = {"n": 10, "t": 9, "r": 13, "f": 12}
#: what stands in a JSON string as itself
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF)]
_MOST_DEEP = 30


def pattern(text: Any, where: str) -> str:
    """GBNF for the JSON strings that a regular expression of JavaScript's kind matches from end to end.

    That is narrower than what a pattern without ^ and $ admits, never wider. Raises UsageError for what is no regular
    language (references, looking around) and what is not supported (\\p, \\b, flags).
    """
    if not isinstance(text, str):
        raise UsageError(f"{where} must be a string")
    return f'"\\"" {_Pattern(text, where).read()} "\\""'


class _Pattern:
    def __init__(self, text: str, where: str):
        self._text, self._where, self._at = text, where, 0

    def read(self) -> str:
        made = self._choice(0)
        if self._at < len(self._text):
            raise self._wrong("a parenthesis too many")
        return made

    def _choice(self, depth: int) -> str:
        if depth > _MOST_DEEP:
            raise self._wrong("parentheses nested too deep")
        parts = [self._sequence(depth)]
        while self._here() == "|":
            self._at += 1
            parts.append(self._sequence(depth))
        return "(" + " | ".join(parts) + ")"

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        if self._here() == "^" and depth == 0:
            self._at += 1
        while self._here() not in ("", "|", ")"):
            if self._here() == "$" and depth == 0 and self._text[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                break
            parts.append(self._atom(depth) + self._times())
        return " ".join(parts)

    def _atom(self, depth: int) -> str:
        c = self._here()
        self._at += 1
        if c == "(":
            if self._here() == "?" and not self._text.startswith("?:", self._at):
                raise self._wrong("'(?' other than '(?:' is not supported")
            self._at += 2 if self._here() == "?" else 0
            made = self._choice(depth + 1)
            if self._here() != ")":
                raise self._wrong("a parenthesis is not closed")
            self._at += 1
            return made
        if c in "*+?{^$":
            raise self._wrong(f"{c!r} is not supported here")
        if c == "[":
            return _of_ranges(self._class())
        if c == ".":
            return _of_ranges(_without(_LINE_ENDS))
        return _of_ranges(self._escape() if c == "\\" else [(ord(c), ord(c))])

    def _escape(self, negated: bool = False) -> Ranges:
        """What stands for some characters stands for no more of them than any reader's; in a negated class for no fewer."""
        c = self._here()
        self._at += 1
        if c.lower() in _CLASSES and c:
            few = _CLASSES[c.lower()]
            if c.islower():
                return _ANY_BLANK if negated and c == "s" else few
            return _without(_ANY_BLANK if c == "S" and not negated else few)
        if c in _NAMED:
            return [(_NAMED[c], _NAMED[c])]
        if c in ("x", "u"):
            n = 2 if c == "x" else 4
            digits = self._text[self._at : self._at + n]
            self._at += n
            if len(digits) == n and all(d in "0123456789abcdefABCDEF" for d in digits):
                return [(int(digits, 16), int(digits, 16))]
        if not c or c.isalnum():
            raise self._wrong(f"'\\{c}' is not supported")
        return [(ord(c), ord(c))]

    def _class(self) -> Ranges:
        negated = self._here() == "^"
        self._at += negated
        ranges: Ranges = []
        while self._here() != "]":
            first = self._member(negated)
            if self._here() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member(negated)
                if not (_is_one(first) and _is_one(last) and first[0][0] <= last[0][1]):
                    raise self._wrong("a range that is none: write \\- for the sign itself")
                first = [(first[0][0], last[0][1])]
            ranges += first
        self._at += 1
        return _without(ranges) if negated else ranges

    def _member(self, negated: bool) -> Ranges:
        c = self._here()
        if not c:
            raise self._wrong("a class is not closed")
        self._at += 1
        return self._escape(negated) if c == "\\" else [(ord(c), ord(c))]

    def _times(self) -> str:
        c = self._here()
        if c not in ("*", "+", "?", "{"):
            return ""
        end = self._text.find("}", self._at) if c == "{" else self._at
        times = self._text[self._at : end + 1]
        numbers = times[1:-1].split(",") if c == "{" else []
        fine = len(numbers) <= 2 and all(n.isdecimal() for n in numbers[1:] if n) and all(n.isdecimal() for n in numbers[:1])
        if end < 0 or not fine:
            raise self._wrong("a repetition is written {m}, {m,} or {m,n}")
        self._at = end + 1
        if self._here() == "?":  # as few as possible: the same strings
            self._at += 1
        return times

    def _here(self) -> str:
        return self._text[self._at : self._at + 1]

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"{self._where}: {what} (character {self._at})")


def _is_one(ranges: Ranges) -> bool:
    """Whether this is one character."""
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _without(ranges: Ranges) -> Ranges:
    """All characters but these, and but those that JSON would escape with a name or a number."""
    left, at = [], 0x20
    for low, high in sorted(ranges):
        if low > at:
            left.append((at, low - 1))
        at = max(at, high + 1)
    if at <= 0x10FFFF:
        left.append((at, 0x10FFFF))
    return left


def _of_ranges(ranges: Ranges) -> str:
    """GBNF for one character of these, as JSON writes it in a string."""
    plain = [(max(a, c), min(b, d)) for a, b in ranges for c, d in _PLAIN if max(a, c) <= min(b, d)]
    parts = ["[" + "".join(f"\\U{a:08X}-\\U{b:08X}" for a, b in plain) + "]"] if plain else []
    for c, written in (('"', '\\"'), ("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r"), ("\f", "\\f")):
        if any(a <= ord(c) <= b for a, b in ranges):
            parts.append(literal(written))
    return "(" + " | ".join(parts) + ")" if parts else "[\\x01-\\x00]"
