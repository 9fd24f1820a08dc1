"""Options that several commands share, named as llama.cpp's users know them, and the settings made of them."""

from __future__ import annotations

import functools
import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from localspec import gbnf, native, rpc
from localspec.accept import Sampling
from localspec.blocks import ADAPTIVE_N_MAX, DEFAULT_N_MAX
from localspec.cli.help import option
from localspec.errors import UsageError
from localspec.json_schema import to_gbnf
from localspec.target import SessionSettings

F = TypeVar("F", bound=Callable[..., Any])

#: --spec-type -> the drafter (localspec/drafters) that runs it; auto and none beside
DRAFTERS = {
    "ngram": "ngram", "lm": "lm", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dflash", "mtp": "mtp",
}  # fmt: skip


def _stack(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        return functools.reduce(lambda f, d: d(f), reversed(decorators), function)

    return apply


def _layers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    if value in ("all", "auto"):
        return -1
    try:
        return min(int(value), 1 << 16)  # more than any model has; llama.cpp takes 32 bits
    except ValueError:
        raise click.BadParameter(f"'{value}' is neither a number, 'all' nor 'auto'") from None


model_options = _stack(
    option("Model", "-m", "--target", "--model", "target", metavar="FILE", help="The model whose text counts (GGUF)."),
    option("Model", "-hf", "hf", metavar="USER/REPO[:QUANT]", help="The target, from the Hugging Face Hub."),
    option("Context", "-c", "--ctx-size", "n_ctx", type=int, default=0, metavar="N",
           help="Context in tokens; 0: at most 4096."),
    option("Machine", "-t", "--threads", "n_threads", type=int, default=0, metavar="N",
           help="CPU threads; 0: one per core."),
    option("Machine", "-ngl", "--n-gpu-layers", "n_gpu_layers", callback=_layers, metavar="N|all",
           help="Layers on the GPU.  [default: 0]"),
    option("Machine", "--rpc", "rpc", metavar="HOST:PORT,...",
           help="Compute the target's layers on other machines, each running llama.cpp's rpc-server: all layers unless "
                "--n-gpu-layers says how many. The protocol has no key: trusted networks only."),
    option("Context", "-fa", "--flash-attn", "flash_attention", default="auto", metavar="on|off|auto",
           help="Flash attention."),
    option("Context", "-ctk", "--cache-type-k", "type_k", default="f16", metavar="TYPE",
           help="Type of cached keys: f16, q8_0, ..."),
    option("Context", "-ctv", "--cache-type-v", "type_v", default="f16", metavar="TYPE",
           help="Type of cached values: f16, q8_0, ..."),
    option("Machine", "--mmap/--no-mmap", "use_mmap", default=True, show_default=True,
           help="Map the model's file, or read it whole."),
    option("Machine", "--kernels", type=click.Choice(native.KERNELS), default="auto", show_default=True,
           help="CPU kernels: llama.cpp's own or ours."),
)  # fmt: skip

draft_options = _stack(
    option("Speculation", "-md", "--draft", "--model-draft", "draft", metavar="FILE", help="The draft model (GGUF)."),
    option("Speculation", "-hfd", "hfd", metavar="USER/REPO[:QUANT]", help="The draft, from the Hugging Face Hub."),
    option("Machine", "-ngld", "--n-gpu-layers-draft", "n_gpu_layers_draft", default="0", callback=_layers, metavar="N|all",
           help="Layers of the draft on the GPU."),
    option("Speculation", "--spec-type", "spec_type", default="auto",
           metavar="auto|none|" + "|".join(DRAFTERS),
           help="How to draft. auto: by looking back where the text repeats itself, elsewhere by the draft, of whatever "
                "kind it is; without one the draft that comes with localspec for the default model, ngram alone for "
                "others. ngram,TYPE: the same with a draft of this type. TYPE: by the draft alone. lm is any model that "
                "writes text, trained as small or not; llama.cpp's names (draft-simple, ...) are understood, too."),
    option("Speculation", "--spec-draft-n-max", "n_max", type=click.IntRange(0, 64), metavar="N",
           help=f"Tokens drafted at most per verification.  [default: {ADAPTIVE_N_MAX}; {DEFAULT_N_MAX} with "
                "--no-spec-adapt]"),
    option("Speculation", "--spec-draft-p-min", "p_min", type=click.FloatRange(0, 1), default=0.0,
           show_default=True, metavar="P", help="Stop drafting where the draft is less sure than this."),
    option("Speculation", "--spec-adapt/--no-spec-adapt", "adapt", default=True, show_default=True,
           help="Draft as many tokens as pay on this machine, none where none does; or always the same number."),
    option("Speculation", "--spec-tree", "trees", type=click.Choice(["off", "auto", "on"]), default="off", show_default=True,
           help="Draft trees, several branches checked at once (eagle3, lm; one text at a time): auto where they pay over "
                "chains, on always. The text stays the same."),
    option("Speculation", "--accept", "rule", type=click.Choice(["match", "reject"]), default="match", show_default=True,
           help="match: the plain text of the same seed. reject: rejection sampling, same distribution."),
)  # fmt: skip


def sampling_options(temperature: float = 0.8, seed: int = 0) -> Callable[[F], F]:
    """The options of Sampling, with a command's own defaults; seed -1 takes a random one."""
    return _stack(
        option("Sampling", "--temp", "temperature", type=float, default=temperature, show_default=True,
               help="Temperature; 0 is greedy."),
        option("Sampling", "--top-k", type=int, default=40, show_default=True,
               help="Keep the k likeliest tokens; 0: all."),
        option("Sampling", "--top-p", type=float, default=0.95, show_default=True,
               help="Keep this much probability; 1: all."),
        option("Sampling", "--min-p", type=float, default=0.05, show_default=True,
               help="Drop tokens below this share of the top."),
        option("Sampling", "--repeat-penalty", type=float, default=1.0, show_default=True, help="1: off."),
        option("Sampling", "--presence-penalty", type=float, default=0.0, show_default=True, help="0: off."),
        option("Sampling", "--frequency-penalty", type=float, default=0.0, show_default=True, help="0: off."),
        option("Sampling", "--repeat-last-n", "penalty_last_n", type=int, default=64, show_default=True,
               help="Tokens that the penalties look at; 0: none, -1: all."),
        option("Sampling", "-s", "--seed", type=int, default=seed, show_default=True, help="Seed; -1 takes a random one."),
    )  # fmt: skip


grammar_options = _stack(
    option("Output", "--grammar", metavar="TEXT", help="Hold the answer to a grammar, in llama.cpp's GBNF."),
    option("Output", "--grammar-file", metavar="FILE", help="Read the grammar from a file."),
    option("Output", "-j", "--json-schema", metavar="TEXT|@FILE",
           help="Hold the answer to JSON that this schema admits; {} is any."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which files, and how they are to work together, as given on the command line."""

    target: str | None
    hf: str | None
    session: SessionSettings
    n_gpu_layers: int
    use_mmap: bool = True
    kernels: str = "auto"
    rpc: tuple[str, ...] = ()
    draft: str | None = None
    hfd: str | None = None
    n_gpu_layers_draft: int = 0
    spec_type: str = "auto"
    n_max: int = DEFAULT_N_MAX
    p_min: float = 0.0
    adapt: bool = True
    trees: str = "off"
    rule: str = "match"


def take_models(options: dict[str, Any]) -> ModelChoice:
    """Pop what model_options and draft_options gave out of `options`."""
    session = SessionSettings(
        **{name: options.pop(name) for name in ("n_ctx", "n_threads", "type_k", "type_v", "flash_attention")}
    )
    _take_rpc(options)
    names = [name for name in ModelChoice.__dataclass_fields__ if name != "session" and name in options]
    if options.get("n_max", 0) is None:
        options["n_max"] = ADAPTIVE_N_MAX if options["adapt"] else DEFAULT_N_MAX
    choice = ModelChoice(session=session, **{name: options.pop(name) for name in names})
    for flag, name in (("--target", choice.target), ("--draft", choice.draft), ("-hf", choice.hf), ("-hfd", choice.hfd)):
        if name is not None and not name.strip():
            raise UsageError(f"{flag} '': no name given (an unset variable?); name a file, or leave {flag} out")
    if math.isnan(choice.p_min):  # passes any comparison with a range's ends
        raise UsageError("--spec-draft-p-min must be between 0 and 1, not nan")
    if choice.target and choice.hf:
        raise UsageError("give the target once: --target or -hf")
    if choice.draft and choice.hfd:
        raise UsageError("give the draft once: --draft or -hfd")
    if choice.draft and choice.draft.isdigit() and not Path(choice.draft).exists():
        raise UsageError(
            f"--draft names the draft model here; for {choice.draft} drafted tokens use --spec-draft-n-max {choice.draft}"
        )
    return choice


def _take_rpc(options: dict[str, Any]) -> None:
    """Resolve `rpc` and `n_gpu_layers` within `options`: layers go where they were sent, or nowhere."""
    options["rpc"] = rpc.parse(options["rpc"]) if options.get("rpc") is not None else ()
    if options["rpc"]:
        if options["kernels"] == "localspec":
            raise UsageError("--kernels localspec serves this machine's CPU: leave it out, or --rpc")
        if options["n_gpu_layers"] == 0:
            raise UsageError("--rpc computes layers elsewhere, and --n-gpu-layers 0 none: leave one of them out")
    if options["n_gpu_layers"] is None:
        options["n_gpu_layers"] = -1 if options["rpc"] else 0


def take_sampling(options: dict[str, Any]) -> Sampling:
    """Pop what sampling_options gave out of `options`; -1 becomes a random seed."""
    fields = {name: options.pop(name) for name in Sampling.__dataclass_fields__}
    if fields["seed"] == -1:
        fields["seed"] = secrets.randbits(32)
    return Sampling(**fields)


def take_grammar(options: dict[str, Any]) -> str | None:
    """Pop what grammar_options gave out of `options`, as a grammar that was looked through."""
    given = {name: value for name in ("grammar", "grammar_file", "json_schema") if (value := options.pop(name)) is not None}
    if not given:
        return None
    flags = ["--" + name.replace("_", "-") for name in given]
    if len(given) > 1:
        raise UsageError(f"give {flags[0]} or {flags[1]}, not both")
    text = next(iter(given.values()))
    if not text.strip():
        raise UsageError(f"{flags[0]} '': nothing given (an unset variable?)")
    if "json_schema" not in given:
        text = _read_text(text) if "grammar_file" in given else text
        gbnf.check(text)
        return text
    try:
        schema = json.loads(_read_text(text[1:]) if text.startswith("@") else text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema: not valid JSON: {error}") from None
    return to_gbnf(schema)


def _read_text(path: str) -> str:
    most = 4 * gbnf.MAX_CHARS
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UsageError(f"{path}: more than {most:,} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
