"""A loaded GGUF: weights and vocabulary, without a context."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

from localspec import native
from localspec.errors import ModelFileError
from localspec.gguf_file import GGUFFile, require_model
from localspec.tokenizer import Tokenizer

#: llama.cpp's values of ``n_gpu_layers``: negative means all.
ALL_LAYERS = -1


class Model:
    """The weights of one GGUF file inside llama.cpp. Raises ModelFileError where the file can't be used.

    `with_heads` loads the next-token heads that lie in the file, too.
    The file is read by our own reader first (`gguf_file`), because llama.cpp aborts the process on some broken files.
    """

    def __init__(
        self, path: str | os.PathLike[str], role: str = "target", n_gpu_layers: int = 0, use_mmap: bool = True,
        with_heads: bool = False,
    ):  # fmt: skip
        self.gguf = GGUFFile.open(path, role)
        require_model(self.gguf, role)
        self.path = Path(path)
        self.n_gpu_layers = n_gpu_layers
        lib = native.lib()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if use_mmap else lib.LLAMA_LOAD_MODE_NONE
        params.load_mtp = with_heads
        no_devices = (ctypes.c_void_p * 1)(None)  # a list that ends at once
        if n_gpu_layers == 0 and native.rpc_servers():
            params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
        native.clear_log()
        self.handle = lib.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self.handle:
            reason = native.last_log_error() or "no reason given"
            raise ModelFileError(f"{self.path}: llama.cpp can't load this {role}: {reason}")
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        if self.n_vocab == 0:
            self.close()
            raise ModelFileError(f"{self.path}: the {role} has no vocabulary, so it can't take or give text")
        if not lib.llama_model_has_decoder(self.handle) or lib.llama_model_has_encoder(self.handle):
            self.close()
            raise ModelFileError(f"{self.path}: {self.gguf.architecture} has an encoder; only decoders can be used here")
        self.n_embd = int(lib.llama_model_n_embd(self.handle))
        self.n_layer = int(lib.llama_model_n_layer(self.handle))
        self.n_swa = int(lib.llama_model_n_swa(self.handle))
        self.n_ctx_train = int(lib.llama_model_n_ctx_train(self.handle))
        self.is_recurrent = bool(lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))
        self.tokenizer = Tokenizer(self.vocab, self.n_vocab)

    @property
    def name(self) -> str:
        """The model's own name, or its file's."""
        return self.gguf.name or self.path.name

    @property
    def description(self) -> str:
        """The file's name without its ending: it says more than llama.cpp's description, which guesses sizes."""
        return self.path.name.removesuffix(".gguf")

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Raise ModelFileError when an id is outside the vocabulary: llama.cpp would refuse the whole batch."""
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= self.n_vocab):
            bad = tokens[(tokens < 0) | (tokens >= self.n_vocab)][0]
            raise ModelFileError(f"{self.path}: token id {int(bad)} is outside the vocabulary of {self.n_vocab}")

    def close(self) -> None:
        """Free the weights. Contexts on this model must be closed before."""
        if self.handle:
            native.lib().llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
