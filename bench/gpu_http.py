"""HTTP on a GPU: seconds from exec to ready, then closed loops of 512 tokens in, 128 out, at several concurrencies.

usage: gpu_http.py [--shape llama8b qwen06b] [--concurrency 1 32 256] [--client FILE] [--json FILE] [-- SERVER FLAGS]

The client is `penstock bench serve`, or a script that is called as FILE URL MODEL VOCAB CONCURRENCY REQUESTS IN OUT and prints
one line of JSON. Beside each figure stands vLLM 0.25.1's on the same card (measured 2026-11-21).
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shapes import SHAPES, write

PEER = {"llama8b": {"ready": 80.6, 1: (199.6, 17.78, 4.91, 5.86), 32: (3647.7, 340.23, 5.81, 13.68),
                    256: (6786.7, 792.49, 13.97, 201.55)},
        "qwen06b": {"ready": 78.5, 1: (583.0, 10.71, 1.6, 3.07), 32: (11224.5, 79.96, 2.11, 7.32),
                    256: (19632.3, 294.14, 9.09, 28.44)}}
"""Seconds from exec to ready; tokens/s, median time to first token, median and 99th percentile between tokens, in ms."""
REQUESTS = {1: 6, 32: 128, 256: 1024}


@contextmanager
def server(model: Path, flags: list[str]) -> Iterator[tuple[str, float]]:
    """A server over the shape: its address, and the seconds from exec until it was ready."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "serve", str(model), "--port", "0", "--load-format", "dummy",
               "--skip-tokenizer-init", "--max-model-len", "16384", "--gpu-memory-utilization", "0.85",
               "--no-enable-prefix-caching", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = None
        for line in process.stdout:
            print("  " + line.rstrip(), flush=True)
            if found := re.search(r"ready at (\S+)", line):
                address = found[1]
                break
        if address is None:
            sys.exit("the server ended before it was ready")
        yield address, time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def load(client: Path | None, address: str, model: str, vocab: int, concurrency: int) -> dict[str, Any]:
    """One closed loop's figures: out_tok_s, ttft_p50, itl_p50, itl_p99 (ms)."""
    requests = REQUESTS.get(concurrency, 4 * concurrency)
    if client is not None:
        command: list[object] = [client, address, model, vocab, concurrency, requests, 512, 128]
    else:
        command = ["-m", "penstock", "bench", "serve", "--url", address, "--num-prompts", requests, "--max-concurrency",
                   concurrency, "--random-input-len", 512, "--random-output-len", 128, "--vocab-size", vocab, "--quiet",
                   "--compact", "--num-warmups", 0]
    done = subprocess.run([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    if client is None:
        record = {"out_tok_s": record["output_throughput"], "ttft_p50": record["median_ttft_ms"],
                  "itl_p50": record["median_itl_ms"], "itl_p99": record["p99_itl_ms"]}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(PEER), default=list(PEER))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--client", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shape:
            model, peer = write(shape, Path(folder)), PEER[shape]
            with server(model, args.flags) as (address, ready):
                print(f"{shape}: ready after {ready:.1f} s (vLLM {peer['ready']})", flush=True)
                records.append({"shape": shape, "ready_s": ready})
                load(args.client, address, str(model), SHAPES[shape]["vocab_size"], 4)  # a warm-up
                for concurrency in args.concurrency:
                    record = load(args.client, address, str(model), SHAPES[shape]["vocab_size"], concurrency)
                    records.append({"shape": shape, "concurrency": concurrency, **record})
                    rate, ttft, p50, p99 = peer.get(concurrency, (0.0,) * 4)
                    print(f"{shape} {concurrency:4}: {record['out_tok_s']:9.1f} tokens/s ({rate}), TTFT p50 "
                          f"{record['ttft_p50']:7.1f} ms ({ttft}), ITL p50 {record['itl_p50']:6.2f} ({p50}), p99 "
                          f"{record['itl_p99']:6.2f} ({p99})", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
