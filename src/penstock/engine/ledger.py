"""The ledger of a request: where its time went, from its arrival at the engine's frontend on."""

import time
from typing import Any

from penstock.core.request import PHASES, Timings
from penstock.scheduler.step import LIMITS


def ledger(timings: Timings) -> dict[str, float]:
    """Seconds by phase, and in all, of a sequence just delivered. `draft`: the part of decoding in which steps drafted for it;
    `decode`: the rest. `detokenize`: from the engine's last token to its text; `sent` is added by whoever sends it."""
    now = time.time()
    found = dict.fromkeys(PHASES, 0.0) | dict(zip(PHASES, timings.phases, strict=False))
    drafting = min(found["decode"], timings.draft_seconds)
    found |= {"decode": found["decode"] - drafting, "draft": drafting, "detokenize": max(0.0, now - timings.finished)}
    return {**found, "sent": 0.0, "total": max(0.0, now - timings.arrival)}


def bound(before: list[float], after: list[float], seconds: float) -> str:
    """A line that names the limit that bound an engine for the last `seconds`, by the seconds of steps for each."""
    spent = [b - a for a, b in zip(before or [0.0] * len(after), after, strict=True)]
    spent[LIMITS.index("client")] = max(0.0, seconds - sum(spent))
    shares = sorted(zip(spent, LIMITS, strict=True), reverse=True)
    return f"the limit is {shares[0][1]}: " + ", ".join(f"{name} {share / seconds:.0%}" for share, name in shares if share > 0)


def rounded(given: dict[str, float]) -> dict[str, Any]:
    """To microseconds."""
    return {name: round(seconds, 6) for name, seconds in given.items()}
