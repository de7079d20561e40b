"""The vocabulary of family files: the specs, parts, rules and config readers that describe a model, in one import."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.layers.attention import AttentionSpec, QueryKeyNorm
from penstock.layers.block import BlockSpec, BranchSpec, LayerNormSpec, NoNormSpec, RMSNormSpec
from penstock.layers.build import MixerSpec
from penstock.layers.embedding import DenseSpec, EmbeddingSpec, HeadSpec, LayerInputsSpec
from penstock.layers.latent import LatentAttentionSpec, SparseLatentAttentionSpec
from penstock.layers.mlp import MLPSpec
from penstock.layers.rope import RopeScaling, RopeSpec
from penstock.layers.spec import ModelSpec
from penstock.layers.streams import StreamsSpec
from penstock.models import parts, rules
from penstock.models.config import ACTIVATIONS, Config, rope
from penstock.models.rules import Rule, by_group, flat, interleaved, transposed
from penstock.ops.experts import Glu
from penstock.ops.routing import Routing

__all__ = [
    "ACTIVATIONS", "AttentionSpec", "BlockSpec", "BranchSpec", "Config", "DenseSpec", "EmbeddingSpec", "Glu", "HeadSpec",
    "LatentAttentionSpec", "LayerInputsSpec", "LayerNormSpec", "Like", "MLPSpec", "MixerSpec", "ModelSpec", "NoNormSpec",
    "QueryKeyNorm", "RMSNormSpec", "RopeScaling", "RopeSpec", "Routing", "Rule", "SparseLatentAttentionSpec", "StreamsSpec",
    "by_group", "flat", "interleaved", "parts", "rope", "rules", "transposed"]


@dataclass(frozen=True, eq=False)
class Like:
    """The members of a family's file, of a family that is in the file of another."""

    ARCHITECTURES: tuple[str, ...]
    MODEL_TYPES: tuple[str, ...]
    DEFAULTS: Mapping[str, Any]
    spec: Callable[[Config], ModelSpec]
    RULES: Sequence[Rule] = rules.LLAMA
    TASK: str = "generate"
