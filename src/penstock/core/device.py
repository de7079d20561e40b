"""Facts about a device, by which kernels are chosen and memory is planned. `platform/facts.py` finds them out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """One device. `flags` are the CPU's instruction sets as Linux names them, empty for a GPU."""

    kind: str
    """cpu | cuda"""
    name: str
    memory: int
    """Bytes, all of it."""
    cores: int
    flags: frozenset[str] = frozenset()
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability."""
