"""Penstock's engine beside llama.cpp on this machine's CPU: the same shape, random weights, in alternate processes.

usage: cpu_peer.py --peer-python PYTHON --peer-script SCRIPT --peer-model FILE.gguf [--same] [--rounds 2] [--dtype bfloat16]
                   [--output FILE.jsonl]
       cpu_peer.py --make FOLDER [--schemes q8_0,q4_0,q4_k_m] [--shape llama1b | olmoe]

--same runs FILE.gguf here too; --make writes the shape with random weights as such files (olmoe: 6.9 billion weights, of which
a token takes 1.2, in q8_0 or q4_0, by the package gguf). SCRIPT is bench/cpu_peer_llama.py,
for llama-cpp-python (LLAMA_CPP_LIB_PATH names the folder of a libllama that was built apart). For each of 1, 4, 8 and 16
sequences it prints a line of JSON: {"batch", "prefill_tok_s", "step_ms"}, for prompts of 128 tokens followed by decode steps
of all sequences together, on two threads. The same is measured here through Engine.turn (planning, sampling and bookkeeping
included) on the shape llama1b of bench/shapes.py. Machines shared with others change from minute to minute, so the two take
turns, and a ratio is that of the medians over the rounds; every figure is in the record.

Before each batch this side also reads a gigabyte plainly on as many threads ("read_gb_s"): "of_read" is the part of that rate
at which decode steps read their weights, of which the embedding's table (taken as two bytes a weight) is none.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.cli.bench.environment import environment
from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from shapes import write

PROMPT = 128
STEPS = {1: 48, 4: 24, 8: 24, 16: 12}
"""Decode steps measured for each number of sequences, as the peer's."""
PLAIN = 1 << 30
"""Bytes of a plain read, many times any cache."""
TABLE = 2 * 32000 * 2048
"""Bytes of llama1b's table of embeddings."""
GOALS = {"decode 1": 1.15, "decode 4": 1.3, "decode 8": 1.3, "decode 16": 1.3, "prefill": 1.2}


def measure(model: Path, dtype: str, threads: int) -> None:
    """This side of the comparison: prints its lines."""
    load = "auto" if model.suffix == ".gguf" else "dummy"
    engine = Engine(EngineOptions(model=str(model), load_format=load, dtype=dtype, skip_tokenizer_init=True, device="cpu",
                                  max_model_len=512, max_num_seqs=16, max_num_batched_tokens=2048, threads=threads))
    for batch, steps in STEPS.items():
        plain = plain_read(threads)
        params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True, seed=0)
        for i in range(batch):
            prompt = [300 + (i * 131 + p * 7) % 30000 for p in range(PROMPT)]
            engine.submit(Request(f"{batch}-{i}", prompt, params))
        begin = time.perf_counter()
        waiting = {f"{batch}-{i}" for i in range(batch)}
        while waiting:
            waiting -= {update.request_id for update in engine.turn()}
        prefill = batch * PROMPT / (time.perf_counter() - begin)
        times: list[float] = []
        begin = time.perf_counter()
        while engine.busy:
            if engine.turn():
                times.append(time.perf_counter() - begin)
                begin = time.perf_counter()
        step = statistics.median(times)
        print(json.dumps({"batch": batch, "prefill_tok_s": round(prefill, 1), "step_ms": round(step * 1e3, 1),
                          "decode_tok_s": round(batch / step, 1), "weight_bytes": engine.info.weight_bytes,
                          "read_gb_s": round(plain / 1e9, 1),
                          "of_read": round((engine.info.weight_bytes - TABLE) / step / plain, 3),
                          "resident_bytes": resident()}), flush=True)
    engine.close()


def plain_read(threads: int) -> float:
    """Bytes a second that so many threads read together, the best of five times: each looks for a byte that is not there."""
    length = PLAIN // threads
    parts = [(ctypes.c_uint8 * length)() for _ in range(threads)]
    find = ctypes.CDLL(None).memchr
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    for part in parts:
        ctypes.memset(part, 2, length)
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            found = list(pool.map(lambda part: find(part, 1, length), parts))
            seconds.append(time.perf_counter() - begin)
            assert not any(found)
    return threads * length / min(seconds)


def written(folder: Path, **changes: Any) -> Path:
    """The shape's folder with random weights and a vocabulary of numbers."""
    import torch
    from safetensors.torch import save_file

    from penstock.models import describe
    from penstock.models.registry import family_of

    model = write("llama1b", folder)
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    rules, tensors = family_of(config)[1].RULES, {}
    for parameter in describe(config).parameters():
        for one in parameter.pieces or (parameter,):
            name = next((found for rule in rules if (found := rule.name_of(one.name)) is not None), None)
            rows = getattr(one, "rows", None) or parameter.shape[0]
            shape = (rows, *parameter.shape[1:])
            if name is not None:
                tensors[name] = (torch.randn(shape) * 0.02).bfloat16() if len(shape) > 1 else torch.ones(shape).bfloat16()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    words = {f"▁{i}": i for i in range(config["vocab_size"])}
    (model / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": words, "merges": []},
                                                      "normalizer": {"type": "Prepend", "prepend": "▁"}}))
    return model


def make(folder: Path, schemes: list[str]) -> None:
    """The shape with random weights, quantized into FOLDER/llama1b-SCHEME.gguf."""
    from penstock.models import gguf_out

    model = written(folder)
    for scheme in schemes:
        out = folder / f"llama1b-{scheme}.gguf"
        ends = {} if scheme == "q4_k_m" else {"lm_head": scheme, "embed_tokens": scheme}
        gguf_out.write(model, out, scheme, ends, "bfloat16")
        print(out, flush=True)


