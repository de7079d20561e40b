"""Reads a LoRA adapter's tensors for a model: which projection each belongs to, checked by names and shapes, cut for a rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch.nn.functional import pad

from penstock.checkpoint.adapter import WEIGHTS, AdapterConfig, read_adapter
from penstock.core.errors import ModelError
from penstock.layers.parameter import Parameter, Split
from penstock.layers.spec import ModelSpec
from penstock.models.expert_adapters import ExpertAdapters
from penstock.models.rules import Rule, transposed
from penstock.ops.lora import MOST_PIECES, Layout, Matrices, padded
from penstock.parallel.axis import Place
from penstock.parallel.group import Group

EMBEDDING, HEAD = "embedding", "head"
"""Paths of the two ends of a model."""
APART = "apart"
"""Stands for all matrices that are no projections of their own: those of experts, and that of MLA's keys and values."""
_PREFIX = "base_model.model."
_KINDS = {"lora_A": "A", "lora_B": "B", "lora_embedding_A": "A", "lora_embedding_B": "B", "lora_magnitude_vector": "magnitude"}
_ROWS = 4096
"""Rows of a matrix whose norms are computed at once."""

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
    """The matrices that adapters may change, by path; the two ends last."""
    found = {parameter.stem: parameter for parameter in spec.parameters()
             if parameter.scheme is not None and len(parameter.shape) == 2 and parameter.name.startswith("blocks.")
             and not (parameter.stack or len(parameter.pieces) > MOST_PIECES)}
    table = next(parameter for parameter in spec.parameters() if parameter.name == "embedding.weight")
    # An embedding's A has a column for each token, on every rank.
    found[EMBEDDING] = Parameter("embedding.weight", (spec.width, spec.vocab_size), table.scheme)
    found[HEAD] = Parameter("head.weight", table.shape, table.scheme, split=Split.ROWS, unit=table.unit)
    return found


def layout(spec: ModelSpec) -> Layout:
    """All that adapters may change of a model, or of a rank's part of it."""
    return Layout([(path, _pieces(one), one.shape[1]) for path, one in _targets(spec).items() if not one.decoded])


def _pieces(parameter: Parameter) -> tuple[int, ...]:
    return tuple(piece.rows for piece in parameter.pieces) or parameter.shape[:1]


def read(folder: Path, spec: ModelSpec, place: Place, rules: Sequence[Rule], dtype: torch.dtype, most: int,
         weights: Rows, group: Group | None = None) -> Weights:
    """The share of the rank at `place` of an adapter for the model `spec`, of rank at most `most`, in the model's dtype on the
    CPU. `group`: the ranks that divide the layers, which all read it at once. ModelError lists every tensor that does not fit
    the model."""
    reader = _Reader(folder, spec, place, rules, most)
    reader.load()
    return reader.packed(dtype, weights, group)


@dataclass
class _Pair:
    """The tensors of a module, as PEFT computes with them."""

    path: str
    piece: int
    """The piece that it is; -1: the whole projection."""
    tensors: dict[str, torch.Tensor]
    scale: float


