"""Which pairs fit and why not, who can roll back, and what memory they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.errors import PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.memory import recurrent_layers, windowed_layers
from localspec.pairing import can_draft, check_pair, drafter_for, memory_needed, rollback_of
from tests import gguf_maker

Variant = Callable[..., GGUFFile]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.tiny_llama(tmp_path_factory.mktemp("pairs") / "target.gguf")


@pytest.fixture
def variant(tmp_path: Path) -> Variant:
    """A draft with other tokenizer keys than the default ones."""

    def make(put: Mapping[str, Any] | None = None, vocab: int = 320, drop: tuple[str, ...] = ()) -> GGUFFile:
        keys = gguf_maker.tokenizer_keys(vocab) | dict(put or {})
        keys = {k: v for k, v in keys.items() if k not in drop}
        n = len(list(tmp_path.iterdir()))
        return GGUFFile.open(gguf_maker.tiny_llama(tmp_path / f"draft{n}.gguf", tokenizer=keys, n_layer=1), "draft")

    return make


def misfit(target: GGUFFile, draft: GGUFFile) -> str:
    with pytest.raises(PairingError) as caught:
        check_pair(target, draft)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{draft.path.name} can't draft for {target.path.name}: ")
    return text


def tokens_with(changes: Mapping[int, str], vocab: int = 320) -> dict[str, Any]:
    texts = list(gguf_maker.tokenizer_keys(vocab)["tokenizer.ggml.tokens"])
    for i, text in changes.items():
        texts[i] = text
    return {"tokenizer.ggml.tokens": texts}


# -- tokenizers -------------------------------------------------------------------------------------------------------


def test_same_tokenizer_fits(tiny: Path, variant: Variant) -> None:
    target, draft = GGUFFile.open(tiny), variant()
    check_pair(target, draft)
    check_pair(draft, target)
    assert drafter_for(draft) == "lm"


def test_names_the_first_token_that_differs(tiny: Path, variant: Variant) -> None:
    text = misfit(GGUFFile.open(tiny), variant(tokens_with({270: "north", 280: "south"})))
    assert "token 270 is" in text
    assert "'north' in the draft" in text
    assert "south" not in text


def test_a_newline_in_a_token_stays_one_line(tiny: Path, variant: Variant) -> None:
    assert r"two\\nlines" in misfit(GGUFFile.open(tiny), variant(tokens_with({270: "two\nlines"})))


def test_padding_at_the_end_may_differ(tiny: Path, variant: Variant) -> None:
    target = GGUFFile.open(tiny)
    for vocab in (307, 308, 400):
        draft = variant(vocab=vocab)
        check_pair(target, draft)
        check_pair(draft, target)
    check_pair(target, variant(tokens_with({310: "<|reserved_special_token_7|>", 319: "<unused3>"})))


def test_padding_is_not_believed_where_the_type_says_normal(tiny: Path, variant: Variant) -> None:
    types = gguf_maker.tokenizer_keys(400)["tokenizer.ggml.token_type"].copy()
    types[399] = gguf_maker.NORMAL
    text = misfit(GGUFFile.open(tiny), variant({"tokenizer.ggml.token_type": types}, vocab=400))
    assert "320 (target) and 400 (draft)" in text
    assert "token 399, '[PAD399]', is only in the draft" in text


def test_a_real_token_beyond_the_shorter_vocabulary_is_named(tiny: Path, variant: Variant) -> None:
    longer = variant(tokens_with({350: "<|tool|>"}, 400) | {"tokenizer.ggml.token_type": _types(400, {350: 4})}, vocab=400)
    assert "token 350, '<|tool|>', is only in the draft" in misfit(GGUFFile.open(tiny), longer)
    assert "token 350, '<|tool|>', is only in the target" in misfit(longer, GGUFFile.open(tiny))


def _types(vocab: int, changes: Mapping[int, int]) -> np.ndarray:
    types = gguf_maker.tokenizer_keys(vocab)["tokenizer.ggml.token_type"].copy()
    for i, kind in changes.items():
        types[i] = kind
    return types


def test_a_difference_inside_the_padding_range_of_one_only_is_found(tiny: Path, variant: Variant) -> None:
    real = variant(tokens_with({312: "<|tool|>"}) | {"tokenizer.ggml.token_type": _types(320, {312: 3})})
    assert "token 312 is '[PAD312]' in the target and '<|tool|>' in the draft" in misfit(GGUFFile.open(tiny), real)


@pytest.mark.parametrize(
    ("put", "says"),
    [
        ({"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizers differ (target gpt-2, draft qwen2)"),
        ({"tokenizer.ggml.eos_token_id": 304}, "the eos token differs (target 306 '<|im_end|>', draft 304"),
        ({"tokenizer.ggml.bos_token_id": 305}, "the bos token differs (target 304 '<|endoftext|>', draft 305"),
        ({"tokenizer.ggml.add_bos_token": True}, "only the draft puts a bos token"),
    ],
)
def test_what_else_must_agree(tiny: Path, variant: Variant, put: dict[str, Any], says: str) -> None:
    assert says in misfit(GGUFFile.open(tiny), variant(put))


def test_what_need_not_agree(tiny: Path, variant: Variant) -> None:
    target = GGUFFile.open(tiny)
    check_pair(target, variant({"tokenizer.ggml.padding_token_id": 3, "tokenizer.chat_template": "{{ other }}"}))
    check_pair(target, variant(drop=("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")))


def test_kinds_of_tokenizer(tiny: Path, gemma3: Path) -> None:
    assert "different kinds (target gpt2, draft llama)" in misfit(GGUFFile.open(tiny), GGUFFile.open(gemma3))


def test_real_models_that_do_not_fit(smollm2: Path, gemma3: Path) -> None:
    misfit(GGUFFile.open(smollm2), GGUFFile.open(gemma3))
    misfit(GGUFFile.open(gemma3), GGUFFile.open(smollm2))


def test_random_draft_has_exactly_the_tokenizer(smollm2: Path, tmp_path: Path) -> None:
    draft = GGUFFile.open(gguf_maker.random_draft(tmp_path / "draft.gguf", like=smollm2))
    check_pair(GGUFFile.open(smollm2), draft)
    assert draft.tokenizer_hash() == GGUFFile.open(smollm2).tokenizer_hash()


@pytest.mark.big
def test_qwen_pair_fits(qwen15: Path, qwen05: Path) -> None:
    check_pair(GGUFFile.open(qwen15), GGUFFile.open(qwen05))


# -- draft heads ------------------------------------------------------------------------------------------------------


def test_head_for_its_own_target(tiny: Path, tmp_path: Path) -> None:
    head = GGUFFile.open(gguf_maker.eagle3_stub(tmp_path / "head.gguf", like=tiny), "draft")
    check_pair(GGUFFile.open(tiny), head)


@pytest.mark.parametrize(
    ("make", "put", "says"),
    [
        ({"target_hidden_size": 96}, {}, "made for a hidden size of 96, the target has 64"),
        ({}, {"eagle3.target_layers": [0, 1]}, "reads 2 of the target's layers where eagle3 reads 3"),
        ({}, {"eagle3.target_layers": [0, 1, 99]}, "reads layer 99, the target has 2"),
        ({"draft_vocab": 400}, {}, "names id 320, the target has 320 tokens"),
        ({}, {"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizers differ"),
    ],
)
def test_head_that_does_not_fit(tiny: Path, tmp_path: Path, make: dict[str, Any], put: dict[str, Any], says: str) -> None:
    head = gguf_maker.eagle3_stub(tmp_path / "made.gguf", like=tiny, **make)
    assert says in misfit(GGUFFile.open(tiny), GGUFFile.open(gguf_maker.edit(head, tmp_path / "head.gguf", put=put)))


def test_drafters_are_found_by_their_file(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head works as soon as drafters/<name>.py is there, and is named where it isn't."""
    from localspec import pairing

    (tmp_path / "drafters").mkdir()
    monkeypatch.setattr(pairing, "__file__", str(tmp_path / "pairing.py"))
    for arch, drafter in (("eagle3", "eagle3"), ("dflash", "dflash"), ("gemma4-assistant", "mtp")):
        head = GGUFFile.open(gguf_maker.eagle3_stub(tmp_path / f"{arch}.gguf", like=tiny, arch=arch))
        with pytest.raises(PairingError, match=f"architecture {arch}, which is not supported in this version"):
            drafter_for(head)
        (tmp_path / "drafters" / f"{drafter}.py").write_text("")
        assert drafter_for(head) == drafter


