"""Facts about the machine, by which kernels are chosen and memory is planned. No kernel and no policy lives here."""

import logging
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from penstock.core.errors import ConfigError, first_line
from penstock.core.rank import DeviceFacts

LOG = logging.getLogger("penstock")


@cache
def _cpu() -> DeviceFacts:
    name, flags = "cpu", frozenset[str]()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
            elif line.startswith("flags"):
                flags = frozenset(line.split(":", 1)[1].split())
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceFacts("cpu", name, memory, len(os.sched_getaffinity(0)), flags)


def available_memory() -> int:
    """Returns the bytes of host memory available without swapping, within the cgroup's limit."""
    try:
        stated = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.M)
        available = int(stated[1]) * 1024 if stated else 0
    except OSError:
        available = _cpu().memory
    with suppress(OSError):
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            # The group is charged for cached files as well, which the kernel gives back when memory is needed.
            found = re.search(r"^inactive_file (\d+)$", (_CGROUP / "memory.stat").read_text(), re.M)
            available = min(available, int(limit) - used + (int(found[1]) if found else 0))
    return max(0, available)


_CGROUP = Path("/sys/fs/cgroup")


def detect(device: str = "auto") -> DeviceFacts:
    """Facts of `device`: auto (a GPU if there is a usable one), cpu, cuda or cuda:N. Raises ConfigError if it cannot serve."""
    if device == "cpu":
        return _cpu()
    if device == "auto":
        try:
            return _gpu(0)
        except ConfigError as error:
            if _GPU_DRIVER.exists():
                LOG.warning("there is an NVIDIA GPU, but the CPU will serve: %s", error)
            return _cpu()
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isdigit() or device == "cuda"):
        raise ConfigError(f"device {device!r} is not known; possible are auto, cpu, cuda and cuda:N")
    return _gpu(int(index or 0))


_GPU_DRIVER = Path("/proc/driver/nvidia/version")
"""There if NVIDIA's driver is loaded."""


def _gpu(index: int) -> DeviceFacts:
    """Facts of GPU `index`, or a ConfigError saying what was found instead."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        # Without torch's advice.
        why = first_line(error).split(". ")[0].rstrip(".:")
        raise ConfigError(f"device cuda:{index} cannot be used by torch {torch.__version__}: {why}; install a CUDA build of "
                          "torch and a driver that is new enough for it, or use --device cpu") from None
    count = torch.cuda.device_count()
    if index >= count:
        names = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise ConfigError(f"device cuda:{index} was asked for, but there {'is' if count == 1 else 'are'} {names}")
    found = torch.cuda.get_device_properties(index)
    capability = (found.major, found.minor)
    built = sorted(_capability(name) for name in torch.cuda.get_arch_list() if name.startswith("sm_"))
    if built and capability < built[0]:
        raise ConfigError(f"device cuda:{index}, {found.name}, has compute capability {_dotted(capability)}, but torch "
                          f"{torch.__version__} was built for {_dotted(built[0])} and later; install a build of torch for this "
                          "GPU, choose another (--device cuda:N), or use --device cpu")
    return DeviceFacts("cuda", found.name, found.total_memory, os.cpu_count() or 1, frozenset(), capability)


def _capability(name: str) -> tuple[int, int]:
    """(9, 0) of sm_90a."""
    digits = "".join(c for c in name if c.isdigit())
    return int(digits[:-1]), int(digits[-1])


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def device_name(asked: str, facts: DeviceFacts) -> str:
    """torch's name of the device that `detect(asked)` found: its index, where the user gave one, is kept."""
    return asked if ":" in asked else facts.kind


__all__ = ["DeviceFacts", "available_memory", "detect", "device_name"]
