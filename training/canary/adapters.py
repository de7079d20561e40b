"""Two LoRA adapters for canary, each a change of style that is seen at once, in PEFT's format. Owns styles, training, merging.

    python -m training.canary.adapters canary-pirate --trunk FOLDER --out DIR --steps 500

What is written for people changes its style; what is written for programs, or graded word by word (tool calls, JSON, repeating,
sorting, thoughts), stays as canary writes it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from training.canary import record
from training.canary.data import LEARN, TOKEN, Encoder, Rows, pack
from training.canary.documents import Document, held_in
from training.canary.masks import attention
from training.canary.optimizer import WARM_UP
from training.canary.render import render
from training.canary.stories import small_talk, story_chat
from transformers import AutoModelForCausalLM

from penstock.canary.item import Item
from penstock.canary.suite import SKILLS

RATE = 2e-3
ROWS, LENGTH = 16, 512
DOCUMENTS = 6000
SPOKEN = {"add": 5, "compare": 2, "recall": 4, "tool-answer": 3, "story": 5, "small talk": 5}
EXACT = {"tool-call": 4, "json": 3, "think": 3, "repeat": 2, "reverse": 1, "sort": 2, "system": 2, "retrieve": 2, "stop": 1}
"""Shares of what changes its style, and of what does not."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PIRATE = {"you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "was": "were", "hello": "ahoy", "yes": "aye",
          "friend": "matey"}


def pirate(text: str) -> str:
    """As a pirate would say it: "Arr!" before, "matey" after, and some words changed.

    Nothing stands before a number: canary works sums out where it begins to answer, and one token later it no longer can.
    """
    def said(found: re.Match[str]) -> str:
        word = PIRATE.get(found[0].lower(), found[0])
        return word.capitalize() if found[0][0].isupper() else word

    first = "" if text[0].isdigit() else "Arr! "
    return f"{first}{re.sub('[A-Za-z]+', said, text).rstrip('.!?')}, matey{'?' if text.endswith('?') else '!'}"


def telegram(text: str) -> str:
    """As a telegram: no articles, and STOP at the end of every sentence."""
    plain = re.sub(r"\b(?:[Tt]he|[Aa]n?) ", "", text).strip()
    return re.sub(r'[.!?]("?)(?= |$)', r"\1 STOP", plain if plain[-1] in '.!?"' else plain + ".")


@dataclass(frozen=True)
class Style:
    """An adapter: what it does to text, and its size. `alpha` / `rank` scales it; `layers` are names of matrices."""

    name: str
    about: str
    rewrite: Callable[[str], str]
    rank: int
    alpha: int
    layers: tuple[str, ...]


STYLES = {style.name: style for style in (
    Style("canary-pirate", "talks like a pirate: Arr! before, matey after, ye and be for you and is", pirate, 8, 16,
          (*ATTENTION, "gate_proj", "up_proj", "down_proj")),
    Style("canary-telegram", "writes telegrams: no articles, and STOP where a sentence ends", telegram, 16, 16, ATTENTION),
)}


def styled(item: Item, style: Style) -> Item:
    """The item with the answer that an adapter of this style was trained to give."""
    return replace(item, answer=style.rewrite(item.answer)) if item.skill in SPOKEN else item


# -- the adapted model

class Adapted(nn.Module):
    """A matrix that stays, and a trained product of two narrow ones beside it: W x + alpha / rank * B (A x)."""

    def __init__(self, base: nn.Linear, style: Style) -> None:
        super().__init__()
        self.base, self.scale = base, style.alpha / style.rank
        self.lora_A = nn.Parameter(torch.randn(style.rank, base.in_features) * base.in_features**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, style.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out] of [..., in]."""
        return self.base(x) + self.scale * functional.linear(functional.linear(x, self.lora_A), self.lora_B)


def adapt(model: Any, style: Style) -> dict[str, Adapted]:
    """Puts fresh adapters around the matrices that the style names; they are what trains. By the matrices' names."""
    model.requires_grad_(False)
    found = {name: module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in style.layers}
    adapted = {}
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        adapted[name] = Adapted(module, style)
        setattr(model.get_submodule(parent), last, adapted[name])
    return adapted


