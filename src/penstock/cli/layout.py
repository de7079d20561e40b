"""`--layout auto` of the commands: looks at the GPUs and the model's files, and fills in ranks, stages and replicas."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from dataclasses import replace

from penstock.checkpoint import read_config, resolve_folder
from penstock.checkpoint.tensors import find
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.parallel.layout import chosen

_DECIDED = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size", "nnodes")


def add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=("auto",), help="auto: ranks, stages and replicas by the model's size and the "
                                                            "GPUs' memory; by default those that other flags name")


def laid_out(args: argparse.Namespace, options: EngineOptions) -> tuple[EngineOptions, str]:
    """The options with the layout filled in, and why; "" if it is not asked for. A hub id is downloaded first. ConfigError if a
    flag decides already, or if the model is too large."""
    if args.layout is None:
        return options, ""
    given = [name for name in _DECIDED if getattr(options, name) != 1]
    if given:
        raise ConfigError(f"layout auto decides {given[0]}; leave one of them out")
    folder = resolve_folder(options.model, options.revision)
    config = read_config(folder)
    heads = (config.get("text_config") or config).get("num_attention_heads") or 0
    weights = sum(path.stat().st_size for path in find(folder))
    found = chosen(weights, heads, [] if options.device == "cpu" else _memories(), options.gpu_memory_utilization)
    return replace(options, tensor_parallel_size=found.tensors, pipeline_parallel_size=found.stages,
                   data_parallel_size=found.replicas), found.why


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
