"""The GGUF reader: right about sound files, one clear line about broken ones, and nothing that aborts llama.cpp."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec import llama_arch
from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile, require_model
from localspec.gguf_format import TENSOR_TYPES, FormatError, parse
from tests import gguf_maker


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return gguf_maker.broken_files(tmp_path_factory.mktemp("broken"))


def refusal(path: Path, role: str = "target") -> str:
    with pytest.raises(ModelFileError) as caught:
        require_model(GGUFFile.open(path, role), role)
    return str(caught.value)


# -- sound files ------------------------------------------------------------------------------------------------------


def test_reads_what_was_written(tiny: Path) -> None:
    file = GGUFFile.open(tiny)
    require_model(file, "target")
    assert (file.architecture, file.name, file.n_layer, file.n_embd) == ("llama", "tiny llama", 2, 64)
    assert (file.n_head, file.n_head_kv, file.key_length, file.value_length) == ([4, 4], [2, 2], 16, 16)
    assert (file.n_ctx_train, file.vocab_size, file.sliding_window, file.quant_label) == (512, 320, 0, "F32")
    assert file.arch("rope.dimension_count") == 16
    assert file.arch("no such key", "default") == "default"
    assert file.chat_template == gguf_maker.CHATML
    keys = gguf_maker.tokenizer_keys(320)
    tokenizer = file.tokenizer
    assert [t.decode() for t in tokenizer.tokens] == keys["tokenizer.ggml.tokens"]
    assert np.array_equal(tokenizer.token_types, keys["tokenizer.ggml.token_type"])
    assert (tokenizer.model, tokenizer.pre, tokenizer.add_bos, tokenizer.n_merges) == ("gpt2", "gpt-2", False, 48)
    assert (tokenizer.bos, tokenizer.eos) == (tokenizer.ids["bos"], tokenizer.ids["eos"]) == (304, 306)


def test_tensors_are_the_bytes_that_were_written(tmp_path: Path) -> None:
    data = {"a.weight": np.arange(32, dtype=np.float32).reshape(2, 16), "b": np.arange(5, dtype=np.int64)}
    file = GGUFFile.open(gguf_maker.write(tmp_path / "x.gguf", "llama", {}, data))
    assert file.tensors["a.weight"].shape == (16, 2)
    for name, array in data.items():
        assert bytes(file.tensor_bytes(name)) == array.tobytes()
    assert file.n_params == 37
    with pytest.raises(ModelFileError, match="no tensor nope"):
        file.tensor_bytes("nope")


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    import gguf

    path = gguf_maker.tiny_jamba(tmp_path / "jamba.gguf")
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    assert set(ours.metadata) == {k for k in theirs.fields if not k.startswith("GGUF.")}
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        got = value.tolist() if isinstance(value, np.ndarray) else value
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
            got = [t.decode() for t in value]  # type: ignore[union-attr]
        assert got == pytest.approx(expected) if isinstance(got, float) else got == expected, key
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].offset == tensor.data_offset
        assert bytes(ours.tensor_bytes(tensor.name)) == tensor.data.tobytes()
    assert ours.n_head_kv == [0, 2]


def test_every_kind_of_value_survives(tmp_path: Path) -> None:
    keys = {"k.i": 7, "k.f": 0.5, "k.t": "häß", "k.b": True, "k.ai": [1, -2], "k.as": ["a", "", "ü"], "k.ab": [True, False]}
    file = GGUFFile.open(gguf_maker.write(tmp_path / "x.gguf", "llama", keys, {"a": np.ones(1, np.float32)}))
    read = {k: file.metadata[k] for k in keys}
    assert (read["k.i"], read["k.f"], read["k.t"], read["k.b"]) == (7, 0.5, "häß", True)
    assert list(read["k.ai"]) == [1, -2]  # type: ignore[arg-type]
    assert [t.decode() for t in read["k.as"]] == ["a", "", "ü"]  # type: ignore[union-attr]
    assert list(read["k.ab"]) == [True, False]  # type: ignore[arg-type]


def test_value_of_another_kind_is_an_error_not_a_surprise(tmp_path: Path, tiny: Path) -> None:
    file = GGUFFile.open(gguf_maker.edit(tiny, tmp_path / "x.gguf", put={"llama.context_length": "long"}))
    with pytest.raises(ModelFileError, match=r"llama\.context_length holds text"):
        _ = file.n_ctx_train


def test_tokenizer_hash_ties_vocabularies(tmp_path: Path, tiny: Path) -> None:
    same = gguf_maker.tiny_llama(tmp_path / "same.gguf", n_layer=1, seed=5, ftype="q8_0")
    hashed = GGUFFile.open(tiny).tokenizer_hash()
    assert GGUFFile.open(same).tokenizer_hash() == hashed
    tokens = [t.decode() for t in GGUFFile.open(tiny).tokenizer.tokens]
    tokens[270] += "x"
    for i, put in enumerate(
        ({"tokenizer.ggml.tokens": tokens}, {"tokenizer.ggml.pre": "qwen2"}, {"tokenizer.ggml.eos_token_id": 1})
    ):
        other = GGUFFile.open(gguf_maker.edit(tiny, tmp_path / f"other{i}.gguf", put=put))
        assert other.tokenizer_hash() != hashed
    # Fixed for ever: drafts on people's disks carry it.
    assert hashed == "17411a5dcabda5ee52e14bd29079ab6132dcf49f9a5809b9696ebccbdd686d73"


def test_tensor_sizes_match_the_library() -> None:
    from llama_cpp import _ggml

    lib = _ggml.libggml_base if hasattr(_ggml, "libggml_base") else _ggml.libggml
    lib.ggml_type_size.restype, lib.ggml_type_size.argtypes = ctypes.c_size_t, [ctypes.c_int]
    lib.ggml_blck_size.restype, lib.ggml_blck_size.argtypes = ctypes.c_int64, [ctypes.c_int]
    for kind, (name, block, nbytes) in TENSOR_TYPES.items():
        assert (lib.ggml_blck_size(kind), lib.ggml_type_size(kind)) == (block, nbytes), name


def test_known_architectures_match_the_library(tiny: Path, tmp_path: Path) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    known = set()
    for arch in [*llama_arch.KNOWN, "hal9000"]:
        path = gguf_maker.edit(tiny, tmp_path / "arch.gguf", arch=arch, tensors=False)
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if model:
            known.add(arch)
            is_recurrent = llama_cpp.llama_model_is_recurrent(model)
            is_hybrid = llama_cpp.llama_model_is_hybrid(model)
            assert is_recurrent == (arch in llama_arch.RECURRENT), arch
            assert is_hybrid == (arch in llama_arch.HYBRID), arch
            llama_cpp.llama_model_free(model)
    assert known == set(llama_arch.KNOWN)


def test_rwkv_escapes_cover_every_byte() -> None:
    from localspec.gguf_guards import _rwkv_bytes

    tokens = [bytes([b]) if 32 < b < 127 and b != 92 else b"\\x%02x" % b for b in range(256)]
    tokens[9:11], tokens[92] = [b"\\t", b"\\n"], b"\\\\"
    assert _rwkv_bytes([*tokens, b"the", b"\\xzz"]) == set(range(256))
    assert _rwkv_bytes(tokens[1:]) == set(range(1, 256))


# -- files that can't be used -----------------------------------------------------------------------------------------

SAYS = {
    "missing": "does not exist",
    "directory": "is a directory",
    "empty": "is empty",
    "text": "begins with b'just'",
    "html": "web page",
    "lfs": "git lfs pull",
    "safetensors": "safetensors",
    "torch zip": "PyTorch",
    "pickle": "pickle",
    "legacy ggml": "before GGUF",
    "zeros": "unfinished download",
    "big-endian": "big-endian",
    "version 1": "version 1",
    "version 9": "version 9",
    "cut in the header": "truncated",
    "cut in the metadata": "truncated",
    "cut in the tensors": "bytes are missing",
    "cut at the last byte": "1 of",
    "absurd tensor count": "tensors, more than its",
    "absurd key count": "key-value pairs, more than its",
    "absurd key length": "claims a length",
    "adapter": "adapter",
    "projector": "projector",
    "imatrix": "importance matrix",
    "split": "llama-gguf-split --merge",
    "split by name": "llama-gguf-split --merge",
    "unknown architecture": "hal9000",
    "encoder": "encoder (bert)",
    "encoder-decoder": "encoder-decoder",
    "diffusion": "diffusion",
    "vocabulary only": "vocabulary only",
    "no tokenizer": "no tokenizer",
    "unknown tokenizer": "abacus",
    "encoder's tokenizer": "kind bert",
    "tokenizer with missing bytes": "every single byte",
    "sentencepiece with missing bytes": "without a token for byte",
    "twin tokens": "tokens 10 and 300",
}


def test_every_broken_file_is_refused_in_one_line(broken: dict[str, Path]) -> None:
    for name, path in broken.items():
        text = refusal(path)
        assert "\n" not in text
        assert text.startswith(f"target {path}"), name
        assert SAYS.get(name, "") in text, name
    assert not SAYS.keys() - broken.keys()


def test_says_how_much_is_missing(tiny: Path, tmp_path: Path) -> None:
    size = tiny.stat().st_size
    text = refusal(gguf_maker.truncated(tiny, tmp_path / "cut.gguf", size - 1000))
    assert f"1000 of {size} bytes are missing" in text


def test_unreadable_file(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "locked.gguf"
    path.write_bytes(tiny.read_bytes())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "permission denied" in refusal(path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")


def test_directory_names_a_file_in_it(tiny: Path) -> None:
    assert "tiny.gguf" in refusal(tiny.parent)


def test_path_with_a_newline_stays_one_line(tmp_path: Path) -> None:
    assert "\n" not in refusal(tmp_path / "two\nlines.gguf")


def test_draft_head_is_no_target(tiny: Path, tmp_path: Path) -> None:
    head = gguf_maker.eagle3_stub(tmp_path / "head.gguf", like=tiny)
    require_model(GGUFFile.open(head, "draft"), "draft")
    assert "--draft" in refusal(head)


def _header(pairs: bytes = b"", n_pairs: int = 0, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    counts = n_tensors.to_bytes(8, "little") + n_pairs.to_bytes(8, "little")
    return b"GGUF" + (3).to_bytes(4, "little") + counts + pairs + tensors


def _text(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _pair(key: bytes, kind: int, value: bytes) -> bytes:
    return _text(key) + kind.to_bytes(4, "little") + value


def _tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    dims = b"".join(n.to_bytes(8, "little") for n in shape)
    return _text(name) + len(shape).to_bytes(4, "little") + dims + kind.to_bytes(4, "little") + offset.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (_header(_pair(b"a", 4, bytes(4)) * 2, 2), "a stands twice"),
        (_header(_pair(b"", 4, bytes(4)), 1), "key 0 is empty"),
        (_header(_pair(b"a", 77, bytes(4)), 1), "unknown type 77"),
        (_header(_pair(b"a", 9, (9).to_bytes(4, "little") + bytes(8)), 1), "unknown type 9"),
        (_header(_pair(b"a", 9, (8).to_bytes(4, "little") + b"\xff" * 8), 1), "elements"),
        (_header(_pair(b"a", 9, (8).to_bytes(4, "little") + (3).to_bytes(8, "little")) + bytes(8), 1), "truncated"),
        (_header(_pair(b"a", 8, b"\xff" * 8), 1), "claims a length"),
        (_header(_pair(b"general.alignment", 4, (24).to_bytes(4, "little")), 1), "power of two"),
        (_header(_pair(b"general.alignment", 10, (32).to_bytes(8, "little")), 1), "unsigned 32-bit"),
        (_header(b"", 0, _tensor(b"t", [4], 0, 0) * 2, 2) + bytes(64), "t stands twice"),
        (_header(b"", 0, _tensor(b"t", [4], 4, 0), 1) + bytes(64), "type 4"),
        (_header(b"", 0, _tensor(b"t", [33], 2, 0), 1) + bytes(64), "blocks of 32"),
        (_header(b"", 0, _tensor(b"t", [4], 0, 4), 1) + bytes(64), "begins at data byte 4"),
        (_header(b"", 0, _tensor(b"t", [1, 1, 1, 1, 1], 0, 0), 1) + bytes(64), "5 dimensions"),
        (_header(b"", 0, _tensor(b"t", [1 << 40, 1 << 40], 0, 0), 1) + bytes(64), "claims the shape"),
        (_header(b"", 0, _tensor(b"t" * 64, [4], 0, 0), 1) + bytes(64), "63 bytes"),
        (_header(b"", 0, _tensor(b"t", [4], 0, 0), 1), "bytes are missing"),
    ],
)
def test_malformed_table(raw: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        parse(memoryview(raw))


def _use(path: Path) -> None:
    """Everything that inspect asks of a file."""
    from localspec.memory import memory_needed

    file = GGUFFile.open(path, "target")
    require_model(file, "target")
    memory_needed(file, 4096)
    file.tokenizer_hash()
    assert file.n_params >= 0
    assert isinstance(file.quant_label, str)


@pytest.mark.parametrize("seed", range(8))
def test_fuzzed_bytes_give_an_answer_or_a_model_file_error(tiny: Path, tmp_path: Path, seed: int) -> None:
    raw, rng, path = tiny.read_bytes(), random.Random(seed), tmp_path / "fuzzed.gguf"
    end = GGUFFile.open(tiny).data_start
    refused = 0
    for _ in range(60):
        data = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(end)] = rng.choice((0, 1, 9, 127, 128, 255, rng.randrange(256)))
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        path.write_bytes(data)
        fault = None
        try:
            _use(path)
        except ModelFileError as e:
            fault = str(e)
        refused += fault is not None
        assert fault is None or (fault and "\n" not in fault)
    assert refused > 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_parser_takes_any_bytes(tail: bytes) -> None:
    for raw in (tail, b"GGUF" + tail, _header() + tail, _header(tail, 3), _header(b"", 0, tail, 2)):
        with contextlib.suppress(FormatError):
            assert parse(memoryview(raw)).version in (2, 3)


# llama.cpp in its own process, because a failure here is an abort: exit code 0 decoded, 3 refused by llama.cpp itself.
LOAD = """
import ctypes, os, sys
import llama_cpp
llama_cpp.llama_backend_init()
for path in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not model:
            os._exit(3)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            os._exit(3)
        vocab = llama_cpp.llama_model_get_vocab(model)
        text, ids = "the cat\\n é 漢 <|im_end|>".encode(), (llama_cpp.llama_token * 128)()
        n = llama_cpp.llama_tokenize(vocab, text, len(text), ids, 128, True, True)
        if n > 0:
            llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, n))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def _load_all(paths: list[Path]) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, paths)], capture_output=True, text=True, timeout=300, check=True
    )
    return [int(line) for line in done.stdout.split()]


