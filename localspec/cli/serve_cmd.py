"""`localspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import click

from localspec.cli.console import counted
from localspec.cli.help import Command, option
from localspec.cli.loading import open_engine, say
from localspec.cli.options import draft_options, model_options, sampling_options, take_models, take_sampling
from localspec.cli.trace import traced
from localspec.errors import UsageError


@click.command("serve", cls=Command)
@model_options
@draft_options
@sampling_options(seed=-1)
@option("Server", "--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@option("Server", "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any free one.")
@option("Server", "-np", "--parallel", "parallel", type=click.IntRange(1, 64), default=4, show_default=True, metavar="N",
        help="Texts written at once; -c is the context of each.")
@option("Server", "--queue", "n_queue", type=click.IntRange(0, 100_000), default=64, show_default=True, metavar="N",
        help="Requests that may wait; more are refused (429).")
@option("Server", "--max-tokens", type=click.IntRange(1), metavar="N", help="No answer gets more tokens than this.")
@option("Server", "--api-key", metavar="KEY", help="Ask for this key.  [default: $LOCALSPEC_API_KEY, else none]")
@option("Server", "--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
        help="Answer to this name, too. On loopback only localhost, 127.0.0.1 and [::1] are; may be given several times.")
@option("Server", "--cors-origin", "origins", multiple=True, metavar="ORIGIN",
        help="Let pages of this origin (http://name:port) read answers. May be given several times.  [default: none]")
@option("Server", "--alias", metavar="NAME", help="The model's id.  [default: the file's name]")
@option("Server", "--trace", metavar="FILE", help="Write a line of JSON for each step: what was drafted, and why.")
@option("Server", "--grace", type=click.FloatRange(0, 3600), default=10.0, show_default=True, metavar="S",
        help="Seconds that running answers get to end when the server is stopped.")
def serve_cmd(
    host: str, port: int, parallel: int, n_queue: int, max_tokens: int | None, api_key: str | None,
    allowed_hosts: tuple[str, ...], origins: tuple[str, ...], alias: str | None, trace: str | None, grace: float,
    **options: Any,
) -> None:  # fmt: skip
    """Answer OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models; and /health, /metrics.

    Only this machine can reach it unless --host says otherwise. The sampling options hold where a request doesn't say;
    without a seed each request gets a random one. Ctrl-C ends it.
    """
    _require_libraries()
    from localspec.serve import app, guard, schema, server
    from localspec.serve.worker import Worker

    key = _key(api_key)
    if alias is not None and not alias.strip():
        raise UsageError("--alias '': no name given (an unset variable?); give a name, or leave --alias out")
    seed = None if options["seed"] == -1 else options["seed"]
    sampling = take_sampling(options)
    choice = take_models(options)
    cross_origins = guard.check_origins(origins)
    with server.bind(host, port) as sock:
        names = guard.hosts(sock.getsockname()[0], server.is_loopback(sock), allowed_hosts)
        if key is None and not server.is_loopback(sock):
            say(f"warning: anyone who reaches {host} can use this server; give an --api-key")
        loaded = open_engine(choice, n_sequences=parallel)
        try:
            name = alias or loaded.model.path.stem
            defaults = schema.Defaults(replace(sampling, seed=seed or 0), seed, max_tokens)
            served = app.Served(name, loaded.model, loaded.session.n_ctx, defaults, key)
            worker = Worker(loaded.engine, n_queue)
            drafter = loaded.drafter.name if loaded.drafter else "none"
            say(
                f"{loaded.model.description}, drafter {drafter}, kernels {loaded.kernels}, "
                f"{counted(parallel, 'sequence')} of {loaded.session.n_ctx} tokens"
            )
            where = f"listening on {server.url(sock)}"
            api = app.make_app(worker, served, guard.middleware(names, cross_origins))
            with traced(loaded.engine, trace):
                code = server.run(api, worker, sock, grace, lambda: say(where))
        finally:
            loaded.close()
    raise click.exceptions.Exit(code)


def _require_libraries() -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _key(given: str | None) -> str | None:
    """The key asked for; an empty variable means none, an empty option is a mistake."""
    if given is not None and not given.strip():
        raise UsageError("--api-key '': no key given (an unset variable?); give a key, or leave --api-key out")
    key = given or os.environ.get("LOCALSPEC_API_KEY", "").strip() or None
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise UsageError("--api-key: a key has visible ASCII characters only")
    return key
