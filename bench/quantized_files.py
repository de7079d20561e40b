"""GGUF files by llama.cpp's own quantizer: bytes, canary's right answers, and perplexities here and in llama.cpp.

usage: quantized_files.py --text FILE --calibrate FILE [--types Q4_K_M,IQ4_XS] [--count 4] [--folder /tmp/penstock-types]

Needs llama-cpp-python. K-quants take rows of 256 columns, so canary is widened: its 192 channels become 256 and its 480 inner
ones 512, the new ones zero, and norms are multiplied by the root of 192 / 256, which leaves the function as it was. IQ types
below three bits and IQ3_XXS need an importance matrix: the mean squares of each projection's inputs over the text to calibrate
on, which only they get. Prints Markdown.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
from pathlib import Path
from typing import Any

import llama_cpp as lc
import torch
from safetensors.torch import load_file, save_file

from penstock import canary
from penstock.checkpoint import gguf_writing
from penstock.config.flags import integer
from penstock.models import configured, describe, gguf_out
from penstock.models.quantized import projections
from penstock.text.tokenizer import Tokenizer
from penstock.worker.calibration import Moments
from quantized import measured

TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17,
         "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28,
         "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38}
"""llama_ftype by name."""
WINDOW = 512


def widened(out: Path) -> Path:
    """canary's folder in sizes that are multiples of 256."""
    if out.exists():
        return out
    folder = Path(canary.model_folder())
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text())
    width, inner = config["hidden_size"], config["intermediate_size"]
    wide = {width: 256, inner: 512}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("_layernorm.weight", "model.norm.weight")):
            tensor = (tensor.float() * math.sqrt(width / 256)).to(tensor.dtype)
        shape = [wide.get(size, size) if "_norm" not in name or "layernorm" in name else size for size in tensor.shape]
        whole = torch.zeros(shape, dtype=tensor.dtype)
        whole[tuple(slice(size) for size in tensor.shape)] = tensor
        tensors[name] = whole
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config |= {"hidden_size": 256, "intermediate_size": 512, "rms_norm_eps": config["rms_norm_eps"] * width / 256}
    (out / "config.json").write_text(json.dumps(config))
    return out


def importance(folder: Path, text: str) -> Any:
    """llama.cpp's importance matrix: for each projection, the mean squares of its inputs over windows of the text."""
    config = configured(folder)
    ids = Tokenizer.load(folder).encode(text, add_special_tokens=False)[:32 * WINDOW]
    moments = Moments(folder, config, "bfloat16", "cpu", [ids[at:at + WINDOW] for at in range(0, len(ids), WINDOW)])
    arch, found = gguf_writing.architecture(config)[1], list[lc.llama_model_imatrix_data]()
    for module, path in projections(describe(config), config).items():
        squares = moments.of(path) if path.startswith("blocks.") else None
        if squares is not None:
            mean = (squares.diagonal() / len(ids)).tolist()
            found.append(lc.llama_model_imatrix_data(gguf_writing.name_of(arch, f"{module}.weight").encode(),
                                                     (ctypes.c_float * len(mean))(*mean), len(mean)))
    return (lc.llama_model_imatrix_data * (len(found) + 1))(*found)


def quantized(plain: Path, out: Path, kind: str, matrix: Any) -> Path:
    if not out.exists():
        params = lc.llama_model_quantize_default_params()
        params.ftype, params.nthread, params.allow_requantize = TYPES[kind], 1, True
        if kind.startswith(("IQ1", "IQ2", "IQ3_XXS")):
            params.imatrix = matrix
        code = lc.llama_model_quantize(str(plain).encode(), str(out).encode(), ctypes.byref(params))
        assert code == 0, f"llama.cpp's quantizer ended with {code}"
    return out


def peer(path: Path, ids: list[int]) -> float:
    """llama.cpp's perplexity, in the windows of ours."""
    model = lc.Llama(str(path), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False, n_threads=1)
    total, count = 0.0, 0
    for at in range(0, len(ids), WINDOW - 1):
        window = ids[at:at + WINDOW - 1]
        if len(window) < 2:
            continue
        model.reset()
        model.eval(window)
        found = torch.from_numpy(model.scores[:len(window) - 1].copy()).float().log_softmax(-1)
        total -= float(found.gather(1, torch.tensor(window[1:])[:, None]).sum())
        count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True, help="another text, for the importance matrix")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--count", type=integer, default=4, help="prompts of each skill (default: 4)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/penstock-types"))
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True, parents=True)
    lc.llama_log_set(_quiet, None)
    folder, text = widened(args.folder / "canary-wide"), args.text.read_text("utf-8")[:6000]
    plain = args.folder / "plain.gguf"
    if not plain.exists():
        # The writer wants something to quantize: one small matrix, with a scale for every 32 numbers.
        gguf_out.write(folder, plain, "q8_0", {"layers.0.self_attn.k_proj": "q8_0", "*": "plain"}, "bfloat16")
    ids, matrix = Tokenizer.load(folder).encode(text, add_special_tokens=False), importance(folder, args.calibrate.read_text())
    print("| type | bytes | right | perplexity | llama.cpp's |\n|---|---|---|---|---|", flush=True)
    for kind in args.types.split(","):
        try:
            path = quantized(plain, args.folder / f"{kind}.gguf", kind, matrix)
            found: dict[str, Any] = measured(str(path), text, args.count)
            print(f"| `{kind}` | {path.stat().st_size:,} | {found['right']} of {found['asked']} | {found['perplexity']:,.1f} | "
                  f"{peer(path, ids):,.1f} |", flush=True)
        except Exception as error:  # noqa: BLE001 (one type that fails leaves the others)
            print(f"{kind}: {type(error).__name__} {str(error)[:200]}", flush=True)


@lc.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: Any) -> None:
    pass


if __name__ == "__main__":
    main()
