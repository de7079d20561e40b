"""Drafts by the model's own first layers, its last norm and its head (LayerSkip, Elhoushi et al. 2024).

The first layers' cache entries are the same whether they draft or verify, so drafts need no own entries: they go to the
target's pages, where verification writes them again. It pays for models trained to say something after their first layers."""

from copy import copy
from dataclasses import replace

import numpy as np

from penstock.core.errors import ConfigError
from penstock.layers.decoder import Decoder
from penstock.layers.spec import ModelSpec
from penstock.worker.drafters.model import DraftModel, lag
from penstock.worker.drafting import Drafting


def check(target: ModelSpec, layers: int) -> int:
    """The number of layers that draft, if `layers` are asked for. ConfigError if the model cannot draft so."""
    count = len(target.blocks)
    if not 0 <= layers < count:
        raise ConfigError(f"draft_layers is {layers}, but the model has {count} layers; possible are 1 to {count - 1}")
    if count < 2 or not lag(target.states("float32")):
        raise ConfigError("speculate layer_skip needs a model of several layers with full attention or sliding windows; its "
                          "states must be able to go back by a few tokens. Use ngram or suffix")
    return layers or max(1, count // 4)


def first(model: Decoder, layers: int) -> Decoder:
    """A model of another's first layers, which shares everything with it."""
    found = copy(model)
    found.blocks = model.blocks[:layers]
    found.spec = replace(model.spec, blocks=model.spec.blocks[:layers])
    found.states = found.spec.states(str(model.dtype).removeprefix("torch."))
    return found


class Layers(DraftModel):
    """The first layers on the rows of one worker. They are never behind, as the target computes them in every step."""

    def propose(self, drafting: Drafting) -> None:
        if len(drafting.segments):
            self._first(drafting, np.zeros(len(drafting.segments), np.int32))
