"""The headers of a model folder's safetensors files: names, types, shapes and places, checked before anything is read.

Format: github.com/huggingface/safetensors (8 bytes of header length, a JSON header, then the data that its offsets cut)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint import gguf
from penstock.core.errors import ModelError
from penstock.core.files import read_json

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The types that a plain weight may be stored in, and their torch names."""
TORCH_NAMES = {**DTYPES, "I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64", "F8_E4M3": "float8_e4m3fn",
               "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
"""All types that a scheme may store."""

_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
               "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
_LARGEST_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Stored:
    """One tensor in a file; `start` and `end` are byte offsets from the beginning of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    made: bool = False
    """It is computed from other tensors when it is read; `start` and `end` say its size only."""
    arranged: bool = False
    """It is as the parameter has it: a rule's change does not apply."""

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def find(folder: Path) -> list[Path]:
    """A folder's safetensors files: model.safetensors, the files that the index names, or the only file there is."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in _index(folder).values()})
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise ModelError(f"{folder} has {len(others)} safetensors files but no {INDEX} to say which belong to the model; "
                         f"download the folder again, or leave only {SINGLE}")
    blocks = sorted(folder.glob("*.gguf"))
    if blocks and len(gguf.siblings(blocks[0])) == len(blocks):
        return blocks
    found = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
             for path in sorted(folder.glob(pattern))]
    instead = f"; it has {', '.join(found[:4])}, and Penstock reads safetensors only" if found else ""
    raise ModelError(f"{folder} has no {SINGLE} and no {INDEX}{instead}. Convert the weights to safetensors (in transformers: "
                     "from_pretrained, then save_pretrained), or download a safetensors revision of the model")


def _index(folder: Path) -> dict[str, str]:
    """The index's map from tensor to file name, checked."""
    path = folder / INDEX
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ModelError(f"{path} has no weight_map from tensors to files; download it again")
    for name in sorted(set(index.values())):
        if Path(name).name != name:
            raise ModelError(f"{path} names {name!r}, which is not a file of its own folder")
        if not (folder / name).is_file():
            raise ModelError(f"{path} names {name}, which is not in the folder; download it")
    return index


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, every offset checked against the file's size. ModelError says what is wrong with it."""
    if path.suffix == ".gguf":
        return _gguf_header(path)

    def corrupt(what: str) -> ModelError:
        return ModelError(f"{path} is not a whole safetensors file: {what}; download it again")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise corrupt(f"its header would be {length} bytes long in a file of {size} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise corrupt(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise corrupt("its header is not an object")
    header.pop("__metadata__", None)
    found = {name: _stored(path, name, entry, 8 + length, corrupt) for name, entry in header.items()}
    at = 8 + length
    for stored in sorted(found.values(), key=lambda s: (s.start, s.end)):
        if stored.start != at:
            raise corrupt(f"tensor {stored.name} begins at byte {stored.start}, not at {at} where the one before ends")
        at = stored.end
    if at != size:
        raise corrupt(f"its header describes {at} bytes, the file has {size}" + (" (cut short)" if at > size else ""))
    return found


def _gguf_header(path: Path) -> dict[str, Stored]:
    """The tensors of a GGUF file by a Hugging Face folder's names. Blocks are rows of bytes."""
    file = gguf.read(path)
    first = file if "general.architecture" in file.metadata else gguf.read(gguf.siblings(path)[0])
    arch = gguf.architecture(first.metadata, (name for one in gguf.siblings(path) for name in gguf.read(one).tensors))
    found = {}
    for entry in file.tensors.values():
        for name, one in gguf.renamed(arch, entry):
            plain = {"f32": "F32", "f16": "F16", "bf16": "BF16"}.get(one.kind)
            rows = math.prod(one.shape[:-1])
            shape = one.shape if plain is not None else (*one.shape[:-1], (one.end - one.start) // rows)
            found[name] = Stored(name, path, plain or "U8", shape, one.start, one.end)
    return found


def _stored(path: Path, name: str, entry: Any, base: int, corrupt: Any) -> Stored:
    """One header entry, checked within itself."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        good = dtype in _ITEM_BYTES and all(type(n) is int and n >= 0 for n in (*shape, start, end))
        good = good and end - start == math.prod(shape) * _ITEM_BYTES[dtype]
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise corrupt(f"the header's entry for tensor {name} is {str(entry)[:120]}")
    return Stored(name, path, dtype, shape, base + start, base + end)


def read_headers(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder by name. ModelError if a file is damaged, or the index does not fit the files."""
    tensors: dict[str, Stored] = {}
    for path in find(folder):
        for name, stored in read_header(path).items():
            if name in tensors:
                raise ModelError(f"tensor {name} is both in {tensors[name].file.name} and in {path.name} of {folder}; "
                                 "only one can be meant")
            tensors[name] = stored
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        wrong = [f"{name} in {file}" for name, file in sorted(_index(folder).items())
                 if name not in tensors or tensors[name].file.name != file]
        if wrong:
            raise ModelError(f"{folder / INDEX} does not fit its files, which lack {'; '.join(wrong)}; download them again")
    return tensors


def dtype_of(folder: Path | None, config: Mapping[str, Any]) -> str:
    """The torch name of a checkpoint's own type: the one that config.json states, or else that of most of its bytes.

    bfloat16 where there are neither (a folder for dummy weights)."""
    named = config.get("dtype") or config.get("torch_dtype")
    if named is None:
        if folder is None or not any(folder.glob("*.safetensors")):
            return "bfloat16"
        tensors = read_headers(folder).values()
        sizes = {name: sum(stored.nbytes for stored in tensors if stored.dtype == name) for name in DTYPES}
        return DTYPES[max(sizes, key=lambda name: sizes[name])]
    name = str(named).removeprefix("torch.")
    if name not in DTYPES.values():
        raise ModelError(f"config.json: the weights are {name}; possible are float32, float16 and bfloat16")
    return name
