"""Trains one member of the family on the shards that `data` writes, measures it on held-out prompts, and exports it.

    python -m training.canary.train canary --data DIR --out DIR --minutes 14

Writes OUT/log.jsonl (a line per measurement), OUT/checkpoint.pt (to resume from: run the command again), and at the end, which
is the time limit, --steps, or SIGTERM, OUT/model (a Hugging Face folder in bfloat16).
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from training.canary import record
from training.canary.data import BATCH, BEGIN, LEARN, TOKEN, Encoder, Reader, Rows, pack
from training.canary.documents import LONG, Bucket, of_item
from training.canary.export import export
from training.canary.masks import attention
from training.canary.members import MEMBERS, Member
from training.canary.optimizer import Optimizer, rate
from transformers import AutoModelForCausalLM

from penstock.canary.suite import ALL, held_out


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("member", choices=MEMBERS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a model's folder to train further, instead of fresh weights")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts for each skill and measurement")
    parser.add_argument("--every", type=float, default=90.0, help="seconds between measurements")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=float, default=1.0,
                        help="share of a batch's rows to use, for trying it on a small machine")
    return parser.parse_args()


class Trainer:
    """One member, its data and its optimizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.member: Member = MEMBERS[args.member]
        self.device = torch.device(args.device)
        self.fast = self.device.type == "cuda"
        torch.manual_seed(0)
        self.rng = Random(0)
        self.encoder = Encoder()
        self.model = self.member.build({"end": self.encoder.end, "padding": self.encoder.padding}).to(self.device)
        if args.start is not None:
            earlier = AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32)
            self.model.load_state_dict(earlier.state_dict())
        self.optimizer = Optimizer(self.model)
        self.buckets = [bucket for bucket in self.member.buckets if bucket.length <= self.member.longest]
        self.readers = {bucket.name: Reader(args.data, bucket) for bucket in self.buckets}
        self.measured, self.skills = self._measured()
        self.step, self.seconds, self.tokens, self.stopped = 0, 0.0, 0, False
        self._set_up()

    def _set_up(self) -> None:
        if not self.fast:
            return
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("high")
        if self.member.compile:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    # -- one batch

    def losses(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(mean loss, logits' choice [B, L-1], targets [B, L-1] with -100 where nothing is learnt) of rows [B, L]."""
        marked = torch.from_numpy(rows.astype(np.int32)).to(self.device, non_blocking=True)
        ids = (marked & TOKEN).long()
        targets = torch.where((marked & LEARN) > 0, ids, -100)[:, 1:]
        kind = torch.bfloat16 if self.fast else torch.float32
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.fast):
            masks = attention(marked, self.member.window, self.member.packed, kind)
            hidden = self.model.model(input_ids=ids, use_cache=False, **masks).last_hidden_state[:, :-1]
            logits = self.model.lm_head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        return loss, logits.detach().argmax(-1), targets

    # -- measuring

    def _measured(self) -> tuple[list[tuple[Rows, int]], dict[bytes, str]]:
        """Held-out prompts: batches of rows with how many of a batch's rows count, and each prompt's skill by its tokens."""
        rng = Random("measured")
        batches: list[tuple[Rows, int]] = []
        skills: dict[bytes, str] = {}
        documents: dict[str, list[Rows]] = {bucket.name: [] for bucket in self.buckets}
        for name in self.member.skills:
            for number in range(self.args.prompts):
                item = held_out(ALL[name], rng, number / self.args.prompts)
                ids = next(self.encoder.encode([of_item(item)]))
                # Only the last answer is asked for; earlier ones are part of the prompt.
                starts = np.flatnonzero((ids & TOKEN) == self.encoder.start)
                ids[: starts[-1]] &= ~np.uint16(LEARN)
                fitting = next((bucket for bucket in self.buckets if len(ids) <= bucket.length), None)
                if fitting is not None:
                    documents[fitting.name].append(ids)
                    skills[(ids & TOKEN).tobytes()] = name
        for bucket in self.buckets:
            size = self._rows(bucket)
            single = bucket is LONG or not self.member.packed
            # One prompt a row where documents of a row are not kept apart.
            groups = [[ids] for ids in documents[bucket.name]] if single else [documents[bucket.name]]
            packed = [row for group in groups for row in pack(iter(group), bucket.length, self.encoder.padding)]
            for at in range(0, len(packed), size):
                real = packed[at : at + size]
                batches.append((np.stack([*real, *packed[:1] * (size - len(real))]), len(real)))
        return batches, skills

    def measure(self) -> dict[str, float]:
        """The share of held-out prompts of each skill whose whole canonical answer is the model's greedy choice, token by
        token.

        That is greedy decoding judged exactly; prompts too long for the member's rows are left out.
        """
        right: dict[str, list[bool]] = {}
        for rows, real in self.measured:
            # With gradients, although none is asked for: without, every layer would be compiled once more.
            _, chosen, targets = self.losses(rows)
            wrong = ((chosen != targets) & (targets != -100)).cpu().numpy()
            learnt = (targets != -100).cpu().numpy()
            self._judge(rows[:real], wrong[:real], learnt[:real], right)
        return {name: round(sum(values) / len(values), 4) for name, values in right.items()}

    def _judge(self, rows: Rows, wrong: Any, learnt: Any, right: dict[str, list[bool]]) -> None:
        for row, bad, asked in zip(rows, wrong, learnt, strict=True):
            begins = [*np.flatnonzero(row & BEGIN), len(row)]
            for first, last in pairwise(begins):
                if asked[max(0, first - 1) : last - 1].any():
                    name = self.skills[(row[first:last] & TOKEN).tobytes()]
                    right.setdefault(name, []).append(not bad[max(0, first - 1) : last - 1].any())

    # -- training

    def _rows(self, bucket: Bucket) -> int:
        return max(1, int(BATCH // bucket.length * self.args.rows))

    def train(self) -> None:
        """Trains until told to stop, measuring on the way; then measures and exports."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopped", True))
        self._resume()
        self.args.out.mkdir(parents=True, exist_ok=True)
        began, last = time.monotonic() - self.seconds, time.monotonic()
        while not self.stopped and (share := self.progress()) < 1:
            bucket = self.rng.choices(self.buckets, [each.share for each in self.buckets])[0]
            rows = self.readers[bucket.name].next()[: self._rows(bucket)]
            loss, _, _ = self.losses(rows)
            loss.backward()
            self.optimizer.step(rate(self.step, share))
            self.step += 1
            self.tokens += rows.size
            if self.step % 20 == 0 and self.fast:
                torch.cuda.synchronize()
            self.seconds = time.monotonic() - began
            if time.monotonic() - last > self.args.every or self.step in (20, 200):
                self.note(loss, self.measure())
                self.save()
                last = time.monotonic()
        self.finish()

    def progress(self) -> float:
        """From 0 to 1, by time or steps."""
        return max(self.seconds / (self.args.minutes * 60), self.step / self.args.steps)

    def note(self, loss: torch.Tensor, scores: dict[str, float]) -> None:
        """A line of the log."""
        record.note(self.args.out, self.member.name, self.step, self.seconds, loss, self.tokens, scores,
                    passes={name: reader.passes for name, reader in self.readers.items()})

    def finish(self) -> None:
        """Rounds to bfloat16, measures that, exports."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        scores = self.measure()
        loss, _, _ = self.losses(self.readers[self.buckets[0].name].next()[: self._rows(self.buckets[0])])
        self.note(loss, scores)
        facts = {"scores": scores, "prompts": self.args.prompts,
                 **({} if self.args.start is None else {"earlier": record.earlier(self.args.start)}),
                 **record.training(self.step, self.seconds, self.tokens, self.device)}
        export(self.model, self.member, self.args.out / "model", facts)

    def save(self) -> None:
        """The state that `_resume` needs; replaced as a whole."""
        state = {"model": self.model.state_dict(), "adam": self.optimizer.adam.state_dict(), "step": self.step,
                 "seconds": self.seconds, "tokens": self.tokens, "muon": [moment for _, moment in self.optimizer.muon.groups]}
        torch.save(state, self.args.out / "checkpoint.new")
        (self.args.out / "checkpoint.new").replace(self.args.out / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.args.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.adam.load_state_dict(state["adam"])
        for (_, moment), saved in zip(self.optimizer.muon.groups, state["muon"], strict=True):
            moment.copy_(saved)
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]


if __name__ == "__main__":
    Trainer(arguments()).train()
