"""What a rank reports while it starts. The engine's half plans by this, and asks for nothing else of the worker's half."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.device import DeviceFacts, Occupancy
from penstock.core.state import StateSpec


@dataclass(frozen=True)
class Survey:
    """What is known before anything is loaded: the device, and the model as its folder describes it."""

    device: DeviceFacts
    folder: Path
    architecture: str
    vocab_size: int
    max_positions: int
    parameters: int
    """The model's size."""
    dtype: str
    """The checkpoint's own."""


@dataclass(frozen=True)
class Loaded:
    """What is there once the weights are. Bytes are of this rank alone."""

    states: list[StateSpec]
    """What each layer keeps of each position."""
    weight_bytes: int
    step_bytes: int
    """What the largest step takes beside weights and cache."""
    graph_bytes: int
    room: int
    """The most that the cache may take."""
    occupancy: Occupancy | None
    """A GPU's memory before anything was on it."""
    computation: str
    """What names the computation: equal for ranks and engines whose cached pages are interchangeable."""
    kernels: list[tuple[str, str]]
    """The implementation that serves each operation."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about how it runs."""
    compiled: int = 0
    """Kernels that were compiled, as the cache on disk did not have them."""
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """What preparing to run steps has made."""

    graphs: int = 0
    """Captured CUDA graphs."""
    graph_seconds: float = 0.0
