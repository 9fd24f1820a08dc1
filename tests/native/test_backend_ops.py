"""Whole operations through the plug-in and ggml, against float64 and against the CPU backend.

Each test starts this file as a program: the plug-in registers itself for the whole process, and other tests want stock
kernels.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

QUANTISED = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "IQ4_NL": 20}
QUANTISED |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_XS": 23}
PLAIN = {"F32": 0, "F16": 1, "BF16": 30}


def run_child(library: Path, task: str, **arguments: Any) -> Any:
    command = [sys.executable, __file__, str(library), task, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*QUANTISED, *PLAIN])
def test_error_is_no_worse_than_stock(name: str, backend_library: Path) -> None:
    """Over shapes with partial groups of rows, odd multiples of 32, and 1 to 600 columns."""
    result = run_child(backend_library, "accuracy", name=name)
    for case in result:
        # Equal quantisation of the activations leaves equal errors but for the order of additions.
        assert case["ours"] <= 1.1 * case["stock"] + 1e-12, case


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16"])
def test_rows_are_the_same_for_every_number_of_columns_and_threads(name: str, backend_library: Path) -> None:
    assert run_child(backend_library, "invariance", name=name) == []


def test_broadcast_and_strided_activations(backend_library: Path) -> None:
    for case in run_child(backend_library, "shapes"):
        assert case["error"] < 1e-3, case


def test_experts(backend_library: Path) -> None:
    for case in run_child(backend_library, "experts"):
        assert case["error"] < 1e-3, case


def test_packed_weights_read_back_exactly(backend_library: Path) -> None:
    assert run_child(backend_library, "round_trip") == []


def test_types_without_kernels_are_left_to_the_cpu(backend_library: Path) -> None:
    assert run_child(backend_library, "refusals") == {"Q2_K": False, "Q3_K": False, "Q4_K": True, "F32": True}


# --- the program


class InitParams(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """The few functions of ggml that these tests call, with pointers as plain numbers."""

    def __init__(self, library: str) -> None:
        import llama_cpp

        self.lib = llama_cpp.llama_cpp._lib
        self.call("ggml_backend_load", library.encode())
        self.device = {
            "ours": self.call("ggml_backend_dev_by_name", b"LOCALSPEC"),
            "stock": self.call("ggml_backend_dev_by_name", b"CPU"),
        }
        if not self.device["ours"]:
            raise SystemExit("the plug-in did not register")
        self.backend = {k: self.call("ggml_backend_dev_init", d, None) for k, d in self.device.items()}

    def call(self, name: str, *arguments: Any, result: Any = ctypes.c_void_p) -> Any:
        function = getattr(self.lib, name)
        function.restype = result
        plain = [ctypes.c_void_p(a) if isinstance(a, int) and a > 0xFFFFFFFF else a for a in arguments]
        return function(*(ctypes.c_int64(a) if type(a) is int else a for a in plain))

    def context(self) -> int:
        return int(self.call("ggml_init", InitParams(1 << 20, None, True)))

    def tensor(self, context: int, kind: int, shape: tuple[int, ...]) -> int:
        ne = [*shape, 1, 1, 1][:4]
        return int(self.call("ggml_new_tensor_4d", context, ctypes.c_int(kind), *map(ctypes.c_int64, ne)))

    def put(self, tensor: int, data: np.ndarray[Any, Any]) -> None:
        flat = np.ascontiguousarray(data)
        self.call("ggml_backend_tensor_set", tensor, flat.ctypes.data, ctypes.c_size_t(0), ctypes.c_size_t(flat.nbytes))

    def get(self, tensor: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        out = np.empty(shape, dtype)
        self.call("ggml_backend_tensor_get", tensor, out.ctypes.data, ctypes.c_size_t(0), ctypes.c_size_t(out.nbytes))
        return out

    def threads(self, which: str, n: int) -> None:
        reg = self.call("ggml_backend_dev_backend_reg", self.device[which])
        pointer = self.call("ggml_backend_reg_get_proc_address", reg, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(pointer)(self.backend[which], n)

    def quantise(self, kind: int, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """x float32 [rows, k]; returns the rows as a GGUF file holds them."""
        rows, k = x.shape
        size = int(self.call("ggml_row_size", ctypes.c_int(kind), ctypes.c_int64(k), result=ctypes.c_size_t))
        out = np.zeros((rows, size), np.uint8)
        x = np.ascontiguousarray(x, np.float32)
        n, none = ctypes.c_int64, ctypes.c_void_p(0)
        self.call("ggml_quantize_chunk", ctypes.c_int(kind), x.ctypes.data, out.ctypes.data, n(0), n(rows), n(k), none)
        return out

    def weights(self, which: str, kind: int, shape: tuple[int, ...], data: np.ndarray[Any, Any]) -> int:
        context = self.context()
        tensor = self.tensor(context, kind, shape)
        buft = self.call("ggml_backend_dev_buffer_type", self.device[which])
        buffer = self.call("ggml_backend_alloc_ctx_tensors_from_buft", context, buft)
        self.call("ggml_backend_buffer_set_usage", buffer, ctypes.c_int(1))
        self.put(tensor, data)
        return tensor

    def compute(self, which: str, make: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """make(context) returns the result tensor and a list of (input tensor, data)."""
        context = self.context()
        result, inputs = make(context)
        graph = self.call("ggml_new_graph", context)
        self.call("ggml_build_forward_expand", graph, result)
        buffer = self.call("ggml_backend_alloc_ctx_tensors_from_buft", context, self.call("ggml_backend_cpu_buffer_type"))
        for tensor, data in inputs:
            self.put(tensor, data)
        status = self.call("ggml_backend_graph_compute", self.backend[which], graph, result=ctypes.c_int)
        if status:
            raise SystemExit(f"graph_compute returned {status}")
        out = self.get(result, shape)
        self.call("ggml_backend_buffer_free", buffer)
        self.call("ggml_free", context)
        return out

    def product(self, which: str, weights: int, x: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
        """x float32 [..., n, k] times the weights' rows: [..., n, rows]."""

        def make(context: int) -> tuple[int, list[tuple[int, np.ndarray[Any, Any]]]]:
            b = self.tensor(context, 0, tuple(reversed(x.shape)))
            return self.call("ggml_mul_mat", context, weights, b), [(b, x)]

        return self.compute(which, make, (*x.shape[:-1], rows))


