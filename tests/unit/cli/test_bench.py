"""`penstock bench`: workloads that are what they claim, figures that can be checked by hand, a load on the fake API."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.bench import workload
from penstock.cli.bench.figures import percentile, spread
from penstock.cli.bench.serve import Record, summary
from penstock.cli.bench.workload import make_workload, poisson_arrivals, read_trace
from penstock.cli.main import main
from penstock.core.errors import ConfigError
from tests.data import DATA, need
from tests.unit.cli.fake import FakeApi, served


def flags(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {"num_prompts": 50, "random_input_len": 40, "random_output_len": 10, "random_range_ratio": 0.5,
                              "random_prefix_len": 0, "trace": None, "length_scale": 1.0, "max_input_len": None,
                              "max_output_len": None, "seed": 0}
    return argparse.Namespace(**{**values, **changes})


def test_random_lengths_and_prompts() -> None:
    items = make_workload(flags(random_prefix_len=16), 300).items
    assert len({tuple(item.prompt) for item in items}) == 50
    assert len({tuple(item.prompt[:16]) for item in items}) == 1
    assert all(3 <= t < 300 for item in items for t in item.prompt)
    assert all(20 <= len(item.prompt) == item.input_len <= 60 and 5 <= item.output_len <= 15 for item in items)
    assert items == make_workload(flags(random_prefix_len=16), 300).items
    assert items != make_workload(flags(random_prefix_len=16, seed=1), 300).items
    text = make_workload(flags(), 300, text=True).items[0]
    assert isinstance(text.prompt, str)
    assert len(text.prompt.split()) == text.input_len


def test_arrivals() -> None:
    times = poisson_arrivals(20_000, 50.0, 1.0, 7)
    gaps = np.diff(times)
    assert times[0] == 0
    assert abs(gaps.mean() - 0.02) < 0.0005
    assert abs(gaps.std() / gaps.mean() - 1) < 0.03  # exponential
    bursty = np.diff(poisson_arrivals(20_000, 50.0, 0.25, 7))
    assert abs(bursty.mean() - 0.02) < 0.002
    assert abs(bursty.std() / bursty.mean() - 2) < 0.1  # a gamma's coefficient of variation is shape ** -0.5
    assert poisson_arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError):
        poisson_arrivals(3, 0.0, 1.0, 0)


@pytest.mark.parametrize(("name", "first", "count"), [
    ("azure2023_code.csv", (4808, 10), 8819), ("vidur_arxiv_lengths.csv", (3772, 54), None),
    ("mooncake_synthetic.jsonl", (40160, 6), 3993)])
def test_traces(name: str, first: tuple[int, int], count: int | None) -> None:
    rows = list(read_trace(need(DATA / "traces" / name)))
    assert (rows[0].input_len, rows[0].output_len) == first
    assert count is None or len(rows) == count
    assert all(later.arrival >= sooner.arrival for sooner, later in itertools.pairwise(rows))
    if name.startswith("azure"):
        assert 55 * 60 < rows[-1].arrival - rows[0].arrival < 60 * 60


def test_a_trace_s_shared_blocks_are_shared_tokens() -> None:
    path = need(DATA / "traces" / "mooncake_synthetic.jsonl")
    rows = list(itertools.islice(read_trace(path), 200))
    work = make_workload(flags(num_prompts=200, trace=path, length_scale=1 / 64, max_output_len=8), 300)
    assert work.clipped_outputs == sum(max(1, round(row.output_len / 64)) > 8 for row in rows)
    by_start: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for row, item in zip(rows, work.items, strict=True):
        if len(row.blocks) >= 2 and item.input_len >= 16:
            by_start.setdefault(row.blocks[:2], set()).add(tuple(item.prompt[:16]))
    assert any(sum(r.blocks[:2] == start for r in rows) > 1 for start in by_start)
    assert all(len(starts) == 1 for starts in by_start.values())
    assert len({next(iter(s)) for s in by_start.values()}) == len(by_start)


def test_not_a_trace(tmp_path: Path) -> None:
    for text in ("a,b\n1,2\n", "{}\n", "{nonsense\n"):
        (tmp_path / "t").write_text(text)
        with pytest.raises(ConfigError, match="not a trace"):
            list(read_trace(tmp_path / "t"))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace(tmp_path / "none"))
    (tmp_path / "t").write_text("num_prefill_tokens,num_decode_tokens\n5,6\n")
    with pytest.raises(ConfigError, match="fewer than --num-prompts 2"):
        make_workload(flags(trace=tmp_path / "t", num_prompts=2), 300)


def test_percentiles_lie_between_values() -> None:
    """In whatever order these are; between two the way is linear."""
    for p, found in {0: 1.0, 25: 2.0, 50: 3.0, 90: 7.6, 100: 10.0}.items():
        assert percentile([3.0, 1.0, 10.0, 4.0, 2.0], p) == pytest.approx(found)
    assert spread("x", [], [99]) == {"mean_x_ms": None, "median_x_ms": None, "std_x_ms": None, "p99_x_ms": None}


def test_figures_of_known_requests() -> None:
    """Two answers whose figures can be worked out by hand, and a failure that must not count."""
    records = [Record(100.0, 10, [100.2, 100.3, 100.4], output_len=3), Record(100.1, 20, [100.2, 101.0], output_len=5),
               Record(100.0, 5, [], ended=100.5, error="no", refused=True)]
    result = summary(records, 100.0, 2.0, [50.0], {"ttft": 150.0})
    assert result["p50_refusal_ms"] == pytest.approx(500)
    assert (result["completed"], result["failed"], result["first_error"]) == (2, 1, "no")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 8)
    assert result["output_throughput"] == 4
    assert result["total_token_throughput"] == 19
    assert result["request_goodput"] == 0.5
    assert result["mean_ttft_ms"] == pytest.approx(150)
    assert result["mean_itl_ms"] == pytest.approx((100 + 100 + 800) / 3)
    assert result["mean_tpot_ms"] == pytest.approx((100 + 200) / 2)
    assert result["p50_e2el_ms"] == pytest.approx((400 + 900) / 2)
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == pytest.approx(3 + 2.5)
    assert result["median_itl_ms"] == pytest.approx(100)


def bench(capsys: pytest.CaptureFixture[str], app: FakeApi, *words: str) -> dict[str, Any]:
    with served(app) as url:
        assert main(["bench", "serve", "--url", url, "--quiet", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_closed_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    app = FakeApi()
    found = bench(capsys, app, "--num-prompts", "40", "--max-concurrency", "4", "--random-input-len", "9",
                  "--random-output-len", "12", "--save-detailed", "--output", str(tmp_path / "r.json"),
                  "--metadata", "who=test", "--extra-body", '{"top_p": 0.5}')
    assert found["completed"] == 40
    assert found["total_output_tokens"] == 480
    assert found["max_concurrent_requests"] == app.most_running == 4
    assert found["metadata"] == {"who": "test"}
    assert found["environment"]["packages"]["torch"]
    assert len(found["itls"]) == 40
    assert all(len(itl) == 11 for itl in found["itls"])
    assert len(app.bodies) == 41  # one to warm up
    assert app.bodies[-1]["ignore_eos"] is True
    assert app.bodies[-1]["top_p"] == 0.5
    assert app.bodies[-1]["model"] == "fake"
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 40


def test_an_open_loop_sends_on_time_however_slow_the_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": t, "input_length": 5, "output_length": 3} for t in (0, 100, 400)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bench(capsys, FakeApi(), "--trace", str(trace), "--num-prompts", "3", "--use-trace-arrivals", "--time-scale", "0.5",
                  "--endpoint", "chat", "--save-detailed", "--goodput", "ttft:1000,tpot:1000")
    first, second, third = found["start_times"]
    assert first < 0.05 and second >= 0.049 and third >= 0.199  # timers may fire a millisecond early
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert all(len(text.split()) == 5 for text in found["generated_texts"])


@pytest.mark.parametrize(("words", "message"), [
    (["--goodput", "speed:5"], "knows ttft, tpot, itl, e2el"), (["--goodput", "ttft"], "NAME:MILLISECONDS"),
    (["--endpoint", "chat", "--prompt", "ids"], "no token-id prompts"), (["--num-prompts", "0"], "at least 1"),
    (["--use-trace-arrivals"], "needs a --trace"), (["--metric-percentiles", "101"], "between 0 and 100"),
    (["--request-rate", "-1"], "must be above 0"), (["--url", "http://127.0.0.1:9"], "is the server running")])
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--quiet", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_an_answer_of_one_token_without_text_counts(endpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """End-of-sequence, or the first byte of a character: it used to count as failed, also in the warm-up."""
    monkeypatch.setattr(workload, "WORDS", ["mute"])
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": t, "input_length": 1, "output_length": 1}) + "\n" for t in (0, 1, 2)))
    found = bench(capsys, FakeApi(), "--trace", str(trace), "--num-prompts", "3", "--endpoint", endpoint, "--prompt", "text")
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (3, 0, 3)
    assert found["mean_ttft_ms"] > 0 and found["mean_tpot_ms"] is None


def test_a_table_comes_before_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    with served(FakeApi()) as url:
        words = ["bench", "serve", "--url", url, "--quiet", "--num-prompts", "4", "--goodput", "ttft:1000"]
        assert main(words) == 0
        shown, _, content = capsys.readouterr().out.partition("\n\n")
        assert json.loads(content)["completed"] == 4
        assert re.search(r"^requests answered +4$", shown, re.M)
        assert re.search(r"^time to first token, p99, ms +\d", shown, re.M)
        assert re.search(r"^requests/s within the limits +\d", shown, re.M) and "first error" not in shown
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["completed"] == 4


def test_the_device_s_own_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--device", "cpu", "--size", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["copy_bytes_per_second"] > 1e8 and found["gemm_flops_per_second"] > 1e6 and found["gemm_size"] == 64
    assert main(["bench", "gpu", "--device", "cpu", "--size", "64"]) == 0
    assert "bf16 GEMM of 64^3, TFLOP/s" in capsys.readouterr().out
