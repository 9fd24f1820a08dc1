"""Schemas: that no text of a grammar is wrong for its schema, and that errors speak of the schema alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from localspec.errors import UsageError
from localspec.grammar import Grammar
from localspec.json_schema import to_gbnf
from localspec.model import Model
from tests.gguf_maker import tiny_llama
from tests.test_grammar import admits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(tiny_llama(tmp_path_factory.mktemp("m") / "m.gguf")) as loaded:
        yield loaded


# -- patterns ---------------------------------------------------------------------------------------------------------------

BLANKS = "\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\ufeff\x85"


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\S$", "aé😀-", BLANKS + " "),
        (r"^[\S]$", "aé😀-", BLANKS + " "),
        (r"^[^\s]$", "aé😀-", BLANKS + " "),
        (r"^[^\S]$", " ", BLANKS + "aé"),
        (r"^\s$", " ", "aé"),
        (r"^.$", "a é\u00a0", "\u2028\u2029"),
        (r"^[^\d]$", "aé ", "07"),
        (r"^[a\-z]$", "a-z", "b"),
        (r"^[\d-]$", "0-", "z"),
    ],
)
def test_classes_admit_nothing_beyond_the_pattern(model: Model, pattern: str, good: str, bad: str) -> None:
    grammar = Grammar(model, to_gbnf({"type": "string", "pattern": pattern}))
    for c in good:
        assert admits(grammar, f'"{c}"'), hex(ord(c))
    for c in bad:
        assert not admits(grammar, f'"{c}"'), hex(ord(c))


@pytest.mark.parametrize("pattern", [r"[\d-z]", r"[a-\d]", r"[\w-\d]", "[z-a]"])
def test_ranges_of_classes_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"^schema\.pattern: a range that is none: write \\- for the sign itself"):
        to_gbnf({"type": "string", "pattern": pattern})


# -- oneOf ------------------------------------------------------------------------------------------------------------------


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value}} | more, "required": ["kind"]}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
NESTED = [{"type": "object", "properties": {"a": tagged(i)}, "required": ["a"]} for i in range(2)]


@pytest.mark.parametrize(
    "options",
    [
        [TEXT, WHOLE, {"type": "null"}],
        [{"type": ["string", "null"]}, {"type": ["number", "boolean"]}],
        [{"const": 1}, {"const": True}, {"enum": ["1", 2]}],
        [tagged("a"), tagged("b", x=TEXT), {"type": "array"}],
        [tagged("a") | {"properties": {"kind": {"enum": ["a", "b"]}}}, tagged("c")],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        [{"anyOf": [TEXT, WHOLE]}, {"type": "object"}],
        NESTED,
        [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"a": {"const": 2}}, "required": ["a"]}],
    ],
)
def test_alternatives_that_exclude_each_other(options: list[Any]) -> None:
    assert "root ::=" in to_gbnf({"oneOf": options, "$defs": {"a": tagged("a"), "b": tagged("b")}})


@pytest.mark.parametrize(
    "options",
    [
        [WHOLE, {"type": "number"}],
        [TEXT, {"enum": ["a"]}],
        [{"const": 1}, {"const": 1.0}],
        [tagged("a"), tagged("a", x=TEXT)],
        [tagged("a"), tagged("b") | {"required": []}],
        [{"properties": {"a": {"const": 1}}, "required": ["a"]}, TEXT],  # a text fits the first, too
        [{"anyOf": [TEXT, WHOLE]}, {"type": "string"}],
        [{"$ref": "#/$defs/me"}, {"$ref": "#/$defs/me"}],
        [TEXT, {}],
    ],
)
def test_alternatives_that_may_both_fit_are_refused(options: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"schema\.oneOf: both of the alternatives 0 and 1 may fit.*or write anyOf"):
        to_gbnf({"oneOf": options, "$defs": {"me": {"items": {"$ref": "#/$defs/me"}}}})


# -- errors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "minLength": 10**9}, "schema.minLength: a grammar has no repetition of more than 2,000"),
        ({"type": "string", "maxLength": 10**30}, "schema.maxLength: "),
        ({"type": "array", "minItems": 100_000}, "schema.minItems: "),
        ({"properties": {"a": {"type": "array", "maxItems": 2001}}}, "schema.properties.a.maxItems: "),
        ({"properties": {"a": {"type": "string", "pattern": "a{5000}"}}}, "schema.properties.a: {5000} is no repetition"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "schema.properties.a can begin with itself"),
    ],
)
def test_an_error_names_the_schemas_field(schema: Any, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as error:
        to_gbnf(schema)
    assert not re.search(r"line \d|rule '", str(error.value))