def test_made_models_load_and_decode_in_llama_cpp(tiny: Path, tmp_path: Path) -> None:
    paths = [
        tiny,
        gguf_maker.tiny_llama(tmp_path / "q8.gguf", ftype="q8_0", vocab=400),
        gguf_maker.tiny_llama(tmp_path / "f16.gguf", ftype="f16", n_layer=1),
        gguf_maker.tiny_gemma3(tmp_path / "gemma3.gguf"),
        gguf_maker.tiny_mamba(tmp_path / "mamba.gguf"),
        gguf_maker.tiny_jamba(tmp_path / "jamba.gguf"),
        gguf_maker.random_draft(tmp_path / "draft.gguf", like=tiny),
    ]
    for path in paths:
        require_model(GGUFFile.open(path), "target")
    assert _load_all(paths) == [0] * len(paths)
    assert (tmp_path / "f16.gguf").read_bytes() == gguf_maker.tiny_llama(
        tmp_path / "again.gguf", ftype="f16", n_layer=1
    ).read_bytes()


def test_what_we_let_through_never_aborts_llama_cpp(tmp_path: Path) -> None:
    """Odd values for keys that llama.cpp asserts over: what passes our checks, llama.cpp loads or refuses by itself."""
    odd = [0, 1, 3, 1 << 20, (1 << 32) - 1, -1.0, float("nan"), "x", [1, 2]]
    keys = {
        "llama": ("block_count", "attention.head_count_kv", "expert_used_count", "nextn_predict_layers"),
        "gemma3": ("attention.sliding_window_pattern", "attention.layer_norm_rms_epsilon", "rope.dimension_count"),
        "jamba": ("attention.key_length", "ssm.inner_size"),
    }
    make = {"llama": gguf_maker.tiny_llama, "gemma3": gguf_maker.tiny_gemma3, "jamba": gguf_maker.tiny_jamba}
    passed = []
    for arch, names in keys.items():
        good = make[arch](tmp_path / f"{arch}.gguf")
        for name in names:
            for i, value in enumerate(odd):
                path = tmp_path / f"{arch}-{name}-{i}.gguf"
                gguf_maker.edit(good, path, put={f"{arch}.{name}": value})
                try:
                    _use(path)
                    passed.append(path)
                except ModelFileError:
                    path.unlink()
    small = [gguf_maker.edit(tmp_path / "llama.gguf", tmp_path / f"a{n}.gguf", put={"general.alignment": n}) for n in (1, 8)]
    for path in small:
        assert "multiples of less than 32" in refusal(path)
    codes = dict(zip(passed, _load_all(passed)))
    assert {p.name: c for p, c in codes.items() if c not in (0, 3)} == {}
    assert 3 < len(passed) < 9 * len(odd)


