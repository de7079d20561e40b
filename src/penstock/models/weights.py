"""The strict streaming loader: from a checkpoint to a model's packed parameters.

`assign` maps tensors to parameters by names and shapes alone, before data is read, and lists what does not fit. `stream` then
loads them: on a CPU one by one, so memory peaks at the packed weights and one matrix; on a GPU at the disk's speed."""

import math
import mmap
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from penstock.checkpoint.tensors import DTYPES, TORCH_NAMES, Stored
from penstock.core.errors import ModelError
from penstock.core.state import MODEL_DTYPES
from penstock.layers.attention import AttentionSpec
from penstock.layers.build import Parameter, Piece, Values
from penstock.layers.spec import ModelSpec
from penstock.models.away import Away
from penstock.models.rules import Change, Rule, matched, usual
from penstock.models.shares import Cut, Shares, Source, stored
from penstock.models.transfer import Arrival, Bytes, Transfer
from penstock.models.translated import Checkpoint, stored_dtype
from penstock.ops.linear import Weight
from penstock.ops.registry import Kernels
from penstock.parallel.axis import ALONE, Place
from penstock.quant.scheme import PLAIN, Part, Scheme, pack

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True)
class _Place:
    """The target of a checkpoint's name: rows of a parameter's stored tensor."""

    parameter: Parameter
    part: Part
    """As these rows alone have it."""
    row: int
    rows: int
    first: int
    """Where they begin along the part's axis of rows."""


def _places(spec: ModelSpec, dtype: str) -> dict[str, _Place]:
    """By name, as rules map to them: of every parameter, whole and by pieces."""
    found: dict[str, _Place] = {}
    for parameter in spec.parameters():
        row, at = 0, dict[str, int]()
        for piece in (Piece(parameter.name, parameter.shape[0]), *parameter.pieces):
            whole = piece.name == parameter.name
            for part in stored(parameter, dtype, piece.rows):
                name = f"{piece.name.removesuffix('.weight')}.{part.suffix}" if part.suffix else piece.name
                first = 0 if whole else at.get(part.suffix, 0)
                found[name] = _Place(parameter, part, row, piece.rows, first)
                if not whole and part.rows is not None:
                    at[part.suffix] = first + part.shape[part.rows]
            row += 0 if whole else piece.rows
    return found


def assign(spec: ModelSpec, rules: Sequence[Rule], tensors: dict[str, Stored],
           dtype: str = "float32") -> dict[str, list[Source]]:
    """The sources of every parameter of a model in `dtype`. ModelError lists every missing, unused, doubled or wrong tensor."""
    places = _places(spec, dtype)
    sources: dict[str, list[Source]] = {parameter.name: [] for parameter in spec.parameters()}
    unused, wrong = [], []
    for name, tensor in tensors.items():
        rule, target = _matched(rules, name)
        if target == "" or (target is not None and target.startswith("head.") and target != "head.bias" and spec.head.tied):
            continue
        if _beyond(name, spec) or _unread(target, spec):
            continue
        if rule is not None and rule.spare and target not in places:
            continue
        if rule is None or target not in places:
            unused.append(f"{name} {list(tensor.shape)}")
            continue
        place = places[target]
        change = None if tensor.arranged else rule.change
        if problem := _misfit(tensor, place.part, place.parameter.scheme, change, spec):
            wrong.append(f"{name} {problem}")
        axis = place.part.rows
        count = place.part.shape[axis] if axis is not None else 0
        sources[place.parameter.name].append(
            Source(name, place.part.suffix, place.row, place.rows, axis, place.first, count, change))
    missing, doubled = _coverage(spec, rules, sources, dtype)
    problems = [f"{title} ({len(names)}):\n  " + "\n  ".join(sorted(names)) for title, names in (
        ("missing", missing), ("unused", unused), ("of the wrong shape or type", wrong), ("doubled", doubled)) if names]
    if problems:
        raise ModelError("the checkpoint's tensors do not fit its config. Tensors\n" + "\n".join(problems)
                         + "\nEither config.json belongs to another model, or the checkpoint is incomplete, or it is quantized "
                         "and does not say so.")
    return sources


