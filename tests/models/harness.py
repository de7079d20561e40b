"""Runs a Decoder with the simplest cache there is: pages of one row after another, shuffled, and steps written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from penstock.checkpoint import read_config
from penstock.core.state import Window
from penstock.layers.decoder import Decoder
from penstock.layers.step import StateView, Step
from penstock.models import load
from penstock.ops.registry import Kernels, bind
from penstock.ops.step import GroupStep
from penstock.platform.facts import detect

CPU = torch.device("cpu")
CHUNKS = (7, 1, 30, 13)
"""Sizes of a prompt's chunks; the last takes the rest."""


def reference() -> Kernels:
    """Plain PyTorch for every operation."""
    return bind(detect("cpu"), torch.float32, {"*": "reference"})


def open_model(folder: Path, *, max_model_len: int = 256, dtype: torch.dtype = torch.float32,
               kernels: Kernels | None = None) -> Decoder:
    """The model in `folder`, through the real loader."""
    return load(folder, read_config(folder), dtype=dtype, device=CPU, kernels=kernels or reference(),
                max_model_len=max_model_len)


@dataclass
class Runner:
    """A decoder with room for `rows` sequences of `length` positions. One cache group for each distinct retention.

    The cache starts full of NaN, so that reading a slot that nobody wrote shows.
    """

    decoder: Decoder
    rows: int = 2
    length: int = 256
    page: int = 8
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed = [0] * self.rows
        columns = -(-self.length // self.page)
        keeps = list(dict.fromkeys(state.keep for state in self.decoder.states))
        generator = torch.Generator().manual_seed(1)
        self.tables = [torch.randperm(self.rows * columns, generator=generator).view(self.rows, columns).int() for _ in keeps]
        views = []
        for state in self.decoder.states:
            fields = {}
            for one in state.fields:
                shape = one.shape if one.per == "page" else (*one.shape[:-1], self.page, one.shape[-1])
                kind = getattr(torch, one.dtype)
                fields[one.name] = torch.full((self.rows * columns, *shape), float("nan") if kind.is_floating_point else -99,
                                                dtype=kind)
            views.append(StateView(keeps.index(state.keep), self.page, fields))
        self.keeps = keeps
        self.decoder.attach(views)

    def step(self, segments: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Runs one step of (row, its next tokens) and returns the logits of every token, [T, vocabulary]."""
        rows = torch.tensor([row for row, _ in segments])
        counts = torch.tensor([len(tokens) for _, tokens in segments])
        positions = torch.cat([torch.arange(self.computed[row], self.computed[row] + len(tokens)) for row, tokens in segments])
        of_row = rows.repeat_interleave(counts)
        groups = []
        for keep, table in zip(self.keeps, self.tables, strict=True):
            slots = table[of_row, positions // self.page].long() * self.page + positions % self.page
            seen = table[rows].clone()
            if isinstance(keep, Window):
                for line, (row, _) in enumerate(segments):
                    # Pages wholly behind the window belong to nobody: their entries must not be read.
                    seen[line, :keep.needed(self.computed[row])[0] // self.page] = 2**31 - 1
            groups.append(GroupStep(seen, slots))
        for row, tokens in segments:
            self.computed[row] += len(tokens)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        lengths = np.array([self.computed[row] for row, _ in segments], np.int32)
        queries = counts.numpy().astype(np.int32)
        library = [work.ops.library_spans(work.geometry, queries, lengths) for work in self.decoder.works]
        step = Step(torch.tensor([t for _, tokens in segments for t in tokens]), positions.int(), starts.int(),
                    torch.from_numpy(lengths), groups, [None for _ in self.decoder.works], library)
        with torch.inference_mode():
            return self.decoder.head(self.decoder.forward(step))

    def prompt(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """The logits of every token of a prompt, computed in uneven chunks."""
        parts, at = [], 0
        for size in (*CHUNKS, len(tokens)):
            chunk = tokens[at:at + size]
            if chunk:
                parts.append(self.step([(row, chunk)]))
            at += size
        return torch.cat(parts)

    def greedy(self, prompt: Sequence[int], count: int, row: int = 0) -> tuple[torch.Tensor, list[int], list[float]]:
        """(logits of the prompt, the `count` tokens that greedily follow, their log probabilities)."""
        logits = self.prompt(row, prompt)
        last, ids, logprobs = logits[-1], [], []
        for i in range(count):
            token = int(last.argmax())
            ids.append(token)
            logprobs.append(float(last.log_softmax(-1)[token]))
            if i + 1 < count:
                last = self.step([(row, [token])])[-1]
        return logits, ids, logprobs

    def together(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[tuple[list[int], list[float]]]:
        """For each row's prompt and count, the tokens that greedily follow and their log probabilities; rows share steps."""
        last = {row: self.prompt(row, prompt)[-1] for row, (prompt, _) in enumerate(asked)}
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in asked]
        while last:
            for row, logits in last.items():
                token = int(logits.argmax())
                found[row][0].append(token)
                found[row][1].append(float(logits.log_softmax(-1)[token]))
            rows = [row for row in last if len(found[row][0]) < asked[row][1]]
            last = dict(zip(rows, self.step([(row, found[row][0][-1:]) for row in rows]), strict=True)) if rows else {}
        return found
