"""Makes tests/assets/gguf: tiny models of every architecture, written by llama.cpp's own converter. Not run by tests.

    python tests/assets/make_gguf.py LLAMA_CPP_FOLDER OUT

Weights are float16 numbers; beside each file is what transformers answers greedily in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0, "tie_word_embeddings": False}
NO_HEAD = {name: value for name, value in SMALL.items() if name != "head_dim"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL), "llama3": ("Llama", {**SMALL, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", NO_HEAD), "qwen3": ("Qwen3", {**SMALL, "tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3Moe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                              "norm_topk_prob": True}),
    "qwen2moe": ("Qwen2Moe", {**NO_HEAD, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                              "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}),
    "olmoe": ("Olmoe", {**NO_HEAD, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32}),
    "mixtral": ("Mixtral", {**NO_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma2": ("Gemma2", {**SMALL, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {**SMALL, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16,
                          "tie_word_embeddings": True}),
    "phi3": ("Phi3", NO_HEAD), "granite": ("Granite", {
        **NO_HEAD, "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "logits_scaling": 2.0}),
    "olmo2": ("Olmo2", NO_HEAD), "smollm3": ("SmolLM3", {**NO_HEAD, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_ctx": 64, "vocab_size": 96,
                      "bos_token_id": 1, "eos_token_id": 2}),
}
PROMPT = [1, 17, 40, 3, 77, 21, 60, 5, 5, 31, 44, 90]

CONVERT = """
import sys
sys.path.insert(0, {home!r}); sys.path.insert(0, {home!r} + "/gguf-py")
from conversion.base import TextModel
def vocabulary(self):
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"t%d" % i for i in range(3, 96))]
    self.gguf_writer.add_tokenizer_model("llama"); self.gguf_writer.add_tokenizer_pre("default")
    self.gguf_writer.add_token_list(tokens); self.gguf_writer.add_token_scores([0.0] * 96)
    self.gguf_writer.add_token_types([2, 3, 3] + [1] * 93)
    self.gguf_writer.add_bos_token_id(1); self.gguf_writer.add_eos_token_id(2)
import conversion, importlib, pkgutil
for found in pkgutil.iter_modules(conversion.__path__):
    module = importlib.import_module("conversion." + found.name)
    for one in vars(module).values():
        if isinstance(one, type) and issubclass(one, TextModel):
            one.set_vocab = vocabulary
            one._create_vocab_sentencepiece = lambda self: ([b""] * 96, [], [])
sys.argv = ["convert", {folder!r}, "--outfile", {out!r}, "--outtype", "f16"]
(__import__("pathlib").Path({folder!r}) / "tokenizer.model").touch()
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def make(home: Path, out: Path, name: str) -> None:
    family, config = KINDS[name]
    torch.manual_seed(7)
    kind = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(kind(**config)).eval()
    with torch.no_grad():
        for at, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.3 * parameter.shape[-1] ** -0.5)
            elif "norm" in at or "ln_" in at:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.2)
            parameter.copy_(parameter.half().float())
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0, len(PROMPT):]
    folder = out.parent / "gguf-work" / name
    model.half().save_pretrained(folder)
    target = out / f"{name}.gguf"
    subprocess.run([sys.executable, "-c", CONVERT.format(home=str(home), folder=str(folder), out=str(target))], check=True)
    (out / f"{name}.json").write_text(json.dumps({"prompt": PROMPT, "greedy": ids.tolist()}) + "\n")


if __name__ == "__main__":
    OUT = Path(sys.argv[2])
    OUT.mkdir(parents=True, exist_ok=True)
    for NAME in sys.argv[3:] or KINDS:
        make(Path(sys.argv[1]), OUT, NAME)