def _matched(rules: Sequence[Rule], name: str) -> tuple[Rule | None, str | None]:
    """The rule for a tensor and its target. The parts of a matrix follow the rule of its weight."""
    stem, _, suffix = name.rpartition(".")
    # A checkpoint of a bare backbone leaves out the prefix.
    for asked, ending in ((name, ""), (f"model.{name}", ""), (f"{stem}.weight", suffix), (f"model.{stem}.weight", suffix),
                          (stem, suffix)):
        rule, target = matched(rules, asked)
        if rule is not None:
            fits = not ending or not target or target.endswith(".weight")
            return (rule, target if not ending or not target else f"{target[:-6]}{ending}") if fits else (None, None)
    return None, None


_LAYER = re.compile(r"(?:model\.)?layers\.([0-9]+)\.")


def _beyond(name: str, spec: ModelSpec) -> bool:
    """Whether a checkpoint's tensor is of the layers behind the last block."""
    found = _LAYER.match(name) if spec.beyond else None
    return found is not None and len(spec.blocks) <= int(found[1]) < len(spec.blocks) + spec.beyond


def _unread(target: str | None, spec: ModelSpec) -> bool:
    """Whether a target is of the keys or values of a layer that reads another's: published checkpoints have some."""
    found = re.fullmatch(r"blocks\.([0-9]+)\.attention\.(k|v|k_norm)\..+", target or "")
    return found is not None and any(isinstance(mixer, AttentionSpec) and mixer.reads is not None
                                     for block in spec.blocks[int(found[1]):][:1] for mixer in block.mixers)


def _misfit(tensor: Stored, part: Part, scheme: Scheme | None, change: Change | None, spec: ModelSpec) -> str | None:
    """Why a checkpoint's tensor cannot be a part, if so."""
    if part.dtype in MODEL_DTYPES:
        if tensor.dtype not in DTYPES:
            return f"is {tensor.dtype}; weights can be {', '.join(DTYPES)}"
    elif TORCH_NAMES.get(tensor.dtype) != part.dtype:
        return f"is {tensor.dtype}; the scheme stores it as {part.dtype}"
    if change is not None and scheme is not None and scheme != PLAIN:
        return f"has to be rearranged for this family, which can be done with plain matrices, not with {scheme.name}"
    found: tuple[int, ...] | str = tensor.shape
    if change is not None:
        try:
            found = tuple(change(torch.empty(tensor.shape, device="meta"), spec).shape)
        except RuntimeError:
            found = "something that cannot be arranged"
    if found == part.shape:
        return None
    after = f" (arranged as {list(found) if isinstance(found, tuple) else found})" if found != tensor.shape else ""
    return f"is {list(tensor.shape)}{after}; the config asks for {list(part.shape)}"


def _coverage(spec: ModelSpec, rules: Sequence[Rule], sources: dict[str, list[Source]],
              dtype: str) -> tuple[list[str], list[str]]:
    """Checkpoint names of stored tensors, or pieces of them, that nothing fills, and of those that are filled twice."""
    missing, doubled = list[str](), list[str]()
    for parameter in spec.parameters():
        for part in stored(parameter, dtype):
            whole, *pieces = (f"{name.removesuffix('.weight')}.{part.suffix}" if part.suffix else name
                              for name in (parameter.name, *(piece.name for piece in parameter.pieces)))
            filled = sorted((source for source in sources[parameter.name] if source.part == part.suffix),
                            key=lambda source: source.row)
            if not filled:
                one = usual(rules, whole)
                missing += [one or whole] if one or not pieces else [usual(rules, name) or name for name in pieces]
                continue
            covered = {source.row for source in filled}
            if all(source.rows < parameter.shape[0] for source in filled):
                row = 0
                for piece, name in zip(parameter.pieces, pieces, strict=True):
                    if row not in covered:
                        missing.append(usual(rules, name) or name)
                    row += piece.rows
            if sum(source.rows for source in filled) > sum({s.row: s.rows for s in filled}.values()):
                doubled.append(" and ".join(source.name for source in filled))
    return missing, doubled


