"""The fallback: a decoder that runs through the modules of the library transformers, with our attention, cache and sampling.

One mixer is the whole stack of layers. A step's tokens are one sequence with positions for the modules; only attention tells
the rows apart, and that is ours, registered with transformers under `NAME`. `models/fallback.py` finds such models."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.core.errors import ModelError
from penstock.core.state import Everything, Field, StateSpec
from penstock.layers.build import Build, Mixer, Parameter
from penstock.layers.step import StateView, Step, Works
from penstock.ops.attention import Geometry
from penstock.quant.scheme import PLAIN

log = logging.getLogger(__name__)

NAME = "penstock"
"""Of our attention, as transformers knows it."""


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, dict[str, Any]], torch.Tensor]
"""Attention of a model's modules: query [1, H, T, D], key and value [1, KV, T, D], scaling, options -> [1, T, H, D]."""

_now = threading.local()


@contextmanager
def running(attend: Attend) -> Iterator[None]:
    """Attention of this thread's modules is `attend` within."""
    _now.attend = attend
    try:
        yield
    finally:
        del _now.attend


def _attention(_module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None, **options: Any) -> tuple[torch.Tensor, None]:
    """In the signature of transformers' attention functions, of which some models give even the mask by its name."""
    if attention_mask is not None:
        raise ModelError("its modules make an attention mask of their own")
    return _now.attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, options), None


def skeleton(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of a config: parameters on the meta device, buffers where they belong."""
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        moved = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        plain(module, name, moved)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                kind.from_dict(config), attn_implementation=NAME, dtype=dtype)
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
    return model.eval()


@dataclass(frozen=True)
class ForeignAttention:
    """One call of attention in the model's forward pass."""

    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class ForeignSpec:
    """A stack of layers that transformers computes, from tokens to normed hidden states; x is not looked at."""

    width: int
    config: str
    """The model's config.json."""
    attentions: tuple[ForeignAttention, ...]
    """In the order of their calls."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Parameters and stored buffers by transformers' names, but the embedding's and the head's matrices."""
    embedding: str
    """The name of the embedding's matrix."""
    softcap: float = 0.0
    """Of the logits, behind the head."""

    name = "foreign"
    eager = True
    """Its modules are not known to run inside a CUDA graph."""

    def parameters(self, path: str) -> Iterator[Parameter]:
        for name, shape in self.tensors:
            matrix = len(shape) == 2 and name.endswith(".weight")
            yield Parameter(f"{path}.{name}", shape or (1,), PLAIN if matrix else None, decoded=matrix)

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        return tuple(StateSpec(tuple(Field(name, (each.kv_heads, each.head_size), dtype) for name in "kv"), Everything())
                     for each in self.attentions)

    def share(self, _ranks: int) -> "ForeignSpec":
        raise ModelError("a model that runs through transformers' modules cannot be divided; use tensor_parallel_size 1")

    def build(self, path: str, build: Build) -> "Foreign":
        return Foreign(self, path, build)


class Foreign(Mixer):
    """x [T, W] -> [T, W]: the hidden states of the step's tokens."""

    looks_around = True

    def __init__(self, spec: ForeignSpec, path: str, build: Build) -> None:
        self.spec = spec
        self._kernels = build.kernels
        values = {name: build.values.tensor(one.name).view(shape)
                  for (name, shape), one in zip(spec.tensors, spec.parameters(path), strict=True)}
        embedding = build.values.matrix("embedding.weight")
        values[spec.embedding] = embedding.ops.gather(torch.arange(embedding.n, device=build.device), embedding)
        model = skeleton(json.loads(spec.config), build.device, embedding.dtype)
        model.load_state_dict(values, strict=False, assign=True)
        self._model = model.base_model
        if build.device.type != "meta":
            log.warning("%s is not known to Penstock: transformers' own modules run it, more slowly, with Penstock's "
                        "attention, cache and sampling", type(model).__name__)
            _check(model, spec, build.device, embedding.dtype)

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        self._views = list(views)
        self._works = [works.index(view.group, Geometry(
            each.heads, each.kv_heads, each.head_size, view.page, each.window, view["k"].element_size(),
            plain=not each.softcap), self._kernels.attention)
            for view, each in zip(views, self.spec.attentions, strict=True)]

    def detach(self) -> None:
        self._views = []

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        if step.delta is not None:
            raise ModelError("adapters are not there for models that run through transformers")
        self._step, self._calls = step, 0
        with running(self.attend):
            out = self._model(input_ids=step.tokens[None].long(), position_ids=step.positions[None].long(), use_cache=False)
        found: torch.Tensor = out.last_hidden_state[0].to(x.dtype)
        return found if ends is None else found.index_select(0, ends)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float,
               options: dict[str, Any]) -> torch.Tensor:
        """One layer's attention over the cache (`Attend`)."""
        at, step = self._calls, self._step
        self._calls += 1
        view, work, spec = self._views[at], self._works[at], self.spec.attentions[at]
        group, kernels = step.groups[view.group], self._kernels
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        sinks = options["s_aux"].float() if spec.sinks else None
        q = kernels.rope_write(q, k, v, step.positions, group.slots, view["k"], view["v"])
        return kernels.attention.apply(q, view["k"], view["v"], group.table, step.query_start, step.context, scaling,
                                       spec.window, spec.softcap, sinks, step.work[work], step.library[work])[None]


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float,
           _options: dict[str, Any]) -> torch.Tensor:
    """`Attend` of a few tokens that are one sequence, without a cache."""
    q, k, v = (x.float() for x in (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return found.to(query.dtype).transpose(1, 2)


def _check(model: Any, spec: ForeignSpec, device: torch.device, dtype: torch.dtype) -> None:
    """ModelError if logits are not the hidden states times the head's matrix, but scaled or capped, which is tried with a small
    one; or if tokens are mixed by more than attention (convolutions, recurrences)."""
    head = nn.Linear(spec.width, 8, bias=False, device=device, dtype=dtype).requires_grad_(requires_grad=False)
    # So large that a cap shows.
    head.weight.copy_(torch.randn(8, spec.width, generator=torch.Generator().manual_seed(0)) * 100 * spec.width**-0.5)
    model.set_output_embeddings(head)
    tokens = torch.arange(3, device=device)[None]
    given: dict[str, Any] = {"input_ids": tokens, "position_ids": tokens, "use_cache": False}
    with torch.inference_mode():
        with running(_plain):
            hidden = model.base_model(**given).last_hidden_state
            logits = model(**given).logits
        with running(lambda query, *_: torch.zeros_like(query).transpose(1, 2)):
            among, alone = (model.base_model(**{**given, "input_ids": places, "position_ids": places}).last_hidden_state[0, -1]
                            for places in (tokens, tokens[:, 2:]))
    # Rounding in 16 bits is a hundredth; what another token adds is most of it.
    if (among - alone).norm() > 0.1 * alone.norm():
        raise ModelError(f"layers of {type(model).__name__} keep other states than keys and values, which the fallback to "
                         "transformers does not do: it needs a family file (CONTRIBUTING.md)")
    expected = head(hidden).float()
    if spec.softcap:
        expected = spec.softcap * torch.tanh(expected / spec.softcap)
    if not torch.allclose(logits.float(), expected, rtol=1e-2, atol=1e-2):
        raise ModelError(f"{type(model).__name__} changes its logits behind the head, which the fallback to transformers does "
                         "not do: it needs a family file (CONTRIBUTING.md)")
