"""Show what MODEL is, what memory would be used for, and which kernel serves which operation. Nothing is loaded.
The folder's tensors are checked against the model by name and shape. --load starts the engine and reports what it measured."""

import argparse
import json
import random
import re
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint import dtype_of, resolve_folder
from penstock.cli.api import add_layout, add_model, laid_out, model_or_canary
from penstock.cli.serve import size
from penstock.config.flags import add_flags, from_args
from penstock.config.resolve import EngineConfig, MemoryPlan, cache_asked, memory_limits, resolve
from penstock.config.schema import EngineOptions, place
from penstock.config.speculation import Speculation
from penstock.config.tiers import plan_tiers
from penstock.core.errors import ConfigError
from penstock.core.rank import DeviceFacts
from penstock.parallel.axis import places

if TYPE_CHECKING:
    from penstock.layers.attention import AttentionSpec
    from penstock.layers.spec import ModelSpec
    from penstock.ops.registry import Kernels

TEXT_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--load", action="store_true", help="start the engine, and report its own figures for memory")
    parser.add_argument("--experts", action="store_true",
                        help="run some hundred prompts, and show how often each layer's experts were picked")
    add_layout(parser)
    add_flags(parser, EngineOptions, skip=("model",))


def run(args: argparse.Namespace) -> int:
    """Raises ModelError or ConfigError if the model could not be served as asked."""
    options, why = laid_out(args, from_args(args, EngineOptions, model=model_or_canary(args)))
    found = survey(options, args.load) | ({"layout": why} if why else {})
    if args.experts:
        found["experts"] = picked_experts(options, found["model"])
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def survey(options: EngineOptions, load: bool = False) -> dict[str, Any]:
    """All that `info` says, as plain data. Bytes are bytes."""
    # Late: these bring torch, which `penstock info --help` must not.
    import torch

    from penstock import models
    from penstock.ops import registry
    from penstock.platform.facts import detect, device_name
    from penstock.worker import memory
    from penstock.worker.drafters import loading as drafters

    facts = detect(options.device)
    folder = resolve_folder(options.model, options.revision)
    checkpoint = models.configured(folder, options.quantization, options.quantization_rules, cache_asked(options))
    spec = models.describe(checkpoint)
    own_dtype = dtype_of(folder, checkpoint)
    config = resolve(options, spec.max_positions, own_dtype, facts, spec.used)
    dtype = getattr(torch, config.dtype)
    kernels = registry.bind(facts, dtype, config.kernels, batch_invariant=config.batch_invariant)
    draft = drafters.survey(config.speculation or Speculation("auto"), folder, checkpoint, spec, config.max_model_len,
                            options.load_format == "dummy")
    if load:
        figures = _loaded(options, config)
    else:
        device = torch.device(device_name(options.device, facts))
        own = max(map(spec.at, places(place(options))), key=lambda part: part.nbytes(config.dtype))
        own = replace(own, away=memory.away(options.offload_weights, own, dtype, kernels, facts,
                                            memory.free_bytes(device, options.gpu_memory_utilization)))
        specs = [own] if config.speculation is None or draft.spec is None else [own, draft.spec]
        figures = _planned(options, memory.predicted(memory_limits(options), config, specs, device, facts), config)
    return {"model": {"name": options.model, "folder": str(folder), **_describe(spec), "checkpoint_dtype": own_dtype},
            "files": _files(options, folder, checkpoint, spec), "weights": _weights(spec, config.dtype, kernels),
            "drafter": {"method": draft.asked.method, "folder": str(draft.folder) if draft.folder else None,
                        "on": config.speculation is not None},
            "dialect": _dialect(options, folder), "device": _device(facts), "memory": figures,
            "kernels": {op: {"serves": name, "refused": dict(kernels.refused.get(op, []))} for op, name in kernels.table()}}


