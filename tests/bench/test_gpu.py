"""bench/gpu.py: every table on a small shape; where an engine and a clock are false, figures are worked out by hand."""

from __future__ import annotations

import json
import math
import os
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fixed
import gpu
import gpu_curves
import gpu_http
import gpu_memory
import gpu_processes
import gpu_starts
import timeline
from penstock import models
from penstock.cli.bench import offline
from penstock.cli.bench.environment import environment
from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.engine.llm import LLM
from penstock.models import weights
from penstock.ops import registry
from penstock.platform.facts import detect

TINY: dict[str, Any] = fixed.SHAPES["llama8b"] | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 640, "torch_dtype": "float32"}
SECONDS = {"decode": 0.5, "prefix": 0.25}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that a CPU runs, and two workloads of it."""
    monkeypatch.setitem(fixed.SHAPES, "tiny", TINY)
    monkeypatch.setitem(fixed.TARGET, "tiny", SECONDS)
    monkeypatch.setitem(fixed.PEER, "tiny", {name: 2 * seconds for name, seconds in SECONDS.items()})

    def workloads(shape: str) -> Any:
        yield "decode", [fixed.Ask([3, 4, 5], 4), fixed.Ask([6] * 9, 2)]
        yield "offline", [fixed.Ask([row, 7], 3) for row in range(40)]
        yield "prefix", [fixed.Ask([8] * 40 + [row], 2) for row in range(3)]

    monkeypatch.setitem(fixed.TARGET["tiny"], "offline", 9.0)
    monkeypatch.setitem(fixed.PEER["tiny"], "offline", 9.0)
    monkeypatch.setattr(gpu, "workloads", workloads)
    monkeypatch.setattr(gpu, "CONTEXTS", (64, 100_000))
    monkeypatch.setattr(gpu, "BATCHES", (1, 2))
    monkeypatch.setattr(gpu, "LONG", ((100_000, 1), (100_000, 7), (100_000, 8), (100, 9)))


def answered(tokens: int, reason: str = "length") -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * tokens, finish_reason=reason, error="not finite")])


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (gpu, offline):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


class FalseLLM:
    """Takes 10 ms for a token of a prompt that it has not seen, and 1 ms a step and row; twice that if invariant, three times
    the steps if eager."""

    made: list[dict[str, Any]] = []
    clock: Clock
    short = 0

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.clock.now += 7
        self.seen: set[tuple[int, ...]] = set()
        self.slow = 2 if options["batch_invariant"] else 1
        self.eager = 3 if options["enforce_eager"] else 1
        self.info = SimpleNamespace(
            kv_tokens=4096, graphs=3, graph_seconds=0.5, compiled=6, compile_seconds=7.5, weight_bytes=1, step_bytes=2,
            graph_bytes=4, kv_bytes=5, kernels=[("linear", "false")],
            max_num_seqs=8, max_num_batched_tokens=512, page_size=16,
            max_model_len=options["max_model_len"] or TINY["max_position_embeddings"])

    def __enter__(self) -> FalseLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        self.seen.clear()

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        keys = {tuple(prompt["prompt_token_ids"]) for prompt in prompts}
        fresh = sum(map(len, keys - self.seen))
        self.seen |= keys
        steps = max(one.max_tokens for one in params)
        self.clock.now += self.slow * (0.01 * fresh + 0.001 * self.eager * steps * len(prompts))
        return [answered(one.max_tokens - self.short) for one in params]


@pytest.fixture
def false_engine(monkeypatch: pytest.MonkeyPatch) -> type[FalseLLM]:
    monkeypatch.setattr(FalseLLM, "clock", Clock(monkeypatch), raising=False)
    monkeypatch.setattr(FalseLLM, "made", [])
    monkeypatch.setattr("penstock.engine.llm.LLM", FalseLLM)
    return FalseLLM


def bench(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, Any], str]:
    assert gpu.main(["--shape", "tiny", "--device", "cpu", *map(str, words)]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_workloads(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str]) -> None:
    result, said = bench(capsys, "--repeats", 2)
    found = result["shapes"]["tiny"]
    # All but the prefix workload compute their prompts again in each run.
    assert {name: entry["seconds"] for name, entry in found["workloads"].items()} == pytest.approx(
        {"decode": 0.12 + 0.008, "offline": 0.8 + 0.12, "prefix": 0.006})
    assert len(found["workloads"]["decode"]["all"]) == 2 and len(found["workloads"]["offline"]["all"]) == 1
    assert found["workloads"]["decode"]["peer"] == 1.0 and found["start_seconds"] == 7
    assert found["memory"] == {"weights": 1, "step": 2, "graphs": 4, "kv": 5}
    assert found["workloads"]["decode"]["floor"] == fixed.floor(
        "tiny", [fixed.Ask([3, 4, 5], 4), fixed.Ask([6] * 9, 2)], 8)
    assert "3 graphs in 0.5 s, 6 kernels in 7.5 s" in said
    assert "over the target" not in said and false_engine.made[0]["gpu_memory_utilization"] == 0.85
    assert false_engine.made[0]["load_format"] == "dummy" and false_engine.made[0]["max_model_len"] == 640
    assert {"driver", "gpu", "clocks", "date", "packages", "git_commit"} <= result["environment"].keys()


def test_over_the_target_is_said(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fixed.TARGET["tiny"], "decode", 0.01)
    _, said = bench(capsys, "--workload", "decode")
    assert "over the target" in said and "offline" not in said


def test_what_invariance_costs(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str]) -> None:
    result, said = bench(capsys, "--tables", "invariant", "--workload", "decode")
    assert [made["batch_invariant"] for made in false_engine.made] == [False, True]
    assert result["shapes"]["tiny"]["invariant"]["decode"]["cost"] == pytest.approx(0.5)
    assert "50.0%" in said


def test_steps(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A point is what 32 steps more take; what has no room in context or cache is left out or cut."""
    result, _ = bench(capsys, "--tables", "curve,long", "--draw", tmp_path)
    found = result["shapes"]["tiny"]
    assert [(point["context"], point["batch"]) for point in found["curve"]] == [(64, 1), (64, 2), (582, 1), (582, 2)]
    # Seven contexts have room for 519 tokens each in a cache of 4096, eight for 446; there are only eight rows.
    assert [(point["context"], point["batch"]) for point in found["long"]] == [(582, 1), (519, 7), (446, 8)]
    for point in found["curve"]:
        batch, middle = point["batch"], point["context"] + 33
        assert point["milliseconds"] == pytest.approx(batch) and point["tokens_per_second"] == pytest.approx(1000)
        # By hand: one layer of 32 x (32 + 32) + 32 x 32 + 3 x 32 x 64, a head of 512 x 32, keys and values of 16, all in bf16.
        nbytes = 2 * (2048 + 1024 + 6144 + 16384) + batch * middle * 2 * 16 * 2
        assert point["bytes"] == nbytes
        assert point["floor_milliseconds"] == pytest.approx(1e3 * nbytes / fixed.COPY)
        assert point["of_copy"] == pytest.approx(nbytes / (batch * 1e-3) / fixed.COPY)
    assert false_engine.made[0]["max_model_len"] is None
    drawn = ElementTree.fromstring((tmp_path / "gpu_curve_tiny.svg").read_text())
    lines = [element for element in drawn.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 8 and sum("stroke-dasharray" in line.attrib for line in lines) == 4


def test_long_prompts(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str],
                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fixed.LONG_PROMPTS, "tiny", (fixed.Long(300, 1, 1e-6, 2.0), fixed.Long(500, 2, 1e6, 3.0)))
    monkeypatch.setitem(fixed.LONG_STEPS, "tiny", (fixed.Long(400, 2, 1e6, 4.0),))
    result, said = bench(capsys, "--tables", "prompts")
    found = result["shapes"]["tiny"]["prompts"]
    assert [(one["context"], one["batch"], one["peer"]) for one in found] == [(300, 1, 2.0), (500, 2, 3.0), (400, 2, 4.0)]
    assert all(one["seconds"] > 0 for one in found[:2]) and found[2]["milliseconds"] > 0
    assert said.count("over the target") == 1 and "prompt of 300 x 1" in said and "decode step of 400 x 2" in said


