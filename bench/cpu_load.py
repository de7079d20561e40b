"""Loading of one model in several storages on this machine's CPU: seconds and peak host memory, a stored byte beside bf16.

usage: cpu_load.py [--layers 8] [--folder /tmp/penstock-cpu-load] [--rounds 3] [--output FILE.jsonl]

Writes a random Llama of llama1b's width in bf16, FP8, INT4 as AWQ packs it, and GGUF's Q8_0, Q4_0 and Q4_K_M, unless they are
there. Each is loaded in a process of its own, by turns, from the system's file cache, and packed for the CPU's kernels.
Memory is that of the process beside mapped files, above what it held before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cpu_peer import written
from penstock import models
from penstock.checkpoint import hub
from penstock.cli.bench.environment import environment
from penstock.models import gguf_out, quantized
from penstock.ops import registry
from penstock.platform.facts import detect

KINDS = ("bf16", "fp8", "awq", "q8_0", "q4_0", "q4_k_m")


def make(folder: Path, layers: int) -> dict[str, Path]:
    """The model in every storage."""
    plain = folder / "llama1b"
    if not plain.exists():
        written(folder, num_hidden_layers=layers)
    found = {"bf16": plain, "fp8": folder / "fp8", "awq": folder / "awq",
             **{kind: folder / f"{kind}.gguf" for kind in KINDS[3:]}}
    for kind, path in found.items():
        if path.exists():
            continue
        if kind == "fp8":
            quantized.write(plain, path, "fp8", {}, "bfloat16")
        elif kind == "awq":
            _awq(plain, path)
        else:
            ends = {"lm_head": "q8_0", "embed_tokens": "q8_0"} if kind != "q4_k_m" else {}
            gguf_out.write(plain, path, kind, ends, "bfloat16")
    return found


def _awq(plain: Path, out: Path) -> None:
    """Random codes with zeros and scales of groups of 128: what they stand for does not matter here."""
    out.mkdir()
    config, tensors = json.loads((plain / "config.json").read_text()), {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj." not in name:
            tensors[name] = tensor
            continue
        (n, k), stem = tensor.shape, name.removesuffix(".weight")
        for part, rows in (("qweight", k), ("qzeros", k // 128)):
            tensors[f"{stem}.{part}"] = torch.randint(-(1 << 31), 1 << 31, (rows, n // 8)).to(torch.int32)
        tensors[f"{stem}.scales"] = torch.full((k // 128, n), 0.003, dtype=torch.float16)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    (out / "config.json").write_text(json.dumps(config))


def held() -> int:
    """Bytes that this process holds beside mapped files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def measure(path: Path, threads: int) -> None:
    """Loads once, and prints a line."""
    torch.set_num_threads(threads)
    folder = hub.resolve_folder(str(path), None)
    config, kernels = models.configured(folder), registry.bind(detect("cpu"), torch.bfloat16)
    registry.set_threads(threads, kernels)
    before, most, done = held(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    model = models.load(folder, config, dtype=torch.bfloat16, device=torch.device("cpu"), kernels=kernels, max_model_len=512)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    stored = path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.glob("*.safetensors"))
    print(json.dumps({"seconds": round(seconds, 3), "stored": stored, "peak": max(most[0], held()) - before,
                      "after": held() - before, "matrices": len(list(model.linears))}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/penstock-cpu-load"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="append the record to this file")
    parser.add_argument("--make", action="store_true", help="write the files and nothing else")
    parser.add_argument("--measure", type=Path, help="load this one, once")
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure, options.threads)
    found, taken = make(options.folder, options.layers), dict[str, list[dict[str, Any]]]()
    if options.make:
        return None
    for _ in range(options.rounds):
        for kind, path in found.items():
            done = subprocess.run([sys.executable, __file__, "--measure", str(path), "--threads", str(options.threads)],
                                  stdout=subprocess.PIPE, text=True, check=True)
            taken.setdefault(kind, []).append(json.loads(done.stdout))
    base = 0.0
    print("| stored as | bytes | seconds | ns a byte | of bf16's | peak memory, of the bytes | after |")
    print("|---|---|---|---|---|---|---|")
    for kind, lines in taken.items():
        seconds, stored = statistics.median(line["seconds"] for line in lines), lines[0]["stored"]
        each = seconds / stored * 1e9
        base = base or each
        print(f"| {kind} | {stored:,} | {seconds:.2f} | {each:.2f} | {each / base:.2f} | "
              f"{max(line['peak'] for line in lines) / stored:.2f} | {lines[0]['after'] / stored:.2f} |", flush=True)
    if options.output:
        with options.output.open("a") as file:
            file.write(json.dumps({"environment": environment(), "layers": options.layers, "loads": taken}) + "\n")


if __name__ == "__main__":
    main()