def _describe(spec: "ModelSpec") -> dict[str, Any]:
    layers = Counter((mixer.heads, mixer.kv_heads, mixer.head_size, mixer.window, _stored(mixer)) for mixer in spec.attentions)
    return {"architecture": spec.architecture, "parameters": spec.size, "width": spec.width, "vocab_size": spec.vocab_size,
            "context": spec.max_positions, "tied_embeddings": spec.head.tied, "layers": len(spec.blocks),
            "attention": [{"layers": count, "heads": heads, "kv_heads": kv_heads, "head_size": size, "window": window or None,
                           "cache": codec} for (heads, kv_heads, size, window, codec), count in layers.items()]}


def _stored(mixer: "AttentionSpec") -> str:
    """The storage of keys and values, on the device and behind it."""
    if mixer.reads is not None:
        return f"that of layer {mixer.reads}"
    aged = "" if mixer.aged is None else ", aged behind the device"
    return (mixer.codec.name if mixer.codec is not None else "plain") + aged


def _weights(spec: "ModelSpec", dtype: str, kernels: "Kernels") -> list[dict[str, Any]]:
    """The storage of matrices, the kernels that compute with them, and which layers have them."""
    found: dict[str, dict[str, Any]] = {}
    places: dict[str, dict[str, list[int]]] = {}
    for parameter in spec.parameters():
        if parameter.scheme is not None:
            name = parameter.scheme.name
            one = found.setdefault(name, {"scheme": name, "matrices": 0, "bytes": 0, "kernels": []})
            one["matrices"] += 1
            one["bytes"] += parameter.nbytes(dtype)
            kernel = kernels.linear_name(name, *parameter.shape)
            if kernel not in one["kernels"]:
                one["kernels"].append(kernel)
            block = re.fullmatch(r"blocks\.([0-9]+)\.(.+)", parameter.stem)
            mine = places.setdefault(name, {}).setdefault(f"{block[2] if block else parameter.stem} {kernel}", [])
            mine += [int(block[1])] if block else []
    for name, one in found.items():
        one["layers"] = {matrix: _ranges(layers) for matrix, layers in places[name].items()}
    return list(found.values())


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as 0-3, 5."""
    begins = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(begins, ends, strict=True))


def _files(options: EngineOptions, folder: Path, checkpoint: dict[str, Any], spec: "ModelSpec") -> dict[str, Any]:
    """The files that would be read. Raises ModelError if tensors are missing, unused or of the wrong shape."""
    from penstock.models.registry import checkpoint_of, rules_of
    from penstock.models.weights import assign

    text = [name for name in TEXT_FILES if (folder / name).is_file()]
    if options.load_format == "dummy":
        return {"weights": [], "tensors": 0, "bytes": 0, "text": text}
    tensors = checkpoint_of(folder, checkpoint, spec, "float32").tensors
    assign(spec, rules_of(checkpoint), tensors)
    return {"weights": sorted({stored.file.name for stored in tensors.values()}), "tensors": len(tensors),
            "bytes": sum(stored.nbytes for stored in tensors.values()), "text": text}


def _dialect(options: EngineOptions, folder: Path) -> dict[str, Any]:
    """The format of the model's tool calls and reasoning, and the reason for assuming it."""
    from penstock.dialects.choice import choose
    from penstock.text import ChatTemplate

    home = resolve_folder(options.tokenizer) if options.tokenizer else folder
    template = None if options.skip_tokenizer_init else ChatTemplate.load(home, options.chat_template)
    found = choose(template.sources if template is not None else (), options.tool_call_parser, options.reasoning_parser)
    reasoning = found.dialect.reasoning
    return {"tool_calls": found.dialect.name, "why": found.why, "why_reasoning": found.why_reasoning,
            "reasoning": "channels" if found.dialect.harmony else reasoning.start[0] if reasoning else "none"}


def _device(facts: DeviceFacts) -> dict[str, Any]:
    return {"kind": facts.kind, "name": facts.name, "memory_bytes": facts.memory, "cores": facts.cores}


