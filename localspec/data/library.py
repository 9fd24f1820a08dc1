"""Conversations about Python's standard library, from the one that is installed: code and prose that every machine has.

For `localspec extract`, where a draft's own answers are few: reading a text costs a third of writing one. Functions are
asked for by the first line of their documentation, or by their beginning; longer documentation by its name. In the same
order on every machine with the same Python.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from localspec.data.conversations import Conversation, Message, unique

NAME = "python:"
_LEFT_OUT = {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages", "turtledemo", "encodings",
             "ensurepip", "pydoc_data", "__pycache__"}  # fmt: skip
_SHORTEST, _LONGEST = 80, 2600  # characters of an answer
_TOPIC = 1800  # a topic of the language reference is cut into parts of about so many
_LINES = range(4, 51)  # of a function


def conversations(folder: Path | None = None) -> list[Conversation]:
    """Of the modules below `folder`, by default the standard library; in a mixed but fixed order."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if _LEFT_OUT.isdisjoint(relative.parts):
            found += list(_of_module(path, relative))
    found += list(_topics(folder / "pydoc_data" / "topics.py"))
    return sorted(unique(found, str(folder)), key=lambda c: hashlib.sha256(c.key(whole=True).encode()).digest())


def _made(kind: str, asked: str, answer: str, where: str) -> Iterator[Conversation]:
    if _SHORTEST < len(answer) < _LONGEST and not any("\ud800" <= c <= "\udfff" for c in answer):
        yield Conversation((Message("user", asked), Message("assistant", answer)), f"python-{kind}", where)


def _of_module(path: Path, relative: Path) -> Iterator[Conversation]:
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    name = relative.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    about = ast.get_docstring(tree)
    if about:
        yield from _made("prose", f"What is the Python module {name} for?", about, f"{path} line 1")
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        where, about = f"{path} line {node.lineno}", ast.get_docstring(node)
        if about and len(about) > 300:
            yield from _made("prose", f"Explain `{node.name}` in Python.", about, where)
        own = lines[node.lineno - 1 : node.end_lineno]
        if not isinstance(node, ast.FunctionDef) or len(own) not in _LINES:
            continue
        code = f"```python\n{textwrap.dedent(chr(10).join(own))}\n```"
        if about:
            yield from _made("code", f"Write a Python function `{node.name}`. {about.splitlines()[0]}", code, where)
        elif len(own) >= 8:
            start = code.removesuffix("\n```").split("\n")[: 1 + max(2, len(own) // 4)]
            asked = "Complete this Python function:\n" + "\n".join(start) + "\n```"
            yield from _made("code", asked, code, where)


def _topics(path: Path) -> Iterator[Conversation]:
    """The language reference, as `help()` shows it."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    for table in tables:
        for name, text in ast.literal_eval(table).items():
            parts = [""]
            for paragraph in text.split("\n\n"):
                if parts[-1] and len(parts[-1]) + len(paragraph) > _TOPIC:
                    parts.append("")
                parts[-1] += paragraph + "\n\n"
            for i, part in enumerate(parts, 1):
                which = f", part {i}" if i > 1 else ""
                yield from _made("prose", f"Explain {name} in Python{which}.", part.strip(), f"{path}, {name}")
