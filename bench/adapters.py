"""1,000 adapters on disk, chosen by Zipf's law: time to the first token beside that of adapters that are all in host memory.

    python -m bench.adapters [--model canary] [--adapters 1000] [--resident 250] [--rate 20] [--requests 400]
    python -m bench.adapters --streams 32 [--pairs 11]

The same requests arrive at the same times in both runs, after others that have warmed up host memory. Rank 16 on all
projections of attention and MLP. With --streams: canary on one thread of the CPU, a third each of so many streams without an
adapter and with each of its two, beside all without, in pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.checkpoint import resolve_folder

RANK = 16


def write(model: Path, folder: Path, count: int) -> list[Path]:
    """Random adapters: the same matrices, whose files differ by one number."""
    tensors = {}
    weights = {name: one for file in sorted(model.glob("*.safetensors")) for name, one in load_file(file).items()}
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns) / columns ** 0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK) * 0.01
    first = next(iter(tensors.values()))
    config = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"})
    found = []
    for number in range(count):
        first[0, 0] = number
        found.append(folder / str(number))
        found[-1].mkdir()
        save_file(tensors, found[-1] / "adapter_model.safetensors")
        (found[-1] / "adapter_config.json").write_text(config)
    return found


def first_tokens(llm: LLM, names: Sequence[str], times: Sequence[float], length: int) -> list[float]:
    """Seconds from each request's arrival to its first token."""
    engine, draw, begun, done = llm.engine, random.Random(1), dict[str, float](), dict[str, float]()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    requests = [llm.inputs.request(f"r{i}", [draw.randrange(300, 2000) for _ in range(length)], params, adapter=name)
                for i, name in enumerate(names)]
    start, at = time.perf_counter(), 0
    while at < len(requests) or engine.busy:
        while at < len(requests) and times[at] <= time.perf_counter() - start:
            begun[requests[at].id] = start + times[at]
            engine.submit(requests[at])
            at += 1
        if not engine.busy:
            time.sleep(max(0.0, min(0.002, times[at] - (time.perf_counter() - start))))
            continue
        for update in engine.turn():
            if update.error is not None:
                raise update.error
            done.setdefault(update.request_id, time.perf_counter())
    return [done[name] - begun[name] for name in begun]


def streams(count: int, pairs: int) -> None:
    """Prints the rate of mixed streams relative to the base's, by processor time and by time."""
    assets = Path(__file__).parents[1] / "tests" / "assets"
    modules = [f"{name}={assets / f'canary-{name}'}" for name in ("pirate", "telegram")]
    with LLM("canary", device="cpu", threads=1, dtype="bfloat16", enable_lora=True, lora_modules=modules, max_model_len=256,
             max_num_seqs=count, enable_prefix_caching=False) as llm:
        engine, draw, number = llm.engine, random.Random(1), itertools.count()
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        names = ["", *(adapter.digest for adapter in engine.info.adapters)]

        def run(mixed: bool) -> tuple[float, float]:
            for i in range(count):
                prompt = [draw.randrange(300, 2000) for _ in range(64)]
                engine.submit(llm.inputs.request(f"r{next(number)}", prompt, params, adapter=names[i % 3] if mixed else ""))
            began = time.process_time(), time.perf_counter()
            while engine.busy:
                for update in engine.turn():
                    if update.error is not None:
                        raise update.error
            return time.process_time() - began[0], time.perf_counter() - began[1]

        run(False), run(True)
        found = np.array([[run(False), run(True)] for _ in range(pairs)])
    for kind, each in zip(("processor time", "time"), np.moveaxis(found, 2, 0), strict=True):
        base, mixed = each.T
        print(f"{count} streams, {kind}: base {base.min():.3f} s, mixed {mixed.min():.3f} s; base / mixed, median of {pairs} "
              f"pairs {np.median(base / mixed):.3f} (goal 0.85)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="canary")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--resident", type=int, default=250, help="in host memory, of the first run; all of the second")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=11)
    asked = parser.parse_args()
    if asked.streams:
        streams(asked.streams, asked.pairs)
        return
    draw = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, asked.adapters + 1)
    picks = draw.choice(asked.adapters, asked.requests, p=weights / weights.sum())
    warm = draw.choice(asked.adapters, min(asked.requests, asked.resident), p=weights / weights.sum())
    times = np.cumsum(draw.exponential(1 / asked.rate, asked.requests)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        folders = write(Path(resolve_folder(asked.model, None)), Path(folder), asked.adapters)
        found = {}
        for kind, resident in (("on disk", asked.resident), ("resident", asked.adapters)):
            with LLM(asked.model, device=asked.device, enable_lora=True, max_lora_rank=RANK, max_loras=asked.slots,
                     max_cpu_loras=resident, max_model_len=512, max_num_seqs=32, enable_prefix_caching=False) as llm:
                names = [llm.engine.add_adapter(str(one)) for one in folders]
                first_tokens(llm, [names[i] for i in warm], times[:len(warm)], asked.length)
                seconds = first_tokens(llm, [names[i] for i in picks], times, asked.length)
            found[kind] = np.percentile(seconds, [50, 99]) * 1e3
            print(f"{kind}: time to first token p50 {found[kind][0]:.1f} ms, p99 {found[kind][1]:.1f} ms", flush=True)
    ratio = found["on disk"][1] / found["resident"][1]
    print(f"p99 on disk / resident: {ratio:.2f} ({asked.adapters} adapters, {len(set(picks.tolist()))} of them asked for)")


if __name__ == "__main__":
    main()
