"""From a checkpoint to a model's packed parameters: strict, on a CPU a matrix at a time, on a GPU at the disk's speed.

`assign` decides from names and shapes alone, before a byte of data is read, which tensor becomes what, and lists everything
that does not fit. `stream` then fills one parameter after another, so that memory peaks at the packed weights and one matrix.
"""

from __future__ import annotations

import math
import mmap
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.checkpoint.tensors import DTYPES, Stored
from penstock.core.errors import ModelError
from penstock.layers.linear import Values
from penstock.layers.spec import ModelSpec, Parameter
from penstock.models.mapped import Checkpoint, stored_dtype
from penstock.models.rules import Change, Rule
from penstock.models.transfer import Arrival, opened
from penstock.ops.linear import Weight
from penstock.ops.registry import Kernels

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True)
class Source:
    """A checkpoint's tensor and the rows of a parameter that it fills."""

    name: str
    first_row: int
    rows: int
    change: Change | None


def assign(spec: ModelSpec, rules: Sequence[Rule], tensors: dict[str, Stored]) -> dict[str, list[Source]]:
    """The sources of every parameter. One ModelError lists every missing, unused, doubled, wrongly shaped or typed tensor."""
    places = {}
    for parameter in spec.parameters():
        places[parameter.name] = (parameter, 0, parameter.shape[0])
        row = 0
        for piece in parameter.pieces:
            places[piece.name] = (parameter, row, piece.rows)
            row += piece.rows
    sources: dict[str, list[Source]] = {parameter.name: [] for parameter in spec.parameters()}
    unused, wrong = [], []
    for name, stored in tensors.items():
        rule, target = next(((rule, target) for rule in rules if (target := rule.match(name)) is not None), (None, None))
        if target == "" or (target == "head.weight" and spec.head.tied):
            continue
        if rule is None or target not in places:
            unused.append(f"{name} {list(stored.shape)}")
            continue
        parameter, first, rows = places[target]
        problem = _misfit(stored, (rows, *parameter.shape[1:]), rule.change, spec)
        if problem:
            wrong.append(f"{name} {problem}")
        sources[parameter.name].append(Source(name, first, rows, rule.change))
    missing, doubled = _coverage(spec, rules, sources)
    problems = [f"{title} ({len(names)}):\n  " + "\n  ".join(sorted(names)) for title, names in (
        ("missing", missing), ("unused", unused), ("of the wrong shape or type", wrong), ("doubled", doubled)) if names]
    if problems:
        raise ModelError("the checkpoint's tensors do not fit its config. Tensors\n" + "\n".join(problems)
                         + "\nEither config.json belongs to another model, or the checkpoint is incomplete or quantized.")
    return sources


def _misfit(stored: Stored, shape: tuple[int, ...], change: Change | None, spec: ModelSpec) -> str | None:
    """Why a tensor cannot fill rows of `shape`, if so."""
    if stored.dtype not in DTYPES:
        return f"is {stored.dtype}; weights can be {', '.join(DTYPES)}"
    found: tuple[int, ...] | str = stored.shape
    if change is not None:
        try:
            found = tuple(change(torch.empty(stored.shape, device="meta"), spec).shape)
        except RuntimeError:
            found = "something that cannot be arranged"
    if found == shape:
        return None
    after = f" (arranged as {list(found) if isinstance(found, tuple) else found})" if found != stored.shape else ""
    return f"is {list(stored.shape)}{after}; the config asks for {list(shape)}"


def _coverage(spec: ModelSpec, rules: Sequence[Rule], sources: dict[str, list[Source]]) -> tuple[list[str], list[str]]:
    """Checkpoint names of parameters, or pieces of them, that nothing fills, and of those that are filled twice."""

    def usual(name: str) -> str | None:
        return next((found for rule in rules if (found := rule.name_of(name)) is not None), None)

    missing, doubled = [], []
    for parameter in spec.parameters():
        filled = sorted(sources[parameter.name], key=lambda source: source.first_row)
        if not filled:
            names = [usual(parameter.name)] if usual(parameter.name) else [usual(p.name) or p.name for p in parameter.pieces]
            missing += [name or parameter.name for name in names or [parameter.name]]
            continue
        covered = {source.first_row for source in filled}
        if all(source.rows < parameter.shape[0] for source in filled):
            row = 0
            for piece in parameter.pieces:
                if row not in covered:
                    missing.append(usual(piece.name) or piece.name)
                row += piece.rows
        if sum(source.rows for source in filled) > sum({s.first_row: s.rows for s in filled}.values()):
            doubled.append(" and ".join(source.name for source in filled))
    return missing, doubled


def stream(spec: ModelSpec, rules: Sequence[Rule], checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device,
           kernels: Kernels, progress: Progress | None) -> Values:
    """Every parameter from the checkpoint, in `dtype`, packed where the operation `linear` reads it."""
    try:
        sources = assign(spec, rules, checkpoint.tensors)
    except ModelError as error:
        raise ModelError(f"{checkpoint.folder}: {error}") from None
    read = _to_host if device.type == "cpu" else _to_device
    return read(spec, sources, checkpoint, dtype, device, kernels, _Progress(checkpoint, sources, progress))


class _Progress:
    """Adds up what was read."""

    def __init__(self, checkpoint: Checkpoint, sources: dict[str, list[Source]], told: Progress | None) -> None:
        self._total = sum(checkpoint.tensors[source.name].nbytes for found in sources.values() for source in found)
        self._done = 0
        self._told = told

    def add(self, stored: Stored) -> None:
        self._done += stored.nbytes
        if self._told is not None:
            self._told(self._done, self._total)