def test_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The questions asked of them, the company, and the pictures; a false program stands for the engine's."""
    busy: list[bool] = []
    neighbours = gpu_processes._neighbours

    child = tmp_path / "child.py"
    child.write_text("import sys\nassert open(sys.argv[1] + '/config.json').read() and sys.stdin.readline() == 'begin\\n'\n"
                     "print('{\"decode_b1\": 0.1, \"decode_b8\": 0.2}')\n")

    def runs(model: Path, count: int, say: Callable[[str], None]) -> Iterator[dict[str, float]]:
        for found in told(model, count, say):
            busy.append(bool(inside))
            yield found | {"decode_b1": found["decode_b1"] + 0.01 * len(busy)}

    inside: list[int] = []

    @contextmanager
    def beside() -> Iterator[None]:
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
        with neighbours():
            inside.append(1)
            yield
            inside.clear()

    told = gpu_processes._runs
    monkeypatch.setattr(gpu_processes, "_CHILD", child)
    monkeypatch.setattr(gpu_processes, "_runs", runs)
    monkeypatch.setattr(gpu_processes, "_neighbours", beside)
    result, said = bench(capsys, "--tables", "processes", "--processes", "6", "--draw", str(tmp_path))
    assert busy == [False] * 4 + [True] * 2
    child.write_text("raise SystemExit('no card')")
    with pytest.raises(ConfigError, match="a process failed: no card"):
        list(told(tmp_path, 5, print))
    assert len(result["processes"][0]["runs"]["alone"]) == 4
    assert "decode_b1 in 4 processes alone: 0.110 least, 0.125 median, 0.140 most" in said
    for name in ("decode_b1", "decode_b8"):
        ElementTree.parse(tmp_path / f"gpu_processes_tiny_{name}.svg")


