"""The slash commands of a chat, as functions from text to text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localspec.chat.conversation import Chat
from localspec.errors import UsageError
from localspec.report import rate, stats_lines


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command has to say, and whether it ends the chat."""

    text: str
    leave: bool = False


def run_command(chat: Chat, line: str) -> Reply:
    """Do what a line that begins with a slash says. Raises UsageError: one line, nothing changed."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name.lower())
    if command is None:
        raise UsageError(f"unknown command {name}: /help lists them")
    return command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> Reply:
    heads = {name: f"{name} {COMMANDS[name].argument}".rstrip() for name in COMMAND_NAMES}
    width = max(map(len, heads.values()))
    lines = [f"{head:<{width}}  {COMMANDS[name].help}" for name, head in heads.items()]
    lines += ["", *KEYS]
    return Reply("\n".join(lines))


def _system(chat: Chat, argument: str) -> Reply:
    if not argument:
        return Reply(f"system message: {chat.system}" if chat.system else "there is no system message")
    if argument.lower() == "off":
        chat.set_system(None)
        return Reply("system message removed" + _goes_on(chat))
    chat.set_system(argument)
    return Reply("system message set" + _goes_on(chat))


def _goes_on(chat: Chat) -> str:
    return "; the conversation is read anew with the next message" if chat.exchanges else ""


def _reset(chat: Chat, argument: str) -> Reply:
    n = chat.reset()
    return Reply(f"new conversation ({_exchanges(n)} forgotten{', system message kept' if chat.system else ''})")


def _undo(chat: Chat, argument: str) -> Reply:
    text = " ".join(chat.undo().user.split())
    return Reply(f"taken back: {text if len(text) <= 50 else text[:49] + '…'}")


def _save(chat: Chat, argument: str) -> Reply:
    path = _path(chat, argument, "/save FILE")
    replaced = chat.save(path)
    return Reply(f"saved {_exchanges(len(chat.exchanges))} to {path}{' (replaced)' if replaced else ''}")


def _load(chat: Chat, argument: str) -> Reply:
    path = _path(chat, argument, "/load FILE")
    chat.load(path)
    system = ", with a system message" if chat.system else ""
    return Reply(f"loaded {_exchanges(len(chat.exchanges))} from {path}{system}")


def _path(chat: Chat, argument: str, usage: str) -> Path:
    if not argument:
        if chat.file is None:
            raise UsageError(f"which file? {usage}")
        return chat.file
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # ~nobody
        raise UsageError(f"{argument}: {error}") from error


def _draft(chat: Chat, argument: str) -> Reply:
    wanted = argument.lower()
    if wanted not in ("", "on", "off"):
        raise UsageError(f"/draft on or /draft off, not '{argument}'")
    if wanted:
        chat.set_drafting(wanted == "on")
    if chat.drafter_name is None:
        return Reply("drafting is off: there is no drafter in this session")
    return Reply(f"drafting is {'on' if chat.drafting else 'off'} (drafter {chat.drafter_name})")


def _temp(chat: Chat, argument: str) -> Reply:
    if argument:
        chat.set_temperature(argument)
    return Reply(f"temperature {chat.sampling.temperature:g}")


def _stats(chat: Chat, argument: str) -> Reply:
    if chat.last is None:
        return Reply("nothing was asked yet")
    turn, total = chat.last, chat.total
    lines = ["last answer", *(f"  {line}" for line in stats_lines(turn.stats, turn.stop, turn.stats.n_drafted > 0))]
    lines += [
        f"all {chat.n_answers} answers" if chat.n_answers != 1 else "the only answer",
        f"  prompts {total.n_prompt} tokens ({total.n_prompt_computed} computed), generated {total.n_generated} tokens at "
        f"{rate(total.n_generated, total.t_generate):.1f} tok/s",
    ]
    if total.n_drafted:
        share, gain = f"{total.acceptance:.2f} of {total.n_drafted}", f"{total.tokens_per_verify:.2f}"
        lines.append(f"  accepted {share} drafted tokens, {gain} tokens per verify")
    forgotten = f", {_exchanges(chat.first)} no longer sent" if chat.first else ""
    lines.append(
        f"context {chat.n_used} of {chat.engine.session.n_ctx} tokens, {_exchanges(len(chat.exchanges))}{forgotten}; "
        f"seed {chat.sampling.seed}, temperature {chat.sampling.temperature:g}"
    )
    return Reply("\n".join(lines))


def _quit(chat: Chat, argument: str) -> Reply:
    return Reply("", leave=True)


def _exchanges(n: int) -> str:
    return f"{n} exchange{'' if n == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: what it does, how its argument is called, and its line in /help."""

    run: Callable[[Chat, str], Reply]
    argument: str
    help: str


COMMANDS = {
    "/help": Command(_help, "", "this list"),
    "/system": Command(_system, "[TEXT]", "set the system message, or show it; off removes it"),
    "/reset": Command(_reset, "", "begin a new conversation"),
    "/undo": Command(_undo, "", "take the last question and its answer back"),
    "/save": Command(_save, "FILE", "write the conversation as JSON"),
    "/load": Command(_load, "FILE", "go on with a saved conversation"),
    "/draft": Command(_draft, "on|off", "draft, or decode plainly"),
    "/temp": Command(_temp, "[X]", "set the temperature, or show it; 0 is greedy"),
    "/stats": Command(_stats, "", "counts and times of the answers so far"),
    "/quit": Command(_quit, "", "leave (also /exit)"),
}
COMMAND_NAMES = tuple(COMMANDS)
COMMANDS["/exit"] = COMMANDS["/quit"]

KEYS = (
    "Enter sends. Alt-Enter, Esc Enter or a backslash before Enter begins a new line.",
    "Ctrl-C ends an answer and keeps what was said; at the prompt it clears the line.",
    "Ctrl-D leaves. Up and down go through what you typed before.",
    "A line that begins with a blank is a message, even where a slash follows.",
)
