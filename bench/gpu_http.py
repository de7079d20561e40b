"""A server on this machine: seconds from exec to ready, then closed loops at several concurrencies, beside target and peer.

The client is `penstock bench serve`, or a script that is called as FILE URL MODEL VOCAB CONCURRENCY REQUESTS IN OUT and prints
one line of JSON with `Answers`' names (out_tok_s for the first).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fixed import HTTP_PEER, HTTP_TARGET, LOAD, READY_PEER, READY_TARGET, SHAPES, Answers, write
from penstock.core.errors import ConfigError

_REQUESTS = {1: 6, 32: 128, 256: 1024}
"""As many as the peer was asked; four for each at once elsewhere."""
_KEYS = {"tokens_per_second": "output_throughput", "ttft_p50": "median_ttft_ms", "itl_p50": "median_itl_ms",
         "itl_p99": "p99_itl_ms"}
"""Names of an answer's figures in `penstock bench serve`."""
_PENSTOCK = [sys.executable, "-m", "penstock"]


@contextmanager
def server(model: Path, flags: Sequence[str]) -> Iterator[tuple[str, float]]:
    """A server over random weights: its address, and the seconds from exec until it was ready."""
    began = time.perf_counter()
    command = [*_PENSTOCK, "serve", str(model), "--port", "0", "--load-format", "dummy", "--skip-tokenizer-init", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next((found[1] for line in process.stdout if (found := re.search(r"ready at (\S+)", line))), None)
        if address is None:
            raise ConfigError(f"the server ended before it was ready, with status {process.wait()}")
        yield address, time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def over_http(shape: str, concurrencies: Sequence[int], client: Path | None,
              say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The shape's record of the start, then one of each concurrency."""
    config = SHAPES[shape]
    length = min(16384, config["max_position_embeddings"])
    flags = ["--max-model-len", str(length), "--gpu-memory-utilization", "0.85", "--no-enable-prefix-caching"]
    with tempfile.TemporaryDirectory() as folder:
        model = write(config, Path(folder) / shape)
        with server(model, flags) as (address, ready):
            say(f"{shape}: ready after {ready:.1f} s (target {READY_TARGET:g}, peer {READY_PEER.get(shape)})")
            yield {"shape": shape, "ready_seconds": ready, "target": READY_TARGET, "peer": READY_PEER.get(shape)}
            load(client, address, model, config["vocab_size"], 4)  # warms up
            for concurrency in concurrencies:
                found = load(client, address, model, config["vocab_size"], concurrency)
                target = HTTP_TARGET.get(shape, {}).get(concurrency, Answers())
                peer = HTTP_PEER.get(shape, {}).get(concurrency, Answers())
                say(f"{shape} {concurrency:4}: " + ", ".join(
                    f"{name} {value:.2f}" + ("" if aim is None else f" (target {aim:g})") + f" [{other}]"
                    for name, value, aim, other in zip(Answers._fields, found, target, peer, strict=True)))
                yield {"shape": shape, "concurrency": concurrency, "tokens_in": LOAD[0], "tokens_out": LOAD[1],
                       **found._asdict(), "target": target._asdict(), "peer": peer._asdict()}


def load(client: Path | None, address: str, model: Path, vocab: int, concurrency: int) -> Answers:
    """One closed loop's figures, from a client in a process of its own."""
    requests = _REQUESTS.get(concurrency, 4 * concurrency)
    if client is not None:
        command: list[object] = [sys.executable, client, address, model, vocab, concurrency, requests, *LOAD]
    else:
        command = [*_PENSTOCK, "bench", "serve", "--url", address, "--num-prompts", requests, "--max-concurrency", concurrency,
                   "--random-input-len", LOAD[0], "--random-output-len", LOAD[1], "--vocab-size", vocab, "--quiet", "--compact",
                   "--num-warmups", 0, "--extra-body", '{"return_token_ids": true}']  # without a tokenizer there is no text
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the client failed with status {done.returncode}")
    record = json.loads(done.stdout.splitlines()[-1])
    if client is None:
        return Answers(**{name: record[key] for name, key in _KEYS.items()})
    return Answers(record["out_tok_s"], *(record[name] for name in Answers._fields[1:]))
