"""States and the teacher's view for text that exists already: prefill in place of generation, the same samples.

With our kernels the rows are those of generation, bit for bit; llama.cpp's own give nearly the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from localspec.data.conversations import Conversation
from localspec.data.mask import Masked, Renderer, render
from localspec.data.shards import Sample
from localspec.errors import UsageError
from localspec.target import TargetSession
from localspec.topk import Tops, top_k


def extract(
    session: TargetSession,
    conversations: Iterable[Conversation],
    done: set[str],
    teacher_k: int = 32,
    keep_thinking: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Sample, str]]:
    """(sample, key) for every conversation that is not `done`, cut to the session's context.

    Raises UsageError that names the conversation in which nothing counts.
    """
    renderer = Renderer(session.model)
    for conversation in conversations:
        key = conversation.key(whole=True) + "#text"
        if key in done:
            continue
        for number, masked in enumerate(render(conversation, renderer, session.n_ctx)):
            mask = masked.mask(renderer.tokenizer, keep_thinking)
            if not mask.any():
                raise UsageError(f"{conversation.where}: nothing but thinking in it (an empty mask): use --thinking keep")
            if stopped():
                return
            yield read_states(session, masked, mask, teacher_k, conversation.source), key + (f".{number}" if number else "")


def read_states(session: TargetSession, masked: Masked, mask: np.ndarray, teacher_k: int, source: str) -> Sample:
    """Tokens, of which at least one counts, as a sample: computed in sequence 0, whose cache is given up."""
    n = len(masked.tokens)
    wanted = np.flatnonzero(mask) - 1
    taps = np.zeros((n, len(session.settings.taps), session.model.n_embd), np.float32)
    tops: list[Tops] = []
    session.rollback(0, 0)
    for start in range(0, n, session.n_batch):
        end = min(n, start + session.n_batch)
        rows = session.decode([(0, masked.tokens[start:end])])
        if rows.taps is not None:
            taps[start:end] = rows.taps
        here = wanted[(wanted >= start) & (wanted < end)] - start
        if len(here):
            tops.append(top_k(np.ascontiguousarray(rows.logits[here]), teacher_k))
    return Sample(
        np.array(masked.tokens, np.int32), mask, taps, wanted, np.concatenate([t.ids for t in tops]),
        np.concatenate([t.logits for t in tops]), np.concatenate([t.lse for t in tops]), source,
    )  # fmt: skip
