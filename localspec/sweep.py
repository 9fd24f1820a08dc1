"""Drafting measured over a grid: tokens drafted x texts at once x temperature, beside plain decoding and llama-server.

Requests go in waves of as many as are decoded at once. Every side decodes a wave before the next one is begun, in an order
that turns from wave to wave: a machine that slows down slows all of them. One wave of one side is a unit; each is written
down when it is done (sweep_state.py), so a sweep that was killed goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.accept import Sampling
from localspec.bench import compare, encode_prompts
from localspec.blocks import FixedBlock
from localspec.control import Adaptive
from localspec.curve import DEFAULT_SIZES, Curve, Probe, measure_curves
from localspec.drafters import Drafter
from localspec.engine import Engine, Request, Stats
from localspec.peer import LlamaServer, draft_arguments, server_arguments
from localspec.prompts import Prompt
from localspec.report import rate
from localspec.sweep_state import State
from localspec.target import TargetSession

PLAIN, ADAPTIVE, SERVER = "plain", "adaptive", "llama-server"
_CURVE_CONTEXT = 128
_CURVE_ROUNDS = 7
_LEAST_WAVES = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One way of decoding. `n` drafted tokens each time (of `adaptive` the most); None where nothing is drafted."""

    kind: str  # plain, fixed, adaptive, llama-server
    n: int | None = None

    @property
    def name(self) -> str:
        return self.kind if self.n is None or self.kind == ADAPTIVE else f"{self.kind} {self.n}"

    @property
    def ours(self) -> bool:
        return self.kind != SERVER


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: every combination. `adaptive` is the most that the adaptive side drafts, 0 leaves it out."""

    n_max: tuple[int, ...]
    concurrency: tuple[int, ...]
    temperatures: tuple[float, ...]
    adaptive: int = 0
    peer: Path | None = None

    @property
    def sides(self) -> list[Side]:
        """In the order of tables."""
        ours = [Side(PLAIN), *(Side("fixed", n) for n in self.n_max)]
        ours += [Side(ADAPTIVE, self.adaptive)] if self.adaptive else []
        return ours + ([Side(SERVER), *(Side(SERVER, n) for n in self.n_max)] if self.peer else [])

    def n_waves(self, n_at_once: int, n_prompts: int) -> int:
        """Waves that hold every prompt, at least two: no side is measured at one moment alone. Prompts from the beginning
        fill them up."""
        return max(_LEAST_WAVES, -(-n_prompts // n_at_once))

    def n_units(self, n_prompts: int) -> int:
        """All units: the curve, and of each wave its sides."""
        waves = sum(self.n_waves(c, n_prompts) for c in self.concurrency)
        return 1 + waves * len(self.temperatures) * len(self.sides)


def unit_name(n_at_once: int, temperature: float, wave: int, side: str) -> str:
    """The key of a unit in the state."""
    return f"{n_at_once}/{temperature:g}/{wave}/{side}"


def compared_name(n_at_once: int, temperature: float, wave: int, side: str) -> str:
    """The key of what comparing a unit's texts found."""
    return unit_name(n_at_once, temperature, wave, side) + "/compared"


