"""Whether no JSON fits two schemas at once, as `oneOf` wants: told from types, constants, and what objects must hold.

"No" means that it can't be told from these; what else two schemas may differ in is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_KINDS = frozenset({"object", "array", "string", "number", "boolean", "null"})
_OBJECT_WORDS = {"properties", "required", "additionalProperties"}
_MOST_DEEP = 12

#: the schema that a `$ref` names
Resolve = Callable[[Any], Any]


def exclusive(a: Any, b: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Whether nothing can fit both. Where a schema gives properties and no type, objects alone are written for it."""
    if depth > _MOST_DEEP:
        return False
    lefts, rights = list(_options(a, resolve)), list(_options(b, resolve))
    return all(_apart(left, right, resolve, depth) for left in lefts for right in rights)


def _options(schema: Any, resolve: Resolve, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The schemas of which one must fit, references followed."""
    if not isinstance(schema, dict) or depth > _MOST_DEEP:
        yield {}
    elif "$ref" in schema:
        yield from _options(resolve(schema["$ref"]), resolve, depth + 1)
    elif isinstance(several := schema.get("anyOf", schema.get("oneOf", schema.get("allOf"))), list):
        for option in several:
            yield from _options(option, resolve, depth + 1)
    else:
        yield schema


def _apart(a: dict[str, Any], b: dict[str, Any], resolve: Resolve, depth: int) -> bool:
    common = (_written(a) & _fitting(b)) | (_written(b) & _fitting(a))
    if not common:
        return True
    mine, theirs = _values(a), _values(b)
    if mine is not None and theirs is not None:
        return not mine & theirs
    if common != {"object"}:
        return False
    needed = [
        {name for name in s["required"] if isinstance(name, str)} if isinstance(s.get("required"), list) else set()
        for s in (a, b)
    ]
    left, right = _properties(a), _properties(b)
    both = needed[0] & needed[1] & left.keys() & right.keys()
    return any(exclusive(left[name], right[name], resolve, depth + 1) for name in both)


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    given = schema.get("properties")
    return given if isinstance(given, dict) else {}


def _fitting(schema: dict[str, Any]) -> frozenset[str]:
    """The types that a schema admits."""
    values = _values(schema)
    if values is not None:
        return frozenset(value[0] for value in values)
    given = schema.get("type")
    types = [kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)]
    return frozenset("number" if kind == "integer" else kind for kind in types) or _KINDS


def _written(schema: dict[str, Any]) -> frozenset[str]:
    """The types of what is written for a schema."""
    if "type" not in schema and _OBJECT_WORDS & schema.keys():
        return frozenset({"object"})
    return _fitting(schema)


def _values(schema: dict[str, Any]) -> set[tuple[str, Any]] | None:
    """What a schema admits, where it lists that."""
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    return None if values is None else {_key(value) for value in values}


def _key(value: Any) -> tuple[str, Any]:
    """(type, value): equal where JSON's values are, as 1 and 1.0 are, and 1 and true are not."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, int | float):
        return "number", value
    if isinstance(value, dict):
        return "object", frozenset((name, _key(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return "array", tuple(_key(inner) for inner in value)
    return ("null", None) if value is None else ("string", value)
