"""What machine this is: the facts by which kernels are chosen and memory is planned. No kernel and no policy lives here."""

from __future__ import annotations

import os
from functools import cache

from penstock.core.device import DeviceFacts
from penstock.core.errors import ConfigError


@cache
def _cpu() -> DeviceFacts:
    name, flags = "cpu", frozenset[str]()
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    name = line.split(":", 1)[1].strip()
                elif line.startswith("flags"):
                    flags = frozenset(line.split(":", 1)[1].split())
                    break
    except OSError:
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceFacts("cpu", name, memory, len(os.sched_getaffinity(0)), flags)


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping, the cgroup's limit respected."""
    available = 0
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    available = int(line.split()[1]) * 1024
    except OSError:
        available = _cpu().memory
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(current.read()))
    except OSError:
        pass
    return available


def detect(device: str = "auto") -> DeviceFacts:
    """Facts of `device`: auto (a GPU if there is a usable one), cpu, cuda or cuda:N. Raises ConfigError if it is not there."""
    if device == "cpu":
        return _cpu()
    import torch

    if device == "auto":
        return detect("cuda") if torch.cuda.is_available() else _cpu()
    if not device.startswith("cuda"):
        raise ConfigError(f"device {device!r} is not known; possible are auto, cpu, cuda and cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch {torch.__version__} sees no usable GPU; "
                          "install a CUDA build of torch and a driver, or use --device cpu")
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} was asked for, but the last GPU is cuda:{torch.cuda.device_count() - 1}")
    facts = torch.cuda.get_device_properties(index)
    return DeviceFacts("cuda", facts.name, facts.total_memory, os.cpu_count() or 1, frozenset(), (facts.major, facts.minor))


def device_name(asked: str, facts: DeviceFacts) -> str:
    """torch's name of the device that `detect(asked)` found: its index, where the user gave one, is kept."""
    return asked if ":" in asked else facts.kind


__all__ = ["DeviceFacts", "available_memory", "detect", "device_name"]
