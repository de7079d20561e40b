"""Trains a head on a finished member, which stays as it is: canary-eagle on canary, the multi-token prediction layer on
canary-mla.

    python -m training.canary.frozen canary-eagle --trunk FOLDER --data DIR --out DIR --minutes 5

Where the assistant speaks, the head learns the trunk's own distribution over the next token. Owns the loop and the loss; what a
head computes is `heads`'. Writes OUT/log.jsonl and OUT/model.
"""

from __future__ import annotations

import argparse
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn
from training.canary import cards, record
from training.canary.data import BATCH, LEARN, TOKEN, Reader, Rows
from training.canary.documents import BUCKETS, LONG, Bucket
from training.canary.heads import DRAFTED, Eagle, NextToken, beside, features
from training.canary.masks import attention, documents_of, seen_within
from training.canary.members import every_expert
from training.canary.optimizer import Optimizer, rate
from transformers import AutoModelForCausalLM

DEPTH = 4
"""Tokens of a draft in training canary-eagle."""
FADING = 0.8
"""Each step of a draft counts so much of the one before."""
SHARE = 0.5
"""Of the rows of a batch, how many a head trains on: it goes over each several times."""


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", choices=HEADS)
    parser.add_argument("--trunk", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between measurements")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=float, default=SHARE, help="share of a batch's rows to use")
    return parser.parse_args()


class Training(ABC):
    """One head beside its trunk."""

    head: nn.Module

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.fast = self.device.type == "cuda"
        self.kind = torch.bfloat16 if self.fast else torch.float32
        torch.manual_seed(0)
        if self.fast:
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.set_float32_matmul_precision("high")
        self.trunk = AutoModelForCausalLM.from_pretrained(args.trunk, dtype=self.kind).to(self.device).eval()
        self.trunk.requires_grad_(False)
        every_expert(self.trunk)
        self.rng = Random(0)
        self.readers = {bucket.name: Reader(args.data, bucket) for bucket in BUCKETS}
        self.step, self.tokens = 0, 0

    # -- what the heads differ in

    @abstractmethod
    def losses(self, marked: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(loss, for each step of a draft whether the trunk's choice was drafted, at the places that count) of rows [B, L]."""

    @abstractmethod
    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes the folder."""

    # -- what they share

    def rows(self, bucket: Bucket) -> torch.Tensor:
        """The next marked rows."""
        count = max(1, int(BATCH // bucket.length * self.args.rows / (2 if bucket is LONG else 1)))  # memory
        rows: Rows = self.readers[bucket.name].next()[:count]
        self.tokens += rows.size
        return torch.from_numpy(rows.astype(np.int32)).to(self.device)

    def matched(self, logits: torch.Tensor, wanted: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean cross entropy [], whether the likeliest are the same [N]) at the N places that count.

        logits [B, L, V] are a head's at t, wanted [B, L, V] the trunk's at t + 1.
        """
        mine, theirs = logits[counted].float(), wanted[counted].float()
        loss = -(theirs.softmax(-1) * mine.log_softmax(-1)).sum(-1).mean()
        return loss, mine.detach().argmax(-1) == theirs.argmax(-1)

    def train(self) -> None:
        """Trains until the time or the steps are used up, then exports."""
        self.head.to(self.device)
        optimizer = Optimizer(self.head)
        self.args.out.mkdir(parents=True, exist_ok=True)
        began = last = time.monotonic()
        share = 0.0
        while share < 1:
            bucket = self.rng.choices(BUCKETS, [each.share for each in BUCKETS])[0]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.fast):
                loss, agreed = self.losses(self.rows(bucket))
            loss.backward()
            optimizer.step(rate(self.step, share))
            self.step += 1
            if self.step % 20 == 0 and self.fast:
                torch.cuda.synchronize()
            now = time.monotonic()
            share = max((now - began) / (self.args.minutes * 60), self.step / self.args.steps)
            if now - last > self.args.every or share >= 1:
                self._note(now - began, loss, agreed)
                last = now
        self.export(self.args.out / "model", record.training(self.step, time.monotonic() - began, self.tokens, self.device))

    def _note(self, seconds: float, loss: torch.Tensor, agreed: list[torch.Tensor]) -> None:
        scores = {f"drafted {step + 1}": round(each.float().mean().item(), 4) for step, each in enumerate(agreed)}
        record.note(self.args.out, self.args.head, self.step, seconds, loss, self.tokens, scores)


class EagleTraining(Training):
    """canary-eagle: a draft of several tokens is unrolled at every place, on the head's own states (EAGLE-3's training-time
    test).
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.head = beside(self.trunk, self._said())

    def _said(self) -> torch.Tensor:
        """The tokens that the assistant says most often in one shard of each bucket."""
        counts = np.zeros(self.trunk.config.vocab_size, dtype=np.int64)
        for bucket in BUCKETS:
            for _ in range(8):
                rows = self.readers[bucket.name].next()
                counts += np.bincount(rows[(rows & LEARN) > 0] & TOKEN, minlength=len(counts))
        # Of equally frequent ones the first: canary's tokenizer numbers them by frequency.
        return torch.from_numpy(np.argsort(-counts, kind="stable")[:DRAFTED].copy())

    def losses(self, marked: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `Training.losses`."""
        ids = (marked & TOKEN).long()
        document, positions = documents_of(marked)
        with torch.no_grad():
            states, last = features(self.trunk, ids, attention(marked, None, True, self.kind))
            wanted = self.trunk.lm_head(last[:, 1:-1])
            embeds = self.trunk.model.embed_tokens(ids)
        head: Eagle = self.head  # type: ignore[assignment]
        targets = head.targets()
        here = slice(0, -2)  # places with a token two further on
        draftable = head.t2d[wanted.argmax(-1)] & ((marked[:, 2:] & LEARN) > 0)
        logits = head(embeds[:, 1:-1], states[:, here], positions[:, here], seen_within(document[:, here]), DEPTH)
        loss, agreed = torch.zeros((), device=self.device), []
        for step, each in enumerate(logits):
            begun = shifted_documents(document[:, here], step) == document[:, 2:]
            part, same = self.matched(each, wanted[..., targets], draftable & begun)
            loss = loss + FADING**step * part
            agreed.append(same)
        return loss, agreed

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes the head."""
        self.head.save(folder)  # type: ignore[operator]
        record.write(folder, facts)
        cards.write(self.args.head, folder)


def shifted_documents(document: torch.Tensor, places: int) -> torch.Tensor:
    """[B, L] moved towards the end by so many places, with 0, which is no document, before."""
    return nn.functional.pad(document, (places, 0))[:, : document.shape[1]]


class NextTokenTraining(Training):
    """canary-mla's next layer: one token ahead of the trunk."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.head = NextToken.beside(self.trunk)

    def losses(self, marked: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `Training.losses`."""
        ids = (marked & TOKEN).long()
        document, positions = documents_of(marked)
        masks = attention(marked, None, True, self.kind)
        with torch.no_grad():
            last = self.trunk.model(input_ids=ids, use_cache=False, **masks).last_hidden_state
            wanted = self.trunk.lm_head(last[:, 1:-1])
            embeds = self.trunk.model.embed_tokens(ids)
        here = slice(0, -2)
        own = {"position_ids": positions[:, here]}
        if masks:
            own["attention_mask"] = masks["attention_mask"][:, :, here, here]
        states = self.head(embeds[:, 1:-1], last[:, here], own)
        counted = ((marked[:, 2:] & LEARN) > 0) & (document[:, here] == document[:, 2:])
        loss, same = self.matched(self.trunk.lm_head(states), wanted, counted)
        return loss, [same]

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """The trunk's folder with the layer; the facts beside the trunk's own."""
        self.head.save(self.args.trunk, folder)  # type: ignore[operator]
        record.add(folder, {"next": facts, "acceptance": None})  # an earlier layer's, if the trunk had one
        cards.write(self.args.head, folder)


HEADS: dict[str, type[Training]] = {"canary-eagle": EagleTraining, "canary-mla": NextTokenTraining}


if __name__ == "__main__":
    arguments_ = arguments()
    HEADS[arguments_.head](arguments_).train()
