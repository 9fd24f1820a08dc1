"""The plug-in in llama.cpp: flash attention on "auto", several models at once, memory given back, another ggml declined.

Runs in processes of its own, because the plug-in registers itself for a whole process.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_matmul


def run_child(library: Path, model: Path, **arguments: Any) -> Any:
    command = [sys.executable, __file__, str(library), str(model), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_flash_attention_stays_on_when_llama_cpp_probes_for_it(smollm2: Path, backend_library: Path) -> None:
    """With `auto`, attention must be with the CPU while llama.cpp looks, and is ours afterwards."""
    result = run_child(backend_library, smollm2, depths=[20], flash=-1, threads=2)
    assert result["different"] == []
    assert result["attentions"] > 0


def test_several_models_without_mmap_and_freed(smollm2: Path, gemma3: Path, backend_library: Path) -> None:
    result = run_child(backend_library, smollm2, depths=[30], flash=1, threads=2, other=str(gemma3))
    assert result["different"] == []
    assert result["resident_after_close"] < result["resident_open"] - 150e6


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_another_ggml_is_declined_with_one_line(backend_library: Path, tmp_path: Path) -> None:
    source = tmp_path / "host.c"
    source.write_text(
        "#include <dlfcn.h>\n"
        'const char * ggml_commit(void) { return "0123456"; }\n'
        "void ggml_backend_buffer_init(void) {}\nvoid ggml_backend_cpu_buffer_type(void) {}\n"
        "void ggml_backend_dev_by_type(void) {}\n"
        "int main(int n, char ** a) { void * h = dlopen(a[n - 1], RTLD_NOW); void * (*f)(void);\n"
        '  if (!h) return 3; *(void **) &f = dlsym(h, "ggml_backend_init"); return f() ? 2 : 0; }\n'
    )
    subprocess.run(["cc", str(source), "-o", str(tmp_path / "host"), "-rdynamic", "-ldl"], check=True)
    done = subprocess.run([str(tmp_path / "host"), str(backend_library)], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "0123456" in done.stderr


# --- the program


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def counters(llama: Any) -> tuple[int, int]:
    lib = llama.llama_cpp._lib
    for name in ("ggml_backend_reg_by_name", "ggml_backend_reg_get_proc_address"):
        getattr(lib, name).restype = ctypes.c_void_p
    reg = lib.ggml_backend_reg_by_name(b"LOCALSPEC")
    pointer = lib.ggml_backend_reg_get_proc_address(ctypes.c_void_p(reg), b"localspec_counters")
    two = ctypes.c_longlong(), ctypes.c_longlong()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(pointer)(ctypes.addressof(two[0]), ctypes.addressof(two[1]))
    return two[0].value, two[1].value


def main() -> None:
    library, model = sys.argv[1:3]
    options = json.loads(sys.argv[3])
    size = max(options["depths"]) + 64
    llama, loaded, context = bench_matmul.load(model, library, options["threads"], size, options["flash"])
    decode = bench_matmul.Decoder(llama, loaded, context)

    def rows(start: int, n: int) -> np.ndarray[Any, Any]:
        decode(start, n)
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (n, decode.n_vocab)).copy()

    other = None
    if "other" in options:
        mp = llama.llama_model_default_params()
        mp.use_mmap = False
        second = llama.llama_model_load_from_file(options["other"].encode(), mp)
        cp = llama.llama_context_default_params()
        cp.n_ctx, cp.n_threads = 128, 2
        other = bench_matmul.Decoder(llama, second, llama.llama_init_from_model(second, cp))
    different = []
    for depth in options["depths"]:
        decode(0, depth)
        alone = np.concatenate([rows(depth + i, 1) for i in range(9)])
        for n in (2, 3, 5, 8, 9, 40):
            if other:
                other(0, n)
            together = rows(depth, n)[:9]
            if not np.array_equal(together, alone[: len(together)]):
                different.append(f"{n} tokens at {depth}")
    result: dict[str, Any] = {"different": different}
    result["multiplications"], result["attentions"] = counters(llama)
    result["resident_open"] = resident()
    if other:
        llama.llama_free(other.context)
        llama.llama_model_free(second)
    llama.llama_free(context)
    llama.llama_model_free(loaded)
    result["resident_after_close"] = resident()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
