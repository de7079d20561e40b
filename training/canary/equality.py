"""Whether Penstock's greedy answers are transformers' own: canary in float32, token by token.

    python -m training.canary.equality --prompts 500

Penstock answers graded prompts, up to 32 at once; transformers reads each prompt with its answer, and every token must be the
likeliest there by its reading. Writes what was found to `equality.json`; exits with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import transformers
from training.canary.documents import CONTEXT
from training.canary.evaluate import Reference

from penstock import LLM, SamplingParams, canary
from penstock.canary.suite import SKILLS, prompts
from penstock.cli.eval import room


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500, help="in all, the skills in turn")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "equality.json")
    args = parser.parse_args()
    reference = Reference(canary.model_folder())
    share, more = divmod(args.prompts, len(SKILLS))
    # A few in reserve for prompts that do not fit the context.
    groups = [[item for item in prompts(skill, share + 10) if len(reference.encode(item)) + room(item) <= CONTEXT]
              for skill in SKILLS]
    items = [item for number, group in enumerate(groups) for item in group[: share + (number < more)]]
    asked = [reference.encode(item) for item in items]
    began = time.monotonic()
    with LLM(dtype="float32", device="cpu", kv_cache_memory_bytes=512 << 20, max_num_seqs=32) as llm:
        outputs = llm.generate(asked, [SamplingParams(temperature=0, max_tokens=room(item)) for item in items], use_tqdm=False)
    tokens, differing = 0, []
    for item, ids, output in zip(items, asked, outputs, strict=True):
        said = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            hidden = reference.model.model(torch.tensor([[*ids, *said]])).last_hidden_state[0, len(ids) - 1 : -1]
            chosen = reference.model.lm_head(hidden).argmax(-1).tolist()
        tokens += len(said)
        if chosen != said:
            differing.append(item.key)
    found = {"prompts": len(items), "tokens": tokens, "differing": len(differing), "dtype": "float32", "device": "cpu",
             "seconds": round(time.monotonic() - began, 1), "torch": torch.__version__,
             "transformers": transformers.__version__}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(found, *differing[:5], sep="\n")  # noqa: T201
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