def _to_host(spec: ModelSpec, sources: dict[str, list[Source]], checkpoint: Checkpoint, dtype: torch.dtype,
             device: torch.device, kernels: Kernels, progress: _Progress) -> Values:
    """One parameter after another, from the mapped files: packing takes what memory there is to spare."""
    values = Values()
    with checkpoint.mapped():
        for parameter, bench in _order(spec):
            whole = bench.take(parameter.shape, dtype)
            for source in sources[parameter.name]:
                tensor = checkpoint.read(source.name)
                if source.change is not None:
                    tensor = source.change(tensor, spec)
                whole[source.first_row:source.first_row + source.rows].copy_(tensor)
                del tensor
                checkpoint.drop(source.name)
                progress.add(checkpoint.tensors[source.name])
            values[parameter.name] = _place(whole, parameter, device, kernels)
            del whole
    return values


_WAITING = 2 << 30
"""Bytes that may lie on a device as they were stored, because they still have to be changed."""


def _to_device(spec: ModelSpec, sources: dict[str, list[Source]], checkpoint: Checkpoint, dtype: torch.dtype,
               device: torch.device, kernels: Kernels, progress: _Progress) -> Values:
    """Everything under way at once, straight to where it stays; changes of type and order are made on the device."""
    wholes: dict[str, torch.Tensor] = {}
    coming: deque[tuple[Source, torch.Tensor, torch.Tensor, Arrival]] = deque()
    waiting = 0

    def settle() -> None:
        nonlocal waiting
        source, raw, rows, arrival = coming.popleft()
        arrival.wait()
        if raw is not rows:
            rows.copy_(raw if source.change is None else source.change(raw, spec))
            waiting -= raw.nbytes
        progress.add(checkpoint.tensors[source.name])

    with opened(device) as transfer:
        for parameter, _ in _order(spec):
            whole = wholes[parameter.name] = torch.empty(parameter.shape, dtype=dtype, device=device)
            for source in sources[parameter.name]:
                stored = checkpoint.tensors[source.name]
                raw = rows = whole[source.first_row:source.first_row + source.rows]
                if source.change is not None or stored_dtype(stored.dtype) != dtype:
                    raw = torch.empty(stored.shape, dtype=stored_dtype(stored.dtype), device=device)
                    waiting += raw.nbytes
                coming.append((source, raw, rows, transfer.send(stored.file, stored.start, raw)))
                while waiting > _WAITING:
                    settle()
        while coming:
            settle()
    return Values((parameter.name, _place(wholes.pop(parameter.name), parameter, device, kernels))
                  for parameter in spec.parameters())


class _Workbench:
    """Memory to put one parameter after another together in, taken from the system and given back to it when done.

    malloc would keep it, in holes between the packed weights, for the life of the process; and fresh memory for each parameter
    costs half a second a gigabyte in page faults. Packing may keep the memory as it is: then the next one gets new memory.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor; the one before must be gone, unless packing has kept it."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes < _SMALL:
            return torch.empty(shape, dtype=dtype)
        # A tensor over the memory holds a reference to it; two are ours, the attribute and the argument.
        if self._memory is None or len(self._memory) < nbytes or sys.getrefcount(self._memory) > 2:
            self._memory = mmap.mmap(-1, nbytes)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


_SMALL = 1 << 20


def _order(spec: ModelSpec) -> Iterator[tuple[Parameter, _Workbench]]:
    """Every parameter and where to build it. Those outside the blocks come first: they are the largest, and while there is
    little else their copies cost no peak."""
    outside = [parameter for parameter in spec.parameters() if not parameter.name.startswith("blocks.")]
    inside = [parameter for parameter in spec.parameters() if parameter.name.startswith("blocks.")]
    for parameters in (outside, inside):
        bench = _Workbench()
        for parameter in parameters:
            yield parameter, bench


def _place(whole: torch.Tensor, parameter: Parameter, device: torch.device, kernels: Kernels) -> Weight | torch.Tensor:
    whole = whole.to(device)
    return kernels.linear.pack(whole) if parameter.packed else whole


_RANDOM = 1_000_003
"""Numbers drawn for dummy weights; a prime, so that no row of a matrix repeats another."""


def dummy(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, kernels: Kernels, seed: int,
          progress: Progress | None) -> Values:
    """Random parameters of the same shapes, a function of the seed alone: for benchmarks.

    Matrices are N(0, 1 / columns), so that activations and logits stay of the size of one. They are cut from one stretch of
    random numbers, repeated: drawing a billion takes a minute, copying them a second.
    """
    stretch = torch.randn(_RANDOM, generator=torch.Generator().manual_seed(seed))
    scaled: dict[int, torch.Tensor] = {}
    done, total = 0, spec.size * dtype.itemsize
    values = Values()
    host = device.type == "cpu"
    for parameter, bench in _order(spec):
        if parameter.packed:
            columns = parameter.shape[1]
            if columns not in scaled:
                scaled[columns] = (stretch * columns**-0.5).to(dtype).to(device)
            whole = bench.take(parameter.shape, dtype) if host else torch.empty(parameter.shape, dtype=dtype, device=device)
            _repeat(scaled[columns].roll(-(zlib.crc32(parameter.name.encode()) % _RANDOM)), whole.view(-1))
        else:
            whole = torch.full(parameter.shape, parameter.rest, dtype=dtype, device=device)
        values[parameter.name] = _place(whole, parameter, device, kernels)
        del whole
        done += parameter.size * dtype.itemsize
        if progress is not None:
            progress(done, total)
    return values


def _repeat(stretch: torch.Tensor, out: torch.Tensor) -> None:
    """Fills `out` with `stretch`, again and again."""
    times, rest = divmod(len(out), len(stretch))
    out[:times * len(stretch)].view(times, len(stretch)).copy_(stretch)
    out[len(out) - rest:] = stretch[:rest]
