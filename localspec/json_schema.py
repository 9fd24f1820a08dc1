"""JSON schemas as grammars in GBNF: every text of the grammar is JSON that the schema admits, in the order it names things.

The other way round it need not hold: properties come in the schema's order, what it leaves open is left out (properties that
it does not name, unless `additionalProperties` says so), blanks are few. What can't be written as a grammar is refused by
name, never passed over, but for what only describes (`title`, `default`, ...). Of `oneOf` the alternatives must exclude
each other by what can be told of them (json_exclusive.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from localspec import gbnf
from localspec.errors import UsageError
from localspec.json_exclusive import exclusive
from localspec.json_parts import FORMATS, PARTS, integers, literal, numbers, other_strings, pattern

MAX_BYTES = 1 << 16
#: of any JSON object: what `json_object` asks for
ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}

_DESCRIBES = {
    "title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "$defs", "definitions",
    "deprecated", "readOnly", "writeOnly", "discriminator",
}  # fmt: skip
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_IS: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: not isinstance(v, bool) and (isinstance(v, int) or (isinstance(v, float) and v.is_integer())),
    "number": lambda v: not isinstance(v, bool) and isinstance(v, int | float),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}


def to_gbnf(schema: Any) -> str:
    """The grammar of a schema, given as JSON's own types. Raises UsageError, naming the place, for what is no schema, admits
    nothing, or can't be written as a grammar."""
    try:
        size = len(json.dumps(schema))
        if size > MAX_BYTES:
            raise UsageError(f"the schema has {size:,} bytes; at most {MAX_BYTES:,} are taken")
        converter = _Converter(schema)
        text = converter.grammar()
    except RecursionError:
        raise UsageError("the schema is nested too deep") from None
    try:
        gbnf.check(text)
    except UsageError as error:
        raise UsageError(f"the schema can't be written as a grammar: {converter.said(str(error), text)}") from error
    return text