OLMOE = {"width": 2048, "layers": 16, "heads": 16, "inner": 1024, "experts": 64, "picks": 8, "vocab": 50304}


def make_olmoe(out: Path, scheme: str) -> None:
    """OLMoE's shape in blocks of random bytes, whose scales give weights a standard deviation of about 0.02."""
    import gguf
    import numpy as np

    kind, scale = gguf.GGMLQuantizationType[scheme.upper()], 0.02 / {"q8_0": 74, "q4_0": 4.6}[scheme]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    width, inner, count = OLMOE["width"], OLMOE["inner"], OLMOE["experts"]
    writer = gguf.GGUFWriter(out, "olmoe")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(OLMOE["layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(OLMOE["heads"])
    writer.add_head_count_kv(OLMOE["heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(count)
    writer.add_expert_used_count(OLMOE["picks"])
    writer.add_vocab_size(OLMOE["vocab"])
    writer.add_tokenizer_model("no_vocab")
    layer = {"attn_norm": (width,), **{f"attn_{name}": (width, width) for name in ("q", "k", "v", "output")},
             "attn_q_norm": (width,), "attn_k_norm": (width,), "ffn_norm": (width,), "ffn_gate_inp": (count, width),
             **{f"ffn_{name}_exps": (count, inner, width) for name in ("gate", "up")}, "ffn_down_exps": (count, width, inner)}
    shapes = {"token_embd": (OLMOE["vocab"], width), "output_norm": (width,), "output": (OLMOE["vocab"], width),
              **{f"blk.{i}.{name}": shape for i in range(OLMOE["layers"]) for name, shape in layer.items()}}
    plain = {name for name, shape in shapes.items() if len(shape) == 1 or name.endswith("gate_inp")}
    for name, shape in shapes.items():
        bytes_of = (4 * int(np.prod(shape))) if name in plain else int(np.prod(shape)) // block * size
        writer.add_tensor_info(f"{name}.weight", shape if name in plain else (*shape[:-1], shape[-1] // block * size),
                               np.dtype(np.float32 if name in plain else np.uint8), bytes_of, None if name in plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name in plain:
            data = np.ones(shape, np.float32) if len(shape) == 1 else draw.normal(0, 0.02, shape).astype(np.float32)
        else:
            data = np.frombuffer(draw.bytes(int(np.prod(shape)) // block * size), np.uint8).reshape(-1, size).copy()
            data[:, :2] = np.array([scale], np.float16).view(np.uint8)
        writer.write_tensor_data(data)
    writer.close()


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def lines(command: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    ours: list[list[dict[str, Any]]] = []
    theirs: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(options.peer_model) if options.same else write("llama1b", Path(folder))
        for _ in range(options.rounds):
            theirs.append(lines([options.peer_python, options.peer_script, options.peer_model]))
            ours.append(lines([sys.executable, __file__, "--measure", str(model), "--dtype", options.dtype,
                               "--threads", str(options.threads)]))
            print(json.dumps({"penstock": ours[-1], "peer": theirs[-1]}), file=sys.stderr, flush=True)
    ratios: dict[str, float] = {}
    for at, batch in enumerate(STEPS):
        ratios[f"decode {batch}"] = median(theirs, at, "step_ms") / median(ours, at, "step_ms")
    of_read = {f"decode {batch}": round(median(ours, at, "of_read"), 3) for at, batch in enumerate(STEPS)}
    ratios["prefill"] = statistics.median([median(ours, at, "prefill_tok_s") / median(theirs, at, "prefill_tok_s")
                                           for at in range(len(STEPS))])
    return {"environment": environment(), "dtype": options.dtype, "peer_model": Path(options.peer_model).name,
            "ratios": {name: round(value, 3) for name, value in ratios.items()},
            "of_read": of_read, "goals_met": {name: ratios[name] >= goal for name, goal in GOALS.items()},
            "penstock": ours, "peer": theirs}


def median(rounds: list[list[dict[str, Any]]], at: int, key: str) -> float:
    return statistics.median(one[at][key] for one in rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-script")
    parser.add_argument("--peer-model")
    parser.add_argument("--same", action="store_true", help="run the peer's file here too")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write the shape as GGUF files there")
    parser.add_argument("--schemes", default="q8_0,q4_0,q4_k_m")
    parser.add_argument("--shape", choices=("llama1b", "olmoe"), default="llama1b", help="of --make")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="append the record to this file")
    parser.add_argument("--measure", type=Path, help="only this side, on a model folder")
    options = parser.parse_args()
    if options.make and options.shape == "olmoe":
        options.make.mkdir(parents=True, exist_ok=True)
        for scheme in options.schemes.split(","):
            make_olmoe(options.make / f"olmoe-{scheme}.gguf", scheme)
        return None
    if options.make:
        return make(options.make, options.schemes.split(","))
    if options.measure:
        return measure(options.measure, options.dtype, options.threads)
    if not (options.peer_python and options.peer_script and options.peer_model):
        parser.error("--peer-python, --peer-script and --peer-model say how to run the peer")
    record = json.dumps(compare(options))
    print(record)
    if options.output:
        with options.output.open("a") as file:
            file.write(record + "\n")
    return None


if __name__ == "__main__":
    main()
