"""A checkpoint in any dialect, shown to the loader as if it held the parts of schemes: names, shapes and types are checked
before data is read, and a module's tensors are converted when the first of its parts is asked for."""

import dataclasses
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.checkpoint.tensors import TORCH_NAMES, Stored, read_headers
from penstock.core.errors import ModelError
from penstock.layers.build import Parameter, Piece
from penstock.layers.spec import ModelSpec
from penstock.models.rules import Change, Rule, matched, usual
from penstock.quant.form import Form, Reader
from penstock.quant.scheme import Scheme


class Checkpoint:
    """All tensors of a model folder by name; their data can be read while it is `mapped`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_headers(folder)
        self._files = {stored.file for stored in self.tensors.values()}
        self._maps: dict[Path, mmap.mmap] = {}

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Maps the files during the context. Tensors from `read` must be released before its end."""
        with ExitStack() as stack:
            stack.callback(self._maps.clear)
            for path in self._files:
                with path.open("rb") as file:
                    # torch warns of memory that is not writable, so the mapping is private; nothing writes to it.
                    self._maps[path] = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            yield

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, without a copy: the system reads its pages from the file on access."""
        return self.view(self.tensors[name])

    def view(self, stored: Stored) -> torch.Tensor:
        """The tensor that lies at a place of a mapped file."""
        dtype = stored_dtype(stored.dtype)
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        flat = torch.frombuffer(self._maps[stored.file], dtype=dtype, count=math.prod(stored.shape), offset=stored.start)
        return flat.view(stored.shape)

    def behind(self, _name: str) -> Iterable[Stored]:
        """The files' tensors that `read` makes a tensor of, if it is not one of them itself."""
        return ()

    def take(self, stored: Stored) -> torch.Tensor:
        """One of those, where tensors are made. A loader may replace it."""
        return self.view(stored)

    def drop(self, name: str) -> None:
        """Releases the memory pages of a tensor that was read; they can be read from the file again."""
        self.release(self.tensors[name])

    def release(self, stored: Stored) -> None:
        """The same for a place of a mapped file."""
        page = mmap.PAGESIZE
        start = stored.start // page * page
        length = min(-(-stored.end // page) * page, os.path.getsize(stored.file)) - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[stored.file].madvise(mmap.MADV_DONTNEED, start, length)


def stored_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return found


_CODES = {torch_name: code for code, torch_name in TORCH_NAMES.items()}
_CACHE_SCALES = re.compile(r".*\.(k_scale|v_scale|q_scale|prob_output_scale|kv_cache_scale|[kv]_proj\.output_scale)")
"""Scales of keys and values for a cache in FP8, which `models/caching.py` reads."""


def _modules(spec: ModelSpec, rules: Sequence[Rule]) -> Iterator[tuple[str, Parameter | Piece, int]]:
    """Every matrix that checkpoints store on its own: its module's usual name, itself, and its columns."""
    for parameter in spec.parameters():
        if parameter.scheme is None:
            continue
        pieces: list[Parameter | Piece] = [piece for piece in parameter.pieces if usual(rules, piece.name) is not None]
        for one in pieces or [parameter]:
            if (name := usual(rules, one.name)) is not None:
                yield name.removesuffix(".weight"), one, parameter.shape[1]


def _rows(one: Parameter | Piece) -> int:
    return one.rows if isinstance(one, Piece) else one.shape[0]


def _form(reader: Reader, module: str, one: Parameter | Piece, k: int) -> Form | None:
    """The reader's, but a plain matrix that joins several, whose borders blocks would reach over, stays plain."""
    found = reader.form(module, _rows(one), k)
    joined = one.pieces if isinstance(one, Parameter) and found is not None and found.plain else ()
    return None if found is not None and any(piece.rows % found.scheme.grain[0] for piece in joined) else found


def with_schemes(spec: ModelSpec, rules: Sequence[Rule], reader: Reader) -> ModelSpec:
    """The model with its matrices stored as the reader says. One pattern stands for all layers that agree."""
    found: dict[str, dict[str, Scheme | None]] = {}
    for module, one, k in _modules(dataclasses.replace(spec, schemes=()), rules):
        form = _form(reader, module, one, k)
        stem = one.name.removesuffix(".weight")
        general = re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", stem)
        found.setdefault(general, {})[stem] = form.scheme if form is not None else None
    schemes: list[tuple[str, Scheme]] = []
    for general, stems in found.items():
        agreed = {general: next(iter(stems.values()))} if len(set(stems.values())) == 1 else stems
        schemes += [(name, scheme) for name, scheme in agreed.items() if scheme is not None]
    return dataclasses.replace(spec, schemes=tuple(schemes))


class _Module(NamedTuple):
    form: Form
    raw: dict[str, Stored]
    """The given tensors by suffix."""
    change: Change | None
    n: int
    k: int


class Translated(Checkpoint):
    """A checkpoint whose modules are stored as a reader says. `tensors` are what the loader sees."""

    def __init__(self, folder: Path, spec: ModelSpec, rules: Sequence[Rule], reader: Reader, dtype: str,
                 device: torch.device | None = None) -> None:
        """Conversions run on `device`, or on the CPU. ModelError lists tensors that do not fit what the config says."""
        super().__init__(folder)
        self._spec, self._device = spec, device
        self.raw = self.tensors
        """The files' own tensors."""
        self._made: dict[str, tuple[str, str]] = {}
        self._adjusted: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.linears: list[str] = []
        """All modules with a matrix, plain ones too, by the files' names."""
        self._cached: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._modules, self.tensors = self._sorted(rules, reader)
        self._leave_out_zeros(rules)
        if wrong := [problem for name, module in self._modules.items() for problem in _misfits(name, module, spec)]:
            raise ModelError(f"{folder}: tensors do not fit quantization_config in config.json:\n  "
                             + "\n  ".join(sorted(wrong)))
        for name, module in self._modules.items():
            for part in module.form.scheme.parts(module.n, module.k, dtype):
                shown = f"{name}.{part.suffix}"
                if shown in self.tensors:
                    raise ModelError(f"{folder}: {shown} is there; {module.form.scheme.name} has no such tensor")
                if (same := module.form.same.get(part.suffix)) is not None:
                    self.tensors[shown] = dataclasses.replace(module.raw[same], name=shown, arranged=reader.arranged)
                else:
                    first = next(iter(module.raw.values()))
                    self._made[shown] = name, part.suffix
                    self.tensors[shown] = Stored(shown, first.file, _CODES[part.dtype], part.shape, 0, part.nbytes,
                                                 made=True, arranged=True)

    def _sorted(self, rules: Sequence[Rule], reader: Reader) -> tuple[dict[str, _Module], dict[str, Stored]]:
        """(modules that a form describes, all other tensors)."""
        shapes: dict[str, tuple[Parameter | Piece, int]] = {}
        for parameter in dataclasses.replace(self._spec, schemes=()).parameters():
            if parameter.scheme is not None:
                ones: list[Parameter | Piece] = [parameter, *parameter.pieces]
                for one in ones:
                    shapes[one.name] = one, parameter.shape[1]
        modules: dict[str, _Module] = {}
        others: dict[str, Stored] = {}
        forms: dict[str, tuple[Form, Change | None, int, int] | None] = {}
        endings = sorted(((suffix if suffix[0] in "._" else f".{suffix}", suffix) for suffix in reader.suffixes),
                         key=lambda pair: -len(pair[0]))
        for name, stored in self.raw.items():
            if _CACHE_SCALES.fullmatch(name):
                continue
            ending, suffix = next((pair for pair in endings if name.endswith(pair[0])), ("", "weight" if reader.bare else ""))
            stem = name.removesuffix(ending)
            if suffix and stem not in forms:
                self.linears += [stem] if len(stored.shape) > 1 and "embed" not in stem else []
                forms[stem] = _form_of(stem, rules, reader, shapes)
            found = forms.get(stem) if suffix else None
            if found is None:
                adjust = reader.adjust(name)
                if adjust is not None:
                    self._adjusted[name] = adjust
                others[name] = dataclasses.replace(stored, arranged=reader.arranged, made=adjust is not None)
                continue
            form, change, n, k = found
            modules.setdefault(stem, _Module(form, {}, change, n, k)).raw[suffix] = stored
        return modules, others

    def _leave_out_zeros(self, rules: Sequence[Rule]) -> None:
        """Leaves out biases of zeros beside matrices that have none in the family: GPTQ's older programs write one for each."""
        known = {name for one in self._spec.parameters() for name in (one.name, *(piece.name for piece in one.pieces))}
        found = [name for name in (f"{module}.bias" for module in self._modules) if name in self.tensors
                 and not any(rule.match(asked) in known for asked in (name, f"model.{name}") for rule in rules)]
        if found:
            with self.mapped():
                for name in found:
                    if not bool(self.view(self.raw[name]).any()):
                        del self.tensors[name]

    def modules(self) -> dict[str, Form]:
        return {name: module.form for name, module in self._modules.items()}

    def rearranged(self, module: str) -> bool:
        """Whether the family takes a module's tensors in another layout than the files'."""
        return self._modules[module].change is not None

    def read(self, name: str) -> torch.Tensor:
        if name in self._adjusted:
            return self._adjusted[name](self.take(self.raw[name]).to(self._device or "cpu"))
        if name not in self._made:
            return super().read(name)
        owner, suffix = self._made[name]
        if self._cached[0] != owner:
            module = self._modules[owner]
            raw = {given: self.take(stored).to(self._device or "cpu") for given, stored in module.raw.items()}
            if module.change is not None and module.form.plain:
                raw = {given: module.change(tensor, self._spec) for given, tensor in raw.items()}
            try:
                parts = module.form.parts(raw)
            except ModelError as error:
                raise ModelError(f"{self.folder}: {owner}: {error}") from None
            if module.change is not None and module.form.stacked:
                parts = {part: module.change(tensor, self._spec) for part, tensor in parts.items()}
            self._cached = owner, parts
        return self._cached[1][suffix]

    def behind(self, name: str) -> Iterable[Stored]:
        return (self.raw[name],) if name in self._adjusted else self._modules[self._made[name][0]].raw.values()

    def drop(self, name: str) -> None:
        if name not in self._made:
            super().drop(name)
            return
        owner, suffix = self._made[name]
        parts = self._cached[1] if self._cached[0] == owner else {}
        parts.pop(suffix, None)
        if not parts:
            for stored in self._modules[owner].raw.values():
                self.release(stored)


def _form_of(module: str, rules: Sequence[Rule], reader: Reader,
             shapes: dict[str, tuple[Parameter | Piece, int]]) -> tuple[Form, Change | None, int, int] | None:
    # A checkpoint of a bare backbone leaves out the prefix. Readers know a language model beside towers by its names alone.
    rule, target = matched(rules, f"{module}.weight", module, f"model.{module}.weight")
    if rule is None or target not in shapes:
        return None
    one, k = shapes[target]
    form = _form(reader, module.replace("language_model.", ""), one, k)
    return None if form is None else (form, None if reader.arranged else rule.change, _rows(one), k)


def _misfits(name: str, module: _Module, spec: ModelSpec) -> Iterator[str]:
    """Why a module's tensors are not what its form takes."""
    form, raw = module.form, module.raw
    if module.change is not None and not form.plain and not form.stacked:
        yield f"{name} has to be rearranged for this family, which can be done with plain matrices, not with {form.scheme.name}"
        return
    known = {given.suffix: given for given in form.given}
    for suffix, given in known.items():
        if suffix not in raw:
            if not given.optional and given.unless not in raw:
                yield f"{name}.{suffix} is missing; {form.scheme.name} needs it"
            continue
        kind, shape = TORCH_NAMES.get(raw[suffix].dtype, raw[suffix].dtype), raw[suffix].shape
        if module.change is not None and form.plain:
            shape = tuple(module.change(torch.empty(shape, device="meta"), spec).shape)
        if kind not in given.dtypes:
            yield f"{name}.{suffix} is {kind}; possible are {', '.join(given.dtypes)}"
        if given.shapes and shape not in given.shapes:
            yield f"{name}.{suffix} is {list(shape)}; the config asks for {' or '.join(str(list(one)) for one in given.shapes)}"
    for suffix in raw.keys() - known.keys():
        yield f"{name}.{suffix} is there; {form.scheme.name} has no such tensor"