def test_looking_for_a_drafter_loads_no_llama_cpp(tiny: Path) -> None:
    code = (
        "import sys; from localspec.gguf_file import GGUFFile; from localspec.pairing import drafter_for;"
        f"print(drafter_for(GGUFFile.open({str(tiny)!r})), 'llama_cpp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lm", "False"]


# -- rollback and layers ----------------------------------------------------------------------------------------------


def test_who_can_roll_back(tiny: Path, tmp_path: Path) -> None:
    for path in (tiny, gguf_maker.tiny_gemma3(tmp_path / "g.gguf")):
        assert rollback_of(GGUFFile.open(path))[0] == "trim"
        assert can_draft(GGUFFile.open(path))[0]
    mamba = GGUFFile.open(gguf_maker.tiny_mamba(tmp_path / "m.gguf"))
    assert rollback_of(mamba)[0] == "snapshot"
    able, reason = can_draft(mamba)
    assert (able, "mamba is recurrent" in reason) == (False, True)
    jamba = GGUFFile.open(gguf_maker.tiny_jamba(tmp_path / "j.gguf"))
    able, reason = can_draft(jamba)
    assert (able, "jamba is a hybrid" in reason) == (False, True)
    assert recurrent_layers(jamba) == [True, False]


def test_windows(gemma3: Path, tiny: Path, tmp_path: Path) -> None:
    assert windowed_layers(GGUFFile.open(gemma3)) == ([True] * 5 + [False]) * 3
    assert windowed_layers(GGUFFile.open(tiny)) == [False] * 2
    own = gguf_maker.tiny_gemma3(tmp_path / "g.gguf", n_layer=3)
    pattern = {"gemma3.attention.sliding_window_pattern": [False, True, False]}
    edited = gguf_maker.edit(own, tmp_path / "own.gguf", put=pattern)
    assert windowed_layers(GGUFFile.open(edited)) == [False, True, False]


