"""Facts about a device, by which kernels are chosen and memory is planned. `platform/facts.py` finds them out."""

from dataclasses import dataclass

_GIB = 1 << 30


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


@dataclass(frozen=True)
class Occupancy:
    """A GPU's memory in bytes, before the engine takes any except CUDA's own needs."""

    free: int
    total: int

    @property
    def used(self) -> int:
        return self.total - self.free

    def __str__(self) -> str:
        return f"{self.used / _GIB:.1f} GiB of the GPU's {self.total / _GIB:.1f} are in use already"