def _planned(options: EngineOptions, plan: MemoryPlan, config: EngineConfig) -> dict[str, Any]:
    return {"measured": False, "dtype": config.dtype, "weight_bytes": plan.weight_bytes, "step_bytes": plan.step_bytes,
            "kv_bytes": plan.layout.nbytes, "kv_tokens": plan.kv_tokens, "page_size": config.page,
            "max_model_len": plan.max_model_len, "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens, "depth": config.depth,
            "threads": config.threads, "ranks": options.ranks,
            "groups": [{"layers": len(group.layers), "page_bytes": group.page_bytes} for group in plan.layout.groups],
            "cache": _cache(options, plan)}


def _cache(options: EngineOptions, plan: MemoryPlan) -> dict[str, Any]:
    """The settings of the prefix cache and its tiers. Raises ConfigError if they cannot be honoured."""
    tiers = plan_tiers(options, plan.behind)
    return {"prefix_caching": options.enable_prefix_caching, "tenant_share": options.cache_tenant_share,
            "host_bytes": tiers.host_slabs * plan.behind.slab_bytes, "disk": tiers.disk,
            "disk_bytes": tiers.disk_bytes if tiers.disk else 0, "remote": tiers.remote,
            "kv_events": dict(options.kv_events_config) or None}


def _loaded(options: EngineOptions, config: EngineConfig) -> dict[str, Any]:
    from penstock.engine.engine import Engine

    start = time.perf_counter()
    with closing(Engine(options)) as engine:
        seconds = time.perf_counter() - start
        return {**_planned(options, engine.memory, config), "measured": True, "load_seconds": round(seconds, 3)}


def as_text(found: dict[str, Any]) -> str:
    model, files, memory, device = found["model"], found["files"], found["memory"], found["device"]
    lines = [f"{model['architecture']}  {model['folder']}",
             f"  parameters   {model['parameters']:,}; {model['layers']} layers of width {model['width']:,}, "
             f"vocabulary {model['vocab_size']:,}{', tied' if model['tied_embeddings'] else ''}",
             f"  context      {model['context']:,} tokens"]
    for kind in model["attention"]:
        window = f", window {kind['window']:,}" if kind["window"] else ""
        lines.append(f"  attention    {kind['layers']} layers: {kind['heads']} heads, {kind['kv_heads']} key/value heads "
                     f"of {kind['head_size']}{window}" + (f", cached as {kind['cache']}" if kind["cache"] != "plain" else ""))
    for one in found["weights"]:
        lines.append(f"  matrices     {one['matrices']} stored {one['scheme']}, {size(one['bytes'])}: "
                     f"{', '.join(one['kernels'])}")
        by_layers: dict[str, list[str]] = {}
        for matrix, layers in one["layers"].items():
            name = matrix if len(one["kernels"]) > 1 else matrix.split()[0]
            by_layers.setdefault(f"layers {layers}" if layers else "outside of layers", []).append(name)
        lines += [f"    {layers}: {', '.join(matrices)}" for layers, matrices in by_layers.items()]
    lines += [f"  weights      {files['tensors']} tensors, {size(files['bytes'])} of {model['checkpoint_dtype']} "
              f"in {', '.join(files['weights'])}" if files["weights"] else "  weights      random (load_format dummy)",
              f"  text         {', '.join(files['text']) or 'no tokenizer'}",
              f"  drafter      {_drafter(found['drafter'])}",
              f"  tool calls   {found['dialect']['tool_calls']}: {found['dialect']['why']}",
              f"  reasoning    {found['dialect']['reasoning']}: {found['dialect']['why_reasoning']}", "",
              f"{device['name']}, {device['cores']} cores, {size(device['memory_bytes'])}", "",
              f"Memory, {'measured' if memory['measured'] else 'planned'} for {memory['dtype']}"
              + (f", of each of {memory['ranks']} ranks" if memory["ranks"] > 1 else "")
              + (f" (layout: {found['layout']})" if "layout" in found else ""),
              f"  weights      {size(memory['weight_bytes'])}",
              f"  largest step {size(memory['step_bytes'])} ({memory['max_num_batched_tokens']:,} tokens, "
              f"{memory['max_num_seqs']} sequences)",
              f"  KV cache     {size(memory['kv_bytes'])}: {memory['kv_tokens']:,} tokens in pages of {memory['page_size']}",
              f"  prefixes     {_prefixes(memory['cache'])}",
              f"  longest      {memory['max_model_len']:,} tokens, prompt and output", "", "Kernels"]
    width = max(map(len, found["kernels"]))
    for op, kernel in found["kernels"].items():
        lines.append(f"  {op:<{width}}  {kernel['serves']}")
        lines += [f"  {'':<{width}}  not {name}: {reason}" for name, reason in kernel["refused"].items()]
    if "experts" in found:
        lines += ["", *_of_experts(found["experts"])]
    return "\n".join(lines)