# -- memory -----------------------------------------------------------------------------------------------------------

# llama.cpp's own account of what it allocates, from its log.
MEASURE = """
import ctypes, json, re, sys
import llama_cpp
sizes = {"kv": 0.0, "compute": 0.0}
@llama_cpp.llama_log_callback
def log(level, text, data):
    found = re.search(r"(KV|RS|compute|output) buffer size = +([0-9.]+) MiB", text.decode(errors="replace"))
    if found:
        sizes["compute" if found[1] in ("compute", "output") else "kv"] += float(found[2])
llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
path, n_ctx, n_seq, type_k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = n_ctx * n_seq, n_seq, 512, 512
params.swa_full, params.type_k = False, type_k
assert llama_cpp.llama_init_from_model(model, params)
print(json.dumps(sizes))
"""


def measured(path: Path, n_ctx: int, n_seq: int = 1, type_k: int = 1) -> dict[str, float]:
    """MiB that llama.cpp says it allocates; type_k 1 is f16, 8 is q8_0."""
    import json

    args = [sys.executable, "-c", MEASURE, str(path), str(n_ctx), str(n_seq), str(type_k)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120, check=True)
    sizes: dict[str, float] = json.loads(done.stdout)
    return sizes


@pytest.mark.parametrize(("n_ctx", "n_seq", "type_k"), [(512, 1, "f16"), (4000, 1, "f16"), (1024, 4, "q8_0")])
def test_memory_of_smollm2_is_what_llama_cpp_allocates(smollm2: Path, n_ctx: int, n_seq: int, type_k: str) -> None:
    need = memory_needed(GGUFFile.open(smollm2), n_ctx, type_k=type_k, n_seq=n_seq)
    real = measured(smollm2, n_ctx, n_seq, {"f16": 1, "q8_0": 8}[type_k])
    assert need.kv / 2**20 == pytest.approx(real["kv"], rel=0.005)
    assert need.compute / 2**20 == pytest.approx(real["compute"], rel=0.3)
    assert need.weights == pytest.approx(92.1 * 2**20, rel=0.001)
    assert need.total == need.weights + need.kv + need.compute


def test_memory_of_gemma3_knows_its_window(gemma3: Path) -> None:
    need, real = memory_needed(GGUFFile.open(gemma3), 8192), measured(gemma3, 8192)
    assert need.kv / 2**20 == pytest.approx(real["kv"], rel=0.005)
    assert need.compute / 2**20 == pytest.approx(real["compute"], rel=0.3)
    full = 18 * 8192 * 2 * 256 * 2
    assert need.kv < full / 2


def test_memory_of_recurrent_models(tmp_path: Path) -> None:
    for make in (gguf_maker.tiny_mamba, gguf_maker.tiny_jamba):
        path = make(tmp_path / f"{make.__name__}.gguf")
        need, real = memory_needed(GGUFFile.open(path), 512), measured(path, 512)
        assert need.kv / 2**20 == pytest.approx(real["kv"], abs=0.01)


def test_unknown_cache_type(tiny: Path) -> None:
    with pytest.raises(UsageError, match="no cache type"):
        memory_needed(GGUFFile.open(tiny), 512, type_k="q3")
