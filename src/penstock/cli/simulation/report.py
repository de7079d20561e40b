"""The tables and plots of simulated runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.cli.bench.drawing import COLOURS, Box, Line, legend, panel, picture, rounded
from penstock.cli.bench.figures import percentile
from penstock.cli.simulation.fleet import Outcome, Record
from penstock.core.service import Service

PERCENTILES = (50, 90, 99)


def figures(outcome: Outcome, classes: Mapping[str, Service]) -> dict[str, Any]:
    """Everything that a run showed, by class and in all, in seconds and tokens."""
    records = outcome.records
    tiers = {tier: [record for record in records if record.tier == tier] for tier in sorted({r.tier for r in records})}
    span = max(outcome.seconds - (records[0].arrival if records else 0.0), 1e-9)
    kept = sum(record.kept(classes[record.tier]) for record in records)
    prompts = sum(record.prompt for record in records if record.tokens)
    return {
        "classes": {tier or "none": _of(own, classes[tier]) for tier, own in tiers.items()},
        "requests": len(records), "goodput": kept / max(1, len(records)), "kept_per_second": kept / span,
        "refused": sum(record.refused for record in records) / max(1, len(records)), "seconds": span,
        "output_tokens_per_second": sum(record.tokens for record in records) / span,
        "hit_rate": sum(record.cached for record in records) / max(1, prompts),
        "utilisation": [busy / span for busy in outcome.busy], "preemptions": outcome.preemptions,
        "limits": {name: seconds / span / len(outcome.busy) for name, seconds in outcome.limits.items()}}


def _of(records: Sequence[Record], service: Service) -> dict[str, Any]:
    answered = [record for record in records if record.tokens]
    first, each = [record.ttft for record in answered], [record.tpot for record in answered if record.tokens > 1]
    return {"requests": len(records), "refused": sum(record.refused for record in records) / len(records),
            "goodput": sum(record.kept(service) for record in records) / len(records),
            **{f"{name}_p{p}": percentile(values or [0.0], p) for name, values in (("ttft", first), ("tpot", each))
               for p in PERCENTILES}}


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{'class':14}{'requests':>9}{'goodput':>9}{'refused':>9}" + "".join(
        f"{name} p{p}".rjust(12) for name in ("TTFT", "TPOT") for p in PERCENTILES)]
    for tier, own in found["classes"].items():
        lines.append(f"{tier:14}{own['requests']:>9}{own['goodput']:>9.1%}{own['refused']:>9.1%}" + "".join(
            f"{own[f'{name}_p{p}'] * 1e3:>9.1f} ms" for name in ("ttft", "tpot") for p in PERCENTILES))
    used = found["utilisation"]
    lines.append(f"goodput {found['goodput']:.1%} ({found['kept_per_second']:.2f} requests/s), "
                 f"{found['output_tokens_per_second']:.0f} output tokens/s, {found['hit_rate']:.1%} of prompts cached, "
                 f"{found['preemptions']} preemptions in {found['seconds']:.1f} s")
    lines.append(f"replicas are busy {min(used):.0%} to {max(used):.0%} of the time; limits: " + (", ".join(
        f"{name} {share:.0%}" for name, share in sorted(found["limits"].items(), key=lambda item: -item[1])) or "none"))
    return "\n".join(lines)


def curves(records: Sequence[Record], title: str) -> str:
    """SVG: the cumulative distributions of TTFT and TPOT by class."""
    parts: list[str] = []
    for i, name in enumerate(("TTFT", "TPOT")):
        lines = []
        for colour, tier in zip(COLOURS, sorted({record.tier for record in records}), strict=False):
            values = [max(1e-4, getattr(one, name.lower())) for one in records if one.tier == tier and one.tokens > i]
            if values:
                shares = np.percentile(values, range(101)).tolist()
                lines.append(Line(tier or "none", [(value, step / 100) for step, value in enumerate(shares)], colour))
        if lines:
            box = Box(70 + 430 * i, 60, 340, 220)
            x = rounded([point[0] for line in lines for point in line.points], True)
            parts += panel(box, f"{title}: {name}, share of requests", x, rounded([0.0, 1.0]), lines, "seconds")
            parts += legend(box.left + 220, box.top + 140, lines)
    return picture(900, 340, parts)
