"""The worker's counts in Prometheus's text format (version 0.0.4)."""

from __future__ import annotations

from localspec.serve.worker import Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(worker: Worker) -> str:
    """All metrics; token and time counts are of requests that have ended."""
    running, waiting = worker.counts()
    totals = worker.totals()
    stats = totals.stats
    rows: list[tuple[str, str, str, float]] = [
        ("requests_running", "gauge", "Requests being answered.", running),
        ("requests_waiting", "gauge", "Requests in the queue.", waiting),
        ("requests_done_total", "counter", "Requests answered to the end.", totals.n_done),
        ("requests_cancelled_total", "counter", "Requests whose client went away or was too slow.", totals.n_cancelled),
        ("requests_failed_total", "counter", "Requests that ended with an error.", totals.n_failed),
        ("requests_refused_total", "counter", "Requests refused because the queue was full.", totals.n_refused),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", stats.n_prompt),
        ("prompt_tokens_computed_total", "counter", "Tokens of prompts that were not in a cache.", stats.n_prompt_computed),
        ("generated_tokens_total", "counter", "Tokens written.", stats.n_generated),
        ("drafted_tokens_total", "counter", "Tokens drafted and checked.", stats.n_drafted),
        ("accepted_tokens_total", "counter", "Drafted tokens that were kept.", stats.n_accepted),
        ("verifications_total", "counter", "Blocks checked by the target.", stats.n_verify),
        ("prompt_seconds_total", "counter", "Time on prompts.", stats.t_prompt),
        ("draft_seconds_total", "counter", "Time on drafting.", stats.t_draft),
        ("generate_seconds_total", "counter", "Time on writing, drafting included.", stats.t_step),
    ]
    lines = []
    for name, kind, text, value in rows:
        full = f"localspec_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value!r}"]
    return "\n".join(lines) + "\n"
