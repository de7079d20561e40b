"""The cost of quantization, for each scheme of weights and each codec of the cache: bytes, right answers, perplexities.

usage: python bench/quantized.py [--only caches|weights] [--count 12] [--stories FOLDER ...] --text FILE [--draw FOLDER]
                                 [--folders FOLDER ...] [--wide FOLDER]

Canary is asked graded prompts of every skill, and scores a text; story models score their own stories. `--folders` are canary
as other tools have quantized it, a row each. `--wide` is canary in rows of 256 columns, which superblocks need and
bench/quantized_files.py makes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

from penstock.canary.suite import SKILLS, graded, prompts
from penstock.cli.eval import answers, perplexity
from penstock.cli.info import survey
from penstock.config.flags import integer
from penstock.config.schema import EngineOptions
from penstock.core.errors import PenstockError
from penstock.engine.llm import LLM
from penstock.ops.codec import CODECS
from penstock.quant.dialects.at_load import SCHEMES

SUPERBLOCKS = ("q4_k", "q6_k")


def measured(model: str, text: str, count: int, **options: Any) -> dict[str, Any]:
    """Bytes of matrices as they are stored and of a cached token, a text's perplexity, and right answers to `count` prompts a
    skill."""
    stored = survey(EngineOptions(model=model, device="cpu", **options))["weights"]
    room = {} if count else {"max_model_len": 200}
    with LLM(model, device="cpu", threads=1, **({"kv_cache_memory_bytes": 1 << 28} | room | options)) as llm:
        info = llm.info
        found: dict[str, Any] = {"weights": sum(one["bytes"] for one in stored),
                                 "cache": info.kv_bytes / max(1, info.kv_tokens),
                                 "perplexity": perplexity(llm, text, 512 if count else 192)[0]}
        for _ in range(2 if "cache_host_bytes" in options else 1 if count else 0):
            scores = [graded(items, answers(llm, items)) for items in (prompts(skill, count) for skill in SKILLS)]
            found |= {"right": sum(one.right for one in scores), "asked": sum(one.asked for one in scores)}
        for tier in llm.stats().tiers if "cache_host_bytes" in options else ():
            if tier.name == "host":
                page = tier.bytes_in / max(1, tier.stored_pages)
                found |= {"cache": page / info.page_size, "read back": tier.hit_tokens}
    gc.collect()
    return found


def rows(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Names of the table's rows, and the options that each sets."""
    if kind == "caches":
        # Pages that were evicted in 4 bits are read back when everything is asked a second time, which is what counts.
        aged = {"kv_cache_dtype": "aged", "cache_host_bytes": 1 << 28, "cache_load": "always", "cache_write": "evict",
                "max_num_seqs": 2, "max_model_len": 1024, "kv_cache_memory_bytes": 9 << 18}
        return [("plain", {}), *((f"{name}", {"kv_cache_dtype": name}) for name in CODECS),
                *((f"{name}, first and last layer plain", {"kv_cache_dtype": name, "kv_cache_plain_layers": ["first", "last"]})
                  for name in ("turbo4", "turbo3")), ("aged", aged)]
    return [("plain", {}), *((name, {"quantization": name}) for name in SCHEMES)]


def table(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints as it goes."""
    stories = [Path(one) for one in args.stories]
    text = args.text.read_text("utf-8")[:6000]
    told = {one: "\n".join(case["text"] for case in json.loads((one / "greedy_golden.json").read_text())["cases"])
            for one in stories}
    unit = "cache" if kind == "caches" else "weights"
    print(f"| {kind} | bytes | right | perplexity |" + "".join(f" {one.name} |" for one in stories), flush=True)
    print("|---|---|---|---|" + "---|" * len(stories), flush=True)
    found = []
    more = [(folder.name, {"model": str(folder)}) for folder in args.folders] if kind == "weights" else []
    for name, options in [*rows(kind), *more]:
        if name in SUPERBLOCKS and args.wide:
            options = options | {"model": str(args.wide)}
        one: dict[str, Any] = {"name": name}
        try:
            one |= measured(**({"model": "canary", "text": text, "count": args.count} | options))
            right = f"{one['right']} of {one['asked']}" if "right" in one else ""
            shown = f"| `{name}` | {one[unit]:,.0f} | {right} | {one['perplexity']:,.1f} |"
        except PenstockError as error:
            print(f"{name}: {error}", file=sys.stderr)
            shown = f"| `{name}` | does not fit | | |"
        if "read back" in one:
            print(f"{name}: {one['read back']:,} tokens were read back", file=sys.stderr)
        if "model" in options or name == "aged":
            shown += " |" * len(stories)
            stories_here: list[Path] = []
        else:
            stories_here = stories
        for folder in stories_here:
            try:
                one[folder.name] = measured(str(folder), told[folder], 0, **options)["perplexity"]
                shown += f" {one[folder.name]:.3f} |"
            except PenstockError:
                shown += " does not fit |"
        print(shown, flush=True)
        found.append(one)
    return found


def drawn(found: list[dict[str, Any]], unit: str) -> str:
    """Right answers over bytes, as SVG."""
    points = [one for one in found if "right" in one]
    most, what = max(one[unit] for one in points), "a cached token" if unit == "cache" else "the model"
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" width="640" height="400" font-family="sans-serif" font-size="11">',
             '<path d="M50 10V360H630" fill="none" stroke="black"/>',
             f'<text x="340" y="392" text-anchor="middle">bytes of {what}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        lines.append(f'<text x="46" y="{364 - 340 * share:.0f}" text-anchor="end">{share:.0%}</text>')
    for one in points:
        x, y = 50 + 560 * one[unit] / most, 360 - 340 * one["right"] / one["asked"]
        lines.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="#268"/><text x="{x + 6:.0f}" y="{y - 5:.0f}" '
                     f'transform="rotate(-35 {x:.0f} {y:.0f})">{one["name"]}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/quantized.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("caches", "weights"), action="append", help="one of the tables (default: both)")
    parser.add_argument("--count", type=integer, default=12, help="prompts of each skill (default: 12)")
    parser.add_argument("--text", type=Path, required=True, help="a text for canary's perplexity, 6,000 characters of it")
    parser.add_argument("--stories", nargs="*", default=[], metavar="FOLDER",
                        help="story models, with the stories that they told (greedy_golden.json), which they score")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], metavar="FOLDER",
                        help="canary as other tools have quantized it")
    parser.add_argument("--wide", type=Path, metavar="FOLDER", help="canary in rows of 256 columns")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="write quantized_KIND.svg there")
    args = parser.parse_args()
    for kind in args.only or ["caches", "weights"]:
        found = table(kind, args)
        if args.draw:
            (args.draw / f"quantized_{kind}.svg").write_text(drawn(found, "cache" if kind == "caches" else "weights"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
