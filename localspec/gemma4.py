"""How a Gemma 4 assistant hangs on to its target, from the two files alone.

The assistant's windowed layers read the keys and values of the target's last windowed layer that has its own, its full
layers those of the last full one. llama.cpp finds them as the target's layers n - 2 and n - 1, or, where the target's last
layers share keys and values, as the last two that don't; with any other order of layers it would read what is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.errors import ModelFileError, PairingError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import clip
from localspec.memory import windowed_layers
from localspec.speculator import KeyValue, SpeculatorConfig, TargetIdentity

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


def taps_read(target: GGUFFile) -> tuple[int, int, int]:
    """The taps from which an assistant can be trained: what goes into the two layers whose keys it reads, and the state
    after the last norm. Raises PairingError."""
    return (*layers_read(target), target.n_layer + 1)


def assistant_config(
    target: GGUFFile, windowed: Sequence[bool], n_embd: int, n_head: int, n_ff: int, rms_eps: float, depth: int
) -> SpeculatorConfig:
    """An assistant for this target: what has to agree with the target is the target's. Raises PairingError."""
    n_kv = {kind: target.n_head_kv[layer] for kind, layer in zip((True, False), layers_read(target))}
    full, window = head_sizes(target, False)[0], head_sizes(target, True)[0]

    def number(key: str, default: float) -> float:
        return float(target.get(f"{target.architecture}.{key}", (int, float), default))

    extra: dict[str, KeyValue] = {
        "nextn_predict_layers": len(windowed),
        "embedding_length_out": target.n_embd,
        "attention.head_count_kv": [n_kv[bool(kind)] for kind in windowed],
        "attention.key_length_swa": window,
        "attention.value_length_swa": window,
        "attention.sliding_window_pattern": [int(kind) for kind in windowed],
        "attention.shared_kv_layers": len(windowed),
        "rope.dimension_count": int(number("rope.dimension_count", full)),
        "rope.dimension_count_swa": int(number("rope.dimension_count_swa", window)),
        "rope.freq_base_swa": number("rope.freq_base_swa", 10000.0),
    }
    return SpeculatorConfig(
        method="mtp",
        target=TargetIdentity.of(target),
        taps=taps_read(target),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_kv[False],
        head_dim=full,
        n_ff=n_ff,
        n_layer=len(windowed),
        rms_eps=rms_eps,
        rope_base=number("rope.freq_base", 10000.0),
        depth=depth,
        window=target.sliding_window,
        n_ctx_train=target.n_ctx_train,
        architecture=ARCHITECTURE,
        extra=extra,
    )


def windowed_of(config: SpeculatorConfig) -> list[bool]:
    """For each layer of an assistant, whether it is windowed. Raises ModelFileError where its record doesn't say."""
    pattern = config.extra.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != config.n_layer:
        raise ModelFileError("an MTP assistant without a list of its layers' kinds (attention.sliding_window_pattern)")
    return [bool(kind) for kind in pattern]


def size_of(config: SpeculatorConfig, windowed: bool) -> int:
    """Elements of a head in an assistant's windowed or full layers."""
    size = config.extra.get("attention.key_length_swa")
    return size if windowed and isinstance(size, int) else config.head_dim
