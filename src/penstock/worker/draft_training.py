"""Trains an EAGLE-3 head for a model, from the model's own hidden states and logits on a text.

Training-time test (Li et al. 2025): each draft of several tokens is unrolled at every place, on the head's own states, so that
the head learns from what it will meet. The loss is the cross entropy of the target's distribution over the draft vocabulary."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.layers.spec import ModelSpec
from penstock.models.draft_heads import usual_taps
from penstock.models.eagle_module import Eagle
from penstock.worker.windows import Windows

_FADING = 0.8
"""Weight of each further token of a draft in the loss, in proportion to the one before."""
_WARM_UP = 0.05
"""Share of the steps in which the learning rate rises."""
_COUNTED = 200_000
"""Tokens of the text that the draft vocabulary is counted on."""

Progress = Callable[[int, float, list[float]], None]
"""Called with (step, loss, for each token of a draft the share that is the target's choice)."""


@dataclass(frozen=True)
class Recipe:
    steps: int
    batch: int
    """Windows of a step."""
    drafts: int
    """Tokens of an unrolled draft."""
    vocabulary: int
    """The most tokens that the head can draft."""
    rate: float | None = None
    """The highest learning rate of AdamW; None: by the model's width."""


class DraftTraining:
    """One head beside one target. `head` is trained by `train`."""

    def __init__(self, folder: Path, config: dict[str, Any], dtype: str, device: str, windows: Sequence[Sequence[int]],
                 said: Sequence[Sequence[bool]] | None, recipe: Recipe) -> None:
        """`windows`: token ids, all of one length. `said`: which of them are the target's own; the head learns from these, or
        from all if there are none. ConfigError for a target that EAGLE-3 heads cannot serve."""
        layers = _layers(config)
        self._windows = torch.tensor(windows, dtype=torch.int32)
        self._said = torch.ones_like(self._windows, dtype=torch.bool) if said is None else torch.tensor(said)
        self._recipe = recipe
        self._reader = reader = Windows(folder, config, dtype, device, len(windows[0]))
        model = reader.model
        if not model.states or model.logits is None or model.embedding is None or not model.spec.ends:
            raise ConfigError("an EAGLE-3 head drafts for models that generate text")
        taps = usual_taps(layers)
        model.tap(taps, len(windows[0]))
        self._logits, self._embed = model.logits, model.embedding
        tokens = self._spoken()
        rows = self._logits.weight.ops.gather(tokens.to(reader.device), self._logits.weight).float()
        torch.manual_seed(0)
        self.head = Eagle.fresh(_geometry(config, model.spec), list(taps), tokens.cpu(), rows.cpu()).to(reader.device)

    def _spoken(self) -> torch.Tensor:
        """The tokens that the target chooses most often on the text, [draft vocabulary]; all, if the head may draft all."""
        size, most = self._reader.model.spec.vocab_size, self._recipe.vocabulary
        if most >= size:
            return torch.arange(size)
        counts = torch.zeros(size, dtype=torch.int64)
        for window in self._windows[:max(1, _COUNTED // self._windows.shape[1])]:
            counts += torch.bincount(self._target(window)[2].argmax(-1).cpu(), minlength=size)[:size]
        return counts.argsort(descending=True, stable=True)[:most]

    @torch.no_grad()
    def _target(self, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(embeddings [T, width], what the head reads [T, taps x width], logits [T, vocabulary]) of a window, float32."""
        step, hidden = self._reader.read(window)
        model = self._reader.model
        # The next window overwrites the memory of the taps.
        taps = model.tapped[:len(window)].to(torch.float32, copy=True)
        return self._embed(step).float(), taps, model.head(hidden)[:, :model.spec.vocab_size]

    def losses(self, picked: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(loss, for each token of a draft whether it is the target's choice, at the places that count) of windows [B]."""
        windows = self._windows[picked]
        head, columns = self.head, self.head.targets()
        embeds, taps, wanted = (torch.stack(parts) for parts in zip(*map(self._target, windows), strict=True))
        places = torch.arange(windows.shape[1] - 2, device=embeds.device)
        seen = (places[:, None] >= places)[None].expand(len(windows), -1, -1)
        positions = places[None].expand(len(windows), -1)
        # At place t the head predicts the target's choice behind the token at t + 1.
        teacher = wanted[:, 1:-1]
        counted = head.t2d[teacher.argmax(-1)] & self._said[picked][:, 2:].to(teacher.device)
        theirs = teacher[..., columns][counted]
        share, best = theirs.softmax(-1), theirs.argmax(-1)
        loss, agreed = torch.zeros((), device=embeds.device), []
        for place, logits in enumerate(head(embeds[:, 1:-1], taps[:, :-2], positions, seen, self._recipe.drafts)):
            mine = logits[counted].float()
            loss = loss - _FADING**place * (share * mine.log_softmax(-1)).sum(-1).mean()
            agreed.append(mine.detach().argmax(-1) == best)
        return loss, agreed

    def train(self, progress: Progress) -> None:
        recipe, head = self._recipe, self.head
        highest = recipe.rate or 5e-4 * math.sqrt(1024 / self._reader.model.spec.width)
        optimizer = torch.optim.AdamW(head.parameters(), lr=highest, betas=(0.9, 0.95), weight_decay=0.01)
        draw, order = torch.Generator().manual_seed(0), torch.zeros(0, dtype=torch.int64)
        for step in range(recipe.steps):
            if len(order) < recipe.batch:
                order = torch.cat((order, torch.randperm(len(self._windows), generator=draw)))
            picked, order = order[:recipe.batch], order[recipe.batch:]
            share = step / recipe.steps
            rate = share / _WARM_UP if share < _WARM_UP else 0.55 + 0.45 * math.cos(math.pi * share)
            for group in optimizer.param_groups:
                group["lr"] = highest * max(rate, 0.02)
            loss, agreed = self.losses(picked)
            if not len(agreed[0]):
                continue
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            progress(step + 1, loss.item(), [one.float().mean().item() for one in agreed])


def _layers(config: Mapping[str, Any]) -> int:
    """The target's number of layers. ConfigError if no head can be made for it."""
    layers = int(config.get("num_hidden_layers") or 0)
    missing = [name for name in ("num_attention_heads", "intermediate_size") if not config.get(name)]
    if layers < 6 or missing:
        raise ConfigError("an EAGLE-3 head is made for models of at least 6 layers whose config has num_attention_heads and "
                          f"intermediate_size; this one has {layers} layers" + (f" and no {missing[0]}" if missing else ""))
    return layers


def _geometry(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The head's config: the target's, with the values that it leaves to its architecture's defaults."""
    heads = int(config["num_attention_heads"])
    given = {name: value for name, value in config.items() if value is not None}
    rope = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 1e4
    return {"num_key_value_heads": heads, "head_dim": spec.width // heads, "rms_norm_eps": 1e-6,
            "max_position_embeddings": spec.max_positions, **given, "vocab_size": spec.vocab_size, "rope_theta": rope}