def stream(spec: ModelSpec, rules: Sequence[Rule], checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device,
           kernels: Kernels, progress: Progress | None, place: Place = ALONE, away: Away | None = None) -> Values:
    """Every parameter from the checkpoint, in `dtype`, packed where the operation `linear` reads it. `spec` is the whole model;
    of each parameter, the share of the rank at `place` is read. `away` gets what is not to stay on the device."""
    try:
        sources = assign(spec, rules, checkpoint.tensors, str(dtype).removeprefix("torch."))
    except ModelError as error:
        raise ModelError(f"{checkpoint.folder}: {error}") from None
    read = _to_host if device.type == "cpu" else _to_device
    shares = Shares(spec, place, str(dtype).removeprefix("torch."))
    return read(shares, sources, checkpoint, dtype, device, kernels, _Progress(checkpoint, sources, progress), away)


class _Progress:
    def __init__(self, checkpoint: Checkpoint, sources: dict[str, list[Source]], told: Progress | None) -> None:
        self._total = sum(checkpoint.tensors[source.name].nbytes for found in sources.values() for source in found)
        self._seen, self._done, self._told = set[str](), 0, told

    def add(self, tensor: Stored) -> None:
        if tensor.name in self._seen:
            return
        self._seen.add(tensor.name)
        self._done += tensor.nbytes
        if self._told is not None:
            self._told(self._done, self._total)


def _to_host(shares: Shares, sources: dict[str, list[Source]], checkpoint: Checkpoint, dtype: torch.dtype,
             device: torch.device, kernels: Kernels, progress: _Progress, away: Away | None) -> Values:
    """Loads one parameter after another from the mapped files, to bound host memory."""
    values = Values()
    with checkpoint.mapped():
        for parameter, bench in _order(shares.spec):
            wholes = _wholes(shares, parameter, sources, dtype, bench.take)
            seen = set[str]()
            for source in sources[parameter.name]:
                _read(checkpoint, source, list(shares.cuts(parameter, source)), shares.whole, wholes, seen)
                progress.add(checkpoint.tensors[source.name])
            _keep(values, parameter, _place(wholes, parameter, dtype, device, kernels), away)
            del wholes
    return values


def _read(checkpoint: Checkpoint, source: Source, cuts: Sequence[Cut], spec: ModelSpec, wholes: dict[str, torch.Tensor],
          seen: set[str]) -> None:
    """Copies cuts of a source's tensor to their place. If all rows of a joined matrix share it (the scale of its inputs), it
    is the largest that the pieces bring, so that no activation is cut off; `seen` has the parts that were brought before."""
    if not cuts:
        return
    tensor = checkpoint.read(source.name)
    if source.change is not None:
        tensor = source.change(tensor, spec)
    for cut in cuts:
        target, found = cut.target(wholes[source.part]), cut.source(tensor)
        if source.axis is None and source.part in seen:
            found = torch.maximum(target, found.to(target))
        target.copy_(found)
    seen.add(source.part)
    checkpoint.drop(source.name)


_WAITING = 2 << 30
"""The most bytes on a device that still have to be converted or rearranged."""
_AHEAD = 512 << 20
"""Bytes that are sent to a device before a conversion asks for them."""


class _Ahead:
    """The files' tensors that conversions on a device take, sent before they are asked for."""

    def __init__(self, transfer: Transfer, device: torch.device, coming: dict[str, Stored]) -> None:
        """`coming`: by name, in the order in which they will be asked for."""
        self._transfer, self._device, self._coming = transfer, device, coming
        self._sent: dict[str, tuple[torch.Tensor, Arrival]] = {}
        self._under_way = 0

    def _send(self, stored: Stored) -> None:
        raw = torch.empty(stored.shape, dtype=stored_dtype(stored.dtype), device=self._device)
        self._sent[stored.name] = raw, self._transfer.send(stored.file, Bytes.of(stored.start, raw), raw)
        self._under_way += raw.nbytes

    def take(self, stored: Stored) -> torch.Tensor:
        if stored.name not in self._sent:
            self._send(self._coming.pop(stored.name, stored))
        while self._coming and self._under_way < _AHEAD:
            self._send(self._coming.pop(next(iter(self._coming))))
        raw, arrival = self._sent.pop(stored.name)
        arrival.wait()
        self._under_way -= raw.nbytes
        return raw


