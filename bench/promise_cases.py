"""Three promises on simulated 8B on an H200: a long prompt among short ones, ten tenants of which one sends ten times as much,
and three times the load that can be served.

usage: python bench/promise_cases.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from msgspec import structs

from penstock.cli.simulation.fleet import Fleet, Outcome, read_cost
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.service import BUILT_IN
from promises import RESULTS

WIDE = {name: structs.replace(service, queue=1 << 20) for name, service in BUILT_IN.items()}
COST = read_cost(RESULTS / "cost_llama8b_h200.json")


def ask(number: int, tokens: int, tier: str, arrival: float, output: int, tenant: str = "", waits: bool = False) -> Request:
    base = (number + 1) * 200_003 % (1 << 29)
    return Request(str(number), list(range(base, base + tokens)), SamplingParams(max_tokens=output, ignore_eos=True, seed=0),
                   arrival=arrival, tier=tier, tenant=tenant, waits=waits)


def at(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def served(requests: Iterator[Request], policy: str = "promises") -> Outcome:
    vllm = policy == "vllm"
    cost = structs.replace(COST, step_target=None if vllm else 0.05)
    return Fleet(cost, 1, policy="fcfs" if vllm else policy, classes=WIDE).run(requests)


def chats(long: bool) -> Iterator[Request]:
    """Fifty short chats at once, each asking again every second; a prompt of 128k tokens comes in their midst."""
    draw = random.Random(1)
    times = sorted(1.0 + turn + draw.random() for turn in range(30) for _ in range(50))
    sent = False
    for number, when in enumerate(times):
        if long and when > 6 and not sent:
            sent = True
            yield ask(99_999, 127_000, "interactive", when, 100, waits=True)
        yield ask(number, draw.randint(100, 400), "interactive", when, 50)


def long_prompt() -> None:
    for policy in ("promises", "fcfs", "vllm"):
        found = []
        for long in (False, True):
            records = served(chats(long), policy).records
            short = [r for r in records if r.prompt < 1000]
            found.append((at([r.ttft for r in short], .99), at([r.tpot for r in short], .99), sum(r.refused for r in short)))
        own = next((r for r in records if r.prompt > 1000), None)
        print(json.dumps({"case": "128k among 50 chats", "policy": policy, "ttft_p99_ms": [round(f[0] * 1e3, 1) for f in found],
                          "tpot_p99_ms": [round(f[1] * 1e3, 2) for f in found], "refused": [f[2] for f in found],
                          "ttft_ratio": round(found[1][0] / found[0][0], 2), "tpot_ratio": round(found[1][1] / found[0][1], 2),
                          "long_ttft": round(own.ttft, 2) if own else None}), flush=True)


def tenants() -> None:
    def stream() -> Iterator[Request]:
        draw = random.Random(1)
        for number in range(5700):
            tenant = 0 if number % 19 < 10 else number % 19 - 9
            yield ask(number, draw.randint(500, 3000), "standard", 1.0 + number * 1e-3, draw.randint(20, 200), f"t{tenant}",
                      True)

    for policy in ("promises", "fcfs"):
        records = served(stream(), policy).records
        own = [[r for r in records if r.tenant == f"t{i}"] for i in range(10)]
        until = min(max(r.first for r in mine) for mine in own)
        got = [float(sum(r.prompt + 4 * r.tokens for r in mine if r.first <= until)) for mine in own]
        print(json.dumps({"case": "ten tenants, one sends 10x", "policy": policy, "seconds": round(until, 1),
                          "jain": round(sum(got) ** 2 / (10 * sum(g * g for g in got)), 4)}), flush=True)


def overload() -> None:
    def stream(rate: float, count: int) -> Iterator[Request]:
        draw, now = random.Random(2), 1.0
        for number in range(count):
            now += draw.expovariate(rate)
            tier = draw.choice(["interactive", "standard", "batch"])
            yield ask(number, draw.randint(500, 1500), tier, now, draw.randint(20, 200))

    for policy in ("promises", "fcfs", "vllm"):
        row = {}
        for load in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
            rate = 33.0 * load
            outcome = served(stream(rate, int(rate * 60)), policy)
            until = 61.0
            kept = [r for r in outcome.records if r.kept(BUILT_IN[r.tier]) and r.last <= until]
            promised = [r for r in outcome.records if not r.refused and r.tier != "batch"]
            refused = sum(r.refused for r in outcome.records)
            row[load] = {"kept_per_second": round(len(kept) / 60, 2), "refused": round(refused / len(outcome.records), 3),
                         "accepted_kept": round(sum(r.kept(BUILT_IN[r.tier]) for r in promised) / max(1, len(promised)), 4),
                         "tokens_per_second": round(sum(r.tokens for r in outcome.records if r.last <= until) / 60)}
        print(json.dumps({"case": "overload", "policy": policy, "loads": row}), flush=True)


if __name__ == "__main__":
    long_prompt()
    tenants()
    overload()
