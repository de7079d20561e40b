"""Memory by accounting: what was predicted at start is what is used at the peak, and random loads never run out."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from tests.gpu.conftest import engine, generate

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
GEMMA: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "vocab_size": 256000,
    "layer_types": ["sliding_attention", "full_attention"] * 4, "attention_bias": False}
CONFIGURATIONS = [
    (LLAMA, {}), (LLAMA, {"max_num_seqs": 32}), (LLAMA, {"max_num_batched_tokens": 2048, "max_num_seqs": 64}),
    (LLAMA, {"max_model_len": 2048}), (LLAMA, {"dtype": "float16", "block_size": 32}), (LLAMA, {"enforce_eager": True}),
    (LLAMA, {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 16384}), (LLAMA, {"batch_invariant": True}),
    (GEMMA, {}), (GEMMA, {"max_num_seqs": 16, "enforce_eager": True}), (GEMMA, {"max_model_len": 1024}),
]


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_predicted_is_measured(number: int, tmp_path: Any) -> None:
    """Total of weights, working memory and cache against the peak of what the driver says is gone, within 2 %."""
    config, options = CONFIGURATIONS[number]
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    rng = random.Random(number)
    with engine(model=str(tmp_path), load_format="dummy", **{"gpu_memory_utilization": 0.3, **options}) as made:
        info = made.info
        predicted = info.weight_bytes + info.step_bytes + info.graph_bytes + info.kv_bytes
        lowest = torch.cuda.mem_get_info()[0]
        for count, longest in ((300, 200), (3, info.max_model_len - 40), (40, info.max_model_len // 2)):
            prompts = [[rng.randrange(3, 30000) for _ in range(rng.randint(1, longest))] for _ in range(count)]
            generate(made, prompts, [rng.randint(1, 20) for _ in prompts])
            lowest = min(lowest, torch.cuda.mem_get_info()[0])
        measured = before - lowest
    share = measured / predicted - 1
    print(f"{number}: predicted {predicted / 2**30:.3f} GiB, measured {measured / 2**30:.3f} GiB, {share:+.2%}")
    assert abs(share) < 0.02
