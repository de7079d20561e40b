"""Layouts over several GPUs: first whether greedy tokens equal one card's, then seconds of fixed workloads; or steps on paper,
and workloads on the simulator (`penstock simulate`), whose device takes what the paper says.

usage: python bench/layouts.py equal tp2 pp2 ep2
       python bench/layouts.py time llama8b:tp2:decode_b1,prefill_8k llama70b:tp2:decode_b1 [--repeats 2] [--limit 60]
       python bench/layouts.py predict [--shape llama8b llama70b qwen30b_a3b]
       python bench/layouts.py simulate [--shape ...] [--workload decode_b32 decode_b256 offline_mix1000]
       python bench/layouts.py cost llama70b:tp4 > cost.json; penstock simulate TRACE --model-cost cost.json

Every engine is a process of its own with a limit, and every figure is printed and appended to $OUT/layouts.jsonl as it comes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from fixed import ATTENTION, SHAPES, Ask, sizes, workloads, write
from penstock.cli.simulation.fleet import Cost, Fleet
from penstock.config.schema import engine_options
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.steptime import TERMS, Load, StepTime
from penstock.parallel.layout import COMPUTE, LINKS, READ, STEP, sum_seconds

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {}, **{f"tp{n}": {"tensor_parallel_size": n} for n in (2, 3, 4, 8)},
    **{f"pp{n}": {"pipeline_parallel_size": n} for n in (2, 3, 4)},
    **{f"ep{n}": {"tensor_parallel_size": n, "enable_expert_parallel": True} for n in (2, 4, 8)},
    **{f"dp{n}": {"data_parallel_size": n} for n in (2, 4, 8)},
    **{f"cp{n}": {"context_parallel_size": n} for n in (2, 4, 8)},
    **{f"dpep{n}": {"data_parallel_size": n, "enable_expert_parallel": True} for n in (2, 4, 8)},
    **{f"dpepb{n}": {"data_parallel_size": n, "enable_expert_parallel": True, "enable_eplb": True,
                     "eplb_config": {"step_interval": 32, "num_redundant_experts": 2 * n}} for n in (2, 4, 8)},
    **{f"away{n}": {"offload_weights": str(n / 100)} for n in (25, 50, 75, 100)},
    "disk50": {"offload_weights": "0.5", "offload_folder": os.environ.get("FOLDER", "/tmp")},
    "tp2once": {"tensor_parallel_size": 2, "kernels": {"messages": "reference"}},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp4dp2": {"tensor_parallel_size": 4, "data_parallel_size": 2},
    "tp4pp2": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
    "tp2dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2}}

SMALL: dict[str, dict[str, Any]] = {"8b-small": SHAPES["llama8b"] | {"num_hidden_layers": 4},
                                    "8b-eight": SHAPES["llama8b"] | {"num_hidden_layers": 8},
                                    "8b-million": SHAPES["llama8b"] | {"num_hidden_layers": 4,
                                                                       "max_position_embeddings": 1 << 21},
    "tiny": SHAPES["llama8b"] | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                                 "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048},
    "tiny-moe": SHAPES["qwen30b_a3b"] | {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
                                         "num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                                         "num_experts_per_tok": 2, "vocab_size": 2048}}
"""Shapes cut to a few layers: for equality, and for long prompts whose ratios are wanted soon."""

LENGTHS = {"1m": (1 << 20) + 64, "500k": 524288, "120k": 131072}
"""The context by a part of the workload's name."""

DEVICE = os.environ.get("DEVICE", "cuda")
OUT = Path(os.environ.get("OUT", "."))
SHARE = float(os.environ.get("SHARE", "0.85"))
"""Of each card's memory."""


def say(**found: Any) -> None:
    line = json.dumps(found)
    print(line, flush=True)
    with (OUT / "layouts.jsonl").open("a") as file:
        file.write(line + "\n")


