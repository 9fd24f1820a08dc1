"""Texts held to a grammar: the same with any draft and none, masked as asking about every token would, whole at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import gbnf
from localspec.accept import Block, Draft, Sampling, verify
from localspec.blocks import FixedBlock
from localspec.cli.options import take_grammar
from localspec.drafters import DrafterSettings, load
from localspec.engine import Engine, Request, Stats
from localspec.errors import NativeError, UsageError
from localspec.grammar import Constraint, Grammar, narrowed
from localspec.json_schema import ANY_OBJECT, to_gbnf
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests.conftest import Cli
from tests.gguf_maker import random_draft, tiny_llama

GREEDY = Sampling(temperature=0)
SAMPLINGS = [
    GREEDY,
    Sampling(seed=3),
    Sampling(seed=4, temperature=1.5, top_k=0, top_p=1, min_p=0),
    Sampling(seed=5, temperature=1.2, top_k=0, top_p=0.9, min_p=0, repeat_penalty=1.3, frequency_penalty=0.2),
    Sampling(seed=6, top_k=12, top_p=1, min_p=0.02, presence_penalty=0.5, penalty_last_n=-1),
]
CITY = {"type": "string", "pattern": "^[A-Zéü😀]{2}-\\d{1,4}$"}
MARK = {"type": "integer", "minimum": -3, "maximum": 120}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "mood": {"enum": ["glad", "träge", "日本 😀", 'a "b"\n', None, 1.5]},
        "marks": {"type": "array", "items": MARK, "minItems": 2, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"city": CITY, "flat": {"type": ["integer", "null"]}},
            "required": ["city"],
        },
    },
    "required": ["name", "mood", "marks", "home"],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=1 << 12, logit_std=3.0)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def session(model: Model) -> Iterator[TargetSession]:
    with TargetSession(model, SessionSettings(n_ctx=1024, n_sequences=2, n_threads=1)) as made:
        yield made


def write(engine: Engine, grammar: Grammar, sampling: Sampling, n: int = 400) -> tuple[list[int], str, str | None, Stats]:
    prompt = engine.session.model.tokenizer.encode("the cat sat on the mat")
    engine.session.rollback(0, 0)
    text, stop = "", None
    for step in engine.generate(Request(prompt, sampling, n, grammar=grammar)):
        text += "".join(piece.text for piece in step.pieces)
        stop = step.stop
    ids = engine.tokens(0)[len(prompt) :]
    return ids, text, stop, engine.finish(0)


# -- the text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_the_text_is_the_same_with_any_draft(session: TargetSession, path: Path, tmp_path: Path, sampling: Sampling) -> None:
    grammar = Grammar(session.model, to_gbnf(PERSON))
    plain = write(Engine(session), grammar, sampling)
    assert plain[2] == "eog"
    assert_fits(json.loads(plain[1]))
    accepted = 0
    for name, draft in (("ngram", None), ("lm", path), ("lm", random_draft(tmp_path / "draft.gguf", path))):
        drafter = load(name, session, DrafterSettings(draft, "match"))
        for k in (1, 4) if name == "lm" else (3,):
            ids, text, stop, stats = write(Engine(session, drafter, FixedBlock(k)), grammar, sampling)
            assert (ids, text, stop) == plain[:3]
            accepted += stats.n_accepted
        drafter.close()
    assert accepted > 0


@pytest.mark.parametrize("name", ["ngram", "lm"])
def test_under_rejection_texts_fit_too(session: TargetSession, path: Path, name: str) -> None:
    grammar = Grammar(session.model, to_gbnf(PERSON))
    drafter = load(name, session, DrafterSettings(path if name == "lm" else None, "reject"))
    for sampling in SAMPLINGS:
        _, text, stop, _ = write(Engine(session, drafter, FixedBlock(3), "reject"), grammar, sampling)
        assert stop == "eog"
        assert_fits(json.loads(text))
    drafter.close()


def assert_fits(person: Any) -> None:
    assert set(person) == set(PERSON["required"])
    assert isinstance(person["name"], str)
    assert len(person["name"].encode("utf-16-le")) // 2 <= 24  # of 12 characters, each one or two units
    assert person["mood"] in PERSON["properties"]["mood"]["enum"]  # type: ignore[index]
    assert 2 <= len(person["marks"]) <= 3
    assert all(type(mark) is int and -3 <= mark <= 120 for mark in person["marks"])
    assert set(person["home"]) <= {"city", "flat"}
    head, _, number = person["home"]["city"].partition("-")
    assert len(head) == 2
    assert number.isdecimal()


def test_a_real_model_writes_sense(smollm2: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string"}, "capital": {"type": "string"}, "in_europe": {"type": "boolean"}},
        "required": ["country", "capital", "in_europe"],
    }
    with Model(smollm2) as model, TargetSession(model, SessionSettings(n_ctx=256, n_threads=1)) as session:
        drafter = load("ngram", session, DrafterSettings())
        grammar = Grammar(model, to_gbnf(schema))
        shown = 'The capital of Spain: {"country": "Spain", "capital": "Madrid"}. The capital of France: '
        prompt = model.tokenizer.encode(shown)
        texts = []
        for engine in (Engine(session), Engine(session, drafter, FixedBlock(3))):
            session.rollback(0, 0)
            steps = list(engine.generate(Request(prompt, GREEDY, 60, grammar=grammar)))
            texts.append("".join(piece.text for step in steps for piece in step.pieces))
            assert steps[-1].stop == "eog"
            assert engine.finish(0).n_accepted > 0 or engine.drafter is None
        assert texts[0] == texts[1]
        assert json.loads(texts[0]) | {"in_europe": True} == {"country": "France", "capital": "Paris", "in_europe": True}


def test_the_end_is_allowed_only_where_the_grammar_is_complete(session: TargetSession) -> None:
    whole = Grammar(session.model, 'root ::= "cat" "s"{3}')
    assert write(Engine(session), whole, GREEDY)[1:3] == ("catsss", "eog")
    dead = Grammar(session.model, 'root ::= "cat" [z-a]')
    assert write(Engine(session), dead, GREEDY)[1:3] == ("cat", "grammar")
    drafter = load("ngram", session, DrafterSettings(rule="reject"))
    assert write(Engine(session, drafter, FixedBlock(4), "reject"), dead, Sampling())[1:3] == ("cat", "grammar")


def test_control_tokens_have_no_place_in_a_text(session: TargetSession) -> None:
    tokenizer = session.model.tokenizer
    start = tokenizer.encode("<|im_start|>")
    assert len(start) == 1
    constraint = Grammar(session.model, 'root ::= "<" [^>]* ">"').begin()
    assert not constraint.allows(start[0])
    for token in tokenizer.encode("<|im_start|>", parse_special=False):
        constraint.take(token)
    assert constraint.may_end


def test_a_refused_token_is_an_error_and_not_the_end_of_the_process(session: TargetSession) -> None:
    constraint = Grammar(session.model, 'root ::= "a"').begin()
    for token in (session.model.tokenizer.encode("b")[0], session.model.tokenizer.eos):
        with pytest.raises(NativeError, match="does not go on"):
            constraint.take(token)


def test_a_text_that_can_be_read_in_too_many_ways_comes_to_its_end(session: TargetSession, model: Model) -> None:
    """Every `a` doubles the ways."""
    grammar = Grammar(model, 'root ::= "a" root "b" | "a" root "c"')
    engine = Engine(session, controller=FixedBlock(0))
    tokens, text, stop, _ = write(engine, grammar, GREEDY)
    assert (set(text), stop) == ({"a"}, "grammar")
    assert len(tokens) < 40
    constraint = grammar.begin()
    for token in model.tokenizer.encode("a" * 64, add_special=False):
        constraint.take(token)
    assert constraint.hopeless
    assert constraint.copy().hopeless
    assert not len(constraint.every())
    assert not constraint.may_end


PLACES = [
    (to_gbnf(PERSON), '{"name": "thé 😀", "mood": "gl'),
    ('root ::= [^é]+ "x" [éü]', "e 😀xü"),
    ('root ::= " a"? "b" | [à-ÿ] . "!"', "üé!"),
]


def test_every_allowed_token_is_found(smollm2: Path, model: Model) -> None:
    with Model(smollm2) as real:
        for loaded in (model, real):
            every = np.arange(loaded.n_vocab, dtype=np.int32)
            for grammar, text in PLACES:
                constraint = Grammar(loaded, grammar).begin()
                for token in loaded.tokenizer.encode(text):
                    assert constraint.every().tolist() == np.flatnonzero(constraint.allowed(every)).tolist()
                    constraint.take(token)


# -- rows -------------------------------------------------------------------------------------------------------------------


def asked_in_full(constraint: Constraint, row: np.ndarray) -> np.ndarray:
    """What `narrow` saves: every token is asked about."""
    return np.where(constraint.allowed(np.arange(len(row), dtype=np.int32)), row, np.float32(-np.inf))


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("n_vocab", [320, 6000])
def test_rows_give_what_full_masks_would(tmp_path: Path, n_vocab: int, rule: str) -> None:
    rng = np.random.default_rng(n_vocab)
    n_asked: list[int] = []
    with Model(tiny_llama(tmp_path / "tiny.gguf", vocab=n_vocab, n_layer=1)) as model:
        words = model.tokenizer.encode("the other cat sat")
        constraint = Grammar(model, r'root ::= ("the " | "a ") [^a-f]+ "." [0-9]* | [^x]{3} root').begin()
        allowed = constraint.allowed
        constraint.allowed = lambda ids: n_asked.append(len(ids)) or allowed(ids)  # type: ignore[method-assign,func-returns-value]
        for n in range(120):
            width = rng.choice([0.5, 2, 6, 12])
            row = (rng.standard_normal(model.n_vocab) * width).astype(np.float32)
            row[rng.integers(0, model.n_vocab, 40)] = row.max()  # ties
            row[rng.integers(0, model.n_vocab, 9)] = [np.nan, -np.inf, -np.inf] * 3
            sampling = Sampling(
                float(rng.choice([0, 0.5, 1.3])), int(rng.choice([0, 5, 40])), float(rng.choice([0.8, 0.95, 1])),
                float(rng.choice([0, 0.05, 0.3])), repeat_penalty=float(rng.choice([1, 1.4])), seed=n,
            )  # fmt: skip
            q = rng.dirichlet(np.ones(8)).astype(np.float32)
            ids = np.sort(rng.choice(model.n_vocab, 8, replace=False)).astype(np.int32)
            ids[0] = words[0] if words[0] < ids[1] else ids[0]
            token = int(ids[0])
            draft = Draft(np.array([token], np.int32), np.ones(1, np.float32), ids, q, np.array([0, 8], np.int32))
            block = Block(0, n, draft, sampling, np.array(words, np.int32))
            rows = np.stack([row, row])
            full = np.stack([asked_in_full(constraint, row), row])
            got = verify(narrowed(rows, [block], [constraint], rule), [block], rule)[0]
            if constraint.allows(token) and got.n_accepted:
                after = constraint.copy()
                after.take(token)
                full[1] = asked_in_full(after, row)
            want = verify(full, [block], rule)[0]
            assert (got.n_accepted, got.tokens.tolist()) == (want.n_accepted, want.tokens.tolist()), sampling
        if n_vocab > 1000:
            assert sum(n < 1000 for n in n_asked) > 60  # and mostly few are asked about


def test_dropping_forbidden_drafts_keeps_the_distribution(session: TargetSession) -> None:
    """Under `reject`, a drawn token that the grammar forbids is judged; what takes its place comes from the residual."""
    n_vocab = session.model.n_vocab
    letters = [session.model.tokenizer.encode(c)[0] for c in "abcxy"]
    constraint = Grammar(session.model, 'root ::= [abc]+ "."').begin()
    row = np.full(n_vocab, -20, np.float32)
    row[letters] = np.log([0.1, 0.3, 0.1, 0.4, 0.1]).astype(np.float32)
    wanted = np.array([0.2, 0.6, 0.2])
    order = np.argsort(letters)
    q = np.array([0.45, 0.01, 0.04, 0.45, 0.05])
    rng = np.random.default_rng(1)
    counts = {"judged": np.zeros(3), "point": np.zeros(3)}
    n = 800
    for seed in range(n):
        drawn = rng.choice(5, p=q)
        sampling = Sampling(1.0, 0, 0.999, 0.0, seed=seed)
        tokens = np.array([letters[drawn], letters[0]], np.int32)
        ids, probs = np.array(letters, np.int32)[order], q[order].astype(np.float32)
        full = Draft(tokens, np.ones(2, np.float32), np.tile(ids, 2), np.tile(probs, 2), np.array([0, 5, 10], np.int32))
        for name, draft in (("judged", full), ("point", Draft(tokens, np.ones(2, np.float32)))):
            kept = constraint.useful(draft, draft.q_ids is None)
            assert len(kept.tokens) == (2 if drawn < 3 else 1 if name == "judged" else 0)
            block = Block(0, 7, kept, sampling, np.zeros(0, np.int32))
            rows = np.tile(row, (len(kept.tokens) + 1, 1))
            first = verify(narrowed(rows, [block], [constraint], "reject"), [block], "reject")[0].tokens[0]
            counts[name][letters.index(int(first))] += 1
    for got in counts.values():
        assert np.abs(got / n - wanted).max() < 4 * np.sqrt(0.25 / n)


# -- grammars ---------------------------------------------------------------------------------------------------------------

BROKEN = [
    ("", "no rule 'root'"),
    ('x ::= "a"', "no rule 'root'"),
    ("root ::= foo", "'foo', which is not defined"),
    ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
    ('root ::= "a', "not closed"),
    ("root ::= [a", "not closed"),
    ("root ::= (" + '"a"', "parenthesis is not closed"),
    ('root ::= "a")', "')' is not expected"),
    ("root ::= *", "nothing to repeat"),
    ('root ::= "\\q"', "no escape"),
    ('root ::= "a"{3,2}', "no repetition"),
    ('root ::= "a"{x}', "a repetition is written"),
    ('root ::= "a"{0,5000}', "no repetition"),
    ('root ::= ("a" | "b"){50}{50}', "more than 2000 rules"),
    ('root ::= "abcdefgh"{2000} "abcdefgh"{2000}', "more than 20,000 elements"),
    ("root ::= " + "(" * 100_000, "nested more than 64"),
    ("root = 5", "'::=' is missing"),
    ("root ::= <think>", "tokens"),
    ("root ::= $", "'$' is not expected"),
    ('root ::= "a\0b"', "zero byte"),
    ('root ::= "\ud800"', "half a character"),
    ("root ::= " + '"a" ' * 100_000, "characters"),
    ('root ::= root "a" | "b"', "rule 'root' can begin with itself"),
    ('root ::= ("a"?)*', "can begin with itself"),
    # llama.cpp does not see that c may be empty, and would never come back
    ('root ::= a "x" | "y"\na ::= b root?\nb ::= c\nc ::= "" | "z"', "can begin with itself"),
    ("root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(900)) + '\nr900 ::= "a"', "chain of more than 500"),
    # ... nor does it come back from looking for left recursion in 2^40 ways
    ("root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(40)) + '\nr40 ::= "a"', "in more than 2000"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_grammar_is_one_line(model: Model, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Grammar(model, text)
    assert message in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= greeting " " [a-z]+ "!"? # and a comment\n\ngreeting ::= ("hi" |\n  "hello")', "hello you!", "hi You"),
        ('root ::= [^\\x00-\\x1f"\\\\\\]-]{2,3} "\\u00e9" .', "ab\u00e9\U0001f600", "a]\u00e9x"),
        ('root ::= ("a" "b"){2,} "c"{0} | []', "ababab", "abc"),
    ],
)
def test_grammars_are_read_as_llama_cpp_does(model: Model, text: str, good: str, bad: str) -> None:
    gbnf.check(text)
    assert admits(Grammar(model, text), good)
    assert not admits(Grammar(model, text), bad)


def admits(grammar: Grammar, text: str) -> bool:
    constraint = grammar.begin()
    for token in grammar.model.tokenizer.encode(text, parse_special=False):
        if not constraint.allows(token):
            return False
        constraint.take(token)
    return constraint.may_end


# -- schemas ----------------------------------------------------------------------------------------------------------------

NEXT = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}
TREE = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"v": {"type": "number"}, "next": NEXT}}}}
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    ({}, ['"a"', "[1,{}]", "null"], ["", "nul", "[1,]"]),
    (ANY_OBJECT, ["{}", '{"a": {"b": [true, -0.5e-3]}}'], ["[]", "{} "]),
    ({"type": "string"}, ['"é😀\\n\\u00e9\\ud83d\\ude00"'], ['"\n"', '"\\ud83d"', '"\\x"', '"a']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"éé\\n"'], ['"a"', '"abcd"']),
    ({"type": "integer"}, ["0", "-12"], ["01", "1.0", "+1"]),
    ({"type": "integer", "minimum": 9, "exclusiveMaximum": 121}, ["9", "10", "99", "100", "120"], ["8", "121", "-9", "09"]),
    ({"type": "integer", "minimum": -15, "maximum": -7}, ["-7", "-10", "-15"], ["-6", "-16", "7", "-0"]),
    ({"minimum": 100}, ["100", "999999", "100.5"], ["99", "-100", "99.9"]),
    ({"const": {"a": "x\n\"é"}}, ['{"a": "x\\n\\"é"}'], ['{"a":"x"}']),
    ({"enum": [1, "1", None], "type": ["integer", "null"]}, ["1", "null"], ['"1"']),
    ({"type": ["boolean", "array"], "items": {"const": 1}, "minItems": 1}, ["true", "[1, 1]"], ["[]", "[2]", "null"]),
    ({"prefixItems": [{"type": "integer"}, {"type": "null"}], "items": {"type": "boolean"}, "maxItems": 3},
     ["[1,null]", "[1, null, true]"], ["[1]", "[1,null,true,true]", "[1,null,2]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]},
     ['{"b": 2}', '{"a": 1,"b": 2}', '{\n  "b": 2,\n  "c": 3\n}'], ["{}", '{"a": 1}', '{"b": 2,}', '{"b": 2, "d": 4}']),
    ({"properties": {"ab": {"const": 1}}, "required": ["z"], "additionalProperties": {"type": "null"}},
     ['{"z": 5}', '{"ab": 1, "z": "", "abc": null, "x": null}'],
     ['{"z": 5, "ab": null}', '{"z": 1, "y": 1}', '{"z": 5, "\\u0061b": null}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"é": 1, "b": 2}'], ['{"a": "b"}']),
    (TREE, ["{}", '{"v": 1, "next": {"next": null}}'], ['{"next": {"next": 1}}']),
    ({"type": "string", "pattern": "^(foo|b[^a-y]+)\\.\\d{2,3}$"},
     ['"foo.12"', '"bzZ\\".123"'], ['"foo.1"', '"ba.12"', '"xfoo.12"']),
    ({"type": "string", "format": "date"}, ['"2024-02-28"', '"1999-12-31"'], ['"2024-02-30"', '"2024-13-01"']),
    ({"type": "string", "format": "ipv4"}, ['"255.0.10.199"'], ['"256.1.1.1"', '"1.1.1"']),
    ({"allOf": [{"title": "only", "type": "boolean"}], "description": "x"}, ["true"], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_schemas_admit_what_they_should(model: Model, schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = Grammar(model, to_gbnf(schema))
    for text in good:
        json.loads(text)
        assert admits(grammar, text), text
    for text in bad:
        assert not admits(grammar, text), text


def test_integer_bounds_hold_for_every_number(model: Model) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        low, high = sorted(int(rng.integers(-1200, 1200)) for _ in range(2))
        grammar = Grammar(model, to_gbnf({"type": "integer", "minimum": low, "maximum": high}))
        for value in {low - 1, low, low + 1, high - 1, high, high + 1, 0, *rng.integers(-1300, 1300, 12).tolist()}:
            assert admits(grammar, str(value)) == (low <= value <= high), (low, high, value)


def test_bounds_of_numbers_hold(model: Model) -> None:
    values = ["0", "0.0", "-0.0", "0.5", "-0.25", "1", "1.0", "1.01", "0.999", "-1", "-1.5", "-2", "-2.00", "-2.1", "17"]
    for low, high in ((0, 1), (-2, 1), (-2, -1), (-2, 0), (0, None), (None, 0), (1, 10), (None, 17), (3, 10)):
        for open_low, open_high in ((False, False), (True, False), (False, True), (True, True)):
            schema: dict[str, Any] = {"type": "number"}
            if low is not None:
                schema["exclusiveMinimum" if open_low else "minimum"] = low
            if high is not None:
                schema["exclusiveMaximum" if open_high else "maximum"] = high
            grammar = Grammar(model, to_gbnf(schema))
            for text in values:
                v = float(text)
                above = low is None or (v > low if open_low else v >= low)
                below = high is None or (v < high if open_high else v <= high)
                # "-0" is 0, and is written for it or not
                assert admits(grammar, text) == (above and below) or v == 0, (schema, text)
                assert not admits(grammar, text) or (above and below), (schema, text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "false admits nothing"),
        ([], "schema must be an object"),
        ({"type": "thing"}, "schema.type: 'thing' is no type"),
        ({"type": "object", "patternProperties": {}}, "'patternProperties' is not supported"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "schema.properties.a: uniqueItems is not supported"),
        ({"type": "number", "minimum": 0.5}, "schema.minimum must be a whole number"),
        ({"type": "number", "minimum": 1, "exclusiveMaximum": 1}, "no number is between"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf' is not supported"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no whole number"),
        ({"type": "string", "format": "hostname"}, "format 'hostname' is not supported"),
        ({"type": "string", "pattern": "(?=a)"}, "'(?' other than"),
        ({"type": "string", "pattern": "(a"}, "not closed"),
        ({"type": "string", "pattern": "\\bx"}, "'\\b' is not supported"),
        ({"$ref": "https://example.org/x"}, "is not in this schema"),
        ({"$ref": "#/$defs/nowhere"}, "there is no '#/$defs/nowhere'"),
        ({"$ref": "#"}, "can begin with itself"),
        ({"allOf": [{}, {}]}, "allOf of more than one"),
        ({"not": {}}, "'not' is not supported"),
        ({"enum": []}, "at least one"),
        ({"enum": ["a"], "type": "integer"}, "no value is left"),
        ({"const": float("nan")}, "NaN"),
        ({"type": "array", "minItems": 3000}, "no repetition"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "no list"),
        ({"enum": ["x" * 70_000]}, "bytes"),
    ],
)
def test_schemas_that_are_refused_are_told_why(schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        to_gbnf(schema)
    assert message in str(error.value)


def test_a_schema_nested_beyond_reason_is_refused() -> None:
    deep: Any = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(UsageError, match="nested too deep"):
        to_gbnf(deep)


# -- the command line -------------------------------------------------------------------------------------------------------


def test_run_takes_grammars_and_schemas(cli: Cli, path: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["é", 7]}', encoding="utf-8")
    (tmp_path / "yes.gbnf").write_text('root ::= "yes" | "no"\n')
    for args, texts in (
        (["-j", "@schema.json"], ('"é"', "7")),
        (["--grammar-file", "yes.gbnf", "--accept", "reject"], ("yes", "no")),
    ):
        result = cli("run", "-m", path, "-p", "the cat", "-t", 1, *args)
        assert (result.rc, result.stdout.strip() in texts) == (0, True), result
        assert "stop: eog" in result.stderr


    result = cli("run", "-m", path, "-p", "the cat", "-t", 1, "--grammar", 'root ::= "cat" [z-a]')
    assert result.rc == 2
    assert "allows no token" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grammar": "root ::= x"}, "'x', which is not defined"),
        ({"grammar": " "}, "--grammar '': nothing given"),
        ({"grammar_file": "/no/such.gbnf"}, "/no/such.gbnf"),
        ({"grammar_file": "/dev/zero"}, "bytes"),
        ({"json_schema": "{"}, "--json-schema: not valid JSON"),
        ({"json_schema": "@/no/such.json"}, "/no/such.json"),
        ({"grammar": 'root ::= "a"', "json_schema": "{}"}, "give --grammar or --json-schema"),
    ],
)
def test_options_that_give_no_grammar(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        take_grammar({"grammar": None, "grammar_file": None, "json_schema": None} | given)
