"""Chat templates: rendering, the beginning-of-text token, and templates that refuse or break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.errors import ModelFileError, UsageError
from localspec.model import Model
from localspec.template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[Model]:
    loaded = Model(smollm2)
    yield loaded
    loaded.close()


def test_the_models_own_template(model: Model) -> None:
    template = ChatTemplate.of(model)
    assert template is not None
    text = template.render(HELLO)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")
    tokens = template.encode(HELLO)
    assert model.tokenizer.decode(tokens, special=True) == text
    assert "You are Bob" in template.render([{"role": "system", "content": "You are Bob"}, *HELLO])


def test_the_beginning_of_text_stands_once(model: Model) -> None:
    bos = model.tokenizer.bos
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", model)
    tokens = template.encode(HELLO)
    assert tokens.count(bos) == 1


def test_what_templates_in_the_wild_use(model: Model) -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 5 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') }}{% if add_generation_prompt %}>{% endif %}"
    )
    text = ChatTemplate(source, model).render([{"role": "user", "content": "<é>"}])
    assert '"<é>"' in text
    assert text.endswith(">")


def test_a_template_that_refuses(model: Model) -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", model)
    with pytest.raises(UsageError, match="roles must alternate"):
        template.render(HELLO)


@pytest.mark.parametrize("source", ["{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_a_template_that_fails(model: Model, source: str) -> None:
    with pytest.raises(UsageError):
        ChatTemplate(source, model).render(HELLO)


def test_a_broken_template(model: Model) -> None:
    with pytest.raises(ModelFileError, match="--raw"):
        ChatTemplate("{% if %}", model)


def test_templates_are_sandboxed(model: Model) -> None:
    with pytest.raises(UsageError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", model).render(HELLO)