def ended(group: int) -> None:
    """Ends processes that take too long; each says where it is."""
    os.killpg(group, signal.SIGABRT)
    time.sleep(1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def child(*words: str, limit: float, told: Callable[[dict[str, Any]], None]) -> None:
    """Runs this script with `words` and passes on each line of JSON that it prints, as it comes; what it says besides goes to
    the error output."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, start_new_session=True,
                               env=os.environ | {"PYTHONFAULTHANDLER": "1"})
    ending = threading.Timer(limit, ended, (process.pid,))
    ending.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            told(json.loads(line))
    status = process.wait()
    ending.cancel()
    if status:
        why = "limit" if status in (-6, -9) else status
        say(failed=" ".join(words), after=round(time.monotonic() - started, 1), status=why)


# -- equality

KINDS = (("canary", "float32"), ("canary-moe", "float32"), ("canary-sink", "float32"), ("8b-small", "bfloat16"))
"""Shapes and types, the smallest first. In float32 by plain PyTorch sums over ranks leave no ties, and nothing is compiled; in
bfloat16 with every kernel and graph, batch-invariant, pipeline stages must be equal, and sums over ranks may not."""


def tokens(layout: str, *kinds: str) -> None:
    """Prints the greedy tokens of a few prompts for each SHAPE:DTYPE, as they come. Says where it is if it takes long."""
    faulthandler.dump_traceback_later(45, repeat=True)
    prompts = [[(7 + 31 * i * (row + 1)) % 4000 + 1 for i in range(length)] for row, length in enumerate((1, 40, 300, 17, 700))]
    for kind in kinds:
        shape, _, dtype = kind.partition(":")
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            made = shape in SMALL
            model = str(write(SMALL[shape], Path(folder) / shape)) if made else "canary" if shape == "canary" else str(
                Path(__file__).parents[1] / "tests" / "assets" / shape)
            options = {"dtype": dtype, "device": DEVICE, "max_model_len": 1024, "max_num_seqs": 16, "threads": 1,
                       "skip_tokenizer_init": True, "gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 1 << 28,
                       "load_format": "dummy" if made else "auto", "batch_invariant": dtype == "bfloat16", **LAYOUTS[layout],
                       "kernels": {"*": "reference"} if dtype == "float32" and DEVICE == "cuda" else {}}
            found = answers(model, options, [(prompt, 32) for prompt in prompts])[1]
        print(json.dumps({"kind": kind, "layout": layout, "tokens": found, "s": round(time.perf_counter() - started, 1)}),
              flush=True)


def equal(layouts: list[str], limit: float, kinds: Sequence[tuple[str, str]] = KINDS) -> None:
    """Compares every layout with one card, and says so as soon as both have answered. One process for each layout."""
    known: dict[tuple[str, str], list[list[int]]] = {}
    lock = threading.Lock()

    def told(line: dict[str, Any]) -> None:
        with lock:
            known[line["kind"], line["layout"]] = line["tokens"]
            whose = layouts if line["layout"] == "one" else [line["layout"]]
            for layout in whose:
                one, other = known.get((line["kind"], "one")), known.get((line["kind"], layout))
                if one is not None and other is not None:
                    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
                    same = sum(a == b for a, b in pairs)
                    say(equal=same == len(pairs), kind=line["kind"], layout=layout, same_tokens=same, of=len(pairs),
                        seconds=line["s"])

    def run(layout: str) -> None:
        asked = [f"{shape}:{dtype}" for shape, dtype in kinds if "ep" not in layout or "moe" in shape]
        child("tokens", layout, *asked, limit=limit, told=told)

    with ThreadPoolExecutor(len(layouts) + 1) as pool:
        list(pool.map(run, ("one", *layouts)))


# -- time


def answers(model: str, options: dict[str, Any], asks: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of every request."""
    with Engine(model, options) as engine:
        return engine.run(asks)


class Engine:
    """An offline engine, or several behind the server's balancer."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        started = time.perf_counter()
        self._several = options.get("data_parallel_size", 1) > 1
        if self._several:
            from penstock.engine.async_llm import AsyncLLM

            self._loop = asyncio.new_event_loop()
            self._llm: Any = AsyncLLM(engine_options(model, options))
            self._loop.run_until_complete(self._llm.start())
        else:
            from penstock.engine.llm import LLM

            self._llm = LLM(model, **options)
        self.seconds = time.perf_counter() - started

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._several:
            self._loop.run_until_complete(self._llm.shutdown())
        else:
            self._llm.close()

    def run(self, asks: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
        params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False) for _, output in asks]
        if self._several:
            return self._loop.run_until_complete(self._all(asks, params))
        self._llm.reset_prefix_cache()
        started = time.perf_counter()
        found = self._llm.generate([{"prompt_token_ids": prompt} for prompt, _ in asks], params, use_tqdm=False)
        return time.perf_counter() - started, [list(one.outputs[0].token_ids) for one in found]

    async def _all(self, asks: list[tuple[list[int], int]], params: list[Any]) -> tuple[float, list[list[int]]]:
        await self._llm.reset_prefix_cache()

        async def one(number: int) -> list[int]:
            *_, last = [output async for output in self._llm.generate(
                {"prompt_token_ids": asks[number][0]}, params[number], f"{number}")]
            return list(last.outputs[0].token_ids)

        started = time.perf_counter()
        found = await asyncio.gather(*map(one, range(len(asks))))
        return time.perf_counter() - started, found


def timed(shape: str, layout: str, names: str, repeats: int) -> None:
    """Prints the median seconds of workloads; also of a prompt of 122,880 tokens: prompt_120k, and decode_120k with steps."""
    known = {name: [(ask.prompt, ask.output) for ask in asks]
             for name, asks in workloads(shape if shape in SHAPES else "llama8b")}
    long = [1000 + i * 7919 % 90000 for i in range(122880)]
    for cards in (2, 4, 8):
        known[f"decode_b{256 * cards}"] = [(prompt[turn:] + prompt[:turn], output) for turn in range(cards)
                                           for prompt, output in known["decode_b256"]]
    known |= {name: [([1000 + i * 7919 % 90000 for i in range(count)], 1)]
              for name, count in (("prompt_500k", 500_000), ("prompt_1m", 1 << 20))}
    if shape.startswith("tiny"):
        known = {name: [([1 + token % 2000 for token in prompt[:24]], 6) for prompt, _ in asks[:4]]
                 for name, asks in known.items()}
    known["prompt_120k"], known["decode_120k"] = [(long, 1)], [(long, 33)]
    with tempfile.TemporaryDirectory() as folder:
        model = str(write((SHAPES | SMALL)[shape], Path(folder) / shape))
        options = {"device": DEVICE, "load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": SHARE,
                   "max_model_len": next((most for part, most in LENGTHS.items() if part in names), 16384),
                   "threads": 1, "dtype": "float32" if DEVICE == "cpu" else "bfloat16", **LAYOUTS[layout]}
        with Engine(model, options) as engine:
            print(json.dumps({"shape": shape, "layout": layout, "start_s": round(engine.seconds, 1)}), flush=True)
            for name in names.split(","):
                seconds = [engine.run(known[name])[0] for _ in range(repeats + 1)][min(1, repeats):]
                print(json.dumps({"shape": shape, "layout": layout, "workload": name,
                                  "seconds": round(statistics.median(seconds), 4)}), flush=True)


# -- on paper

REDUCE, LINK = LINKS["NVLink"]
LONG, LONG_COMPUTE = 1024, 650e12
"""Tokens of a step above which products run at so many FLOP/s, the card's power being the limit (8B's prompts, measured)."""


def predicted(shape: str, ranks: int, rows: int, context: float, experts: bool = False, pairs: float = 0.0) -> dict[str, float]:
    """Seconds of a step of `rows` tokens under tensor parallelism, or experts over ranks. A mixture's ranks read the
    experts that any of the rows picks; under expert parallelism the busiest rank has more than its share of them. `context`:
    entries of the cache that each row reads; prompts among the rows have so many `pairs` of query and key besides."""
    size, width = sizes(SHAPES[shape]), SHAPES[shape]["hidden_size"]
    moved = size.read(rows) * 2 + rows * context * size.entry
    uneven = 1 + 0.6 / max(1.0, rows * size.picks / ranks) ** 0.5 if experts and ranks > 1 else 1.0
    reading = moved / ranks / READ * uneven
    computing = 2 * size.weights * rows / (COMPUTE if rows <= LONG else LONG_COMPUTE) / ranks
    attending = 4 * pairs * size.queries * size.layers / ATTENTION / ranks
    message = rows * width * 2
    one = sum_seconds(message, ranks)
    return {"seconds": STEP + max(reading, computing) + attending + (2 * size.layers + 1) * one * (ranks > 1),
            "sums": (2 * size.layers + 1) * one * (ranks > 1)}


DEEPSEEK = SHAPES["dsv2lite"] | {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "vocab_size": 129280}
"""DeepSeek V3's shape. Queries are counted as if they were projected at once, which overstates attention by a tenth."""
SMALL["dsv3-few"] = DEEPSEEK | {"num_hidden_layers": 12, "quantization_config": {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}
HOST, NETWORK, NETWORK_FIRST = 8, 45e9, 20e-6
"""Cards of a host; bytes/s one way and seconds of a first byte between cards of other hosts (assumed: 400 Gbit/s for each)."""


def by_data(config: dict[str, Any], cards: int, rows: int, context: float, picked: bool,
            pairs: float = 0.0) -> dict[str, float]:
    """Seconds of a decode step of `rows` sequences a card, attention by data and experts over the cards, weights in FP8. Tokens
    go to all cards in bf16 and sums come back, as here; or (`picked`) only to the cards of their experts, in FP8, and back."""
    size, width = sizes(config), config["hidden_size"]
    total = rows * cards
    all_experts = size.experts * size.expert
    touched = size.read(total) - size.weights + size.picks * size.expert
    alike = size.weights - size.picks * size.expert  # what each card has of everything else
    uneven = 1 + 0.6 / max(1.0, total * size.picks / cards) ** 0.5
    reading = (alike + min(touched, all_experts) / cards * uneven + rows * context * size.entry) / READ
    computing = 2 * size.weights * rows / (1.5 * (COMPUTE if rows <= LONG else LONG_COMPUTE))
    attending = 4 * pairs * size.queries * size.layers / ATTENTION
    layers = size.layers - config["first_k_dense_replace"]
    reached = min(cards - 1, size.picks) if picked else cards - 1
    sent = rows * width * reached * (3 if picked else 4)
    far = max(0.0, (cards - HOST) / max(1, cards - 1))
    one = sent * (1 - far) / LINK + sent * far / NETWORK + 2 * (REDUCE if cards <= HOST else NETWORK_FIRST)
    return {"seconds": STEP + max(reading, computing) + attending + layers * one, "messages": layers * one}


def predict_by_data() -> None:
    """Prints a table in Markdown."""
    print("| DeepSeek V3, FP8, 4k contexts, attention by data; ms (of it messages), tokens/s a card | 8 cards | 32 cards |")
    print("|---|---|---|")
    for rows in (8, 32, 64, 128):
        for picked in (False, True):
            found = [by_data(DEEPSEEK, cards, rows, 4096, picked) for cards in (8, 32)]
            cells = [f"{one['seconds'] * 1e3:.1f} ({one['messages'] * 1e3:.1f}), {rows / one['seconds']:.0f}" for one in found]
            print(f"| {rows} sequences a card, {'to the experts of its picks' if picked else 'tokens to all'} | "
                  + " | ".join(cells) + " |")


MEMORY, CHUNK, MOST = 0.85 * 141e9, 8192, 1024
"""Bytes of a card that an engine may use; tokens and sequences of a step."""


def fitted(name: str, step: Callable[[int, float, float], float], room: float) -> Cost:
    """Predicted steps as `penstock simulate` takes them: a model of step time, fitted to steps of drawn sizes. `step`: seconds,
    by tokens, entries of the cache that each reads, and pairs of query and key of prompts. `room`: tokens; few: ValueError."""
    if room < CHUNK:
        raise ValueError(f"{name}: weights leave no room")
    times, draw = StepTime(chunk=CHUNK), random.Random(0)
    for turn in range(6000):
        rows, context = int(2 ** draw.uniform(0, 10)) if turn % 3 else 0, 2 ** draw.uniform(7, 12)
        prompt = int(2 ** draw.uniform(4, 13)) if turn % 3 != 1 else 0
        tokens, pairs = rows + prompt, prompt * (draw.choice([0, 2 ** draw.uniform(7, 13)]) + prompt / 2)
        load = Load(rows + (prompt > 0), tokens, rows * context, pairs)
        times.learn(load, step(tokens, rows * context / max(1, tokens), pairs))
    return Cost(name=f"{name}, as predicted by bench/layouts.py; steps within {times.error:.1%}",
                weights=dict(zip(TERMS, times.weights, strict=True)), kv_tokens=int(room), max_num_seqs=MOST,
                max_num_batched_tokens=CHUNK, max_model_len=131072, step_target=None)


@functools.cache
def cost(shape: str, layout: str) -> Cost:
    """`layout`: one, tpN or epN; dpepN or, with tokens sent to the experts of their picks, dpepNp: DeepSeek V3, one of its
    cards. ValueError if the weights do not fit."""
    if layout.startswith("dpep"):
        cards, picked = int(layout[4:].rstrip("p")), layout.endswith("p")
        size = sizes(DEEPSEEK)
        weights = size.weights + (size.experts / cards - size.picks) * size.expert
        return fitted(f"{shape}, {layout}", lambda tokens, context, pairs: by_data(
            DEEPSEEK, cards, tokens, context, picked, pairs)["seconds"], (MEMORY - weights) / size.entry)
    size, ranks, experts = sizes(SHAPES[shape]), 1 if layout == "one" else int(layout[2:]), layout.startswith("ep")
    width, vocabulary = SHAPES[shape]["hidden_size"], SHAPES[shape]["vocab_size"]
    weights = 2 * (size.weights + (size.experts - size.picks) * size.expert + width * vocabulary)
    return fitted(f"{shape}, {layout}", lambda tokens, context, pairs: predicted(
        shape, ranks, tokens, context, experts, pairs)["seconds"], (MEMORY * ranks - weights) / size.entry)


def simulated(found: Cost, asks: list[Ask], replicas: int = 1) -> float:
    """Seconds of a workload offline: the scheduler and the cache are the engine's, the device takes the predicted times."""
    requests = (Request(str(i), ask.prompt, SamplingParams(max_tokens=ask.output, ignore_eos=True, seed=0), arrival=1.0)
                for i, ask in enumerate(asks))
    return Fleet(found, replicas, policy="fcfs").run(requests).seconds - 1.0


def simulate(shapes: list[str], names: list[str]) -> None:
    """Prints a table in Markdown: each workload over so many cards by tensors, and of mixtures by experts."""
    print("| simulated seconds | " + " | ".join(f"{n} card{'s' * (n > 1)}" for n in (1, 2, 4, 8)) + " |")
    print("|---|" + "---|" * 4)
    for shape in shapes:
        known = dict(workloads(shape))
        for axis in ("tp", "ep") if sizes(SHAPES[shape]).experts else ("tp",):
            costs: list[Cost | None] = []
            for n in (1, 2, 4, 8):
                try:
                    costs.append(cost(shape, f"{axis}{n}"))
                except ValueError:
                    costs.append(None)
            for name in names:
                cells = [f"{simulated(one, known[name]):.3f}" if one else "no room" for one in costs]
                print(" | ".join([f"| {shape}, {name}, {'experts' if axis == 'ep' else 'tensors'}", *cells]) + " |", flush=True)
    print("\n| DeepSeek V3, FP8, attention by data: simulated seconds of what each card is asked for | 8 cards | 32 cards |")
    print("|---|---|---|")
    known = dict(workloads("llama8b"))
    for name in names:
        for form, words in (("", "tokens to all"), ("p", "to the experts of its picks")):
            cells = [f"{simulated(cost('deepseek', f'dpep{cards}{form}'), known[name]):.3f}" for cards in (8, 32)]
            print(" | ".join([f"| {name}, {words}", *cells]) + " |", flush=True)


def predict(shapes: list[str]) -> None:
    """Prints a table in Markdown."""
    print("| decode step, ms (of it sums over ranks) | " + " | ".join(f"{n} card{'s' * (n > 1)}" for n in (1, 2, 4, 8)) + " |")
    print("|---|" + "---|" * 4)
    for shape in shapes:
        for rows, context in ((1, 256), (32, 576), (256, 576)):
            for experts in (False, True) if sizes(SHAPES[shape]).experts else (False,):
                cells = [predicted(shape, n, rows, context, experts) for n in (1, 2, 4, 8)]
                kind = "experts" if experts else "tensors"
                print(f"| {shape}, {rows} sequences, {kind} | "
                      + " | ".join(f"{c['seconds'] * 1e3:.2f} ({c['sums'] * 1e3:.2f})" for c in cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("equal", "time", "predict", "simulate", "cost", "tokens", "timed"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shape", nargs="*", default=["llama8b", "llama70b", "qwen30b_a3b"])
    parser.add_argument("--workload", nargs="*", default=["decode_b1", "decode_b32", "decode_b256", "prefill_16x2k",
                                                          "offline_mix1000"], help="of bench/fixed.py, simulated")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each engine")
    args = parser.parse_intermixed_args()
    if args.what == "predict":
        predict(args.shape)
        predict_by_data()
    elif args.what == "simulate":
        simulate(args.shape, args.workload)
    elif args.what == "cost":
        for name in args.names:
            print(msgspec.json.encode(cost(*name.split(":"))).decode())
    elif args.what == "tokens":
        tokens(*args.names)
    elif args.what == "timed":
        timed(*args.names, args.repeats)
    elif args.what == "equal":
        equal(args.names, args.limit)
    else:
        for name in args.names:
            child("timed", *name.split(":"), "--repeats", str(args.repeats), limit=args.limit, told=lambda line: say(**line))


if __name__ == "__main__":
    main()
