"""Reads a LoRA adapter's tensors for a model: which projection each belongs to, checked by names and shapes, cut for a rank.

Adapters of mixtures' experts (`ExpertAdapters`) are of modules or of stacked parameters, as PEFT writes them."""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from penstock.checkpoint.adapter import WEIGHTS, AdapterConfig, digest, read_adapter
from penstock.checkpoint.tensors import DTYPES, read_header
from penstock.core.errors import ModelError
from penstock.layers.build import Parameter, Split, own_channels
from penstock.layers.spec import ModelSpec
from penstock.models.rules import Rule, matched, stacked, transposed
from penstock.ops.lora import MOST_PIECES, Layout, Matrices, padded
from penstock.parallel.axis import Place
from penstock.parallel.group import Group

Factors = tuple[torch.Tensor | None, ...]
"""Of a mixture: A [E, r, k] and B [E, n, r] of gate_up, gates first, then those of down; None where there are none."""


@dataclass(frozen=True)
class _Part:
    """A pair for all experts of a stack, or for some rows of one."""

    a: torch.Tensor
    """[E, r, k], of one expert [1, r, k]."""
    b: torch.Tensor
    expert: int = -1
    first: int = 0
    """Of the expert's rows."""


class ExpertAdapters:
    def __init__(self, spec: ModelSpec, rules: Sequence[Rule]) -> None:
        self._spec, self._rules = spec, rules
        self._stacks = {one.name: one for one in spec.parameters() if one.stack}
        self._pieces = {piece.name: (one, number) for one in self._stacks.values() for number, piece in enumerate(one.pieces)}
        self._parts: dict[str, list[_Part]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(self, module: str, pair: Mapping[str, torch.Tensor], config: AdapterConfig, most: int) -> str | None:
        """Takes the pair of a module, if that is of experts: "", or why it cannot be used. None if it is not."""
        wanted = self._places(module)
        if not wanted:
            return None
        if not {"A", "B"} <= pair.keys() or "magnitude" in pair:
            return f"{module} has {' and '.join(pair)}; adapters of experts have A and B, and no magnitudes (DoRA)"
        a, b = pair["A"], pair["B"]
        for turned in (False, True):
            for name, stack, number, rule in wanted:
                rank, scale = config.scale(name)
                count = 1 if number is not None else stack.stack
                rows = stack.shape[0] // stack.stack if number is None else stack.pieces[number].rows
                shapes = (rank * count, stack.shape[1]), (rows, rank * count)
                if turned:
                    shapes = (rank * count, rows), (stack.shape[1], rank * count)
                if rank <= most and (a.shape, b.shape) == shapes:
                    self._add(stack, number, rule, *_factors(a.float(), b.float() * scale, count, turned))
                    return ""
        asked = "; ".join(f"{name}: rank {config.scale(name)[0]}, {rows_of(stack, number)} x {stack.shape[1]}"
                          for name, stack, number, _ in wanted)
        return (f"{module} has A {list(a.shape)} and B {list(b.shape)}, which fit none of its matrices ({asked}), or have a "
                f"rank above {most} (--max-lora-rank)")

    def _places(self, module: str) -> list[tuple[str, Parameter, int | None, Rule]]:
        """(name, stack, the piece that it is, its rule) of the matrices that a module may adapt: one of an expert's, or those
        parameters of a layer's experts of which PEFT wraps one around the other."""
        found: list[tuple[str, Parameter, int | None, Rule]] = []
        if not self._stacks:
            return found
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        for rule in self._rules:
            name = f"{module}.{rule.source.rpartition('.')[2].replace('*', 'weight')}"
            target = rule.match(name) or ""
            if target in self._stacks:
                found.append((name.removesuffix(".weight"), self._stacks[target], None, rule))
            elif target in self._pieces:
                return [(module, *self._pieces[target], rule)]
        return found

    def _add(self, stack: Parameter, number: int | None, rule: Rule, a: torch.Tensor, b: torch.Tensor) -> None:
        if number is None:
            if rule.change is not None:
                # The rule reorders a stack's rows, and so those of B, which lie like the checkpoint's.
                b = rule.change(b if rule.change is stacked else b.transpose(1, 2), self._spec).view(b.shape)
            part = _Part(a, b)
        else:
            each = len(stack.pieces) // stack.stack
            part = _Part(a, b, number // each, number % each * stack.pieces[number].rows)
        self._parts.setdefault(stack.stem, []).append(part)

    def packed(self, dtype: torch.dtype, place: Place, holds: Callable[[str], bool]) -> Iterator[tuple[str, Factors]]:
        """The path of each mixture that the rank has, and the rank's share of its factors."""
        for path in sorted(filter(holds, {stem.rpartition(".")[0] for stem in self._parts})):
            up, down = (self._joined(f"{path}.{name}") for name in ("gate_up", "down"))
            if place.tensors > 1 and not place.experts:
                inner = self._stacks[f"{path}.down.weight"].shape[1]
                if up is not None:
                    halves = up[1].view(len(up[1]), 2, inner, -1)
                    own = own_channels(halves.transpose(2, 3), place.tensor, place.tensors)
                    up = up[0], own.transpose(2, 3).flatten(1, 2)
                if down is not None:
                    down = own_channels(down[0], place.tensor, place.tensors), down[1]
            every = (*(up or (None, None)), *(down or (None, None)))
            yield path, tuple(None if one is None else one.to(dtype).contiguous() for one in every)

    def _joined(self, stem: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        parts, stack = self._parts.get(stem), self._stacks[f"{stem}.weight"]
        if parts is None:
            return None
        ranks = [sum(one.a.shape[1] for one in parts if one.expert in (-1, expert)) for expert in range(stack.stack)]
        a = torch.zeros(stack.stack, max(ranks), stack.shape[1])
        b = torch.zeros(stack.stack, stack.shape[0] // stack.stack, max(ranks))
        at = [0] * stack.stack
        for one in parts:
            for expert in range(stack.stack) if one.expert < 0 else (one.expert,):
                some, source = slice(at[expert], at[expert] + one.a.shape[1]), expert if one.expert < 0 else 0
                a[expert, some], b[expert, one.first:one.first + one.b.shape[1], some] = one.a[source], one.b[source]
                at[expert] = some.stop
        return a, b


def rows_of(stack: Parameter, number: int | None) -> int:
    return stack.shape[0] // stack.stack if number is None else stack.pieces[number].rows


def _factors(a: torch.Tensor, b: torch.Tensor, count: int, turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, k] and B [E, n, r] of PEFT's [E * r, k] and [n, r * E]. `turned`: as PEFT before 0.18 wrote them for parameters
    [E, outputs, inputs], with the two axes the other way round."""
    first, second = a.view(count, -1, a.shape[1]), b.view(len(b), -1, count).permute(2, 0, 1)
    return (second.transpose(1, 2), first.transpose(1, 2)) if turned else (first, second)


EMBEDDING, HEAD = "embedding", "head"
"""Paths of the two ends of a model."""
APART = "apart"
"""Stands for all matrices that are no projections of their own: those of experts, and that of MLA's keys and values."""
_PREFIX = "base_model.model."
_KINDS = {"lora_A": "A", "lora_B": "B", "lora_embedding_A": "A", "lora_embedding_B": "B", "lora_magnitude_vector": "magnitude"}
_TYPES = {name: getattr(torch, named) for name, named in (*DTYPES.items(), ("F64", "float64"))}
_ROWS = 4096
"""Rows of a matrix whose norms are computed at once."""
_KEPT_BYTES = 1 << 29
"""The most memory that forms keep."""

Rows = Callable[[str, int, int], torch.Tensor]
"""(path, first, end) -> these rows of the model's matrix there, in float32."""


@dataclass(frozen=True)
class Weights:
    """An adapter in host memory."""

    matrices: Matrices
    apart: Mapping[str, tuple[torch.Tensor | None, ...]]
    """By path: whole matrices that take the place of the model's EMBEDDING or HEAD, and the factors of what is APART."""
    ends: frozenset[str]
    """EMBEDDING and HEAD where it changes these in some way, APART."""


def _targets(spec: ModelSpec) -> dict[str, Parameter]:
    """The matrices that adapters may change, by path; the two ends last, where a pipeline stage has them."""
    found = {parameter.stem: parameter for parameter in spec.parameters()
             if parameter.scheme is not None and len(parameter.shape) == 2 and parameter.name.startswith("blocks.")
             and not (parameter.stack or len(parameter.pieces) > MOST_PIECES or ".foreign." in parameter.name)}
    table = next(parameter for parameter in spec.staged.parameters() if parameter.name == "embedding.weight")
    if spec.begins:
        # An embedding's A has a column for each token, on every rank.
        found[EMBEDDING] = Parameter("embedding.weight", (spec.width, spec.vocab_size), table.scheme)
    if spec.ends:
        found[HEAD] = Parameter("head.weight", table.shape, table.scheme, split=Split.ROWS, unit=table.unit)
    return found


def layout(spec: ModelSpec) -> Layout:
    """All that adapters may change of a model, or of a rank's part of it."""
    return Layout([(path, _pieces(one), one.shape[1]) for path, one in _targets(spec).items() if not one.decoded])


def _pieces(parameter: Parameter) -> tuple[int, ...]:
    return tuple(piece.rows for piece in parameter.pieces) or parameter.shape[:1]


class AdapterReader:
    def __init__(self, spec: ModelSpec, place: Place, rules: Sequence[Rule], dtype: torch.dtype, most: int, weights: Rows,
                 group: Group | None = None) -> None:
        """For the rank at `place` of `spec`, and adapters of rank at most `most`; `group`: ranks that read together."""
        self.spec, self.place, self.rules, self.dtype, self.most = spec, place, rules, dtype, most
        self.weights, self.group = weights, group
        self.targets = _targets(spec)
        self.named = {one.name: (path, -1) for path, one in self.targets.items()}
        self.named |= {one.name: (path, piece) for path, whole in self.targets.items()
                       for piece, one in enumerate(whole.pieces)}
        self._own = spec.at(place)
        self.layout = layout(self._own)
        self._idle: dict[tuple[int, str, bytes, int], _Form] = {}
        """Forms that nothing is read through, by the thread that reads, settings, the file's header and its size."""
        self._sums: dict[tuple[Path, tuple[int, ...]], bytes] = {}
        """SHA-256 of files of weights, by their state."""

    def holds(self, path: str) -> bool:
        """Whether the rank's pipeline stage has what is at a path."""
        own, ends = self._own, {EMBEDDING: self._own.begins, HEAD: self._own.ends}
        return ends[path] if path in ends else own.first <= int(path.split(".")[1]) < own.first + len(own.blocks)

    @torch.inference_mode()
    def read(self, folder: Path) -> tuple[str, Weights]:
        """An adapter's digest and the rank's share, in the model's dtype on the CPU. ModelError lists tensors that misfit."""
        config, path = read_adapter(folder), folder / WEIGHTS
        try:
            with path.open("rb") as file:
                size, _, *times = before = _state(file.fileno())
                header = file.read(min(size, int.from_bytes(file.read(8), "little")))
                key = threading.get_ident(), repr(config), header, size
                file.seek(0)
                form = self._idle.pop(key, None) or _Form(self, config, size)
                read, after = file.readinto(memory := form.file.numpy().data), _state(file.fileno())
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
        if read < size or after[:1] + after[2:3] != before[:1] + before[2:3]:
            raise ModelError(f"{path} was changed while it was read")
        found = self._sums.get((path, after)) or hashlib.sha256(memory).digest()
        if time.time_ns() - max(times) > 1e9:  # a file that was changed just now may change again within its clock's tick
            self._sums[path, before] = found
        weights = form.weights(path)
        if form.plain:
            self._idle[key] = form
            if sum(len(one.file) for one in tuple(self._idle.values())) > _KEPT_BYTES:
                self._idle.clear()
        return digest(folder, found), weights


def _state(file: int) -> tuple[int, ...]:
    status = os.fstat(file)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


class _Form:
    """The memory through which adapters go whose settings and headers are equal: the file's tensors, and what they become. The
    first of a form is checked and packed tensor by tensor; those after it lie in the same places, and few calls copy them."""

    def __init__(self, reader: AdapterReader, config: AdapterConfig, size: int) -> None:
        self._reader, self._config = reader, config
        self._spec, self._place, self._targets = reader.spec, reader.place, reader.targets
        self.file = torch.empty(size, dtype=torch.uint8)
        self._tensors: dict[str, torch.Tensor] = {}
        self._pairs: list[tuple[str, int, dict[str, torch.Tensor], float]] = []
        """Path, piece (-1: the whole projection), a module's tensors as PEFT computes with them, and their factor."""
        self._experts = ExpertAdapters(self._spec, reader.rules)
        self._saved: dict[str, torch.Tensor] = {}
        self._wrong: list[str] = []
        self.plain = True
        """Whether another file's bytes may take the place of these."""
        self._weights: Weights | None = None
        self._into, self._from = list[torch.Tensor](), list[torch.Tensor]()
        self._scales: list[float] = []
        """Tensors of the weights, those of the file that are copied there, and what the first are multiplied by then."""

    def weights(self, path: Path) -> Weights:
        """The adapter whose bytes are in `file`, read from `path`. ModelError if it is damaged or does not fit."""
        found = self._weights
        if found is None:
            self._check(path)
            found = self._packed()
        if self._into:
            torch._foreach_copy_(self._into, self._from)
        if any(scale != 1 for scale in self._scales):
            torch._foreach_mul_(self._into, self._scales)
        if self._weights is not None and not all(map(math.isfinite, map(float, torch.aminmax(found.matrices.data)))):
            self._check(path)
            self.plain = False
        self._weights = found
        return replace(found, matrices=replace(found.matrices, data=found.matrices.data.clone())) if self.plain else found

    def _check(self, path: Path) -> None:
        """Finds the tensors in the file's bytes, and notes what each is. ModelError lists what is wrong."""
        stored = [one for one in read_header(path).values() if one.nbytes]
        types = {one.dtype for one in stored}
        if not types <= _TYPES.keys() or max((one.end for one in stored), default=0) != len(self.file):
            raise ModelError(f"{path} has tensors of the types {sorted(types)} (possible: {', '.join(_TYPES)}), or was changed "
                             "while it was read")
        for one in stored:
            data, dtype = self.file[one.start:one.end], _TYPES[one.dtype]
            if one.start % dtype.itemsize:
                data, self.plain = data.clone(), False
            self._tensors[one.name] = data.view(dtype).view(one.shape)
        modules: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self._tensors.items():
            module, _, last = name.removesuffix(".weight").rpartition(".")
            if not bool(tensor.isfinite().all()):
                self._wrong.append(f"{name} has numbers that are not finite")
            elif last == "base_layer":
                # PEFT adds the frozen matrix of an adapted embedding or head, for it may have been resized.
                if tensor.shape != (self._spec.vocab_size, self._spec.width):
                    self._wrong.append(f"{name} is {list(tensor.shape)}: the vocabulary was resized; this model's matrix is "
                                       f"{[self._spec.vocab_size, self._spec.width]}")
            elif last in _KINDS:
                modules.setdefault(module.removeprefix(_PREFIX), {})[_KINDS[last]] = tensor
            else:
                self._save(name.removeprefix(_PREFIX).removesuffix(".weight"), tensor)
        for module, pair in modules.items():
            if (problem := self._experts.take(module, pair, self._config, self._reader.most)) is None:
                self._take(module, pair)
            elif problem:
                self._wrong.append(problem)
        if self._experts and self._place.datas > 1:
            self._wrong.append("adapters of experts are not possible where engines share them (enable_expert_parallel with "
                               "data_parallel_size)")
        named = [name.removesuffix(".weight") for name in self._tensors]
        self._wrong += [f"{one} is among modules_to_save, but not in the file" for one in self._config.saved
                        if not any(name.endswith(one) for name in named)]
        if self._wrong or not (self._pairs or self._saved or self._experts):
            listed = "\n  ".join(sorted(self._wrong)[:20]) or "it has no matrices"
            raise ModelError(f"the adapter {path.parent} does not fit this model:\n  {listed}")

    def _save(self, module: str, tensor: torch.Tensor) -> None:
        path, _, _, problem = self._find(module)
        if path not in (EMBEDDING, HEAD):
            self._wrong.append(f"{module}: " + (problem or "only the embedding and the head can be replaced (modules_to_save)"))
        elif tensor.shape != (self._spec.vocab_size, self._spec.width):
            self._wrong.append(f"{module} is {list(tensor.shape)}; this model's is {[self._spec.vocab_size, self._spec.width]}")
        else:
            self._saved[path] = tensor

    def _find(self, module: str) -> tuple[str, int, Rule | None, str]:
        """(path, piece, the rule that names it, or else why it cannot be)."""
        reader = self._reader
        rule, target = matched(reader.rules, f"{module}.weight")
        if target in reader.named:
            return *reader.named[target], rule, ""
        known = any(target in (one.name, *(piece.name for piece in one.pieces)) for one in self._spec.parameters())
        return "", -1, rule, ("adapters of this tensor are not supported; possible are the embedding, the head, and projections"
                              if known else "this model has no such projection")

    def _take(self, module: str, pair: dict[str, torch.Tensor]) -> None:
        path, piece, rule, problem = self._find(module)
        if path in (EMBEDDING, HEAD) and self._config.invocation:
            self._wrong.append(f"{module}: the embedding and the head cannot be changed from some token on (aLoRA)")
        rank, scale = self._config.scale(module)
        if not path or not {"A", "B"} <= pair.keys():
            self._wrong.append(f"{module}: {problem}" if not path else f"{module} has {' and '.join(pair)} alone")
            return
        if self._config.scaled and "magnitude" not in pair:
            self._wrong.append(f"{module} has no lora_magnitude_vector, but use_dora is true")
        parameter = self._targets[path]
        rows, columns = parameter.shape[0] if piece < 0 else parameter.pieces[piece].rows, parameter.shape[1]
        if rank > self._reader.most:
            self._wrong.append(f"{module} has rank {rank}; at most {self._reader.most} is possible (--max-lora-rank)")
        elif pair["A"].shape != (rank, columns) or pair["B"].shape != (rows, rank):
            self._wrong.append(f"{module} has A {list(pair['A'].shape)} and B {list(pair['B'].shape)}; this model and rank "
                               f"{rank} ask for {[rank, columns]} and {[rows, rank]}")
        elif "magnitude" in pair and (path in (EMBEDDING, HEAD) or parameter.decoded or pair["magnitude"].numel() != rows):
            self._wrong.append(f"{module}: DoRA is not possible for the embedding, the head and MLA's keys and values; and its "
                               f"magnitudes are {list(pair['magnitude'].shape)}, those of this matrix {[rows]}")
        elif parameter.decoded and self._config.invocation:
            self._wrong.append(f"{module}: MLA's keys and values cannot be changed from some token on (aLoRA)")
        else:
            if rule is not None and rule.change is not None and rule.change is not transposed:
                # The rule reorders a matrix's rows, and so those of B.
                pair = {kind: tensor if kind == "A" else rule.change(tensor, self._spec) for kind, tensor in pair.items()}
                self.plain = False
            self._pairs.append((path, piece, pair, scale))

    def _packed(self) -> Weights:
        """The rank's share, as a slot holds it, into which the copies come."""
        found, dtype, holds = self._reader.layout, self._reader.dtype, self._reader.holds
        apart: dict[str, tuple[torch.Tensor | None, ...]] = dict(self._experts.packed(dtype, self._place, holds))
        pairs = [pair for pair in self._pairs if holds(pair[0])]
        apart |= {path: (pair["A"].to(dtype), self._own(path, pair["B"] * scale).to(dtype))
                  for path, _, pair, scale in pairs if self._targets[path].decoded}
        pairs = [pair for pair in pairs if pair[0] not in apart]
        width = padded(max((len(pair["A"]) for _, _, pair, _ in pairs), default=1))
        used = {path for path, *_ in pairs}
        own = Layout([(path, one.pieces, one.inputs) for path, one in found.targets.items() if path in used])
        data, facts, places = torch.zeros(own.unit * width, dtype=dtype), [0] * found.facts, list[tuple[int, int]]()
        for target in map(found.targets.__getitem__, own.targets):
            first, end = target.down * width, padded(target.up + target.rows) * width
            places.append((places.pop()[0] if places and places[-1][1] == first else first, end))
        gains, scaled = torch.zeros(found.gains, dtype=dtype), any("magnitude" in pair for _, _, pair, _ in pairs)
        facts[0] = width
        for path, part, pair, scale in pairs:
            parameter, target, a, b = self._targets[path], found.targets[path], pair["A"], pair["B"]
            # Each element is rounded once: a power of two only changes exponents, of which float16 has few.
            exact = dtype is torch.float32 or (math.frexp(scale)[0] == 0.5 and dtype in (b.dtype, torch.bfloat16))
            if "magnitude" in pair or not (exact or scale == 1):
                b, scale, self.plain = b.float() * scale, 1, False
            pieces = range(len(target.pieces)) if part < 0 else (part,)
            whole = _pieces(parameter)
            at = 0 if part < 0 else sum(whole[:part])
            split = Split.WHOLE if self._place.tensors == 1 else parameter.split
            held = parameter.share(self._place.tensor, self._place.tensors)
            if split is Split.COLUMNS:
                ((first, end),) = held
                a = a[:, first:end]
            up = data[own.targets[path].up * width:][:target.rows * width].view(width, target.rows)
            for piece in pieces:
                rank, row, to = len(a), sum(whole[:piece]), sum(target.pieces[:piece])
                first, end = held[piece] if split is Split.ROWS else (row, row + whole[piece])
                mine = b[first - at:end - at]
                if "magnitude" in pair:
                    magnitude = pair["magnitude"].float().flatten()[first - at:end - at]
                    over = self._reader.group if split is Split.COLUMNS else None
                    gain = _gains(self._reader.weights, over, path, magnitude, a.float(), mine, to)
                    mine = mine * (1 + gain[:, None])
                    gains[target.gains + to:target.gains + to + len(gain)] = gain.to(dtype)
                    facts[target.facts + MOST_PIECES] = 1
                down = data[(own.targets[path].down + piece * target.inputs) * width:][:rank * target.inputs].view(rank, -1)
                self._into += [down[:, :a.shape[1]], up[:rank, to:to + end - first]]
                self._from += [a, mine.t()]
                self._scales += [1, scale]
                facts[target.facts + piece] = padded(rank)
        saved = {path: (self._own(path, one).to(dtype),) for path, one in self._saved.items() if holds(path)}
        ends = {*saved, *(path for path, *_ in pairs if path in (EMBEDDING, HEAD))} | ({APART} if apart else set())
        apart |= saved
        # A stage may have none of an adapter's layers.
        self.plain &= bool(pairs) and not apart
        matrices = Matrices(data, places, gains if scaled else None, torch.tensor(facts, dtype=torch.int32))
        return Weights(matrices, apart, frozenset(ends))

    def _own(self, path: str, matrix: torch.Tensor) -> torch.Tensor:
        """A rank's rows of a matrix, filled up with zeros; an embedding is whole."""
        if path == EMBEDDING or self._place.tensors == 1:
            return matrix
        ((first, end),) = self._targets[path].share(self._place.tensor, self._place.tensors)
        rows = _targets(self._spec.share(self._place.tensors))[path].shape[0]
        return pad(matrix[first:end], (0, 0, 0, rows - end + first))


def _gains(weights: Rows, group: Group | None, path: str, magnitude: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
           at: int) -> torch.Tensor:
    """The factors less 1 of DoRA (Liu et al. 2024): a magnitude, divided by the norm of the row of W + B A. `at`: where the
    rows begin in the rank's matrix. `group`: of ranks that divide the columns."""
    squares = torch.empty_like(magnitude)
    for first in range(0, len(b), _ROWS):
        part = slice(first, min(first + _ROWS, len(b)))
        rows = weights(path, at + part.start, at + part.stop)
        if group is None:
            squares[part] = (rows.cpu() + b[part] @ a).square().sum(1)
        else:
            squares[part] = group.gather((rows + (b[part] @ a).to(rows.device)).square().sum(1)).sum(0).cpu()
    return magnitude / squares.sqrt() - 1
