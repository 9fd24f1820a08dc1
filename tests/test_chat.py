"""The conversation behind `localspec chat`: what is sent, kept, reused and left out. No terminal here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.accept import Draft, Sampling
from localspec.blocks import FixedBlock
from localspec.chat.commands import COMMAND_NAMES, run_command
from localspec.chat.conversation import Chat, Exchange, Known, PlainTranscript, Turn
from localspec.chat.screen import printable, status_line
from localspec.drafters.ngram import NgramDrafter
from localspec.engine import Engine, Stats
from localspec.errors import ContextFullError, LocalspecError, NativeError, UsageError
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession
from localspec.template import ChatTemplate

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[Model]:
    with Model(smollm2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def session(model: Model) -> Iterator[TargetSession]:
    with TargetSession(model, SessionSettings(n_ctx=512, n_batch=64, n_threads=1)) as opened:
        yield opened


@pytest.fixture
def chat(session: TargetSession) -> Chat:
    return Chat(Engine(session, NgramDrafter(), FixedBlock(3)), GREEDY, max_tokens=8)


def small_chat(model: Model, n_ctx: int, **options: object) -> Chat:
    session = TargetSession(model, SessionSettings(n_ctx=n_ctx, n_batch=64, n_threads=1))
    return Chat(Engine(session, NgramDrafter(), FixedBlock(3)), GREEDY, **options)  # type: ignore[arg-type]


def say(chat: Chat, text: str, n_steps: int | None = None) -> Turn:
    """Ask, and take the whole answer, or stop it after `n_steps` steps."""
    turn = chat.ask(text)
    stops = itertools.repeat(False) if n_steps is None else itertools.chain([False] * n_steps, itertools.repeat(True))
    for _ in chat.stream(turn, lambda: next(stops)):
        pass
    return turn


# -- the cache and the ids ---------------------------------------------------------------------------------------------


def test_only_new_tokens_are_computed(chat: Chat, session: TargetSession) -> None:
    first = say(chat, "Name three colours.")
    assert first.stop == "length"
    assert len(first.ids) == 8
    second = say(chat, "And three animals?")
    asked = len(first.tokens) + len(first.ids)
    assert second.tokens[:asked] == first.tokens + first.ids
    # The token gained last in the first answer was pending, not cached; the last of the new prompt is pending now.
    assert second.stats.n_prompt_computed == len(second.tokens) - asked
    assert f"{second.stats.n_prompt} tokens ({second.stats.n_prompt_computed} computed)" in run_command(chat, "/stats").text
    assert chat.n_used == len(session.tokens[0]) + 1


def test_answers_are_those_of_an_empty_cache(chat: Chat, model: Model) -> None:
    say(chat, "Name three colours.")
    second = say(chat, "And three animals?")
    fresh = small_chat(model, 512, max_tokens=8)
    fresh.exchanges = chat.exchanges[:1]
    again = say(fresh, "And three animals?")
    assert again.tokens == second.tokens
    assert again.stats.n_prompt_computed == len(second.tokens) - 1
    assert again.ids == second.ids
    fresh.engine.session.close()


def test_an_ended_answer_is_continued_without_its_end_token(chat: Chat, model: Model) -> None:
    chat.max_tokens = 120
    chat.exchanges = [Exchange("Say yes.", "Yes."), Exchange("Say yes.", "Yes."), Exchange("Say yes.", "Yes.")]
    turn = say(chat, "Say yes.")
    assert turn.stop == "eog"
    assert not model.tokenizer.eog[turn.ids].any()
    assert turn.answer == "Yes."
    following = chat.ask("Why?")
    assert following.tokens == ChatTemplate.of(model).encode(  # type: ignore[union-attr]
        [*chat.messages(), {"role": "user", "content": "Why?"}]
    )


def test_ids_that_were_written_are_kept_where_the_text_agrees(chat: Chat, model: Model) -> None:
    tokenizer = model.tokenizer
    start = chat.ask("Hi")
    # "Hello" letter by letter: not how the tokenizer would cut it.
    letters = [tokenizer.encode(letter, add_special=False)[0] for letter in "Hello"]
    assert letters != tokenizer.encode("Hello", add_special=False)
    known = Known(start.rendered + "Hello", start.tokens + letters)
    chat.exchanges = [Exchange("Hi", "Hello", known)]
    turn = chat.ask("And you?")
    assert turn.tokens[: len(known.tokens)] == known.tokens
    assert tokenizer.decode(turn.tokens, special=True) == turn.rendered

    chat.exchanges = [Exchange("Hi", "Hullo", known)]  # the template would show something else
    turn = chat.ask("And you?")
    assert turn.tokens == chat.template.encode([*chat.messages(), {"role": "user", "content": "And you?"}])


def test_half_a_character_is_not_carried_on(chat: Chat, model: Model) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer.encode("ok 🐈", add_special=False)
    assert len(tokenizer.decode(ids[:-1]).encode()) > 3  # the cat takes several tokens
    turn = chat.ask("Hi")
    turn.ids, turn.answer = ids[:-1], tokenizer.decode(ids[:-1])
    known = chat._known(turn)
    assert known.text == turn.rendered + tokenizer.decode(known.tokens[len(turn.tokens) :])
    assert "\ufffd" not in known.text
    turn.ids, turn.answer = ids, "ok 🐈"
    assert chat._known(turn).tokens == turn.tokens + ids


def test_undo_keeps_what_came_before_in_the_cache(chat: Chat) -> None:
    first = say(chat, "Name three colours.")
    second = say(chat, "And three animals?")
    assert run_command(chat, "/undo").text == "taken back: And three animals?"
    third = say(chat, "And three towns?")
    shared = next(i for i, (a, b) in enumerate(zip(second.tokens, third.tokens)) if a != b)
    assert shared > len(first.tokens) + len(first.ids)
    assert third.stats.n_prompt_computed == len(third.tokens) - 1 - shared
    assert [e.user for e in chat.exchanges] == ["Name three colours.", "And three towns?"]


def test_the_same_question_may_be_answered_in_another_way(session: TargetSession) -> None:
    def answers(seed: int) -> list[str]:
        chat = Chat(Engine(session), Sampling(temperature=1.5, min_p=0, seed=seed), max_tokens=12)
        found = []
        for _ in range(3):
            found.append(say(chat, "Invent a name.").answer)
            chat.undo()
        return found

    once = answers(7)
    assert len(set(once)) == 3
    assert answers(7) == once


# -- ends of all kinds ---------------------------------------------------------------------------------------------------


def test_a_stopped_answer_keeps_what_was_said(chat: Chat) -> None:
    chat.max_tokens = None
    turn = say(chat, "Count to one hundred.", n_steps=4)
    assert turn.stop == "interrupted"
    assert turn.kept
    assert turn.answer
    assert chat.exchanges[-1].assistant == turn.answer
    assert turn.answer in chat.ask("Go on.").rendered


def test_an_answer_stopped_before_it_began_is_no_exchange(chat: Chat) -> None:
    turn = say(chat, "Count to one hundred.", n_steps=0)
    assert turn.stop == "interrupted"
    assert not turn.kept
    assert chat.exchanges == []


class Breaking(NgramDrafter):
    """Raises at its n-th proposal."""

    def __init__(self, n: int, error: BaseException):
        super().__init__()
        self.n = n
        self.error = error

    def propose(self, *args: object) -> list[Draft]:
        self.n -= 1
        if self.n < 0:
            raise self.error
        return super().propose(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("error", [NativeError("llama.cpp could not decode"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_broken_turn_leaves_the_chat_usable(session: TargetSession, n: int, error: BaseException) -> None:
    engine = Engine(session, Breaking(n, error), FixedBlock(3))
    chat = Chat(engine, GREEDY, max_tokens=8)
    chat.exchanges = [Exchange("Hi", "Hello")]
    if isinstance(error, LocalspecError):
        with pytest.raises(NativeError):
            say(chat, "Name three colours.")
    else:
        assert say(chat, "Name three colours.").stop == "interrupted"
    assert len(chat.exchanges) == 1 + (n > 0)
    engine.drafter.n = 10**9  # type: ignore[union-attr]
    turn = say(chat, "And three animals?")
    assert turn.kept
    expected = Chat(Engine(session, NgramDrafter(), FixedBlock(3)), GREEDY, max_tokens=8)
    expected.exchanges = chat.exchanges[:-1]
    assert say(expected, "And three animals?").answer == turn.answer


def test_the_reader_of_an_answer_may_go_away(chat: Chat) -> None:
    turn = chat.ask("Count to ten.")
    steps = chat.stream(turn)
    next(steps)
    steps.close()
    assert turn.stop == "interrupted"
    assert chat.exchanges[-1].assistant == turn.answer
    assert say(chat, "Go on.").kept


# -- a full context ------------------------------------------------------------------------------------------------------


def test_a_full_context_leaves_the_oldest_out(model: Model, tmp_path: Path) -> None:
    chat = small_chat(model, 192, max_tokens=8, system="Be brief.")
    dropped = []
    for i in range(7):
        turn = say(chat, f"Question {i}: what is the number {i} good for?")
        assert turn.kept
        dropped.append(turn.n_dropped)
        if turn.n_dropped:
            assert len(turn.tokens) <= 192 * 3 // 4
    assert sum(dropped) == chat.first > 0
    assert "Be brief." in turn.rendered
    assert "Question 0" not in turn.rendered
    assert "Question 6" in turn.rendered
    # Leaving out makes room for several turns: not every turn has to do it.
    assert 0 in dropped[dropped.index(max(dropped)) + 1 :]
    assert "no longer sent" in run_command(chat, "/stats").text
    run_command(chat, f"/save {tmp_path / 'all.json'}")
    assert len(json.loads((tmp_path / "all.json").read_text())["messages"]) == 14

    exchanges = list(chat.exchanges)
    with pytest.raises(ContextFullError, match=r"holds 192: shorten it") as raised:
        chat.ask("word " * 300)
    assert "\n" not in str(raised.value)
    assert chat.exchanges == exchanges
    assert say(chat, "Still there?").kept
    chat.engine.session.close()


def test_an_answer_may_run_out_of_context(model: Model) -> None:
    chat = small_chat(model, 80)
    turn = say(chat, "Tell me a long story about a cat.")
    assert turn.stop == "context"
    assert turn.n_used <= 81
    assert turn.kept
    following = say(chat, "And on?")
    assert following.n_dropped == 1
    assert following.kept
    chat.engine.session.close()


# -- without a chat template ---------------------------------------------------------------------------------------------


def test_without_a_template_a_transcript_is_written(session: TargetSession, model: Model) -> None:
    template = PlainTranscript(model.tokenizer)
    chat = Chat(Engine(session), GREEDY, system="A talk.", max_tokens=60, template=template)
    chat.exchanges = [Exchange("Say yes.", " Yes."), Exchange("Say yes.", "Yes.")]
    turn = say(chat, "Say yes.")
    assert turn.rendered == (
        "A talk.\n\nUser: Say yes.\nAssistant: Yes.\nUser: Say yes.\nAssistant: Yes.\nUser: Say yes.\nAssistant:"
    )
    assert turn.stop == "stop-string"
    assert turn.answer.strip() == "Yes."
    following = chat.ask("Why?")
    assert following.rendered == turn.rendered + " Yes.\nUser: Why?\nAssistant:"
    shared = len(turn.tokens) + 1
    assert following.tokens[:shared] == [*turn.tokens, turn.ids[0]]


# -- commands ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(chat: Chat) -> None:
    text = run_command(chat, "/help").text
    assert all(name in text for name in COMMAND_NAMES)
    names = "/help /system /reset /undo /save /load /draft /temp /stats /quit"
    assert " ".join(COMMAND_NAMES) == names
    assert max(map(len, text.split("\n"))) <= 80


@pytest.mark.parametrize(
    "line",
    ["/nonsense", "/", "/draft maybe", "/temp hot", "/temp nan", "/temp -1", "/temp inf", "/undo", "/save", "/load ~x/y"],
)
def test_a_wrong_command_is_one_line(chat: Chat, line: str) -> None:
    with pytest.raises(UsageError) as raised:
        run_command(chat, line)
    assert str(raised.value)
    assert "\n" not in str(raised.value)
    assert chat.sampling == GREEDY


def test_settings(chat: Chat) -> None:
    assert run_command(chat, "/temp 0.5").text == "temperature 0.5"
    assert chat.sampling.temperature == 0.5
    assert run_command(chat, "/TEMP").text == "temperature 0.5"
    assert run_command(chat, "/quit").leave
    assert run_command(chat, "/exit").leave
    assert run_command(chat, "/stats").text == "nothing was asked yet"


def test_drafting_off_and_on(chat: Chat) -> None:
    chat.exchanges = [Exchange("Say the days.", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday")]
    with_drafts = say(chat, "Say the days.")
    assert with_drafts.stats.n_drafted > 0
    chat.undo()
    assert "off" in run_command(chat, "/draft off").text
    plain = say(chat, "Say the days.")
    assert plain.stats.n_drafted == 0
    assert plain.stats.n_verify == 8
    assert plain.ids == with_drafts.ids
    chat.undo()
    assert run_command(chat, "/draft on").text == "drafting is on (drafter ngram)"
    assert say(chat, "Say the days.").stats.n_drafted > 0


def test_drafting_without_a_drafter(session: TargetSession) -> None:
    chat = Chat(Engine(session), GREEDY)
    assert "no drafter" in run_command(chat, "/draft").text
    with pytest.raises(UsageError, match="no drafter"):
        run_command(chat, "/draft on")


def test_the_system_message_can_change(chat: Chat) -> None:
    assert run_command(chat, "/system").text == "there is no system message"
    run_command(chat, "/system Talk like a pirate.")
    assert run_command(chat, "/system").text == "system message: Talk like a pirate."
    chat.exchanges = [Exchange("Hi", "Ahoy")]
    assert "Talk like a pirate." in chat.ask("Hi").rendered
    assert "read anew" in run_command(chat, "/system Talk like a king.").text
    rendered = chat.ask("Hi").rendered
    assert "king" in rendered
    assert "pirate" not in rendered
    assert "Ahoy" in rendered
    assert run_command(chat, "/reset").text == "new conversation (1 exchange forgotten, system message kept)"
    assert "king" in chat.ask("Hi").rendered
    run_command(chat, "/system off")
    assert "king" not in chat.ask("Hi").rendered


def test_a_template_that_refuses_a_system_message(session: TargetSession, model: Model) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}hi"
    chat = Chat(Engine(session), GREEDY, template=ChatTemplate(source, model))
    with pytest.raises(UsageError, match="no system"):
        run_command(chat, "/system Be brief.")
    assert chat.system is None


# -- files ---------------------------------------------------------------------------------------------------------------


def test_save_and_load(chat: Chat, tmp_path: Path) -> None:
    chat.set_system("Sei kurz. 短く")
    chat.exchanges = [Exchange("Grüße 🐈", "Hallo\n\n```\n\tx\n```"), Exchange("b", "")]
    path = tmp_path / "a talk.json"
    assert "saved 2 exchanges" in run_command(chat, f"/save {path}").text
    assert json.loads(path.read_text(encoding="utf-8"))["messages"][0] == {"role": "user", "content": "Grüße 🐈"}
    before = [(e.user, e.assistant) for e in chat.exchanges]
    chat.exchanges.append(Exchange("c", "d"))
    assert "(replaced)" in run_command(chat, "/save").text  # the same file again
    chat.undo()
    chat.save(path)
    chat.reset()
    chat.set_system(None)
    assert "loaded 2 exchanges" in run_command(chat, f"/load {path}").text
    assert [(e.user, e.assistant) for e in chat.exchanges] == before
    assert chat.system == "Sei kurz. 短く"
    assert [p.name for p in tmp_path.iterdir()] == ["a talk.json"]
    turn = say(chat, "Hi")
    assert turn.kept
    assert "Grüße 🐈" in turn.rendered


def test_load_takes_the_system_message_from_the_messages(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "\\ud800"},'
                    ' {"role": "assistant", "content": "A"}]}')  # fmt: skip
    chat.load(path)
    assert chat.system == "S"
    assert chat.messages()[1:] == [{"role": "user", "content": "?"}, {"role": "assistant", "content": "A"}]


BROKEN = {
    "empty": "",
    "text": "hello",
    "list": "[]",
    "no messages": '{"system": "x"}',
    "messages": '{"messages": {"role": "user"}}',
    "message": '{"messages": ["hi"]}',
    "content": '{"messages": [{"role": "user", "content": [1]}]}',
    "order": '{"messages": [{"role": "assistant", "content": "x"}]}',
    "open": '{"messages": [{"role": "user", "content": "x"}]}',
    "role": '{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}',
    "system": '{"system": 3, "messages": []}',
    "deep": "[" * 100_000,
    "nul": "\0",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_changes_nothing(chat: Chat, tmp_path: Path, kind: str) -> None:
    chat.exchanges = [Exchange("a", "b")]
    path = tmp_path / "broken.json"
    path.write_text(BROKEN[kind])
    with pytest.raises(UsageError) as raised:
        run_command(chat, f"/load {path}")
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    assert chat.exchanges == [Exchange("a", "b")]
    with pytest.raises(UsageError, match="left as it is"):
        run_command(chat, f"/save {path}")
    assert path.read_text() == BROKEN[kind]


def test_files_out_of_reach(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"messages": "\xe9"}')
    for name in ("none.json", ".", "latin.json", "latin.json/x", "x" * 300):
        with pytest.raises(UsageError):
            run_command(chat, f"/load {tmp_path / name}")
    for name in (".", "none/x.json", "latin.json/x", "x" * 300):
        with pytest.raises(UsageError):
            run_command(chat, f"/save {tmp_path / name}")
    assert [p.name for p in tmp_path.iterdir()] == ["latin.json"]


# -- the status line -----------------------------------------------------------------------------------------------------


def test_the_status_line_fits(chat: Chat) -> None:
    turn = chat.ask("Hi")
    assert status_line(chat, turn, 80) == f"reading {len(turn.tokens)} tokens"
    turn.ids = [1] * 40
    turn.stats = Stats(n_generated=40, n_verify=20, n_drafted=60, n_accepted=20, t_step=2.0)
    used = f"{len(turn.tokens) + 40}/512"
    assert status_line(chat, turn, 80) == f"20.0 tok/s · 33% accepted · 2.00 per verify · context {used}"
    assert status_line(chat, turn, 40) == f"20.0 tok/s · 33% · 2.00 · {used}"
    chat.exchanges = [Exchange("Hi", "x", Known("", turn.tokens + turn.ids))]
    turn.kept, turn.stop = True, "interrupted"
    assert status_line(chat, turn, 80) == f"stopped · 20.0 tok/s · 33% accepted · 2.00 per verify · context {used}"
    for width in range(10, 120):
        assert len(status_line(chat, turn, width)) <= width
    chat.set_drafting(False)
    turn.stats = Stats(n_generated=1, t_step=1)
    assert "drafting off" in status_line(chat, turn, 80)


def test_a_long_prompt_is_read_in_pieces(chat: Chat) -> None:
    chat.system = "A list: " + " ".join(map(str, range(100)))
    turn = chat.ask("Hi")
    assert len(turn.tokens) > 3 * 64  # the batch of this session
    seen = [(turn.n_read, bool(step.pieces)) for step in chat.stream(turn)]
    reads = [n for n, pieces in seen if not pieces]
    assert len(reads) >= 2
    assert all(b - a == 64 for a, b in itertools.pairwise(reads))
    assert turn.stats.n_prompt == len(turn.tokens)
    assert len(turn.tokens) - 64 < turn.stats.n_prompt_computed < len(turn.tokens)
    chat.reset()
    chat.system = "Another list: " + " ".join(map(str, range(100)))
    turn = chat.ask("Hi")
    answers = iter([False, True])
    assert len(list(chat.stream(turn, lambda: next(answers)))) == 1
    assert (turn.kept, turn.stop) == (False, "interrupted")
    assert say(chat, "Hi").kept


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\r\n\tc\x9b1m\x7f日本") == "a[2Jb\n\tc1m日本"
