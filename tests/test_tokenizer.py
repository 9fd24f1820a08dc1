"""Tokens to text as they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.errors import ContextFullError, UsageError
from localspec.model import Model
from localspec.tokenizer import TextStream


class Bytes:
    """A tokenizer whose tokens are given as bytes."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces

    def piece(self, token: int) -> bytes:
        return self.pieces[token]


def stream(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], bool, str]:
    """(text of each push, stopped, rest)."""
    out, stopped = [], False
    text = TextStream(Bytes(pieces), stops)  # type: ignore[arg-type]
    for token in range(len(pieces)):
        pushed = text.push(token)
        out.append(pushed.text)
        if pushed.stopped:
            stopped = True
            break
    return out, stopped, text.finish()


def test_never_half_a_character() -> None:
    euro = "€".encode()
    assert stream([b"a", euro[:1], euro[1:2], euro[2:], b"b"]) == (["a", "", "", "€", "b"], False, "")


def test_a_character_left_incomplete_is_shown_as_such() -> None:
    assert stream(["€".encode()[:2]]) == ([""], False, "�")


def test_stop_string_within_and_across_tokens() -> None:
    assert stream([b"abc END def"], ("END",)) == (["abc "], True, "")
    assert stream([b"abc E", b"N", b"D rest"], ("END",)) == (["abc ", "", ""], True, "")


def test_what_only_looked_like_a_stop_string_comes_out_later() -> None:
    assert stream([b"abc E", b"N", b"ough"], ("END",)) == (["abc ", "", "ENough"], False, "")
    assert stream([b"abc EN"], ("END",)) == (["abc "], False, "EN")


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert stream([b"one two three"], ("three", "two")) == (["one "], True, "")


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[Model]:
    loaded = Model(smollm2)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("text", ["Hello, world", " two  spaces\n\ttabs", "naïve café 日本語 🙂", "x" * 3000, ""])
def test_round_trip(model: Model, text: str) -> None:
    assert model.tokenizer.decode(model.tokenizer.encode(text, add_special=False)) == text


def test_pieces_joined_equal_the_whole(model: Model) -> None:
    tokens = model.tokenizer.encode("日本語 🙂 done", add_special=False)
    text = TextStream(model.tokenizer)
    assert "".join(text.push(t).text for t in tokens) + text.finish() == "日本語 🙂 done"


def test_end_of_generation_is_known(model: Model) -> None:
    eog = model.tokenizer.eog
    assert eog[model.tokenizer.eos]
    assert 0 < int(eog.sum()) < 20


def test_a_hopeless_length_is_told_without_encoding(model: Model) -> None:
    tokenizer = model.tokenizer
    longest = max((tokenizer.piece(i, special=True) for i in range(model.n_vocab)), key=len).decode()
    assert len(tokenizer.encode(longest)) == 1
    tokenizer.check_length(longest * 9, 9)
    with pytest.raises(ContextFullError, match="larger --ctx-size"):
        tokenizer.check_length(longest * 9 + "x", 9)


def test_lone_surrogates_are_refused(model: Model) -> None:
    with pytest.raises(UsageError, match="character 2"):
        model.tokenizer.encode("ab\ud800")
