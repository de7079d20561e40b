"""How much working memory the largest step takes, and how much a device has left. Counted on a CPU, measured on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from penstock.core.layout import lay_out
from penstock.core.plan import Enter, StepPlan, Want
from penstock.core.sampling import SamplingParams
from penstock.layers.decoder import Decoder
from penstock.layers.spec import ModelSpec
from penstock.platform.facts import available_memory
from penstock.worker.worker import Worker


def step_bytes(model: Decoder, tokens: int, rows: int, max_model_len: int, page: int, device: torch.device) -> int:
    """Bytes that a step of `tokens` tokens and `rows` sampled rows allocates at most, beyond weights and cache."""
    if device.type == "cuda":
        # Few long segments and many short ones: attention and the sampler have their peaks at opposite ends.
        few, many = min(rows, -(-tokens // (max_model_len - 1))), min(rows, tokens)
        return max(_measured(model, tokens, rows, segments, max_model_len, page, device) for segments in (few, many))
    return counted(model.spec, model.dtype, tokens, rows)


def counted(spec: ModelSpec, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Upper estimate: the widest live set of a layer (residual, normed input, merged projections, their result), and the
    sampler's copies of the logits, all of which are as wide as the vocabulary and float32."""
    widest = max(parameter.shape[0] for parameter in spec.parameters() if parameter.name.startswith("blocks."))
    layer = tokens * (4 * spec.width + 2 * widest) * dtype.itemsize
    return layer + rows * spec.vocab_size * 4 * 6


def _measured(model: Decoder, tokens: int, rows: int, segments: int, max_model_len: int, page: int,
              device: torch.device) -> int:
    """Runs a step of `segments` equal segments on a small cache and reads the allocator's peak."""
    count = min(tokens // segments, max_model_len - 1)
    small = lay_out(model.states, page, 0)
    layout = lay_out(model.states, page, small.slab_bytes * small.slabs_for(count, count) * segments)
    worker = Worker(model, layout, rows, max_model_len, device)
    plan = probe(worker, segments, count)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    worker.run(plan)
    return torch.cuda.max_memory_allocated(device) - before


def probe(worker: Worker, segments: int, count: int) -> StepPlan:
    """An ordinary plan: `segments` rows of `count` tokens each, all sampled at random with everything reported."""
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)
    enter = [Enter(row, [0] * count, count, params, row, []) for row in range(segments)]
    pages = -(-count // worker.layout.page)
    row, index = np.divmod(np.arange(segments * pages), pages)
    edits = []
    for group in worker.layout.groups:
        # Segments of a window's group may share pages: what is written does not matter, where it is does.
        page = np.arange(segments * pages) % (worker.layout.slabs * group.per_slab)
        edits.append(np.stack((row, index, page), 1).astype(np.int32))
    rows = np.arange(segments, dtype=np.int32)
    return StepPlan(-1, enter, [], edits, [], rows, np.zeros(segments, np.int32), np.full(segments, count, np.int32),
                    np.full(segments, int(Want.SAMPLE), np.int32))


def free_bytes(device: torch.device, utilization: float) -> int:
    """Bytes that may still be taken on `device`; on a GPU, up to `utilization` of its memory for everything on it."""
    if device.type == "cpu":
        return available_memory()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(total * (1 - utilization)))
