"""Makes tests/assets/gguf-canary-256: canary-256 quantized by llama.cpp's own quantizer, and what llama.cpp answers with each
file. Not run by tests.

    pip install llama-cpp-python
    PYTHONPATH=src:. python tests/assets/make_canary_gguf.py OUT [TYPE ...]

expected.json has, for two prompts of each short skill, the prompt's tokens and for each file llama.cpp's greedy tokens up to
the answer's end. llama.cpp rounds activations to 8 bits, in blocks of 32 columns or of 256, and stores pairs as float16.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp as lc
from training.canary.render import render
from training.canary.ship import place

from penstock.canary.suite import SKILLS, prompts
from penstock.models import gguf_out
from penstock.text.tokenizer import Tokenizer

FTYPES = {"Q8_0": 7, "Q4_K_M": 15}
"""llama_ftype by name."""
LONGEST = 48
"""Tokens of an answer that are kept."""


def main() -> None:
    out, folder = Path(sys.argv[1]), place("canary-256")
    out.mkdir(parents=True, exist_ok=True)
    kinds = sys.argv[2:] or list(FTYPES)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain.gguf"
        # Penstock's writer wants something to quantize: one small matrix, with a scale for every 32 numbers.
        gguf_out.write(folder, plain, "q8_0", {"layers.0.self_attn.k_proj": "q8_0", "*": "plain"}, "bfloat16")
        for kind in kinds:
            params = lc.llama_model_quantize_default_params()
            params.ftype, params.nthread, params.allow_requantize = FTYPES[kind], 1, True
            code = lc.llama_model_quantize(str(plain).encode(), str(out / f"{kind}.gguf").encode(), ctypes.byref(params))
            assert code == 0, f"llama.cpp's quantizer ended with {code}"
    tokenizer = Tokenizer.load(folder)
    asked = [{"skill": skill, "prompt": tokenizer.encode(render(item.messages, item.tools, item.thinking, generate=True),
                                                         add_special_tokens=False)}
             for skill in SKILLS if skill != "retrieve-4k" for item in prompts(skill, 2)]
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    for kind in kinds:
        model = lc.Llama(str(out / f"{kind}.gguf"), n_ctx=2048, n_batch=512, verbose=False, n_threads=1)
        for one in asked:
            model.reset()
            answer: list[int] = []
            for token in model.generate(one["prompt"], temp=0.0, repeat_penalty=1.0):
                answer.append(int(token))
                if token == end or len(answer) == LONGEST:
                    break
            one[kind] = answer
    found = {"package": "llama-cpp-python", "version": importlib.metadata.version("llama-cpp-python"), "asked": asked}
    (out / "expected.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
