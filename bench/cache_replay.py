"""Replays traces through the real cache code without a model: how many of the tokens that requests bring are found.

usage: python bench/cache_replay.py TRACE ... [--policies lru adaptive ...] [--capacities 1/64 1/4 4096 ...] [--out FOLDER]

A trace is one of
* a file of JSON lines, one request each, in order of arrival: "hash_ids" (Mooncake: numbers of blocks; equal numbers mean equal
  contexts, and a block counts as one token and one page) or "tokens" (token ids; --page of them are a page); "output" (token
  ids that were generated) and "salt" (a namespace) may come with either;
* a file of JSON with "spans" (OpenTelemetry of agents), or a folder of such: each call's messages as bytes of UTF-8, a byte a
  token; sessions of all workflows run interleaved, each with its own name in its first message (--sessions, --seed);
* a folder of ServeGen's: conversations of several turns, whose lengths are drawn from its histograms (--sessions, --seed).

Capacities are pages, or fractions of the pages of the whole trace (its working set). Beside the policies stand two that no
cache can have: Belady's, which knows the future and gives up the page that is needed again last, and one without limit. One
request runs at a time: prompt matched, computed, output added, released. A request that does not fit is served without cache.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import json
import random
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from penstock.cache import keys
from penstock.cache.eviction import POLICIES
from penstock.cache.manager import Cache, Reuse
from penstock.cli.bench.drawing import COLOURS, Axis, Box, Line, legend, panel, picture
from penstock.cli.bench.environment import environment
from penstock.core.request import Request, Sequence
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec, lay_out

CAPACITIES = ("1/64", "1/32", "1/16", "1/8", "1/4", "1/2", "3/4", "1")
BYTE_PAGE = 64
"""Bytes of text in a page, where bytes stand for tokens: some 16 tokens of a usual vocabulary."""


class Turn(NamedTuple):
    """One request of a trace."""

    prompt: list[int]
    output: list[int]
    salt: str


class Trace(NamedTuple):
    name: str
    page: int
    turns: list[Turn]


# -- reading traces


def read(path: Path, page: int, sessions: int, seed: int) -> Trace:
    """A trace in any of the forms."""
    if path.is_dir():
        if any(path.glob("*-dataset.json")):
            return Trace(path.name, page, _conversations(path, sessions, random.Random(seed)))
        files = sorted(path.glob("*.json"))
        return Trace(path.name, BYTE_PAGE, _agents(files, sessions, random.Random(seed)))
    if path.suffix == ".json":
        return Trace(path.stem, BYTE_PAGE, _agents([path], sessions, random.Random(seed)))
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    blocks = "hash_ids" in lines[0]
    field = "hash_ids" if blocks else "tokens"
    turns = [Turn(line[field], line.get("output", []), line.get("salt", "")) for line in lines]
    return Trace(path.stem, 1 if blocks else page, turns)


def _agents(files: list[Path], sessions: int, rng: random.Random) -> list[Turn]:
    """Calls of many sessions, interleaved at random with each session's order kept."""
    workflows = []
    for file in files:
        spans = json.loads(file.read_text())["spans"]
        calls = [span for span in sorted(spans, key=lambda span: span["start_time"])
                 if "gen_ai.input.messages" in span["attributes"]]
        workflows.append([(span["attributes"]["gen_ai.input.messages"], span["attributes"].get("gen_ai.output.text", ""))
                          for span in calls])
    queues = []
    for number in range(sessions):
        turns = []
        for messages, answer in rng.choice(workflows):
            text, named = "", False
            for message in json.loads(messages):
                text += f"<{message['role']}>"
                if message["role"] == "user" and not named:
                    text, named = text + f"[user {number}] ", True
                text += str(message["content"])
            turns.append(Turn(list((text + "<assistant>").encode()), list(answer.encode()), ""))
        queues.append(turns)
    return list(_interleave(queues, rng))


