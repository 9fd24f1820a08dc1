"""Drafts for a target, found on the hub by the target's identity: the tags of `localspec push` bring candidates, what their
cards say of the target decides."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from localspec import drafters
from localspec.errors import FetchError, PairingError
from localspec.gguf_file import GGUFFile, require_model
from localspec.gguf_format import clip
from localspec.hub import Hub, Spec
from localspec.share.artefact import target_tag, tokenizer_tag
from localspec.share.card import KEY, TAG
from localspec.speculator import TargetIdentity

_AT_MOST = 200  # candidates looked at; the hub gives them by the page


@dataclass(frozen=True)
class Candidate:
    """A draft on the hub, as its card describes it: nothing of that is checked before it is here. `n_bytes` 0 and
    `tokens_per_verify` 0: not told. The latter was measured by whoever made it, on texts of their choice."""

    repo: str
    file: str
    method: str
    n_bytes: int
    tokens_per_verify: float
    downloads: int

    @property
    def spec(self) -> str:
        """What `pull` and ``-hfd`` call it."""
        return f"{self.repo}:{self.file}" if self.file else self.repo


def find(target: GGUFFile) -> list[Candidate]:
    """The drafts on the hub that were made for ``target`` or speak in its tokens, the likeliest to pay first: heads before
    small models, then by tokens per verify, then by downloads.

    Raises:
        FetchError: the hub can't be asked, or knows none; the message says what to do. It never holds the token.
    """
    require_model(target, "target")
    identity = TargetIdentity.of(target)
    hub = Hub("any/repository")
    if hub.offline:
        raise FetchError("HF_HUB_OFFLINE is set: the hub can't be searched; name a draft that is in the cache with -hfd")
    found: dict[str, Candidate] = {}
    try:
        hub.has_token()
        for wanted in ([TAG, target_tag(identity)], [TAG, f"{TAG}-lm", tokenizer_tag(identity)]):
            for info in itertools.islice(hub.api.list_models(filter=wanted, cardData=True, limit=_AT_MOST), _AT_MOST):
                hit = candidate(info, identity)
                if hit is not None:
                    found[hit.repo] = hit
    except hub.failures as error:
        raise FetchError(hub.diagnose(error, hub.repo).text.replace(hub.repo, "the search for drafts")) from error
    return sorted(found.values(), key=lambda c: (c.method == "lm", -c.tokens_per_verify, -c.downloads, c.repo))


def candidate(info: Any, identity: TargetIdentity) -> Candidate | None:
    """A search's hit, unless its card is about something else, or not in a form that we know."""
    card = info.card_data.to_dict() if hasattr(info.card_data, "to_dict") else info.card_data
    about = card.get(KEY) if isinstance(card, Mapping) else None
    if not isinstance(about, Mapping) or about.get("kind") != "draft" or not isinstance(about.get("target"), Mapping):
        return None
    method, file, target = about.get("method"), about.get("file", ""), about["target"]
    if not isinstance(method, str) or method not in drafters.names():
        return None
    if target.get("tokenizer") != identity.tokenizer_hash:
        return None
    shape = (target.get("layers"), target.get("width"), target.get("vocabulary"))
    if method != "lm" and shape != (identity.n_layer, identity.n_embd, identity.n_vocab):
        return None
    try:
        Spec.parse(info.id, "pull")
    except FetchError:
        return None
    good = isinstance(file, str) and file.isprintable() and PurePosixPath(file).name == file and file.endswith(".gguf")
    per_verify = _at_least_0(about.get("tokens_per_verify"))
    return Candidate(
        info.id, file if good else "", method, int(_at_least_0(about.get("bytes"))), min(per_verify, 100.0),
        int(_at_least_0(info.downloads)),
    )  # fmt: skip


def _at_least_0(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
    return float(value) if number else 0.0


def none_found(target: GGUFFile, path: str, shipped: bool) -> PairingError:
    """The error where `find` gave nothing: what to do instead."""
    name = clip(target.name, 80)
    if shipped:
        return PairingError(f"the hub has no draft for {name}; localspec comes with one: localspec run --target {path}")
    tag = target_tag(TargetIdentity.of(target))
    return PairingError(
        f"the hub has no draft for {name} ({tag}); train one: localspec data --target {path} --self 500 -o data, then "
        f"localspec train eagle3 --target {path} --data data -o run"
    )
