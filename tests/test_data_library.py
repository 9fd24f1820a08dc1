"""Texts from a standard library: what is asked, what is answered, what is left out."""

from __future__ import annotations

from pathlib import Path

from localspec.data.library import conversations

MODULE = '''"""Tools for counting cats, worth an answer by its length: the cats are counted one by one, no cat twice."""


def count(cats):
    """Count the cats."""
    seen = set()
    for cat in cats:
        seen.add(cat)
    return len(seen)


class House:
    def enter(self, cat):
        if cat in self.cats:
            raise ValueError("this cat is in the house already")
        self.cats.append(cat)
        for other in self.cats:
            other.greet(cat)
        self.door.close()
        return self
'''
PARAGRAPHS = "\n\n".join(f"Paragraph {i} about assignment. " + "word " * 120 for i in range(4))
TOPICS = f"topics = {{'assignment': {PARAGRAPHS!r}}}\n"


def test_functions_and_documentation_become_conversations(tmp_path: Path) -> None:
    (tmp_path / "cats.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_cats.py").write_text(MODULE.replace("cat", "dog"))
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(TOPICS)
    found = {c.messages[0].content: c for c in conversations(tmp_path)}
    assert set(found) == {
        "What is the Python module cats for?", "Write a Python function `count`. Count the cats.",
        "Complete this Python function:\n```python\ndef enter(self, cat):\n    if cat in self.cats:\n```",
        "Explain assignment in Python.", "Explain assignment in Python, part 2.",
    }  # fmt: skip
    code = found["Write a Python function `count`. Count the cats."]
    assert code.source == "python-code"
    assert code.where == f"{tmp_path / 'cats.py'} line 4"
    answer = code.messages[1].content
    assert answer.startswith("```python\ndef count(cats):\n")
    assert answer.endswith("return len(seen)\n```")
    assert [c.key(True) for c in conversations(tmp_path)] == [c.key(True) for c in conversations(tmp_path)]


def test_the_installed_library_has_plenty() -> None:
    found = conversations()
    assert len(found) > 3000
    assert {c.source for c in found} == {"python-code", "python-prose"}
