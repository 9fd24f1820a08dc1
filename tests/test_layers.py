"""The import order of DESIGN.md, held by walking the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import from its own layer's left and from the layers before it.
LAYERS = [
    ["errors"],
    ["library_file", "native", "gguf_format", "llama_arch", "gguf_guards", "gguf_file", "speculator"],
    ["tokenizer", "rpc"],
    ["model"],
    [
        "template", "pairing", "memory", "accept_reference", "accept", "tree", "accept_tree", "topk", "costs",
        "survival", "prior", "blocks", "ledger", "cuts", "control", "control_tree", "default_model", "profile", "advice",
        "picture", "hub", "fetch",
        "prompts", "shipped", "taps", "threads", "gemma4", "gbnf", "grammar", "json_exclusive", "json_parts", "json_schema",
        "snapshot", "clusters", "passes",
    ],
    ["draft_net", "target", "mtp_context"],
    ["dflash_net", "eagle3_net"],
    ["drafters", "data"],
    ["engine"],
    ["report", "share"],
    [
        "bench", "curve", "peer", "sweep_state", "sweep", "sweep_result", "charts", "sweep_page", "chat", "serve",
        "chat_screen", "train", "convert",
    ],
    ["cli"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
THIRD_PARTY_HOME = {"torch": ("train", "convert"), "rich": ("bench", "chat", "chat_screen", "cli"), "click": ("cli",)}
THIRD_PARTY_HOME |= {"starlette": ("serve",), "uvicorn": ("serve",)}


def modules() -> list[tuple[str, Path]]:
    found = []
    for folder, prefix in ((ROOT / "localspec", ()), (ROOT / "convert", ("convert",))):
        for path in folder.rglob("*.py"):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            found.append((parts[0], path))
    return [(name, path) for name, path in found if name not in ("__init__", "__main__")]


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            if node.module == "localspec":
                names |= {f"localspec.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("part", "path"), modules(), ids=lambda value: str(getattr(value, "name", value)))
def test_imports_go_down_only(part: str, path: Path) -> None:
    assert part in RANK, f"{path}: not in the layers of this test"
    for name in imports(path):
        root, _, rest = name.partition(".")
        if root == "localspec" and rest:
            other = rest.split(".")[0]
            if other in RANK:
                allowed = RANK[other] < RANK[part] or other == part or (RANK[other] == RANK[part])
                assert allowed, f"{path.name} ({part}) imports {name}, which lies above it"
        elif root in THIRD_PARTY_HOME:
            assert part in THIRD_PARTY_HOME[root], f"{path.name} imports {root}"


def test_run_starts_without_the_heavy_libraries() -> None:
    code = (
        "import sys, localspec.cli.run_cmd; "
        "heavy = {'torch', 'rich.live', 'prompt_toolkit', 'huggingface_hub', 'llama_cpp'} & set(sys.modules); "
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
