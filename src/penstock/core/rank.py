"""Facts that a rank reports while it starts, by which kernels are chosen and memory is planned: the device (found out by
`platform/facts.py`), the model, and what it takes. The engine plans by these alone."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.state import StateSpec

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


@dataclass(frozen=True)
class Survey:
    """Facts before anything is loaded: the device, and the model as its folder describes it."""

    device: DeviceFacts
    folder: Path
    architecture: str
    vocab_size: int
    max_positions: int
    parameters: int
    """The number of those by which a token is multiplied."""
    dtype: str
    """The checkpoint's own."""
    task: str = "generate"
    """generate, embed or classify."""
    labels: tuple[str, ...] = ()
    whole: bool = False
    """A prompt has to be in one step."""
    pairs: str = "joined"
    """layers/spec.py::ModelSpec.pairs"""
    second: int = 0
    """layers/embedding.py::EmbeddingSpec.second"""
    alike: list[str] = field(default_factory=list)
    """Of one of several machines: versions, options and a sample of the weights, which have to be the same on all of them."""


@dataclass(frozen=True)
class Loaded:
    """Facts once the weights are loaded. Bytes are those of this rank alone."""

    states: list[StateSpec]
    weight_bytes: int
    step_bytes: int
    """Peak memory of the largest step, beside weights and cache."""
    graph_bytes: int
    room: int
    """The most that the cache may take."""
    occupancy: Occupancy | None
    """A GPU's memory before anything was on it."""
    computation: str
    """Name of the computation: equal for ranks and engines whose cached pages are interchangeable."""
    kernels: list[tuple[str, str]]
    """The implementation that serves each operation."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user about how the model runs."""
    compiled: int = 0
    """Kernels that were compiled, as the cache on disk did not have them."""
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """Facts once the rank is ready to run steps."""

    graphs: int = 0
    graph_seconds: float = 0.0
    buckets: tuple[int, ...] = ()
    """Tokens to which steps are padded, ascending."""