def _conversations(folder: Path, sessions: int, rng: random.Random) -> list[Turn]:
    """Turns of conversations: each brings all that was said before, and something new. Half begin with one of 20 system
    prompts."""
    inputs, outputs = _histogram(folder, "input_tokens"), _histogram(folder, "output_tokens")
    systems = [[rng.randrange(1 << 16) for _ in range(rng.randint(50, 2000))] for _ in range(20)]
    queues = []
    for _ in range(sessions):
        context = list(rng.choice(systems)) if rng.random() < 0.5 else []
        turns = []
        while True:
            context += [rng.randrange(1 << 16) for _ in range(min(_draw(inputs, rng), 4000))]
            answer = [rng.randrange(1 << 16) for _ in range(min(_draw(outputs, rng), 2000))]
            turns.append(Turn(list(context), answer, ""))
            context += answer
            if rng.random() < 0.3 or len(context) > 16_000:
                break
        queues.append(turns)
    return list(_interleave(queues, rng))


def _histogram(folder: Path, field: str) -> list[tuple[int, float]]:
    found: dict[int, float] = {}
    for file in sorted(folder.glob("*-dataset.json")):
        for window in json.loads(file.read_text()).values():
            for length, weight in ast.literal_eval(window[field]).items():
                found[int(length)] = found.get(int(length), 0.0) + float(weight)
    return sorted(found.items())


def _draw(histogram: list[tuple[int, float]], rng: random.Random) -> int:
    return max(1, rng.choices([length for length, _ in histogram], [weight for _, weight in histogram])[0])


def _interleave(queues: list[list[Turn]], rng: random.Random) -> Iterator[Turn]:
    """Sessions arrive one after another, some 20 at a time; which of them goes on next is chance."""
    waiting, active = list(reversed(queues)), list[list[Turn]]()
    while waiting or active:
        while waiting and len(active) < 20:
            active.append(list(waiting.pop()))
        queue = rng.choice(active)
        yield queue.pop(0)
        if not queue:
            active.remove(queue)


# -- replaying them