def exact(kind: int, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows' values in float64."""
    from gguf import GGMLQuantizationType, dequantize

    return np.asarray(dequantize(raw, GGMLQuantizationType(kind)), np.float64)


def make_weights(g: Ggml, kind: int, rows: int, k: int, seed: int) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32) * 0.05
    if kind == 0:
        return x.view(np.uint8)
    return g.quantise(kind, x)


def activations(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Like a transformer's: some channels are many times larger than the rest."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1]))).astype(np.float32)


def nmse(y: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> float:
    return float(((y - truth) ** 2).sum() / (truth**2).sum())


def accuracy(g: Ggml, name: str) -> list[dict[str, Any]]:
    kind = (QUANTISED | PLAIN)[name]
    unit = 256 if name.endswith("K") or name == "IQ4_XS" else 32
    cases = []
    for multiple, rows, n in itertools.product((1, 5, 11), (17, 160), (1, 9, 600)):
        k = unit * multiple
        raw = make_weights(g, kind, rows, k, rows + k)
        truth_w = raw.view(np.float32).astype(np.float64) if kind == 0 else exact(kind, raw)
        x = activations((n, k), n)
        truth = x.astype(np.float64) @ truth_w.T
        case = {"rows": rows, "k": k, "n": n}
        for which in ("ours", "stock"):
            w = g.weights(which, kind, (k, rows), raw)
            case[which] = nmse(g.product(which, w, x, rows), truth)
        cases.append(case)
    return cases


def invariance(g: Ggml, name: str) -> list[str]:
    kind, rows, k = (QUANTISED | PLAIN)[name], 200, 768
    w = g.weights("ours", kind, (k, rows), make_weights(g, kind, rows, k, 3))
    x = activations((70, k), 4)
    g.threads("ours", 2)
    whole = g.product("ours", w, x, rows)
    different = []
    for threads in (1, 2, 3):
        g.threads("ours", threads)
        for n in (1, 2, 3, 5, 7, 8, 9, 16, 33, 70):
            for start in (0, 70 - n):
                part = g.product("ours", w, x[start : start + n], rows)
                if not np.array_equal(part, whole[start : start + n]):
                    different.append(f"{threads} threads, {n} columns from {start}")
    return different


def shapes(g: Ggml) -> list[dict[str, Any]]:
    cases = []
    for name, (planes, k, rows) in itertools.product(("Q4_0", "Q4_K", "F16", "F32"), [((1, 1), 256, 48), ((2, 3), 256, 33)]):
        kind = (QUANTISED | PLAIN)[name]
        p3, p2 = planes
        raw = make_weights(g, kind, rows * p2 * p3, k, 5)
        truth_w = raw.view(np.float32).astype(np.float64) if kind == 0 else exact(kind, raw)
        truth_w = truth_w.reshape(p3, p2, rows, k)
        w = g.weights("ours", kind, (k, rows, p2, p3), raw)
        x = activations((2 * p3, 4 * p2, 5, k), 6)
        spread = np.repeat(np.repeat(truth_w, 2, axis=0), 4, axis=1)
        truth = np.einsum("abnk,abrk->abnr", x.astype(np.float64), spread)
        cases.append({"name": name, "kind": "4D", "error": nmse(g.product("ours", w, x, rows), truth)})

        # The same numbers, stored with dimensions 1 and 2 swapped and every column twice as far from the next.
        stored = np.zeros((2 * p3, 5, 4 * p2, 2 * k), np.float32)
        stored[..., :k] = x.transpose(0, 2, 1, 3)

        def strided(
            context: int, stored: np.ndarray[Any, Any] = stored, w: int = w, k: int = k
        ) -> tuple[int, list[tuple[int, np.ndarray[Any, Any]]]]:
            b = g.tensor(context, 0, tuple(reversed(stored.shape)))
            d3, d2, d1, wide = stored.shape
            size, n = ctypes.c_size_t, ctypes.c_int64
            strides = [size(4 * wide), size(4 * wide * d1), size(4 * wide * d1 * d2), size(0)]
            view = g.call("ggml_view_4d", context, b, n(k), n(d1), n(d2), n(d3), *strides)
            turned = g.call("ggml_permute", context, view, *map(ctypes.c_int, (0, 2, 1, 3)))
            return g.call("ggml_mul_mat", context, w, turned), [(b, stored)]

        y = g.compute("ours", strided, (*x.shape[:-1], rows))
        cases.append({"name": name, "kind": "strided", "error": nmse(y, truth)})
    return cases


def experts(g: Ggml) -> list[dict[str, Any]]:
    cases = []
    for name, inputs in itertools.product(("Q4_K", "Q8_0", "F16"), (1, 3)):
        kind, k, rows, n_experts, used, tokens = (QUANTISED | PLAIN)[name], 256, 40, 6, 3, 29
        raw = make_weights(g, kind, rows * n_experts, k, 7)
        truth_w = exact(kind, raw).reshape(n_experts, rows, k)
        w = g.weights("ours", kind, (k, rows, n_experts), raw)
        x = activations((tokens, inputs, k), 8)
        ids = np.random.default_rng(9).integers(0, n_experts, (tokens, used)).astype(np.int32)

        def make(
            context: int, x: np.ndarray[Any, Any] = x, w: int = w, ids: np.ndarray[Any, Any] = ids
        ) -> tuple[int, list[tuple[int, np.ndarray[Any, Any]]]]:
            b = g.tensor(context, 0, tuple(reversed(x.shape)))
            i = g.tensor(context, 26, tuple(reversed(ids.shape)))
            return g.call("ggml_mul_mat_id", context, w, b, i), [(b, x), (i, ids)]

        y = g.compute("ours", make, (tokens, used, rows))
        truth = np.einsum("tuk,turk->tur", np.broadcast_to(x, (tokens, used, k)).astype(np.float64), truth_w[ids])
        cases.append({"name": name, "inputs": inputs, "error": nmse(y, truth)})
    return cases


def round_trip(g: Ggml) -> list[str]:
    wrong = []
    for name, kind in (QUANTISED | PLAIN).items():
        raw = make_weights(g, kind, 35, 512, 10)
        w = g.weights("ours", kind, (512, 35), raw)
        if not np.array_equal(g.get(w, raw.shape, np.uint8), raw):
            wrong.append(name)
    return wrong


def refusals(g: Ggml) -> dict[str, bool]:
    """What the registered device answers to the question llama.cpp asks before it places a weight."""
    answers = {}
    for name, kind in {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "F32": 0}.items():
        context = g.context()
        w = g.tensor(context, kind, (256, 32))
        buft = g.call("ggml_backend_dev_buffer_type", g.device["ours"])
        op = g.call("ggml_mul_mat", context, w, g.tensor(context, 0, (256, 4)))
        buffer = g.call("ggml_backend_alloc_ctx_tensors_from_buft", context, buft)
        answers[name] = bool(g.call("ggml_backend_dev_supports_op", g.device["ours"], op, result=ctypes.c_bool))
        g.call("ggml_backend_buffer_free", buffer)
    return answers


def main() -> None:
    tasks = {f.__name__: f for f in (accuracy, invariance, shapes, experts, round_trip, refusals)}
    library, task, arguments = sys.argv[1:]
    print(json.dumps(tasks[task](Ggml(library), **json.loads(arguments))))


if __name__ == "__main__":
    main()
