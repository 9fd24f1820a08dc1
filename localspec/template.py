"""Chat templates: the Jinja text that a GGUF carries, rendered the way its authors meant.

The environment (trimmed blocks, loop controls, ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes) is
the one that Hugging Face's ``apply_chat_template`` documents; it is sandboxed, because templates come from strangers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.errors import ModelFileError, UsageError
from localspec.model import Model

Message = Mapping[str, str]


class ChatTemplate:
    """The chat template of one model. `ChatTemplate.of(model)` is None where the file has none (a base model)."""

    def __init__(self, source: str, model: Model):
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self._model = model
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"{model.path}: its chat template is broken ({error}): use --raw") from error

    @classmethod
    def of(cls, model: Model) -> ChatTemplate | None:
        """The template of `model`, or None."""
        source = model.gguf.chat_template
        return cls(source, model) if source else None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises UsageError with the template's own words where it refuses the roles."""
        from jinja2 import TemplateError

        tokenizer = self._model.tokenizer

        def text(token: int) -> str:
            return tokenizer.decode([token], special=True) if token >= 0 else ""

        context: dict[str, Any] = {
            "messages": [dict(m) for m in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": text(tokenizer.bos),
            "eos_token": text(tokenizer.eos),
        }
        try:
            return self._template.render(context)
        except TemplateError as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as error:
            raise UsageError(f"the model's chat template fails on this conversation ({error}): use --raw") from error

    def encode(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. The beginning-of-text token stands once, whether the template writes it or not."""
        tokenizer = self._model.tokenizer
        tokens = tokenizer.encode(self.render(messages, add_generation_prompt), add_special=True, parse_special=True)
        if tokenizer.add_bos and tokens[:2] == [tokenizer.bos, tokenizer.bos]:
            del tokens[0]
        return tokens


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