def _drafter(drafter: dict[str, Any]) -> str:
    named = drafter["method"] + (f" in {drafter['folder']}" if drafter["folder"] else "")
    return named if drafter["on"] else f"none; --speculate auto would take {named}"


def _prefixes(cache: dict[str, Any]) -> str:
    if not cache["prefix_caching"]:
        return "not kept (enable_prefix_caching is off)"
    places = ["found again on the device"]
    if cache["host_bytes"]:
        places.append(f"in {size(cache['host_bytes'])} of host memory")
    if cache["disk"]:
        places.append(f"in up to {size(cache['disk_bytes'])} of {cache['disk']}")
    if cache["remote"]:
        places.append(f"at {cache['remote']}")
    share = f"; at most {100 * cache['tenant_share']:.0f} % for one tenant" if cache["tenant_share"] < 1 else ""
    return ", ".join(places) + share


_PROMPTS = 16
"""Of each skill; without a tokenizer, as many times random tokens."""
_TOKENS, _WAIT = 16, 0.6
"""Of an answer; and the seconds after which the worker reports counts again."""


def picked_experts(options: EngineOptions, model: dict[str, Any]) -> dict[str, Any]:
    """The picks of each layer's experts while the engine answers graded prompts, as data. ConfigError without experts."""
    from penstock.canary.suite import SKILLS, prompts
    from penstock.core.sampling import SamplingParams
    from penstock.engine.llm import LLM

    skills = [skill for skill in SKILLS if skill != "retrieve-4k"]
    asked: list[Any] = [item.messages[-1]["content"] for skill in skills for item in prompts(skill, _PROMPTS)]
    if options.skip_tokenizer_init:
        draw = random.Random(0)
        asked = [{"prompt_token_ids": [draw.randrange(model["vocab_size"]) for _ in range(64)]} for _ in asked]
    greedy = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    with LLM(**asdict(options)) as llm:
        llm.generate(asked, greedy, use_tqdm=False)
        time.sleep(_WAIT)
        llm.generate(asked[:1], greedy, use_tqdm=False)
        picks = llm.engine.stats().expert_picks
    if not picks:
        raise ConfigError(f"--experts: {model['architecture']} has no experts; leave it out")
    return {"prompts": len(asked), "picks": picks}


def _of_experts(found: dict[str, Any]) -> list[str]:
    """The counts for people: a line for each layer."""
    lines = [f"Experts, picked while {found['prompts']} prompts were answered",
             "  layer  experts      picks  never picked  busiest, over the mean  experts with half of all picks"]
    for layer, picks in enumerate(found["picks"]):
        total, order = sum(picks), sorted(picks, reverse=True)
        half = next(i + 1 for i in range(len(order)) if 2 * sum(order[:i + 1]) >= total)
        most = f"{picks.index(order[0])}: {order[0] * len(picks) / max(1, total):.2f}"
        lines.append(f"  {layer:5}  {len(picks):7}  {total:9,}  {picks.count(0):12}  {most:>22}  {half:30}")
    return lines