def _to_device(shares: Shares, sources: dict[str, list[Source]], checkpoint: Checkpoint, dtype: torch.dtype,
               device: torch.device, kernels: Kernels, progress: _Progress, away: Away | None) -> Values:
    """Transfers all tensors concurrently to their final place; conversions and rearrangements are done on the device."""
    wholes: dict[str, dict[str, torch.Tensor]] = {}
    values = Values()
    coming: deque[tuple[Source, torch.Tensor, list[tuple[torch.Tensor, Cut | None]], Arrival]] = deque()
    waiting = 0

    def finish_one() -> None:
        nonlocal waiting
        source, raw, targets, arrival = coming.popleft()
        arrival.wait()
        if targets:
            arranged = raw if source.change is None else source.change(raw, shares.whole)
            for target, cut in targets:
                target.copy_(arranged if cut is None else cut.source(arranged))
            waiting -= raw.nbytes
        progress.add(checkpoint.tensors[source.name])

    with Transfer(device) as transfer, checkpoint.mapped():
        checkpoint.take = _Ahead(transfer, device, {  # type: ignore[method-assign]
            stored.name: stored for parameter, _ in _order(shares.spec) for source in sources[parameter.name]
            if checkpoint.tensors[source.name].made and any(shares.cuts(parameter, source))
            for stored in checkpoint.behind(source.name)}).take
        for parameter, _ in _order(shares.spec):
            mine = wholes[parameter.name] = _wholes(shares, parameter, sources, dtype,
                                                    partial(_room, device=device, parameter=parameter))
            seen = set[str]()
            for source in sources[parameter.name]:
                tensor = checkpoint.tensors[source.name]
                kind = stored_dtype(tensor.dtype)
                cuts = list(shares.cuts(parameter, source))
                if tensor.made or parameter.resident:
                    _read(checkpoint, source, cuts, shares.whole, mine, seen)
                    progress.add(tensor)
                    continue
                targets = [(cut.target(mine[source.part]), cut) for cut in cuts]
                if source.change is not None and targets:
                    raw = torch.empty(tensor.shape, dtype=kind, device=device)
                    waiting += raw.nbytes
                    coming.append((source, raw, [*targets], transfer.send(tensor.file, Bytes.of(tensor.start, raw), raw)))
                for target, cut in targets if source.change is None else ():
                    direct = kind == target.dtype and target.is_contiguous()
                    raw = target if direct else torch.empty(target.shape, dtype=kind, device=device)
                    waiting += 0 if direct else raw.nbytes
                    there = Bytes.of(tensor.start, raw) if cut.taken is None else Bytes.cut(
                        tensor.start, tensor.shape, kind.itemsize, *cut.taken)
                    coming.append((source, raw, [] if direct else [(target, None)], transfer.send(tensor.file, there, raw)))
                while waiting > _WAITING:
                    finish_one()
            if parameter.away:
                # Its memory on the device is the next one's.
                while coming:
                    finish_one()
                _keep(values, parameter, _place(wholes.pop(parameter.name), parameter, dtype, device, kernels), away)
        while coming:
            finish_one()
    for parameter in shares.spec.parameters():
        if not parameter.away:
            values[parameter.name] = _place(wholes.pop(parameter.name), parameter, dtype, device, kernels)
    return values


