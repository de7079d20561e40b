"""The layout that `--layout auto` and `LLM(layout="auto")` find: looks at the GPUs and the model's files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from penstock.checkpoint import read_config, resolve_folder
from penstock.checkpoint.tensors import find
from penstock.core.errors import ConfigError
from penstock.parallel.layout import Layout, chosen

_DECIDED = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size", "nnodes")


def auto(asked: Mapping[str, Any]) -> Layout:
    """The layout of a model, given the values of an engine's options by name; a hub id is downloaded first. ConfigError if one
    of them decides already, or if the model is too large."""
    given = [name for name in _DECIDED if asked[name] != 1]
    if given:
        raise ConfigError(f"layout auto decides {given[0]}; leave one of them out")
    folder = resolve_folder(asked["model"], asked["revision"])
    config = read_config(folder)
    heads = (config.get("text_config") or config).get("num_attention_heads") or 0
    weights = sum(path.stat().st_size for path in find(folder))
    return chosen(weights, heads, [] if asked["device"] == "cpu" else _memories(), asked["gpu_memory_utilization"])


def _memories() -> list[int]:
    """Bytes of memory of each GPU that processes may use. By NVIDIA's own tool, as torch would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run([tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"], capture_output=True,
                            text=True, check=False)
    rows = [[word.strip() for word in line.split(",")] for line in answer.stdout.splitlines() if line.count(",") == 2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    return [int(memory) << 20 for index, uuid, memory in rows if names is None or index in names or uuid in names]
