"""The probe is an ordinary plan that a worker can run at its largest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock import models
from penstock.core.rank import DeviceFacts
from penstock.core.state import lay_out
from penstock.ops import registry
from penstock.parallel.axis import Place
from penstock.worker.dummy import dummy_plan
from penstock.worker.memory import largest_steps, working_bytes
from penstock.worker.worker import Worker

CONFIG = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
          "max_position_embeddings": 128, "sliding_window": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu"}


@pytest.mark.parametrize("segments", [1, 5])
def test_probe_runs(segments: int) -> None:
    kernels = registry.bind(DeviceFacts("cpu", "", 0, 1), torch.float32, {"*": "reference"})
    cpu = torch.device("cpu")
    model = models.load(None, CONFIG, dtype=torch.float32, device=cpu, kernels=kernels, load_format="dummy", max_model_len=128)
    small = lay_out(model.states, 16, 0)
    layout = lay_out(model.states, 16, small.slab_bytes * small.slabs_for(60, 60) * segments)
    worker = Worker(model, layout, 5, 128, cpu)
    result = worker.run(dummy_plan(np.full(segments, 60, np.int32), layout=layout))
    assert (result.tokens >= 0).all() and len(result.tokens) == segments
    assert working_bytes(model, 512, 5, 128, 16, cpu).step > 512 * 32 * 4


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_is_probed_without_the_others(stage: int) -> None:
    """A GPU's memory is measured by a worker that passes nothing on to other stages."""
    cpu = torch.device("cpu")
    model = models.load(None, CONFIG, dtype=torch.float32, device=cpu, load_format="dummy", max_model_len=128,
                        kernels=registry.bind(DeviceFacts("cpu", "", 0, 1), torch.float32, {"*": "reference"}),
                        place=Place(stage=stage, stages=2))
    small = lay_out(model.states, 16, 0)
    layout = lay_out(model.states, 16, small.slab_bytes * small.slabs_for(60, 60))
    result = Worker(model, layout, 5, 128, cpu).run(dummy_plan(np.full(1, 60, np.int32), layout=layout))
    assert len(result.tokens) == stage


@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "longest"), [(8192, 1024, 1024), (8192, 16, 131072), (64, 4, 32), (16, 16, 2)])
def test_the_steps_that_are_measured_can_be_run(tokens: int, rows: int, longest: int, striped: bool) -> None:
    """No more tokens, rows or positions than there is room for; where ranks divide contexts, one step reads the longest."""
    contexts = [before for before in (1, 4096) if before <= longest - 1 - tokens]
    found = largest_steps(tokens, rows, longest, contexts, striped)
    for shape in found:
        assert 1 <= shape.segments <= rows and shape.count >= 1 and shape.segments * shape.count <= tokens
        assert shape.before >= 0 and shape.before + shape.count < longest
    assert not striped or any(shape.before + shape.count == longest - 1 for shape in found)
