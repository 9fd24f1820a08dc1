"""How a Gemma 4 assistant hangs on to its target, from the two files alone.

The assistant's windowed layers read the keys and values of the target's last windowed layer that has its own, its full
layers those of the last full one. llama.cpp finds them as the target's layers n - 2 and n - 1, or, where the target's last
layers share keys and values, as the last two that don't; with any other order of layers it would read what is not there.
"""

from __future__ import annotations

from localspec.errors import PairingError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import clip
from localspec.memory import windowed_layers

ARCHITECTURE = "gemma4-assistant"


def _kind(windowed: bool) -> str:
    return "windowed" if windowed else "full"


def layers_read(target: GGUFFile) -> tuple[int, int]:
    """(windowed, full): the target's layers whose keys and values an assistant reads. Raises PairingError where there are
    none."""
    fault = _layers_fault(target)
    if fault is not None:
        raise PairingError(f"{clip(target.path.name, 120)} {fault}")
    n_own = target.n_layer - target.get("gemma4.attention.shared_kv_layers", int, 0)
    return n_own - 2, n_own - 1


def _layers_fault(target: GGUFFile) -> str | None:
    if target.architecture != "gemma4":
        return f"is a {clip(target.architecture)} model; an MTP assistant reads the cache of a gemma4"
    n, windowed = target.n_layer, windowed_layers(target)
    n_own = n - target.get("gemma4.attention.shared_kv_layers", int, 0)
    if n_own < 2:
        return f"has {n_own} layers with keys and values of their own; an MTP assistant reads two"
    for i in {n_own, n}:
        if windowed[i - 2 : i] != [True, False]:
            return f"has a {_kind(windowed[i - 2])} and a {_kind(windowed[i - 1])} layer where an MTP assistant expects a " \
                   "windowed and a full one"  # fmt: skip
    return None


def head_sizes(gguf: GGUFFile, windowed: bool) -> tuple[int, int]:
    """(key, value) length of a kind of layer."""
    key, value = gguf.key_length, gguf.value_length
    if not windowed:
        return key, value
    arch = gguf.architecture
    return gguf.get(f"{arch}.attention.key_length_swa", int, key), gguf.get(f"{arch}.attention.value_length_swa", int, value)


def misfit(target: GGUFFile, draft: GGUFFile) -> str | None:
    """What keeps this assistant from this target, as the end of a sentence about the pair; None if nothing. llama.cpp would
    read past the end of the cache, or abort, for most of these."""
    fault = _layers_fault(target)
    if fault is not None:
        return f"the target {fault}"
    get = draft.get
    width = get(f"{ARCHITECTURE}.embedding_length_out", int, draft.n_embd)
    if width != target.n_embd:
        return f"it was made for a hidden size of {width}, the target has {target.n_embd}"
    if draft.n_embd == width:
        return f"its own width is the target's ({width}), which llama.cpp does not take"
    if get(f"{ARCHITECTURE}.nextn_predict_layers", int, 0) != draft.n_layer:
        return f"it does not count its {draft.n_layer} layers as next-token layers ({ARCHITECTURE}.nextn_predict_layers)"
    windowed = windowed_layers(draft)
    if not any(windowed):
        return "it has no windowed layer, and llama.cpp expects one"
    layers = dict(zip((True, False), layers_read(target)))
    for i, kind in enumerate(windowed):
        mine = (draft.n_head_kv[i], *head_sizes(draft, kind))
        theirs = (target.n_head_kv[layers[kind]], *head_sizes(target, kind))
        if mine != theirs:
            return (
                f"its {_kind(kind)} layer {i} reads {mine[0]} heads of {mine[1]}/{mine[2]} elements, the target's layer "
                f"{layers[kind]} has {theirs[0]} of {theirs[1]}/{theirs[2]}"
            )
        if draft.n_head[i] % mine[0]:
            return f"its layer {i} has {draft.n_head[i]} heads, which can't share {mine[0]}"
    return None
