"""Targets with a recurrent state: it goes back over refused tokens, and the text is the one that plain decoding writes."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import snapshot, target
from localspec.accept import Draft, Sampling
from localspec.blocks import FixedBlock, Outcome
from localspec.curve import Probe
from localspec.drafters import DrafterSettings, Sequence, load, taps
from localspec.engine import Engine, Request, Stats
from localspec.errors import PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.pairing import can_draft, own_heads, rollback_of
from localspec.target import Rows, SessionSettings, TargetSession
from tests import gguf_maker, recurrent_maker
from tests.test_mtp import write as write_with_head

GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=0.9, top_k=0, top_p=1.0, seed=5)
MAKERS: dict[str, Callable[..., Path]] = {
    "mamba": gguf_maker.tiny_mamba, "jamba": gguf_maker.tiny_jamba, "qwen35": recurrent_maker.tiny_qwen35,
    "lfm2": recurrent_maker.tiny_lfm2, "falcon-h1": recurrent_maker.tiny_falcon_h1,
}  # fmt: skip
PROMPTS = [np.random.default_rng(i).integers(0, 256, n).tolist() for i, n in enumerate((1, 9, 4))]
N = 40
#: name, states that llama.cpp is asked to keep, sequences at once
WAYS = {"snapshot": (0, 1), "states": (8, 1), "three at once": (8, 3)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    folder, open_models = tmp_path_factory.mktemp("recurrent"), dict[str, Model]()

    def get(name: str) -> Model:
        if name not in open_models:
            open_models[name] = Model(MAKERS[name](folder / f"{name}.gguf"))
        return open_models[name]

    yield get
    for model in open_models.values():
        model.close()


class Knowing:
    """Drafts the text itself, of many lengths, with a wrong token now and then."""

    name = "knowing"

    def __init__(self, texts: list[list[int]], n_vocab: int):
        self.texts, self.n_vocab, self.random = texts, n_vocab, np.random.default_rng(1)

    def begin(self, seq: Sequence) -> None: ...

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        drafts = []
        for seq, k in zip(seqs, ks):
            at = len(seq.tokens)
            tokens = np.array(self.texts[seq.key][at : at + int(self.random.integers(0, k + 1))], np.int32)
            wrong = self.random.random(len(tokens)) < 0.25
            tokens[wrong] = (tokens[wrong] + 1) % self.n_vocab
            drafts.append(Draft(tokens, np.ones(len(tokens), np.float32)))
        return drafts

    def commit(self, seq: Sequence, rows: Rows) -> None: ...

    def rewind(self, seq: Sequence, n_keep: int) -> None: ...

    def close(self) -> None: ...


def write(
    model: Model, known: list[list[int]] | None, sampling: Sampling, n_rollback: int = 0, n_sequences: int = 1
) -> tuple[list[list[int]], Stats]:
    """All prompts' texts, so many at once; `known` None: plainly."""
    done: dict[int, list[int]] = {}
    running: dict[int, int] = {}
    total, waiting = Stats(), list(range(len(PROMPTS)))
    settings = SessionSettings(128, n_sequences, n_threads=1, n_rollback=n_rollback)
    with TargetSession(model, settings) as session:
        drafter = Knowing(known, model.n_vocab) if known else None
        engine = Engine(session, drafter, FixedBlock(6 if known else 0))
        while waiting or running:
            while waiting and len(running) < n_sequences:
                i = waiting.pop(0)
                running[engine.start(Request(PROMPTS[i], sampling, N, key=i))] = i
            for step in engine.step():
                if step.stop is not None:
                    done[running.pop(step.slot)] = engine.tokens(step.slot)
                    total.add(engine.finish(step.slot))
    return [done[i] for i in range(len(PROMPTS))], total


# -- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_text_is_that_of_plain_decoding(models: Callable[[str], Model], name: str, sampling: Sampling) -> None:
    model = models(name)
    plain, _ = write(model, None, sampling)
    for n_rollback, n_sequences in WAYS.values():
        drafted, stats = write(model, plain, sampling, n_rollback, n_sequences)
        assert drafted == plain
        assert 0 < stats.n_accepted < stats.n_drafted


