"""The counts of a generation, as people and programs read them."""

from __future__ import annotations

from typing import Any

from localspec.engine import Stats


def rate(n: int, seconds: float) -> float:
    """Tokens per second; 0 where nothing was measured."""
    return n / seconds if seconds > 0 else 0.0


def stats_json(stats: Stats) -> dict[str, Any]:
    """The counts and times of `run --json`."""
    return {
        "n_prompt": stats.n_prompt,
        "n_generated": stats.n_generated,
        "tok_per_s": rate(stats.n_generated, stats.t_generate),
        "prompt_tok_per_s": rate(stats.n_prompt_computed, stats.t_prompt),
        "n_verify": stats.n_verify,
        "n_drafted": stats.n_drafted,
        "n_accepted": stats.n_accepted,
        "tokens_per_verify": stats.tokens_per_verify,
        "acceptance_by_position": stats.acceptance_by_position,
        "ms_draft": 1e3 * stats.t_draft,
        "ms_verify": 1e3 * stats.t_verify,
        "ms_accept": 1e3 * stats.t_accept,
        "ms_step": 1e3 * stats.t_step,
    }


def stats_lines(stats: Stats, stop: str, drafting: bool) -> list[str]:
    """What `run` prints after the text. The acceptance line has the form that llama-server prints and scripts parse."""
    lines = [
        f"prompt:     {stats.n_prompt} tokens ({stats.n_prompt_computed} computed), "
        f"{rate(stats.n_prompt_computed, stats.t_prompt):.1f} tok/s",
        f"generation: {stats.n_generated} tokens, {rate(stats.n_generated, stats.t_generate):.1f} tok/s, stop: {stop}",
    ]
    if drafting:
        lines.append(
            f"draft acceptance = {stats.acceptance or 0.0:.5f} "
            f"({stats.n_accepted:5d} accepted / {stats.n_drafted:5d} generated)"
        )
        by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position) or "-"
        n_drafting = stats.drafted_at[0] if stats.drafted_at else 0
        some = "" if n_drafting == stats.n_verify else f", drafted in {n_drafting} of {stats.n_verify} verifications"
        lines.append(f"tokens per verify = {stats.tokens_per_verify:.2f}, acceptance by position: {by_position}{some}")
    rest = stats.t_step - stats.t_draft - stats.t_verify - stats.t_accept
    lines.append(
        f"time: draft {1e3 * stats.t_draft:.0f} ms, verify {1e3 * stats.t_verify:.0f} ms, "
        f"accept {1e3 * stats.t_accept:.0f} ms, rest {1e3 * max(0.0, rest):.0f} ms"
    )
    return lines