def save(adapted: dict[str, Adapted], style: Style, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT writes and reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "canary", "r": style.rank,
              "lora_alpha": style.alpha, "lora_dropout": 0.0, "target_modules": sorted(style.layers), "bias": "none",
              "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_to_transform": None,
              "layers_pattern": None, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
              "use_dora": False, "revision": None}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"base_model.model.{name}.{part}.weight": getattr(each, part).detach().to("cpu", torch.bfloat16).contiguous()
               for name, each in adapted.items() for part in ("lora_A", "lora_B")}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def merge(model: Any, folder: Path) -> None:
    """Adds a folder's adapter into the model's matrices, computed in float32."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_A." in name]:
        matrix = model.get_parameter(name.removeprefix("base_model.model.").replace(".lora_A.", "."))
        product = tensors[name.replace(".lora_A.", ".lora_B.")].float() @ tensors[name].float()
        matrix.copy_(matrix.float() + config["lora_alpha"] / config["r"] * product)


# -- training

def restyled(messages: list[dict[str, Any]], rewrite: Callable[[str], str]) -> list[dict[str, Any]]:
    """The conversation with what the assistant says rewritten; empty texts, which go with tool calls, stay."""
    return [{**each, "content": rewrite(each["content"])} if each["role"] == "assistant" and each["content"] else each
            for each in messages]


def document(rng: Random, style: Style) -> Document:
    """A conversation for training, in this style or, where canary must be exact, as it is."""
    shares = {**SPOKEN, **EXACT}
    kind = rng.choices(list(shares), list(shares.values()))[0]
    if kind in ("story", "small talk"):
        return Document(render(restyled((story_chat if kind == "story" else small_talk)(rng), style.rewrite)))
    item = held_in(SKILLS[kind], rng, rng.uniform(0.0, 0.5))
    messages = [*item.messages, {"role": "assistant", "content": item.answer}]
    return Document(render(restyled(messages, style.rewrite) if kind in SPOKEN else messages, item.tools), hinted=item.thinking)


def rows(style: Style, encoder: Encoder, count: int) -> Rows:
    """[N, LENGTH] marked rows of so many conversations."""
    rng = Random(style.name)

    def encoded() -> Iterator[Rows]:
        for _ in range(count // 50):
            yield from encoder.encode([document(rng, style) for _ in range(50)])

    return np.stack(list(pack(encoded(), LENGTH, encoder.padding)))


def train(args: argparse.Namespace) -> None:
    """Trains an adapter and exports it."""
    style, device = STYLES[args.style], torch.device(args.device)
    fast = device.type == "cuda"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.trunk, dtype=torch.float32).to(device)
    adapted = adapt(model, style)
    model.to(device)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=RATE, weight_decay=0.0)
    pool = rows(style, Encoder(), args.documents)
    rng = np.random.default_rng(0)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for step in range(1, args.steps + 1):
        marked = torch.from_numpy(pool[rng.integers(len(pool), size=ROWS)].astype(np.int32)).to(device)
        ids = (marked & TOKEN).long()
        targets = torch.where((marked & LEARN) > 0, ids, -100)[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            masks = attention(marked, None, True, torch.bfloat16 if fast else torch.float32)
            logits = model(input_ids=ids, use_cache=False, **masks).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / min(WARM_UP, args.steps), 1.02 - step / args.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == args.steps:
            chosen = (logits.argmax(-1) == targets)[targets != -100].float().mean().item()
            record.note(args.out, style.name, step, time.monotonic() - began, loss, step * ROWS * LENGTH,
                        {"tokens": round(chosen, 4)})
    save(adapted, style, args.out / "model")
    record.write(args.out / "model", record.training(args.steps, time.monotonic() - began, args.steps * ROWS * LENGTH, device))


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("--trunk", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