class _Reader:
    """One adapter being read."""

    def __init__(self, folder: Path, spec: ModelSpec, place: Place, rules: Sequence[Rule], most: int) -> None:
        self._folder, self._spec, self._place, self._rules, self._most = folder, spec, place, rules, most
        self._config: AdapterConfig = read_adapter(folder)
        self._targets = _targets(spec)
        self._named = {one.name: (path, -1) for path, one in self._targets.items()}
        self._named |= {one.name: (path, piece) for path, whole in self._targets.items()
                        for piece, one in enumerate(whole.pieces)}
        self._pairs: list[_Pair] = []
        self._experts = ExpertAdapters(spec, rules)
        self._saved: dict[str, torch.Tensor] = {}
        self._wrong: list[str] = []

    def load(self) -> None:
        """Reads and checks the file. ModelError lists what is wrong."""
        try:
            tensors = load((self._folder / WEIGHTS).read_bytes())  # mapped, it would take twice as long
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._folder / WEIGHTS} is not a whole safetensors file: {error}") from None
        modules: dict[str, dict[str, torch.Tensor]] = {}
        # All norms at once take a fraction of as many checks; one that overflows is looked into.
        norms = torch._foreach_norm([one for one in tensors.values() if one.dtype.is_floating_point])  # noqa: SLF001
        sound = all(map(math.isfinite, torch.stack([one.float() for one in norms]).tolist())) if norms else True
        for name, tensor in tensors.items():
            module, _, last = name.removesuffix(".weight").rpartition(".")
            if not tensor.dtype.is_floating_point or not (sound or bool(tensor.isfinite().all())):
                self._wrong.append(f"{name} is {tensor.dtype} {list(tensor.shape)}, or has numbers that are not finite")
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
            problem = self._experts.take(module, pair, self._config, self._most)
            if problem is None:
                self._take(module, pair)
            elif problem:
                self._wrong.append(problem)
        if self._experts and self._place.datas > 1:
            self._wrong.append("adapters of experts are not possible where engines share the experts (data parallelism)")
        named = [name.removesuffix(".weight") for name in tensors]
        self._wrong += [f"{one} is among modules_to_save, but not in the file" for one in self._config.saved
                        if not any(name.endswith(one) for name in named)]
        if self._wrong or not (self._pairs or self._saved or self._experts):
            listed = "\n  ".join(sorted(self._wrong)[:20]) or "it has no matrices"
            raise ModelError(f"the adapter {self._folder} does not fit this model:\n  {listed}")

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
        name = f"{module}.weight"
        rule, target = next(((rule, target) for rule in self._rules if (target := rule.match(name)) is not None), (None, ""))
        if target in self._named:
            return *self._named[target], rule, ""
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
        if rank > self._most:
            self._wrong.append(f"{module} has rank {rank}; at most {self._most} is possible (--max-lora-rank)")
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
            self._pairs.append(_Pair(path, piece, pair, scale))

    def packed(self, dtype: torch.dtype, weights: Rows, group: Group | None) -> Weights:
        """The rank's share, as a slot holds it."""
        found = layout(self._spec.share(self._place.tensors))
        apart: dict[str, tuple[torch.Tensor | None, ...]] = dict(self._experts.packed(dtype, self._place))
        for pair in [pair for pair in self._pairs if self._targets[pair.path].decoded]:
            self._pairs.remove(pair)
            apart[pair.path] = (pair.tensors["A"].to(dtype),
                                self._own(pair.path, pair.tensors["B"] * pair.scale).to(dtype))
        width = padded(max((len(pair.tensors["A"]) for pair in self._pairs), default=1))
        data, facts = torch.zeros(found.unit * width, dtype=dtype), [0] * found.facts
        gains = torch.zeros(found.gains, dtype=dtype) if any("magnitude" in pair.tensors for pair in self._pairs) else None
        facts[0] = width
        for pair in self._pairs:
            parameter, target = self._targets[pair.path], found.targets[pair.path]
            # Each element is converted where it is stored.
            a, b = pair.tensors["A"], pair.tensors["B"] if pair.scale == 1 else pair.tensors["B"].float() * pair.scale
            pieces = range(len(target.pieces)) if pair.piece < 0 else (pair.piece,)
            whole, own = _pieces(parameter), target.pieces
            at = 0 if pair.piece < 0 else sum(whole[:pair.piece])
            split = Split.WHOLE if self._place.tensors == 1 else parameter.split
            held = parameter.share(self._place.tensor, self._place.tensors)
            if split is Split.COLUMNS:
                ((first, end),) = held
                a = pad(a[:, first:end], (0, target.inputs - end + first))
            up = data[target.up * width:(target.up + target.rows) * width].view(width, target.rows)
            for piece in pieces:
                rank, row, to = len(a), sum(whole[:piece]), sum(own[:piece])
                begin = (target.down + piece * target.inputs) * width
                first, end = held[piece] if split is Split.ROWS else (row, row + whole[piece])
                mine = b[first - at:end - at]
                if "magnitude" in pair.tensors:
                    assert gains is not None
                    magnitude = pair.tensors["magnitude"].float().flatten()[first - at:end - at]
                    over = group if split is Split.COLUMNS else None
                    gain = _gains(weights, over, pair.path, magnitude, a.float(), mine.float(), to)
                    mine = mine * (1 + gain[:, None])
                    gains[target.gains + to:target.gains + to + len(gain)] = gain.to(dtype)
                    facts[target.facts + MOST_PIECES] = 1
                data[begin:begin + rank * target.inputs].view(rank, target.inputs).copy_(a)
                up[:rank, to:to + end - first].copy_(mine.t())
                facts[target.facts + piece] = padded(rank)
        ends = {*self._saved, *(pair.path for pair in self._pairs if pair.path in (EMBEDDING, HEAD))}
        ends |= {APART} if apart else set()
        apart |= {path: (self._own(path, one).to(dtype),) for path, one in self._saved.items()}
        return Weights(Matrices(data, gains, torch.tensor(facts, dtype=torch.int32)), apart, frozenset(ends))

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