def _keep(values: Values, parameter: Parameter, value: Weight | torch.Tensor, away: Away | None) -> None:
    """Adds a parameter. The memory of one that is away is taken over by `away`."""
    values[parameter.name] = value
    if parameter.away:
        assert away is not None and isinstance(value, Weight), parameter.name
        away.keep(int(parameter.name.split(".")[1]), value)


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, parameter: Parameter) -> torch.Tensor:
    """Uninitialised memory for a stored tensor: on the device, or pinned where experts stay on the host."""
    if not parameter.resident:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def _wholes(shares: Shares, parameter: Parameter, sources: dict[str, list[Source]], dtype: torch.dtype,
            take: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Memory for each stored tensor of a parameter, as `take` gives it by shape and type; zeros where no source fills it."""
    shapes = shares.shapes(parameter, sources[parameter.name])
    found = {part.suffix: take(shapes[part.suffix], getattr(torch, part.dtype))
             for part in stored(parameter, str(dtype).removeprefix("torch."))}
    shares.clear(parameter, found)
    return found


class _Workbench:
    """Reusable host memory in which parameters are assembled one after another, mapped from the system and returned when done.

    malloc would keep it, as holes between the packed weights, for the life of the process, and fresh memory for each parameter
    costs half a second per gigabyte in page faults. If packing keeps the memory, the next parameter gets new memory."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor. Memory that a tensor still uses is not reused."""
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
    """Returns every parameter with the memory to assemble it in. Parameters outside the blocks come first: they are the
    largest, and their copies do not raise the peak while little else is loaded."""
    for inside in (False, True):
        bench = _Workbench()
        yield from ((one, bench) for one in spec.parameters() if one.name.startswith("blocks.") is inside)


def _place(parts: dict[str, torch.Tensor], parameter: Parameter, dtype: torch.dtype, device: torch.device,
           kernels: Kernels) -> Weight | torch.Tensor:
    """A parameter as layers take it, given its stored tensors."""
    if not parameter.resident:
        parts = {suffix: whole.to(device) for suffix, whole in parts.items()}
    if parameter.scheme is None:
        return parts[""]
    if parameter.decoded:
        return parameter.scheme.decode(parts, dtype).contiguous()
    return pack(parameter.scheme, parameter.shape, parts, dtype, kernels, parameter.stack, parameter.resident, device)


_RANDOM = 1_000_003
"""Random numbers for dummy weights; a prime count, so that no row of a matrix repeats another."""


def load(spec: ModelSpec, rules: Sequence[Rule], checkpoint: Callable[[], Checkpoint], load_format: str, *, seed: int,
         dtype: torch.dtype, device: torch.device, kernels: Kernels, progress: Progress | None, place: Place,
         away: Away | None = None) -> Values:
    """The parameters as `load_format` says: random ones for "dummy", which needs no checkpoint, else the checkpoint's."""
    if load_format == "dummy":
        values = dummy(spec, dtype=dtype, device=device, kernels=kernels, seed=seed, progress=progress, place=place, away=away)
    else:
        values = stream(spec, rules, checkpoint(), dtype=dtype, device=device, kernels=kernels, progress=progress, place=place,
                        away=away)
    if away is not None:
        away.ready()
        values.away = away
    return values


def dummy(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, kernels: Kernels, seed: int,
          progress: Progress | None, place: Place = ALONE, away: Away | None = None) -> Values:
    """Random parameters of the same shapes, for benchmarks; a function of the seed alone. Ranks have shares of the same ones.

    Matrices are N(0, 1 / columns), for unit scale. They repeat one array: drawing a billion numbers takes a minute."""
    stretch = torch.randn(_RANDOM, generator=torch.Generator().manual_seed(seed))
    scaled: dict[int, torch.Tensor] = {}
    shares = Shares(spec, place, str(dtype).removeprefix("torch."))
    done, total = 0, spec.size * dtype.itemsize
    values = Values()
    host = device.type == "cpu"
    for own, bench in _order(shares.spec):
        parameter = shares.of(own)
        if parameter.scheme is not None:
            columns = parameter.shape[1]
            if columns not in scaled:
                scaled[columns] = (stretch * columns**-0.5).to(dtype).to(device)
            whole = bench.take(parameter.shape, dtype) if host else torch.empty(parameter.shape, dtype=dtype, device=device)
            _repeat(scaled[columns].roll(-(zlib.crc32(parameter.name.encode()) % _RANDOM)), whole.view(-1))
        else:
            whole = torch.full(parameter.shape, parameter.rest, dtype=getattr(torch, parameter.dtype or str(dtype)[6:]),
                               device=device)
        if own.resident and parameter.scheme == PLAIN:
            whole = _room(parameter.shape, dtype, device, parameter).copy_(whole)
        parts = {"": whole} if parameter.scheme is None else parameter.scheme.encode(whole)
        _keep(values, own, _place(shares.taken(own, parts), own, dtype, device, kernels), away)
        del whole, parts
        done += parameter.size * dtype.itemsize
        if progress is not None:
            progress(done, total)
    return values


def _repeat(stretch: torch.Tensor, out: torch.Tensor) -> None:
    times, rest = divmod(len(out), len(stretch))
    out[:times * len(stretch)].view(times, len(stretch)).copy_(stretch)
    out[len(out) - rest:] = stretch[:rest]
