"""The layout that `--layout auto` and `LLM(layout="auto")` find: looks at the GPUs and the model's files."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from penstock.checkpoint import read_config, resolve_folder
from penstock.checkpoint.tensors import find
from penstock.core.errors import ConfigError
from penstock.parallel.layout import Model, chosen

_DECIDED = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size", "nnodes")


def auto(asked: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The layout by an engine's options; a hub id is downloaded. ConfigError if one decides it, or the model is too large."""
    given = [name for name in _DECIDED if asked[name] != 1]
    if given:
        raise ConfigError(f"layout auto decides {given[0]}; leave one of them out")
    folder = resolve_folder(asked["model"], asked["revision"])
    config = read_config(folder)
    text = config.get("text_config") or config
    heads, layers, width = (text.get(name) or 0 for name in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    keys = text.get("num_key_value_heads") or heads
    # Layers that keep less than everything have caches of other sizes.
    plain = not any(text.get(name) for name in ("kv_lora_rank", "sliding_window", "layer_types", "layers_block_type"))
    entry = 4 * layers * keys * (text.get("head_dim") or width // max(1, heads)) if plain else 0
    weights = sum(path.stat().st_size for path in find(folder))
    channels, context = text.get("moe_intermediate_size") or 0, asked["max_model_len"] or 0
    model = Model(weights, heads, keys, layers, width, entry, channels, context)
    return chosen(model, [] if asked["device"] == "cpu" else _memories(), asked["gpu_memory_utilization"], _link())


def _link() -> str:
    """The slowest link between two GPUs of this machine; NVLink if NVIDIA's tool says nothing of it."""
    rows = [line.split() for line in _told("topo", "-m").splitlines() if re.match(r"GPU\d+\s", line)]
    links = {word for row in rows for word in row[1:1 + len(rows)]}
    return "the host" if links & {"SYS", "NODE"} else "PCIe" if links & {"PHB", "PXB", "PIX"} else "NVLink"


def _memories() -> list[int]:
    """Bytes of memory of each GPU that processes may use. By NVIDIA's own tool, as torch would take seconds."""
    answer = _told("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    return [int(memory) << 20 for index, uuid, memory in rows if names is None or index in names or uuid in names]


def _told(*words: str) -> str:
    tool = shutil.which("nvidia-smi")
    return "" if tool is None else str(subprocess.run([tool, *words], capture_output=True, text=True, check=False).stdout)