def test_steps_with_graphs_and_without(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that rows, context or a step have no room for are left out."""
    monkeypatch.setattr(gpu, "ROWS", (1, 8, 9))
    monkeypatch.setattr(gpu, "TOKENS", (16, 300, 513, 640))
    result, said = bench(capsys, "--tables", "eager", "--repeats", 1)
    found = result["shapes"]["tiny"]["eager"]
    assert [(entry.get("rows"), entry.get("tokens")) for entry in found] == [(1, None), (8, None), (None, 16), (None, 300)]
    assert [made["enforce_eager"] for made in false_engine.made] == [False, True]
    # Without graphs the engine takes three times as long a step and row.
    assert [entry["milliseconds"] for entry in found] == pytest.approx([3, 24, 163, 3003])
    assert [entry["with_graphs"] for entry in found] == pytest.approx([1, 8, 161, 3001])
    assert "step of 8 rows: 8.000 ms with graphs, 24.000 without" in said


def test_answers_that_are_too_short(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FalseLLM, "short", 1)
    assert gpu.main(["--shape", "tiny", "--device", "cpu"]) == 1
    assert "a request of 3 + 4 tokens ended after 3 (length), so its time would mean nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["--shape", "huge"], "shape 'huge' is not known; possible are llama8b"),
    (["--workload", "nap"], "workload 'nap' is not known; possible are decode"),
    (["--tables", "nap"], "table 'nap' is not known; possible are workloads")])
def test_unknown_names(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--shape", "tiny"]) == 1
    assert "device cuda:0 cannot be used by torch" in capsys.readouterr().err


def test_a_real_engine_and_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a CPU a trace has no kernels of a device, and says so."""
    result, said = bench(capsys, "--kv-cache-memory-bytes", 4 << 20, "--max-num-seqs", 8, "--workload",
                         "decode", "--repeats", 1, "--profile", tmp_path)
    assert result["shapes"]["tiny"]["workloads"]["decode"]["seconds"] > 0
    assert result["shapes"]["tiny"]["profile"]["decode_b32"] == {"idle_share": 1.0, "steps": 0}
    events = json.loads((tmp_path / "tiny-decode-1.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)
    assert "GPU idle 100.0%" in said


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_offline_measurements_write_traces(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fixed.write(TINY, tmp_path / "model")
    sizes = "--num-iters 1 --batch-size 2 --output-len 3" if kind == "latency" else \
        "--num-prompts 2 --random-input-len 9 --random-output-len 3"
    flags = f"--device cpu --load-format dummy --kv-cache-memory-bytes {4 << 20} --profile {tmp_path}"
    assert main(["bench", kind, str(model), *sizes.split(), *flags.split()]) == 0
    assert json.loads((tmp_path / f"{kind}.json").read_text())["traceEvents"]


def test_the_fixed_workloads_are_those_of_the_peer() -> None:
    """Their sizes as the peer's record tells them, and their floors as they were recorded when 256 rows ran at once."""
    record = json.loads((Path(__file__).parents[2] / "bench" / "results" / "gpu_workloads.json").read_text())
    for shape in ("llama8b", "qwen06b"):
        found = dict(fixed.workloads(shape))
        assert list(found) == list(fixed.PEER[shape]) == list(fixed.TARGET[shape])
        mix = found["offline_mix1000"]
        if shape == "llama8b":
            assert len(mix) == 1000 and round(sum(len(ask.prompt) for ask in mix), -3) == 534_000
            assert round(sum(ask.output for ask in mix), -3) == 252_000
        for name, asks in found.items():
            assert fixed.floor(shape, asks, 256) == pytest.approx(record["shapes"][shape]["workloads"][name]["floor"])


def test_gaps_are_drawn(false_engine: type[FalseLLM], capsys: pytest.CaptureFixture[str], tmp_path: Path,
                        monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the trace has kernels."""
    def traced(work: Callable[[], object], path: Path) -> None:
        work()
        path.write_text(json.dumps({"traceEvents": [kernel("build_step", at, at + 90) for at in range(0, 10_000, 100)]}))

    monkeypatch.setattr(offline, "traced", traced)
    result, said = bench(capsys, "--workload", "decode", "--profile", tmp_path / "traces", "--draw", tmp_path)
    assert result["shapes"]["tiny"]["profile"]["decode_b1"]["idle_share"] == pytest.approx(0.1, abs=0.01)
    assert "GPU idle 9.9% of the time, 0.0% between steps" in said
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["gpu_gaps_tiny_b1.svg", "gpu_gaps_tiny_b32.svg"]


# -- memory


def test_free_memory_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read when all that was launched is done."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (order.append("read"), (5, 9))[1])
    assert gpu_memory.free() == 5 and order == ["synchronize", "read"]


def test_predicted_and_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The lowest reading counts, wherever it is."""
    readings = iter([1 << 40, (1 << 40) - 5_000_000, (1 << 40) - 9_000_000, (1 << 40) - 8_000_000, (1 << 40) - 7_000_000])
    monkeypatch.setattr(gpu_memory, "free", lambda: next(readings))
    options = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 8}
    monkeypatch.setattr(gpu_memory, "CONFIGURATIONS", [(TINY, options)])
    result, said = bench(capsys, "--tables", "memory")
    [found] = result["memory"]
    assert found["measured"] == 9_000_000 and found["predicted"] > 4 << 20
    assert found["error"] == pytest.approx(9_000_000 / found["predicted"] - 1) and f"{found['error']:+.2%}" in said


def test_configurations_are_many_and_valid() -> None:
    """Each is a model that is known, with options that exist."""
    from penstock import models
    from penstock.config.schema import EngineOptions

    assert len(gpu_memory.CONFIGURATIONS) >= 10
    for config, options in gpu_memory.CONFIGURATIONS:
        assert models.describe(config).size > 0
        EngineOptions(**options)


def test_a_soak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache of little more than one context, so that sequences are preempted all the time."""
    def small(model: str, **options: Any) -> LLM:
        return LLM(model, **options, device="cpu", max_num_seqs=16, kv_cache_memory_bytes=42 * 16 * 2 * 16 * 4)

    monkeypatch.setattr(gpu_memory, "LLM", small)
    monkeypatch.setattr(gpu_memory, "_BURST", 4000)
    monkeypatch.setattr(gpu_memory, "SHAPES", {"llama8b": TINY})
    result, said = bench(capsys, "--tables", "soak", "--soak", 0.5)
    found = result["soak"]
    assert found["bursts"] >= 1 and found["requests"] >= found["bursts"] and found["output_tokens"] >= found["requests"]
    assert found["preemptions"] > 0 and "preemptions" in said


class _Soaked:
    """Answers that are right, but for what a test changes."""

    def __init__(self, lost: int = 0, reason: str = "length", held: int = 0) -> None:
        self.lost, self.reason, self.held = lost, reason, held
        self.info = SimpleNamespace(max_model_len=50, max_num_seqs=4, vocab_size=100)

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        return [answered(one.max_tokens - self.lost, self.reason) for one in params]

    def stats(self) -> Any:
        return SimpleNamespace(pages_used=self.held, preemptions=0)


@pytest.mark.parametrize(("llm", "message"), [
    (_Soaked(lost=1), r"tokens got \d+ and ended by length"), (_Soaked(reason="error"), r"ended by error \(not finite\)"),
    (_Soaked(held=3), "3 pages are held")])
def test_a_soak_fails(llm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_memory.soak(llm, 5)


# -- starts and servers


@pytest.mark.exhaustive
def test_starts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes, on a CPU, where there is nothing to compile."""
    monkeypatch.setattr(fixed, "FIRST_TOKEN_TARGET", {"filled": 10.0})
    monkeypatch.setattr(gpu_starts, "FIRST_TOKEN_TARGET", {"filled": 10.0})
    result, said = bench(capsys, "--tables", "start")
    [found] = result["start"]
    assert found["shape"] == "tiny" and found["at_ready"] == found["after"] == [0, 0]
    marks = list(found["marks"].items())
    assert [name for name, _ in marks][:2] == ["python", "torch"] and marks[-1][0] == "first token"
    assert [at for _, at in marks] == sorted(at for _, at in marks) and "first token" in said


@pytest.mark.exhaustive
def test_a_start_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)the engine's process failed: .*config\.json"):
        gpu_starts.start(tmp_path, tmp_path, 64)


@pytest.mark.exhaustive
def test_over_http(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server and a real client, each a process."""
    monkeypatch.setattr(gpu_http, "LOAD", (8, 6))
    monkeypatch.setitem(fixed.HTTP_PEER, "tiny", {2: fixed.Answers(1.0, 2.0, 3.0, 4.0)})
    monkeypatch.setitem(fixed.HTTP_TARGET, "tiny", {2: fixed.Answers(5.0)})
    result, said = bench(capsys, "--tables", "http", "--concurrency", 2)
    start, load = result["http"]
    assert start["ready_seconds"] > 0 and start["target"] == 12
    assert load["concurrency"] == 2 and load["tokens_per_second"] > 0 and load["ttft_p50"] > 0 < load["itl_p50"]
    assert load["itl_p99"] >= load["itl_p50"] and load["peer"]["itl_p99"] == 4.0
    assert "(target 5) [1.0]" in said


CLIENT = """
import json, sys
url, model, vocab, concurrency, requests, n_in, n_out = sys.argv[1:]
assert url.startswith("http") and (int(concurrency), int(requests), int(n_in), int(n_out)) in ((4, 16, 8, 6), (1, 6, 8, 6))
print("noise")
print(json.dumps({"out_tok_s": 10.0, "ttft_p50": 1.5, "itl_p50": 2.5, "itl_p99": int(concurrency)}))
"""


def test_another_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_http, "LOAD", (8, 6))
    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    assert gpu_http.load(client, "http://x", tmp_path, 512, 1) == fixed.Answers(10.0, 1.5, 2.5, 1)
    client.write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="the client failed with status 3"):
        gpu_http.load(client, "http://x", tmp_path, 512, 1)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended before it was ready, with status 1"), gpu_http.server(tmp_path, []):
        pass


def test_clocks_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi of an H200 answers; a clock that it does not know is None."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.159.04, 1980, 1980, 3201, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = environment()
    assert (found["gpu"], found["driver"]) == (["NVIDIA H200"], "580.159.04")
    assert found["clocks"] == [{"sm": 1980, "sm_most": 1980, "memory": 3201, "memory_most": None}]


# -- traces


def kernel(name: str, start: float, end: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}


@pytest.fixture
def trace(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    def write(events: list[dict[str, Any]]) -> Path:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        return path

    return write


def test_idle_time_of_a_known_trace(trace: Callable[[list[dict[str, Any]]], Path], capsys: pytest.CaptureFixture[str],
                                    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 steps of 1,000 us: 100 for the step builder, 3 idle, the model until 950, overlapped by sampling until 960; then 40
    to the next step, of which a copy takes 15. So 28 of 1,000 us are idle, 25 of them between steps."""
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 0, "dur": 1e9}, {"ph": "M", "name": "process_name"}]
    for step in range(100):
        at = step * 1000.0
        events += [kernel("build_step", at, at + 100), kernel("tiles", at + 103, at + 950),
                   kernel("settle", at + 940, at + 960), kernel("Memcpy DtoH", at + 970, at + 985, "gpu_memcpy")]
    path = trace(events)
    found = timeline.timeline(path)
    assert found["idle_share"] == pytest.approx(0.028, rel=0.01)
    assert found["steps"] == 59 and found["step_us"] == 1000
    assert found["between_us"] == pytest.approx({"median": 25, "p99": 25, "most": 25})
    assert found["between_share"] == pytest.approx(0.025)
    # Of a step, gaps of 3, 10 and 15 us.
    shares = {kind["up_to_us"]: kind["share"] for kind in found["gaps"] if kind["count"]}
    assert shares == pytest.approx({5: 0.003, 10: 0.01, 20: 0.015}, abs=3e-4)
    assert sum(kind["count"] for kind in found["gaps"]) == pytest.approx(180, abs=3)
    monkeypatch.setattr("sys.argv", ["timeline", str(path), "--svg", str(tmp_path / "gaps.svg")])
    timeline.main()
    assert json.loads(capsys.readouterr().out)["steps"] == 59
    drawn = ElementTree.fromstring((tmp_path / "gaps.svg").read_text())
    heights = [float(bar.attrib["height"]) for bar in drawn.iter() if bar.tag.endswith("rect") and "x" in bar.attrib]
    assert len(heights) == 9 and heights[2] == pytest.approx(heights[4] * shares[5] / shares[20], rel=0.01)
    assert f"idle {found['idle_share']:.2%} of the time" in (tmp_path / "gaps.svg").read_text()


def test_a_trace_without_steps_of_ours(trace: Callable[[list[dict[str, Any]]], Path]) -> None:
    found = timeline.timeline(trace([kernel("gemm", at, at + 50) for at in range(0, 10_000, 100)]))
    assert found["idle_share"] == pytest.approx(0.5, abs=0.01) and found["steps"] == 0 and "between_us" not in found
    assert "other: idle 49.75% of the time" in timeline.draw(found, "other")
    assert timeline.timeline(trace([])) == {"idle_share": 1.0, "steps": 0}


def test_steps_that_sample_nothing_and_kernels_that_overlap(trace: Callable[[list[dict[str, Any]]], Path]) -> None:
    """Chunks of a prompt end without sampling: what is idle there is no gap between steps."""
    events = []
    for step in range(50):
        events += [kernel("build_step", step * 100.0, step * 100 + 60), kernel("tiles", step * 100 + 10, step * 100 + 90)]
    found = timeline.timeline(trace(events))
    assert found["between_share"] == 0 and found["idle_share"] == pytest.approx(0.1, abs=0.01)


def test_curves_from_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [{"context": context, "batch": batch, "milliseconds": 4.0 + batch / 8, "floor_milliseconds": 3.5}
              for context in (512, 8192) for batch in (1, 8, 256)]
    (tmp_path / "r.json").write_text(json.dumps({"shapes": {"llama8b": {"curve": points}, "qwen06b": {}}}))
    monkeypatch.setattr("sys.argv", ["curves", str(tmp_path / "r.json"), str(tmp_path / "out")])
    gpu_curves.main()
    [file] = (tmp_path / "out").iterdir()
    drawn = ElementTree.fromstring(file.read_text())
    first, *_ = (element for element in drawn.iter() if element.tag.endswith("polyline"))
    places = [tuple(map(float, pair.split(","))) for pair in first.attrib["points"].split()]
    assert [x for x, _ in places] == pytest.approx([60, 60 + 390 * math.log(8) / math.log(256), 450], abs=0.1)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True), "more milliseconds are further up"
    (tmp_path / "r.json").write_text(json.dumps({"shapes": {"llama8b": {}}}))
    with pytest.raises(SystemExit, match="no curve"):
        gpu_curves.main()


def test_the_clock_of_a_soak_is_the_wall_s() -> None:
    began = time.monotonic()
    assert gpu_memory.soak(_Soaked(), 0.05)["seconds"] <= time.monotonic() - began  # type: ignore[arg-type]


def test_weights_as_the_peer_draws_them() -> None:
    """Routers are zero, and in this context alone; other weights stay random."""
    config = fixed.SHAPES["qwen30b_a3b"] | {
        "hidden_size": 64, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "moe_intermediate_size": 32}
    spec, facts = models.describe(config), detect("cpu")
    kernels = registry.bind(facts, torch.float32)

    def routers() -> list[bool]:
        values = weights.dummy(spec, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels, seed=0, progress=None)
        assert all(value.data.any() for name, value in values.items() if "router" not in name and value.data.dim() > 1)
        return [bool(value.data.any()) for name, value in values.items() if "router" in name]

    with fixed.as_peer():
        assert routers() == [False]
    assert routers() == [True]
