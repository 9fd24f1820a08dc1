"""Sessions: decode, prefill, rollback, and what is refused before llama.cpp could abort."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec.errors import ContextFullError, LocalspecError, ModelFileError, UsageError
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from tests.gguf_maker import tiny_mamba

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[Model]:
    loaded = Model(smollm2)
    yield loaded
    loaded.close()


@pytest.fixture
def session(model: Model) -> Iterator[TargetSession]:
    made = TargetSession(model, SessionSettings(n_ctx=256, n_sequences=2, n_batch=64))
    yield made
    made.close()


def last_row(session: TargetSession, seq: int, tokens: list[int]) -> np.ndarray:
    session.prefill(seq, tokens[:-1])
    row = np.array(session.decode([(seq, tokens[-1:])]).logits[0])
    session.rollback(seq, len(tokens) - 1)
    return row


def test_rows_of_a_block_are_the_rows_of_single_decodes(model: Model, session: TargetSession) -> None:
    tokens = model.tokenizer.encode(TEXT)[:20]
    session.prefill(0, tokens[:16])
    block = np.array(session.decode([(0, tokens[16:])]).logits)
    for i in range(4):
        session.rollback(0, 16 + i)
        assert np.argmax(session.decode([(0, tokens[16 + i : 17 + i])]).logits[0]) == np.argmax(block[i])


def test_rollback_leaves_no_trace(model: Model, session: TargetSession) -> None:
    tokens = model.tokenizer.encode(TEXT)[:12]
    before = last_row(session, 0, tokens)
    session.decode([(0, [5, 6, 7, 8])])
    assert session.rollback(0, len(tokens) - 1) == len(tokens) - 1
    assert np.array_equal(before, last_row(session, 0, tokens))


def test_prefill_keeps_the_common_beginning(model: Model, session: TargetSession) -> None:
    tokens = model.tokenizer.encode(TEXT)[:24]
    assert session.prefill(0, tokens) == 24
    assert session.prefill(0, tokens) == 0
    assert session.prefill(0, [*tokens[:10], 3, 4]) == 2
    assert session.tokens[0] == [*tokens[:10], 3, 4]
    assert session.prefill(0, []) == 0
    assert session.tokens[0] == []


def test_prefill_longer_than_a_batch(model: Model, session: TargetSession) -> None:
    tokens = (model.tokenizer.encode(TEXT) * 10)[:200]
    assert session.prefill(1, tokens) == 200
    assert len(session.tokens[1]) == 200


def test_sequences_do_not_mix(model: Model, session: TargetSession) -> None:
    a, b = model.tokenizer.encode("One two three four five")[:6], model.tokenizer.encode("Bonjour tout le monde")[:6]
    alone_a, alone_b = last_row(session, 0, a), last_row(session, 1, b)
    session.rollback(0, 0)
    session.rollback(1, 0)
    session.prefill(0, a[:-1])
    session.prefill(1, b[:-1])
    rows = session.decode([(1, b[-1:]), (0, a[-1:])]).logits
    assert np.argmax(rows[0]) == np.argmax(alone_b)
    assert np.argmax(rows[1]) == np.argmax(alone_a)


def test_a_full_context_is_refused_before_anything_is_computed(session: TargetSession) -> None:
    session.prefill(0, [1] * 250)
    with pytest.raises(ContextFullError, match="256"):
        session.decode([(0, [1] * 7)])
    assert len(session.tokens[0]) == 250
    session.decode([(0, [1] * 6)])


def test_a_small_context_of_the_users_is_kept(model: Model) -> None:
    session = TargetSession(model, SessionSettings(n_ctx=20))
    try:
        assert session.n_ctx == 20
    finally:
        session.close()


@pytest.mark.parametrize("bad", [-1, 49152, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(session: TargetSession, bad: int) -> None:
    with pytest.raises(ModelFileError, match=str(bad)):
        session.decode([(0, [1, bad])])
    assert session.tokens[0] == []


def test_empty_and_oversized_decodes_are_refused(session: TargetSession) -> None:
    with pytest.raises(LocalspecError):
        session.decode([])
    with pytest.raises(UsageError, match="65"):
        session.decode([(0, [1] * 65)])


@pytest.mark.parametrize(
    "settings",
    [
        {"n_ctx": -1},
        {"n_threads": -2},
        {"type_k": "q7"},
        {"type_v": "nope"},
        {"flash_attention": "maybe"},
        {"flash_attention": "off", "type_v": "q8_0"},
    ],
)
def test_settings_out_of_range(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SessionSettings(**settings)  # type: ignore[arg-type]


def test_probe_of_rollback(session: TargetSession, tmp_path: Path) -> None:
    assert session.can_roll_back
    assert session.tokens == [[], []]
    path = tmp_path / "mamba.gguf"
    tiny_mamba(path)
    recurrent = Model(path)
    state = TargetSession(recurrent, SessionSettings(n_ctx=64))
    try:
        assert state.can_roll_back
        assert state.tokens == [[]]
        state.prefill(0, [1, 2, 3, 4])
        assert state.rollback(0, 2) == 0  # only a block's tokens are taken back, so it starts anew
        assert state.prefill(0, [1, 2, 3]) == 3
    finally:
        state.close()
        recurrent.close()


def test_sliding_window_rolls_back_a_block_and_recomputes_what_is_gone(gemma3: Path) -> None:
    model = Model(gemma3)
    session = TargetSession(model, SessionSettings(n_ctx=2048))
    try:
        tokens = (model.tokenizer.encode(TEXT * 60, add_special=True))[:1500]
        whole = last_row(session, 0, tokens)
        session.decode([(0, [*tokens[-1:], 7, 8, 9])])
        assert session.rollback(0, 1499) == 1499
        again = np.array(session.decode([(0, tokens[-1:])]).logits[0])
        assert np.argmax(again) == np.argmax(whole)
        # Far back the window's older keys are gone: the session must say so, not go on with holes.
        kept = session.rollback(0, 600)
        assert kept == 0
        assert session.tokens[0] == []
    finally:
        session.close()
        model.close()