_ROWS = """
import json, sys
import numpy as np
from localspec import native
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
native.use_kernels("localspec")
text = np.random.default_rng(0).integers(0, 256, 24).tolist()
for path in sys.argv[1:]:
    with Model(path) as model, TargetSession(model, SessionSettings(64, n_threads=1)) as session:
        one, far = np.concatenate([session.decode([(0, [t])]).logits.copy() for t in text]), 0.0
        for n in (2, 3, 9):
            session.rollback(0, 0)
            blocks = [session.decode([(0, text[i : i + n])]).logits.copy() for i in range(0, len(text), n)]
            far = max(far, float(np.abs(np.concatenate(blocks) - one).max()))
        print(json.dumps(far))
"""


def test_rows_of_a_block_are_bitwise_those_of_single_decodes_under_our_kernels(models: Callable[[str], Model]) -> None:
    """What makes greedy drafting exactly lossless: scans over a block must not be computed otherwise than token by token."""
    run = [sys.executable, "-c", _ROWS, *(str(models(name).path) for name in MAKERS)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
    if "kernels" in done.stderr and done.returncode:
        pytest.skip("this CPU has not the instructions")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [0.0] * len(MAKERS)


def test_a_state_that_did_not_go_back_would_show(models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without the state, refused tokens change the text."""
    model = models("mamba")
    plain, _ = write(model, None, SAMPLED)
    with TargetSession(model, SessionSettings(128, n_threads=1)) as session:
        assert session.can_roll_back
    save, share = snapshot.RecurrentStates._save, 0.5

    def spoil(self: snapshot.RecurrentStates, seq: int) -> None:
        save(self, seq)
        most = int(self._size[seq] * share)
        ctypes.memset(ctypes.byref(self._data[seq], most), 0, self._size[seq] - most)

    monkeypatch.setattr(snapshot.RecurrentStates, "_save", spoil)
    with TargetSession(model, SessionSettings(128, n_threads=1)) as session:
        assert not session.can_roll_back  # the session finds out
        with pytest.raises(UsageError, match="memory of this mamba model can't be rolled back"):
            Engine(session, Knowing(plain, model.n_vocab))
    monkeypatch.setattr(TargetSession, "can_roll_back", True)
    assert write(model, plain, SAMPLED)[0] == plain  # llama.cpp refused such a state, so all was read again
    share = 0.75  # numbers of the last layer only: llama.cpp takes them
    assert write(model, plain, SAMPLED)[0] != plain


# -- the session ------------------------------------------------------------------------------------------------------


def row_after(session: TargetSession, tokens: list[int]) -> np.ndarray:
    """The target's logits f32[V] after these tokens, in a sequence of their own."""
    session.prefill(1, tokens[:-1])
    row = session.decode([(1, tokens[-1:])]).logits[0].copy()
    session.rollback(1, 0)
    return row


@pytest.mark.parametrize("name", ["mamba", "qwen35"])
def test_a_block_goes_back_again_and_again(models: Callable[[str], Model], name: str) -> None:
    text = list(range(20, 60))
    with TargetSession(models(name), SessionSettings(128, 2, n_threads=1)) as session:
        session.prefill(0, text[:10])
        session.decode([(0, text[10:16])])
        assert session.rollback(0, 14) == 14
        assert session.rollback(0, 12) == 12  # before anything was decoded again
        session.settle()
        assert session.tokens[0] == text[:12]
        got = session.decode([(0, text[12:13])]).logits[0].copy()
        np.testing.assert_allclose(got, row_after(session, text[:13]), atol=1e-2)
        session.decode([(0, text[13:16])])
        session.rollback(0, 14)
        got = session.decode([(0, text[14:15])]).logits  # what is missing comes first, but its row does not
        assert len(got) == 1
        np.testing.assert_allclose(got[0].copy(), row_after(session, text[:15]), atol=1e-2)


@pytest.mark.parametrize("n_rollback", [0, 4])
def test_earlier_decodes_are_gone(models: Callable[[str], Model], n_rollback: int) -> None:
    """llama.cpp would put back a state of the block before, or none of this text at all: the session must not ask."""
    text = list(range(20, 60))
    with TargetSession(models("qwen35"), SessionSettings(128, n_threads=1, n_rollback=n_rollback)) as session:
        session.decode([(0, text[:6])])
        session.decode([(0, text[6:7])])
        assert session.rollback(0, 5) == 0
        assert session.tokens[0] == []
        session.prefill(0, text[:8])
        assert session.rollback(0, 6) == 0
        assert session.prefill(0, text[:8]) == 8
        assert session.prefill(0, text[:10]) == 2  # what goes on needs nothing anew
        session.decode([(0, text[10:14])])
        assert session.rollback(0, 9) == 0  # before the block


def test_kept_states_reach_as_far_as_they_say(models: Callable[[str], Model]) -> None:
    text = list(range(20, 60))
    with TargetSession(models("qwen35"), SessionSettings(128, n_threads=1, n_rollback=3)) as session:
        assert session.max_draft == 3
        session.prefill(0, text[:6])
        session.decode([(0, text[6:10])])
        assert session.rollback(0, 7) == 7
        assert session.rollback(0, 6) == 0  # a state is put back once
        engine = Engine(session, Knowing([text], session.model.n_vocab), FixedBlock(8))
        engine.start(Request(text[:6], GREEDY, 30))
        while engine.step()[0].stop is None:
            pass
        assert len(engine.stats(0).drafted_at) == 3


def test_states_are_kept_only_where_there_is_room(models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("qwen35")
    state = target.recurrent_state(model.gguf)
    needed = target.memory_needed(model.gguf, 64, n_ubatch=64)
    for free, limit in ((needed.kv + needed.compute + 3 * state, 4), (needed.kv + needed.compute + 5 * state, 4)):
        monkeypatch.setattr(target, "available_memory", lambda free=free: free)
        with TargetSession(model, SessionSettings(64, n_batch=64, n_threads=1, n_rollback=limit)) as session:
            roomy = free >= needed.kv + needed.compute + limit * state
            assert session.max_draft == (limit if roomy else session.n_batch)
            assert session.can_roll_back


def test_a_step_pays_for_its_refusals(models: Callable[[str], Model]) -> None:
    """What is decoded again belongs to the step that drafted: nothing of it is left when the controller is told."""
    model = models("mamba")
    plain, _ = write(model, None, GREEDY)
    decodes: list[str] = []

    class Watching(FixedBlock):
        def record(self, outcomes: Seq[Outcome], proposed: int, draft: float, rest: float) -> None:
            decodes.append("told")
            assert not any(session._missing)

    with TargetSession(model, SessionSettings(128, n_threads=1)) as session:
        engine = Engine(session, Knowing(plain, model.n_vocab), Watching(6))
        engine.start(Request(PROMPTS[0], GREEDY, N, key=0))
        run = session._run
        session._run = lambda n: (decodes.append("decode"), run(n))[1]  # type: ignore[method-assign,assignment,func-returns-value]
        while engine.step()[0].stop is None:
            pass
        refused = engine.stats(0)
    assert refused.n_accepted < refused.n_drafted
    assert decodes.count("decode") > decodes.count("told")


def test_costs_of_blocks_are_measured(models: Callable[[str], Model]) -> None:
    for name, n_rollback in (("mamba", 0), ("lfm2", 4)):
        with TargetSession(models(name), SessionSettings(40, n_threads=1, n_rollback=n_rollback)) as session:
            probe = Probe(session, (1, 2, 5), 16)
            for _ in range(10):  # past the end of the context
                assert all(ms > 0 for ms in probe.round())


# -- heads in the target's own file -------------------------------------------------------------------------------------


def test_a_head_in_a_hybrids_own_file_drafts(tmp_path: Path) -> None:
    path = recurrent_maker.tiny_qwen35(tmp_path / "quiet.gguf", quiet=0.1)
    assert own_heads(GGUFFile.open(path)) == (1, "")
    prompts = [list(range(10 + i, 30 + 3 * i)) for i in range(3)] + [[40]]
    with Model(path, with_heads=True) as model:
        for sampling in (GREEDY, SAMPLED):
            plain, _ = write_with_head(model, None, 0, prompts, sampling)
            drafted, stats = write_with_head(model, None, 3, prompts, sampling)
            assert drafted == plain
            assert stats.n_drafted > 60
            assert stats.acceptance is not None
            assert stats.acceptance > 0.5  # it passes on what the last token says, which is nearly all
            assert stats.acceptance < 1.0


def test_a_head_follows_a_hybrid_that_keeps_its_states(tmp_path: Path) -> None:
    path, settings = recurrent_maker.tiny_qwen35(tmp_path / "quiet.gguf", quiet=0.1), DrafterSettings(None)
    texts = []
    with Model(path, with_heads=True) as model:
        for k in (0, 3):
            shape = SessionSettings(128, n_threads=1, taps=taps("mtp", model.gguf, settings), n_rollback=3)
            with TargetSession(model, shape) as session:
                drafter = load("mtp", session, settings)
                engine = Engine(session, drafter if k else None, FixedBlock(k))
                engine.start(Request(list(range(10, 25)), SAMPLED, 60))
                while engine.step()[0].stop is None:
                    pass
                texts.append(engine.tokens(0))
                assert bool(engine.stats(0).n_accepted) == bool(k)
                drafter.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("n_rollback", "n_sequences"), WAYS.values(), ids=WAYS)
def test_a_drafter_that_reads_taps_follows_a_hybrid(
    models: Callable[[str], Model], tmp_path: Path, n_rollback: int, n_sequences: int
) -> None:
    model = models("qwen35")
    settings = DrafterSettings(gguf_maker.eagle3_stub(tmp_path / "head.gguf", like=model.path))
    plain, _ = write(model, None, SAMPLED)
    shape = SessionSettings(
        128, n_sequences, n_threads=1, taps=taps("eagle3", model.gguf, settings), n_rollback=n_rollback
    )
    with TargetSession(model, shape) as session:
        drafter = load("eagle3", session, settings)
        engine, done = Engine(session, drafter, FixedBlock(3)), {}
        for i in range(len(PROMPTS)):
            slot = engine.start(Request(PROMPTS[i], SAMPLED, N, key=i), slot=i if n_sequences > 1 else 0)
            while n_sequences == 1 and engine.step()[0].stop is None:
                pass
            if n_sequences == 1:
                done[i] = engine.tokens(slot)
                assert engine.finish(slot).n_drafted > 10
        while len(done) < len(PROMPTS):
            for step in engine.step():
                if step.stop is not None:
                    done[step.slot] = engine.tokens(step.slot)
                    engine.finish(step.slot)
        drafter.close()
    assert [done[i] for i in range(len(PROMPTS))] == plain


# -- what is said -------------------------------------------------------------------------------------------------------


def test_how_files_are_rolled_back(models: Callable[[str], Model]) -> None:
    assert {name: rollback_of(models(name).gguf)[0] for name in MAKERS} == {
        "mamba": "snapshot", "jamba": "snapshot", "qwen35": "states", "lfm2": "states", "falcon-h1": "snapshot",
    }  # fmt: skip
    assert "hybrid" in can_draft(models("lfm2").gguf)[1]


def test_a_recurrent_draft_is_refused(models: Callable[[str], Model]) -> None:
    mamba = models("mamba")
    with (
        TargetSession(mamba, SessionSettings(64, n_threads=1)) as session,
        pytest.raises(PairingError, match="mamba is recurrent"),
    ):
        load("lm", session, DrafterSettings(mamba.path))


def test_run_drafts_for_recurrent_models(cli: Callable[..., Any], models: Callable[[str], Model]) -> None:
    for name in ("mamba", "lfm2"):
        done = [
            cli("run", "-m", models(name).path, "-p", "the cat the cat the cat", "-n", 30, "--temp", 0, "-t", 1,
                "--spec-type", kind, "--no-spec-adapt")
            for kind in ("ngram", "none")
        ]  # fmt: skip
        assert all(one.rc == 0 for one in done), done[0].stderr
        assert done[0].stdout == done[1].stdout
        assert "ngram" in done[0].stderr
        assert "no speculation" not in done[0].stderr