class Sweep:
    """Measures what `state` does not hold yet. `settings` are bench's: llama-server's flags are made of them."""

    def __init__(
        self, session: TargetSession, drafter: Drafter, rule: str, grid: Grid, prompts: Sequence[Prompt],
        sampling: Sampling, n_predict: int, state: State, settings: dict[str, Any],
    ):  # fmt: skip
        self._session, self._drafter, self._rule = session, drafter, rule
        self._grid, self._sampling, self._n_predict = grid, sampling, n_predict
        self._state, self._settings = state, settings
        self._encoded = encode_prompts(session.model, session.n_ctx, prompts)
        # Made before any of them runs: an engine takes the drafter's own p_min as it finds it.
        self._engines = {PLAIN: Engine(session, rule=rule)}
        for side in grid.sides:
            if side.kind == "fixed":
                self._engines[side.name] = Engine(session, drafter, FixedBlock(side.n or 0), rule)
        self._adaptive = Engine(session, drafter, Adaptive(grid.adaptive), rule) if grid.adaptive else None

    def run(self, progress: Callable[[str], None] = lambda note: None) -> None:
        """Measure; `progress(what it was)` after each unit, those that were done before among them."""
        if "curve" not in self._state.units:
            self._state.add("curve", self._curve().as_json())
        progress("cost curve")
        self._warm_up()
        for n_at_once in self._grid.concurrency:
            with ExitStack() as stack:
                servers: dict[str, LlamaServer] = {}
                for temperature in self._grid.temperatures:
                    self._cell(n_at_once, temperature, servers, stack, progress)

    def _cell(
        self, n_at_once: int, temperature: float, servers: dict[str, LlamaServer], stack: ExitStack,
        progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        sides = self._grid.sides
        if self._adaptive is not None:  # a new one: what it learns belongs to one place of the grid
            curve = self._state.units["curve"]
            self._adaptive.controller = Adaptive(self._grid.adaptive, dict(zip(curve["n"], curve["ratio"])))
        for wave in range(self._grid.n_waves(n_at_once, len(self._encoded))):
            requests = self._requests(n_at_once, temperature, wave)
            turn = wave % len(sides)
            for side in sides[turn:] + sides[:turn]:
                name = unit_name(n_at_once, temperature, wave, side.name)
                if name not in self._state.units:
                    if side.ours:
                        unit = self._ours(side, requests)
                    else:
                        if not servers:
                            self._start_servers(n_at_once, servers, stack)
                        unit = _theirs(servers[side.name], requests)
                    self._state.add(name, unit)
                unit = self._state.units[name]
                tok_per_s = rate(sum(done["n"] for done in unit["requests"]), unit["seconds"])
                progress(f"{n_at_once} at once, temperature {temperature:g}, {side.name}: {tok_per_s:.0f} tok/s")
            for side in sides:
                name = compared_name(n_at_once, temperature, wave, side.name)
                if name not in self._state.units:
                    self._state.add(name, self._compared(side, n_at_once, temperature, wave, requests))

    def _requests(self, n_at_once: int, temperature: float, wave: int) -> list[Request]:
        """The number of a request is its key: its text is the same with any number of texts at once."""
        sampling = replace(self._sampling, temperature=temperature)
        numbers = range(wave * n_at_once, (wave + 1) * n_at_once)
        return [Request(self._encoded[i % len(self._encoded)], sampling, self._n_predict, key=i) for i in numbers]

    # -- one wave ------------------------------------------------------------------------------------------------------

    def _ours(self, side: Side, requests: Sequence[Request]) -> dict[str, Any]:
        engine = self._adaptive if side.kind == ADAPTIVE and self._adaptive is not None else self._engines[side.name]
        texts, stats, seconds = _decode(engine, requests)
        done = [{
            "key": request.key, "n": s.n_generated, "seconds": s.t_generate, "n_verify": s.n_verify,
            "drafted_at": s.drafted_at, "accepted_at": s.accepted_at, "tokens": text,
        } for request, text, s in zip(requests, texts, stats)]  # fmt: skip
        return {"seconds": seconds, "requests": done}

    def _start_servers(self, n_at_once: int, servers: dict[str, LlamaServer], stack: ExitStack) -> None:
        assert self._grid.peer is not None
        settings = self._settings | {"n_ctx": n_at_once * self._session.n_ctx, "adapt": False}
        for side in self._grid.sides:
            if side.ours:
                continue
            drafting = draft_arguments(settings | {"n_max": side.n}) if side.n is not None else []
            server = LlamaServer(self._grid.peer, server_arguments(settings) + drafting, n_at_once)
            servers[side.name] = server
            stack.callback(server.close)
            server.complete([1, 1], Sampling(temperature=0), 4)  # nothing is timed cold

    def _compared(
        self, side: Side, n_at_once: int, temperature: float, wave: int, requests: Sequence[Request]
    ) -> list[list[Any]]:  # fmt: skip
        """Where a side's texts of one wave part from plain ones: [key, token, margin], for our sides where the accept rule
        promises the same text; of llama-server [key] of greedy texts that are not ours, for information."""
        unit, plain = (self._state.units[unit_name(n_at_once, temperature, wave, name)] for name in (side.name, PLAIN))
        found: list[list[Any]] = []
        for request, ours, done in zip(requests, plain["requests"], unit["requests"]):
            text, expected = done["tokens"], ours["tokens"]
            if side.ours and (temperature == 0 or self._rule == "match"):
                difference = compare(self._session, request.prompt, expected, text, request.key)
                if difference is not None:
                    found.append([request.key, difference.token, difference.margin])
            elif not side.ours and temperature == 0 and text not in (expected, expected[:-1]):
                found.append([request.key])
        return found

    # -- before --------------------------------------------------------------------------------------------------------

    def _curve(self) -> Curve:
        n_context = min(_CURVE_CONTEXT, self._session.n_ctx // 2)
        most = min(self._session.n_ctx - n_context, self._session.n_batch)
        probe = Probe(self._session, [n for n in DEFAULT_SIZES if n <= most], n_context)
        return measure_curves({"": (probe.sizes, probe.round)}, _CURVE_ROUNDS)[""]

    def _warm_up(self) -> None:
        """A few tokens of each engine: nothing is timed cold."""
        token = max(0, self._session.model.tokenizer.bos)
        for engine in self._engines.values():
            _decode(engine, [Request([token, token], Sampling(temperature=0), 4)])


def _decode(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], list[Stats], float]:
    """Write all of them at once, nothing cached: their texts, counts, and seconds by the clock, prompts included."""
    session = engine.session
    for slot in range(session.settings.n_sequences):
        session.rollback(slot, 0)
    texts: dict[int, list[int]] = {}
    stats: dict[int, Stats] = {}
    began = time.perf_counter()
    left: set[int] = set()
    try:
        for slot, request in enumerate(requests):
            engine.start(request, slot)
            left.add(slot)
        while left:
            for step in engine.step():
                if step.stop is not None:
                    texts[step.slot] = engine.tokens(step.slot)[len(requests[step.slot].prompt) :]
                    stats[step.slot] = engine.finish(step.slot)
                    left.remove(step.slot)
        seconds = time.perf_counter() - began
    finally:
        for slot in left:
            engine.finish(slot)
    slots = range(len(requests))
    return [texts[slot] for slot in slots], [stats[slot] for slot in slots], seconds


def _theirs(server: LlamaServer, requests: Sequence[Request]) -> dict[str, Any]:
    """The same wave from a llama-server, each request on a connection of its own."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [pool.submit(server.complete, r.prompt, r.sampling, r.max_tokens or 0) for r in requests]
        answers = [future.result() for future in asked]
    seconds = time.perf_counter() - began
    done = [{
        "key": request.key, "n": int(answer["timings"]["predicted_n"]),
        "seconds": float(answer["timings"]["predicted_ms"]) / 1e3, "n_drafted": int(answer["timings"].get("draft_n", 0)),
        "n_accepted": int(answer["timings"].get("draft_n_accepted", 0)), "tokens": answer.get("tokens", []),
    } for request, answer in zip(requests, answers)]  # fmt: skip
    return {"seconds": seconds, "requests": done}