def replay(trace: Trace, capacity: int, policy: str) -> int:
    """Tokens that the cache finds, with room for `capacity` pages."""
    states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
    layout = lay_out(states, trace.page, lay_out(states, trace.page, 0).slab_bytes * capacity)
    cache, found = Cache(layout, policy=policy), 0
    for number, turn in enumerate(trace.turns):
        length = len(turn.prompt) + len(turn.output)
        if -(-length // trace.page) > capacity:
            continue
        request = Request(str(number), turn.prompt, SamplingParams(), salt=turn.salt)
        # A token more than the prompt: all of the prompt may be found.
        sequence = Sequence(request, 0, 0, length + 1)
        sequence.tokens.append(-1)
        cache.evictor.now = float(number)
        sequence.row = 0
        sequence.planned = sequence.computed = hit = min(cache.match(sequence), len(turn.prompt))
        if hit < length and not cache.grow(sequence, length):
            # The page that a match cuts and copies is one too many.
            cache.release(sequence)
            sequence.planned = sequence.computed = hit = min(cache.match(sequence, Reuse.PAGES), len(turn.prompt))
            assert cache.grow(sequence, length), "alone, a request that fits has room"
        found += hit
        sequence.tokens[-1:] = turn.output
        if sequence.cache_state is not None:
            del sequence.cache_state.packed[4 * len(turn.prompt):]
        cache.count_hit(sequence)
        cache.enter(sequence)
        sequence.planned = sequence.computed = length
        if sequence.computed >= sequence.due:
            cache.commit(sequence)
        cache.release(sequence)
    cache.check([])
    return found


def pages(trace: Trace) -> list[tuple[list[bytes], int]]:
    """For each request the names of its whole pages, and how many of them are the prompt's."""
    named = []
    for turn in trace.turns:
        names = keys.chain(keys.root("", "", turn.salt), turn.prompt + turn.output, trace.page)
        named.append((names, len(turn.prompt) // trace.page))
    return named


def belady(named: list[tuple[list[bytes], int]], capacity: int, page: int) -> int:
    """Tokens found in whole pages if what is needed again last is given up first; a page may be given up at once."""
    never = len(named)
    following: dict[bytes, int] = {}
    nexts: list[list[int]] = []
    for number in range(len(named) - 1, -1, -1):
        names, prompt = named[number]
        nexts.append([following.get(name, never) for name in names])
        following.update((name, number) for name in names[:prompt])
        for name in names[prompt:]:
            # Where it is only generated it need not be there before.
            following.pop(name, None)
    nexts.reverse()
    here: dict[bytes, int] = {}
    heap: list[tuple[int, int, bytes]] = []
    found = 0
    for (names, prompt), after in zip(named, nexts, strict=True):
        if len(names) > capacity:
            continue
        hits = 0
        while hits < prompt and names[hits] in here:
            hits += 1
        found += hits * page
        for depth, (name, when) in enumerate(zip(names, after, strict=True)):
            here[name] = when
            heapq.heappush(heap, (-when, -depth, name))
        while len(here) > capacity:
            when, _, name = heapq.heappop(heap)
            if here.get(name) == -when:
                del here[name]
    return found


def measure(trace: Trace, capacities: list[str], policies: list[str]) -> dict[str, object]:
    """The table of one trace: hit rates by capacity."""
    named = pages(trace)
    working_set = len({name for names, _ in named for name in names})
    asked = sum(len(turn.prompt) for turn in trace.turns)
    rows = []
    for text in capacities:
        share = Fraction(text)
        capacity = int(share) if share > 1 else max(1, int(working_set * share))
        row: dict[str, object] = {"capacity": capacity, "share": round(capacity / working_set, 4)}
        for policy in policies:
            row[policy] = round(replay(trace, capacity, policy) / asked, 4)
        row["belady"] = round(belady(named, capacity, trace.page) / asked, 4)
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    longest = max(len(turn.prompt) + len(turn.output) for turn in trace.turns)
    unlimited = replay(trace, working_set + len(trace.turns) + longest, policies[0]) / asked
    print(f"unlimited {unlimited:.4f}", flush=True)
    return {"environment": environment(),
            "trace": trace.name, "requests": len(trace.turns), "prompt_tokens": asked, "page": trace.page,
            "working_set_pages": working_set, "unlimited": round(unlimited, 4), "rows": rows}


# -- drawing


def draw(table: dict[str, object]) -> str:
    """The table as an SVG: hit rate over the share of the working set that fits, on a logarithmic axis."""
    rows: list[dict[str, float]] = table["rows"]  # type: ignore[assignment]
    unlimited = float(str(table["unlimited"]))
    shares = [row["share"] for row in rows]
    top = max(unlimited, 0.01) * 1.05
    series = [name for name in rows[0] if name not in ("capacity", "share")]
    lines = [Line(name, [(row["share"], row[name]) for row in rows], colour)
             for name, colour in zip(series, COLOURS, strict=False)]
    lines.append(Line("unlimited", [(min(shares), unlimited), (max(shares), unlimited)], "black", dashed=True))
    box = Box(60, 30, 450, 310)
    parts = panel(box, f"{table['trace']}: share of prompt tokens found in the cache",
                  Axis(shares, logarithmic=True, label="{:.3g}".format),
                  Axis([top * tick / 5 for tick in range(6)], label="{:.2f}".format), lines,
                  below=f"capacity as a share of the working set ({table['working_set_pages']} pages)")
    return picture(640, 400, parts + legend(box.left + box.width + 12, 40, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--policies", nargs="+", default=["lru", "adaptive"], choices=sorted(POLICIES))
    parser.add_argument("--capacities", nargs="+", default=list(CAPACITIES))
    parser.add_argument("--page", type=int, default=16, help="tokens of a page, where a trace has tokens (default 16)")
    parser.add_argument("--sessions", type=int, default=300, help="sessions that are made of agents' or ServeGen's traces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.svg")
    options = parser.parse_args()
    for path in options.traces:
        trace = read(path, options.page, options.sessions, options.seed)
        if not trace.turns:
            sys.exit(f"{path} has no requests")
        print(f"{trace.name}: {len(trace.turns)} requests", flush=True)
        began = time.perf_counter()
        table = measure(trace, options.capacities, options.policies)
        print(f"took {time.perf_counter() - began:.0f} s", flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"cache_{trace.name}.json").write_text(json.dumps(table, indent=1) + "\n")
            (options.out / f"cache_{trace.name}.svg").write_text(draw(table))


if __name__ == "__main__":
    main()
