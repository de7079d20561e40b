"""How fast weights come to a GPU, beside the disk's own rate.

usage: gpu_load.py [--gb 6] [--folder /tmp/penstock-load] [--json FILE]

Writes a llama checkpoint of that size (8B's width, as many layers as fit) in two files, unless it is there, then loads it from
the disk (after the system has dropped the files from its cache, as far as it obeys), from the cache, and with dummy weights of
the whole 8B shape. The disk's rate is that of reading the same files with 16 threads and O_DIRECT into host memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fixed import SHAPES
from penstock import models
from penstock.cli.bench.environment import environment
from penstock.ops import registry
from penstock.platform.facts import detect

_CHUNK = 16 << 20


def checkpoint(folder: Path, gb: float) -> dict[str, Any]:
    """Its config; the files are written if they are missing or of another size."""
    width, inner, vocab = (SHAPES["llama8b"][name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    layer = 2 * width * (2.5 * width + 3 * inner)
    config = SHAPES["llama8b"] | {"num_hidden_layers": max(1, round((gb * 1e9 - 4 * vocab * width) / layer))}
    tensors = {"model.embed_tokens.weight": [vocab, width], "lm_head.weight": [vocab, width], "model.norm.weight": [width]}
    for i in range(config["num_hidden_layers"]):
        shapes = {"self_attn.q_proj": [width, width], "self_attn.k_proj": [width // 4, width],
                  "self_attn.v_proj": [width // 4, width], "self_attn.o_proj": [width, width], "mlp.gate_proj": [inner, width],
                  "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner], "input_layernorm": [width],
                  "post_attention_layernorm": [width]}
        tensors |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    names = list(tensors)
    files = {f"model-{part + 1:05}-of-00002.safetensors": names[part::2] for part in range(2)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: file for file, own in files.items() for name in own}}))
    noise = (torch.randn(1 << 22) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    for file, own in files.items():
        _write(folder / file, {name: tensors[name] for name in own}, noise)
    return config


def _write(path: Path, tensors: dict[str, list[int]], noise: bytes) -> None:
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    if path.exists() and path.stat().st_size == 8 + len(text) + at:
        return
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while at > 0:
            at -= file.write(noise[:at])
        file.flush()
        os.fsync(file.fileno())


def forget(folder: Path) -> None:
    """Asks the system to drop the files from its cache."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(folder: Path, direct: bool) -> float:
    """Seconds to read all files with 16 threads."""
    def chunks() -> Iterator[tuple[int, int]]:
        for file in files:
            for first in range(0, os.fstat(file).st_size, _CHUNK):
                yield file, first

    def read(job: tuple[int, int]) -> None:
        if not hasattr(mine, "buffer"):
            mine.buffer = mmap.mmap(-1, _CHUNK)
        os.preadv(job[0], [mine.buffer], job[1])

    mine = threading.local()
    files = [os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for path in folder.glob("*.safetensors")]
    try:
        return timed(lambda: list(ThreadPoolExecutor(16).map(read, chunks())))
    finally:
        for file in files:
            os.close(file)


def timed(what: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = what()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del result
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=6.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/penstock-load"))
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "gpu_load.json") if "OUT" in os.environ else "")
    arguments = parser.parse_args()
    config, device = checkpoint(arguments.folder, arguments.gb), torch.device("cuda")
    size = sum(path.stat().st_size for path in arguments.folder.glob("*.safetensors"))
    kernels = registry.bind(detect("cuda"), torch.bfloat16)

    def load(shape: dict[str, Any], load_format: str) -> Any:
        return models.load(arguments.folder, shape, dtype=torch.bfloat16, device=device, kernels=kernels,
                           load_format=load_format, max_model_len=8192)

    seconds: dict[str, float] = {}

    def take(name: str, what: Callable[[], float], nbytes: int) -> None:
        seconds[name] = what()
        print(f"{name:36} {seconds[name]:7.3f} s {nbytes / seconds[name] / 1e9:8.2f} GB/s", flush=True)

    print(f"{size / 1e9:.2f} GB in {config['num_hidden_layers']} layers")
    timed(lambda: torch.empty(1 << 20, pin_memory=True).cuda())
    forget(arguments.folder)
    try:
        take("disk alone, O_DIRECT", lambda: disk(arguments.folder, True), size)
    except OSError as error:
        print(f"no O_DIRECT here: {error}")
    forget(arguments.folder)
    take("load after forgetting", lambda: timed(lambda: load(config, "auto")), size)
    forget(arguments.folder)
    take("disk alone, buffered, forgotten", lambda: disk(arguments.folder, False), size)
    take("host memory alone, cached", lambda: disk(arguments.folder, False), size)
    for _ in range(2):
        take("load from the system's cache", lambda: timed(lambda: load(config, "auto")), size)
    for _ in range(2):
        take("dummy weights, 8B", lambda: timed(lambda: load(SHAPES["llama8b"], "dummy")), 16_060_000_000)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"environment": environment(), "bytes": size, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
