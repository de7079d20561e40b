"""The ceilings of the device: bytes per second of a copy, bf16 FLOP/s of a GEMM."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from penstock.core.errors import ConfigError
from penstock.platform.facts import detect, device_name

_ROUNDS = 5
_REPEATS = {"cuda": 20, "cpu": 2}
"""Launches in a round: enough to hide the launch itself."""
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Much more than caches hold."""
_WIDTH = {"cuda": 8192, "cpu": 1024}


def measure_device(args: argparse.Namespace) -> dict[str, Any]:
    """Median rates of five rounds. ConfigError if there is no such device."""
    facts = detect(args.device)
    import torch  # late: `penstock bench --help` must not pay for it

    device = torch.device(device_name(args.device, facts))
    size = args.size or _WIDTH[facts.kind]
    if size < 1:
        raise ConfigError(f"--size must be at least 1, got {args.size}")
    wait: Callable[[], object] = torch.cuda.synchronize if facts.kind == "cuda" else lambda: None
    repeats = _REPEATS[facts.kind]

    def seconds(work: Callable[[], object]) -> float:
        """Seconds of one launch: the median over rounds, after a warm-up round."""
        found = []
        for _ in range(_ROUNDS + 1):
            wait()
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            wait()
            found.append((time.perf_counter() - start) / repeats)
        return statistics.median(found[1:])

    source = torch.ones(_COPY_BYTES[facts.kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return {"device": facts.name, "memory_bytes": facts.memory,
            "compute_capability": ".".join(map(str, facts.capability)) if facts.kind == "cuda" else None,
            "copy_bytes_per_second": 2 * source.nbytes / seconds(lambda: target.copy_(source)), "gemm_size": size,
            "gemm_flops_per_second": 2 * size ** 3 / seconds(lambda: torch.mm(left, right, out=product))}


def rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("device", result["device"]), ("memory, GiB", result["memory_bytes"] / (1 << 30)),
            ("compute capability", result["compute_capability"]),
            ("copy, read and write, GB/s", result["copy_bytes_per_second"] / 1e9),
            (f"bf16 GEMM of {result['gemm_size']}^3, TFLOP/s", result["gemm_flops_per_second"] / 1e12)]
