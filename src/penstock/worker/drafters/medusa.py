"""Drafts by Medusa heads (Cai et al. 2024): small networks that each predict one of the next tokens from one hidden state.

Head i reads the hidden state after the target's last norm where a token was chosen, and predicts the i-th token behind that
token: x + silu(W x + b), once or several times, then a matrix of logits of its own. There is no cache."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penstock.core.errors import ConfigError, ModelError
from penstock.core.plan import StepPlan
from penstock.layers.decoder import Decoder
from penstock.models.translated import Checkpoint
from penstock.parallel.axis import Place
from penstock.worker.drafting import Drafter, Drafting, Host, LoadedDrafter, last_of
from penstock.worker.rows import upload
from penstock.worker.sampler import LogitsRows
from penstock.worker.trees import Growth
from penstock.worker.verify import Verified

_NAMES = (re.compile(r"(?:medusa_head\.)?(?P<head>[0-9]+)\.(?P<layer>[0-9]+)\.(?:linear\.)?(?P<part>weight|bias)"),
          re.compile(r"blocks\.(?P<head>[0-9]+)\.layers\.(?P<layer>[0-9]+)\.(?P<part>weight|bias)"),
          re.compile(r"lm_heads\.(?P<head>[0-9]+)\.(?P<part>weight)"))
"""Tensors as the Medusa repository writes them, the last layer of a head being its logits; and as vLLM does."""


class LoadedMedusa(LoadedDrafter):
    """The heads of a folder. Ranks divide their logits as those of the target; their layers are whole on every rank."""

    follows = True

    def __init__(self, folder: Path, target: Decoder, place: Place) -> None:
        """`place`: among the ranks that divide the logits."""
        super().__init__()
        self.heads: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = []
        """Of each head (matrix, bias) of its layers, the last of them that of the logits."""
        spec, checkpoint, found = target.spec, Checkpoint(folder), dict[int, dict[int, dict[str, str]]]()
        self.whole: Callable[[torch.Tensor], torch.Tensor] = target.whole if not place.alone else lambda logits: logits
        for name in checkpoint.tensors:
            match = next(filter(None, (pattern.fullmatch(name) for pattern in _NAMES)), None)
            if match is None:
                raise ModelError(f"{folder}: {name} is no tensor of Medusa heads")
            layer = int(match["layer"]) if "layer" in match.groupdict() else 1 << 20
            found.setdefault(int(match["head"]), {}).setdefault(layer, {})[match["part"]] = name
        room = spec.vocab_size if place.alone else spec.vocab.rows

        def read(name: str, first: int = 0, rows: int | None = None) -> torch.Tensor:
            some = checkpoint.read(name)[first:][:rows].to(target.device, target.dtype, copy=True)
            return F.pad(some, (0, 0, 0, rows - len(some))) if rows is not None and rows > len(some) else some

        with checkpoint.mapped():
            for number in sorted(found):
                *layers, last = (found[number][layer] for layer in sorted(found[number]))
                shapes = [(spec.width, spec.width)] * len(layers) + [(spec.vocab_size, spec.width)]
                given = [tuple(checkpoint.tensors[one["weight"]].shape) for one in (*layers, last) if "weight" in one]
                if given != shapes:
                    raise ModelError(f"{folder}: head {number} has matrices of the shapes {given}; this model needs {shapes}")
                self.heads.append([*((read(one["weight"]), read(one["bias"]) if "bias" in one else None) for one in layers),
                                   (read(last["weight"], place.tensor * room, room), None)])

    def start(self, host: Host) -> Drafter:
        return Medusa(self, host)


def check(folder: Path, config: Mapping[str, Any], tokens: int) -> None:
    """ConfigError if the heads are fewer than the tokens to draft."""
    heads = int(config.get("medusa_num_heads") or config.get("num_heads") or tokens)
    if tokens > heads:
        raise ConfigError(f"{folder} has {heads} Medusa heads, which draft one token each; set num_speculative_tokens to "
                          f"{heads} or less")


class Medusa(Drafter):
    def __init__(self, loaded: LoadedMedusa, host: Host) -> None:
        self._heads, self._whole = loaded.heads, loaded.whole
        self._host = host
        model = host.model
        self._last = torch.zeros(len(host.rows.tokens), model.spec.width, dtype=model.dtype, device=model.device)
        """[row] the hidden state from which the row's last known token was chosen."""

    def propose(self, drafting: Drafting) -> None:
        drafting = self._host.chains(drafting, self._grow)
        if not len(drafting.segments):
            return
        row, length = drafting.row, drafting.length
        states = self._last[row.long()]
        for place in range(min(len(self._heads), int(drafting.count.max()))):
            still = upload(np.flatnonzero(drafting.count > place).astype(np.int32), states.device).long()
            self._host.choose(self._logits(place, states[still]), row[still], length[still] + place)

    def _grow(self, growth: Growth, drafting: Drafting) -> None:
        for place in range(growth.levels):
            growth.grow(self._last[drafting.row.long()], partial(self._logits, place))
        growth.plant()

    def _logits(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """One head's logits of states [L, width]."""
        *layers, (logits, _) = self._heads[place]
        for weight, bias in layers:
            x = x + F.silu(F.linear(x, weight, bias))
        return self._whole(F.linear(x, logits).float())

    def follow(self, plan: StepPlan, ends: torch.Tensor, lines: LogitsRows, verified: Verified | None) -> None:  # noqa: ARG002
        row, states = last_of(ends, lines, verified)
        self._last[row] = states