class _Converter:
    """Makes a rule of each part of a schema; `where` is the part's place in it, as a person would look for it."""

    def __init__(self, schema: Any):
        self._schema = schema
        self._rules: dict[str, str] = {}
        self._parts: dict[str, str] = {}
        self._refs: dict[str, str] = {}
        self._places: dict[str, str] = {}  # of rules
        self._place = "schema"

    def said(self, error: str, grammar: str) -> str:
        """An error about the grammar as one about the schema, whose writer never saw the other."""
        line = re.match(r"grammar, line ([0-9]+): ", error)
        if line:
            name = grammar.split("\n")[int(line[1]) - 1].split(" ")[0]
            return f"{self._places.get(name, 'schema')}: {error[line.end() :]}"
        rule = re.match(r"the grammar's rule '([a-z0-9]+)' ", error)
        return f"{self._places.get(rule[1], 'schema')} {error[rule.end() :]}" if rule else error

    def grammar(self) -> str:
        root = self._visit(self._schema, "schema")
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {rule}" for name, rule in (self._parts | self._rules).items())])

    def _rule(self, text: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules[name] = text
        self._places[name] = self._place
        return name

    def _part(self, name: str) -> str:
        """A part that needs no schema, with those that it needs."""
        if name not in self._parts:
            text, needs = PARTS[name]
            self._parts[name] = text
            for other in needs:
                self._part(other)
        return name

    def _visit(self, schema: Any, where: str) -> str:
        """A rule's name."""
        before, self._place = self._place, where
        made = self._made(schema, where)
        self._place = before
        return made

    def _made(self, schema: Any, where: str) -> str:
        if schema is False:
            raise UsageError(f"{where}: false admits nothing")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise UsageError(f"{where} must be an object, not {_clip(schema)}")
        keys = {key: value for key, value in schema.items() if key not in _DESCRIBES}
        if not keys:
            return self._part("value")
        if "$ref" in keys:
            self._alone(keys, {"$ref"}, where)
            return self._ref(keys["$ref"], where)
        if "enum" in keys or "const" in keys:
            return self._constants(keys, where)
        for several in ("anyOf", "oneOf"):
            if several in keys:
                self._alone(keys, {several}, where)
                options = self._list(keys[several], f"{where}.{several}")
                if several == "oneOf":
                    self._require_exclusive(options, f"{where}.oneOf")
                return self._rule(" | ".join(self._visit(o, f"{where}.{several}[{i}]") for i, o in enumerate(options)))
        if "allOf" in keys:
            self._alone(keys, {"allOf"}, where)
            if len(self._list(keys["allOf"], f"{where}.allOf")) > 1:
                raise UsageError(f"{where}: allOf of more than one schema is not supported")
            return self._visit(keys["allOf"][0], f"{where}.allOf[0]")
        types = self._types(keys, where)
        known = set().union({"type"}, *(_KEYWORDS[kind] for kind in types))
        self._alone(keys, known, where)
        made = [getattr(self, f"_{kind}")({k: v for k, v in keys.items() if k in _KEYWORDS[kind]}, where) for kind in types]
        return made[0] if len(made) == 1 else self._rule(" | ".join(made))

    def _require_exclusive(self, options: list[Any], where: str) -> None:
        for i, option in enumerate(options):
            for j in range(i):
                if not exclusive(options[j], option, lambda ref: self._target(ref, where)):
                    raise UsageError(
                        f"{where}: both of the alternatives {j} and {i} may fit, and oneOf wants one: give them different "
                        "types, or a required property with different constants; or write anyOf"
                    )

    def _types(self, keys: dict[str, Any], where: str) -> list[str]:
        given = keys.get("type")
        types = given if isinstance(given, list) and given else [given]
        if given is None:
            types = [kind for kind, words in _KEYWORDS.items() if words & set(keys)]
            if len(types) != 1 and set(types) != {"integer", "number"}:
                odd = sorted(set(keys) - set().union(*_KEYWORDS.values())) or sorted(keys)
                raise UsageError(f"{where}: {_clip(odd[0])} is not supported without a type")
        for kind in types:
            if not isinstance(kind, str) or kind not in _KEYWORDS:
                raise UsageError(f"{where}.type: {_clip(kind)} is no type; there are {', '.join(_KEYWORDS)}")
        if "number" in types and "integer" in types:
            types = [kind for kind in types if kind != "integer"]
        return list(dict.fromkeys(types))

    @staticmethod
    def _alone(keys: dict[str, Any], known: set[str], where: str) -> None:
        for key in keys:
            if key not in known:
                beside = f" beside {sorted(known & set(keys))[0]!r}" if known & set(keys) else ""
                raise UsageError(f"{where}: {_clip(key)} is not supported{beside}")

    @staticmethod
    def _list(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise UsageError(f"{where} must be a list with at least one entry")
        return value

    def _target(self, ref: Any, where: str) -> Any:
        """What a reference names."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise UsageError(f"{where}.$ref: {_clip(ref)} is not in this schema; only places in it (#/...) are supported")
        target = self._schema
        for step in ref.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                raise UsageError(f"{where}.$ref: there is no {_clip(ref)}")
        return target

    def _ref(self, ref: Any, where: str) -> str:
        target = self._target(ref, where)
        if ref not in self._refs:
            self._refs[ref] = self._rule("")  # known from now on: it may name itself
            self._rules[self._refs[ref]] = self._visit(target, ref)
        return self._refs[ref]

    def _constants(self, keys: dict[str, Any], where: str) -> str:
        self._alone(keys, {"enum", "const", "type"}, where)
        values = self._list(keys["enum"], f"{where}.enum") if "enum" in keys else [keys["const"]]
        if "const" in keys and "enum" in keys:
            values = [value for value in values if json.dumps(value) == json.dumps(keys["const"])]
        if "type" in keys:
            types = self._types({"type": keys["type"]}, where)
            values = [value for value in values if any(_IS[kind](value) for kind in types)]
        if not values:
            raise UsageError(f"{where}: no value is left that enum, const and type all admit")
        try:
            texts = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values]
        except ValueError:
            raise UsageError(f"{where}: a value that is no JSON (NaN or infinite)") from None
        return self._rule(" | ".join(map(literal, dict.fromkeys(texts))))

    # -- by type ----------------------------------------------------------------------------------------------------------

    def _object(self, keys: dict[str, Any], where: str) -> str:
        properties = keys.get("properties", {})
        required = keys.get("required", [])
        if not isinstance(properties, dict):
            raise UsageError(f"{where}.properties must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise UsageError(f"{where}.required must be a list of names")
        properties = properties | {name: {} for name in required if name not in properties}
        ws = self._part("ws")
        extra = keys.get("additionalProperties", not keys)  # nothing said at all: any object
        first, more = '"}"', f'{ws} "}}"'
        if extra is not False:
            value = self._visit(extra, f"{where}.additionalProperties")
            self._part("string")
            key = self._rule(other_strings(list(properties), self._rule)) if properties else "string"
            pair = self._rule(f'{key} ":" {ws} {value}')
            more = self._rule(f'("," {ws} {pair})* {ws} "}}"')
            first = self._rule(f'{pair} {more} | "}}"')
        for name, schema in reversed(properties.items()):
            value = self._visit(schema, f"{where}.properties.{name}")
            pair = self._rule(f'{literal(json.dumps(name, ensure_ascii=False))} ":" {ws} {value}')
            if name in required:
                first, more = f"{pair} {more}", f'"," {ws} {pair} {more}'
            else:
                first, more = f"{pair} {more} | {first}", f'("," {ws} {pair})? {more}'
            first, more = self._rule(first), self._rule(more)
        return self._rule(f'"{{" {ws} {first}')

    def _array(self, keys: dict[str, Any], where: str) -> str:
        if keys.get("uniqueItems"):
            raise UsageError(f"{where}: uniqueItems is not supported")
        low, high = self._count(keys, "minItems", where) or 0, self._count(keys, "maxItems", where)
        first = keys.get("prefixItems", [])
        if not isinstance(first, list):
            raise UsageError(f"{where}.prefixItems must be a list")
        items = keys.get("items", not first)
        if items is False:
            high = len(first) if high is None else min(high, len(first))
        if high is not None and high < max(low, len(first)):
            raise UsageError(f"{where}: no list has {max(low, len(first))} or more and at most {high} entries")
        ws = self._part("ws")
        names = [self._visit(schema, f"{where}.prefixItems[{i}]") for i, schema in enumerate(first)]
        left_low, left_high = max(0, low - len(first)), None if high is None else high - len(first)
        more = ""
        if left_high != 0:
            item = self._visit(items, f"{where}.items")
            if not names:
                names = [item]
                empty = f' | "[" {ws} "]"' if left_low == 0 else ""
                left_low, left_high = max(0, left_low - 1), None if left_high is None else left_high - 1
            else:
                empty = ""
            more = f' ("," {ws} {item}){{{left_low},{"" if left_high is None else left_high}}}' if left_high != 0 else ""
        elif not names:
            return self._rule(f'"[" {ws} "]"')
        else:
            empty = ""
        separator = f' "," {ws} '
        return self._rule(f'"[" {ws} {separator.join(names)}{more} {ws} "]"{empty}')

    def _string(self, keys: dict[str, Any], where: str) -> str:
        if "format" in keys or "pattern" in keys:
            if len(keys) > 1:
                raise UsageError(f"{where}: format and pattern are supported alone, not together or with a length")
            if "pattern" in keys:
                return self._rule(pattern(keys["pattern"], f"{where}.pattern"))
            if not isinstance(keys["format"], str) or keys["format"] not in FORMATS:
                raise UsageError(f"{where}: format {_clip(keys['format'])} is not supported; there are {', '.join(FORMATS)}")
            return self._rule(FORMATS[keys["format"]])
        low, high = self._count(keys, "minLength", where), self._count(keys, "maxLength", where)
        if low is None and high is None:
            return self._part("string")
        if high is not None and high < (low or 0):
            raise UsageError(f"{where}: no string has {low} or more and at most {high} characters")
        return self._rule(f'"\\"" {self._part("char")}{{{low or 0},{"" if high is None else high}}} "\\""')

    def _integer(self, keys: dict[str, Any], where: str) -> str:
        low, high, without_low, without_high = self._bounds(keys, where)
        if low is None and high is None:
            return self._part("integer")
        low, high = None if low is None else low + without_low, None if high is None else high - without_high
        return self._rule(integers(low, high, where))

    def _number(self, keys: dict[str, Any], where: str) -> str:
        bounds = self._bounds(keys, where)
        return self._part("number") if bounds[:2] == (None, None) else self._rule(numbers(*bounds, where))

    @staticmethod
    def _bounds(keys: dict[str, Any], where: str) -> tuple[int | None, int | None, bool, bool]:
        """(least, most, is the least left out, is the most)."""
        for key, value in keys.items():
            if not _IS["integer"](value):
                raise UsageError(f"{where}.{key} must be a whole number, not {_clip(value)}")
        lows = [(int(keys[key]), key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in keys]
        highs = [(-int(keys[key]), key != "maximum") for key in ("maximum", "exclusiveMaximum") if key in keys]
        low, without_low = max(lows, default=(None, False))
        high, without_high = max(highs, default=(None, False))
        return low, None if high is None else -high, without_low, without_high

    def _boolean(self, _keys: dict[str, Any], _where: str) -> str:
        return self._rule('"true" | "false"')

    def _null(self, _keys: dict[str, Any], _where: str) -> str:
        return self._rule('"null"')

    @staticmethod
    def _count(keys: dict[str, Any], name: str, where: str) -> int | None:
        value = keys.get(name)
        if value is not None and (not _IS["integer"](value) or value < 0):
            raise UsageError(f"{where}.{name} must be a whole number, 0 or more, not {_clip(value)}")
        if value is not None and value > gbnf.MAX_REPEATS:
            most = f"a grammar has no repetition of more than {gbnf.MAX_REPEATS:,}"
            raise UsageError(f"{where}.{name}: {most}, and {_clip(value)} is given")
        return None if value is None else int(value)


def _clip(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
