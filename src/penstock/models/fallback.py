"""Finds out whether an architecture that no family describes can be run through transformers' own modules, and describes it.

The modules run once on the meta device: attention calls are seen; what `layers/foreign.py` cannot drive is refused."""

import importlib.util
import json
from collections.abc import Mapping
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.layers.block import BlockSpec, BranchSpec, NoNormSpec
from penstock.layers.embedding import EmbeddingSpec, HeadSpec
from penstock.layers.foreign import ForeignAttention, ForeignSpec, running, skeleton
from penstock.layers.spec import ModelSpec
from penstock.models.config import Config
from penstock.models.rules import Rule, flat, text_part

_KNOWN = {"dropout", "sliding_window", "softcap", "s_aux", "position_ids", "is_causal", "cache_position", "use_cache",
          "output_attentions", "output_hidden_states", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
          "max_length_k", "deterministic", "layer_idx", "position_embeddings", "attention_mask"}
"""Arguments of attention that are understood, or change nothing."""


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "ffn_config")
"""Keys by which configs of mixture-of-experts models say how many there are; DBRX says it within its ffn_config."""


def family(config: Mapping[str, Any]) -> SimpleNamespace | None:
    """The members of a family's file, for a config of a decoder that transformers knows; None if it does not, or is not there.

    ModelError if its modules cannot be driven."""
    architecture = (config.get("architectures") or [None])[0]
    if any(config.get(key) for key in EXPERTS):
        return None  # checkpoints of mixtures differ from modules
    if importlib.util.find_spec("transformers") is None or not isinstance(architecture, str) or config.get("auto_map"):
        return None
    given = {name: value for name, value in config.items() if name != "quantization_config"}
    return _family(architecture, json.dumps(given, sort_keys=True))


@lru_cache(maxsize=8)
def _family(architecture: str, text: str) -> SimpleNamespace | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads(text)
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    # Of a checkpoint with towers for images and sound, the text part, whose type the config then has.
    if decoder is None or architecture not in (decoder, decoder.replace("ForCausalLM", "ForConditionalGeneration")):
        return None
    try:
        spec, rules = _described(text, config)
    except ModelError as error:
        raise ModelError(f"config.json names architecture {architecture!r}, which Penstock does not know, and which cannot be "
                         f"run through transformers' modules: {error}") from None
    except Exception as error:  # what transformers raises is of many types, some of huggingface_hub
        raise ModelError(f"config.json names architecture {architecture!r}, which Penstock does not know; transformers' "
                         f"modules do not run here as they are: {type(error).__name__}: {str(error)[:200]}") from error
    return SimpleNamespace(ARCHITECTURES=(architecture,), MODEL_TYPES=(), RULES=rules, spec=lambda _config: spec)


def _described(text: str, config: dict[str, Any]) -> tuple[ModelSpec, tuple[Rule, ...]]:
    model = skeleton(config, torch.device("meta"), torch.bfloat16)  # the type of experts' products on meta tensors
    given = model.config
    if (scaling := (getattr(given, "rope_parameters", None) or {}).get("rope_type", "default")) in ("dynamic", "longrope"):
        raise ModelError(f"its rotation ({scaling}) depends on the longest of the sequences that run together")
    seen: list[ForeignAttention] = []
    positions = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with running(partial(_note, seen)), torch.inference_mode():
        out = model.base_model(input_ids=positions, position_ids=positions, use_cache=False)
    layers = given.num_hidden_layers
    if len(seen) != layers:
        raise ModelError(f"{len(seen)} of its {layers} layers use the attention that can be replaced")
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = bool(given.tie_word_embeddings)
    apart = {names[id(embedding)]: "embedding.weight", **({} if tied else {names[id(head.weight)]: "head.weight"}),
             **({} if head.bias is None else {names[id(head.bias)]: "head.bias"})}
    ignored = {name for name, parameter in model.named_parameters(remove_duplicate=False) if tied and parameter is head.weight}
    tensors = tuple((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()
                    if name not in apart and name not in ignored)
    width, vocabulary = out.last_hidden_state.shape[-1], embedding.shape[0]
    softcap = getattr(given, "final_logit_softcapping", None) or 0.0
    foreign = ForeignSpec(width, text, tuple(seen), tensors, names[id(embedding)], softcap)
    block = BlockSpec(((BranchSpec(foreign, replaces=True),),))
    told = Config({"max_position_embeddings": getattr(given, "max_position_embeddings", None)})  # perhaps by another name
    spec = ModelSpec("", vocabulary, width, told.integer("max_position_embeddings"), (block,), NoNormSpec(),
                     HeadSpec(tied, head.bias is not None, softcap=softcap), EmbeddingSpec())
    rules = (*(Rule(name, target) for name, target in apart.items()), *(Rule(name, None) for name in ignored),
             Rule("model.layers.#.self_attn.rotary_emb.inv_freq", None),
             *(Rule(name, f"blocks.0.foreign.{name}", flat) for name, shape in tensors if not shape),
             *(Rule(f"{first}.**", f"blocks.0.foreign.{first}.**") for first in sorted({
                 name.partition(".")[0] for name, _ in tensors})))
    return spec, text_part(rules)


def _note(seen: list[ForeignAttention], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _scaling: float,
          options: dict[str, Any]) -> torch.Tensor:
    """Notes a call of attention in `seen`; a `layers/foreign.py::Attend`."""
    if unknown := sorted(name for name, option in options.items() if option is not None and name not in _KNOWN):
        raise ModelError(f"its attention takes {', '.join(unknown)}")
    if options.get("is_causal") is False:
        raise ModelError("its attention looks ahead")
    if value.shape[-1] != query.shape[-1]:
        raise ModelError(f"its values ({value.shape[-1]}) are not as wide as its keys ({query.shape[-1]})")
    sinks = options.get("s_aux")
    seen.append(ForeignAttention(query.shape[1], key.shape[1], query.shape[-1], options.get("sliding_window") or 0,
                                 options.get("softcap") or 0.0, sinks is not None))
    return query.transpose(1, 2)