def test_requantized_file_is_smaller_and_still_pairs(tmp_path: Path) -> None:
    source = gguf_maker.tiny_llama(tmp_path / "f16.gguf", ftype="f16", n_embd=256, n_layer=1)
    again = GGUFFile.open(gguf_maker.requantize(source, tmp_path / "q2.gguf", "Q2_K"))
    require_model(again, "draft")
    assert again.quant_label == "Q2_K"
    assert again.size < 0.6 * source.stat().st_size
    assert again.tokenizer_hash() == GGUFFile.open(source).tokenizer_hash()


# -- real files -------------------------------------------------------------------------------------------------------


def test_smollm2(smollm2: Path) -> None:
    file = GGUFFile.open(smollm2)
    require_model(file, "target")
    assert (file.architecture, file.n_layer, file.n_embd, file.vocab_size) == ("llama", 30, 576, 49152)
    assert (file.n_head[0], file.n_head_kv[0], file.key_length, file.n_ctx_train) == (9, 3, 64, 8192)
    assert file.quant_label == "Q4_1"
    assert file.chat_template is not None
    assert file.tokenizer.pre == "smollm"
    assert file.tokenizer.tokens[1] == b"<|im_start|>"
    draft_of = gguf_maker.copied_tokenizer(smollm2)
    assert len(draft_of["tokenizer.ggml.merges"]) == 48900


def test_gemma3_window(gemma3: Path) -> None:
    file = GGUFFile.open(gemma3)
    require_model(file, "target")
    assert (file.architecture, file.sliding_window, file.key_length, file.n_embd) == ("gemma3", 512, 256, 640)
    assert (file.tokenizer.model, file.tokenizer.bos, file.tokenizer.add_bos) == ("llama", 2, True)


@pytest.mark.big
def test_qwen_vocabulary_is_not_decoded_to_open(qwen15: Path, qwen05: Path) -> None:
    file = GGUFFile.open(qwen15)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 151936  # type: ignore[arg-type]
    assert tokens._items is None  # type: ignore[union-attr]
    started = time.perf_counter()
    assert file.tokenizer.tokens[-1] == b"[PAD151935]"
    print(f"decoding 151,936 tokens: {time.perf_counter() - started:.3f} s")
    assert file.tokenizer_hash() == GGUFFile.open(qwen05).tokenizer_hash()
