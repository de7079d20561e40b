"""Ranks in processes: the same tokens over gloo, and what is told and left when one is lost."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import LLM, SamplingParams, canary
from penstock.checkpoint.tensors import find
from penstock.core import child
from penstock.core.errors import ConfigError, EngineDeadError, RankLostError
from penstock.core.plan import (
    Enter,
    Load,
    LoadResult,
    Masks,
    Move,
    PageName,
    Piece,
    Proposal,
    Save,
    StepPlan,
    StepResult,
    Write,
)
from penstock.core.wire import decoder, encode
from penstock.engine import layout, remote
from penstock.engine.remote import RemoteGroup
from penstock.parallel.axis import Place, places
from tests.system.served import ROOT, Served, served

PROMPTS = ["Once upon a time", "The cat sat on the mat, and", "a"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def llm(**more: Any) -> LLM:
    return LLM(**{"model": "canary", "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 512,
                  "max_num_seqs": 8, **more})


def tokens(model: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(found.outputs[0].token_ids) for found in model.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Two ranks with every tier."""
    with llm(tensor_parallel_size=2, cache_host_bytes=1 << 22, cache_disk=str(tmp_path_factory.mktemp("pages")),
             cache_load="always", kv_cache_memory_bytes=1 << 20) as model:
        yield model


def test_plans_and_results_arrive_as_they_were_sent() -> None:
    name = PageName(1, b"\x00key")
    plan = StepPlan(7, [Enter(1, [3, 4], 2, SamplingParams(temperature=0.5, logit_bias={3: 1.0}), -5, [2])], [4], [(1, "a")],
                    [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 3), np.int32)], [Move(0, 1, 2)],
                    np.array([1], np.int32), np.array([0], np.int32), np.array([2], np.int32), np.array([1], np.int32),
                    slack=np.array([1], np.int32), proposals=[Proposal(1, 2, [9])],
                    transfers=[Save(0, 1, 2), Write(3, 0, name, 2), Load(4, [Piece(name, 1, -1, 0)], 0.5)])
    found = decoder(StepPlan)(encode(plan))
    assert found.enter == plan.enter and found.transfers == plan.transfers and found.moves == plan.moves
    assert found.proposals == plan.proposals and found.adapters == plan.adapters
    for field in ("rows", "starts", "counts", "wants", "masked", "slack"):
        assert np.array_equal(getattr(found, field), getattr(plan, field)) and getattr(found, field).dtype == np.int32
    assert [edit.shape for edit in found.edits] == [(2, 3), (0, 3)]
    found.rows[0] = 3
    result = StepResult(7, np.array([5], np.int32), np.array([1], np.int32), load_results=[LoadResult(4, False, lost=(name,))])
    again = decoder(StepResult)(encode(result))
    assert again.load_results == result.load_results and again.tokens.tolist() == [5]
    assert decoder(Masks)(encode(Masks(np.full((2, 3), -1, np.int32)))).bits.tolist() == [[-1] * 3] * 2
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(object())
    with pytest.raises(ValueError, match="extension"):
        decoder(Masks)(msgspec.msgpack.encode({"bits": msgspec.msgpack.Ext(9, b"")}))


def test_two_processes_say_what_one_says(two: LLM) -> None:
    with llm() as one:
        wanted = tokens(one)
        drawn = SamplingParams(temperature=0.8, max_tokens=12, seed=3, logprobs=2, ignore_eos=True)
        assert tokens(two) == wanted
        assert tokens(two, drawn) == tokens(one, drawn)
        constrained = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"regex": "[0-9]{6}"})  # type: ignore[arg-type]
        assert tokens(two, constrained) == tokens(one, constrained)
    assert two.info.weight_bytes < 0.6 * one.info.weight_bytes
    seconds = two.stats().rank_seconds
    assert len(seconds) == 2 and min(seconds) > 0.5 * max(seconds) > 0


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), *(pytest.param(*mesh, marks=pytest.mark.exhaustive)
                                                          for mesh in ((1, 3), (2, 2)))])
def test_stages_in_processes_say_what_one_process_says(ranks: int, stages: int) -> None:
    drawn = SamplingParams(temperature=0.8, max_tokens=12, seed=3, logprobs=2, ignore_eos=True)
    constrained = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"regex": "[0-9]{6}"})  # type: ignore[arg-type]
    with llm() as one, llm(tensor_parallel_size=ranks, pipeline_parallel_size=stages, max_num_batched_tokens=16) as several:
        for params in (GREEDY, drawn, constrained):
            assert tokens(several, params) == tokens(one, params)
        assert several.info.weight_bytes < 0.8 * one.info.weight_bytes
    # Masks of several positions: with drafts of the worker, and of tokens that the grammar forces.
    forced = SamplingParams(temperature=0, max_tokens=24, structured_outputs={"regex": "the (red|old) fox (ran|sat) home"})  # type: ignore[arg-type]
    drafting = {"speculate": "ngram", "draft_policy": "fixed"}
    with llm() as one, llm(tensor_parallel_size=ranks, pipeline_parallel_size=stages, **drafting) as several:
        for params in (GREEDY, drawn, constrained, forced):
            assert tokens(several, params) == tokens(one, params)
        assert several.stats().accepted_tokens > 0


def test_pages_come_back_from_every_ranks_tiers(two: LLM) -> None:
    before = tokens(two)
    filler = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    two.generate([f"{i} and " * 120 for i in range(4)], filler, use_tqdm=False)
    assert tokens(two) == before
    assert sum(tier.hit_tokens for tier in two.stats().tiers) > 0, "no page came back"


def test_no_ranks_are_no_engine() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0"):
        llm(tensor_parallel_size=0)


@pytest.mark.exhaustive
def test_what_a_rank_refuses_is_said() -> None:
    before = set(_rank_processes())
    with pytest.raises(ConfigError, match="max_model_len"):
        llm(tensor_parallel_size=2, max_model_len=1 << 20)
    assert not set(_rank_processes()) - before


def _rank_processes() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"penstock.worker.process" in (entry / "cmdline").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in (os.getpid(), 1):
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"context_parallel_size": 2},
    {"model": str(Path(__file__).parents[1] / "assets" / "canary-moe"), "tensor_parallel_size": 2,
     "enable_expert_parallel": True}]
FIRST = 1, signal.SIGKILL
STRIKES = [FIRST, (0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]


@pytest.mark.parametrize(("divided", "which", "how"), [
    pytest.param(one, *strike, marks=[] if one is LAYOUTS[0] and strike is FIRST else [pytest.mark.exhaustive])
    for one in LAYOUTS for strike in STRIKES], ids=str)
def test_a_lost_rank_is_noticed(divided: dict[str, Any], how: signal.Signals, which: int) -> None:
    """Within 5 s, while steps run; nothing is left, and the error says who."""
    model = llm(**divided)
    group = model.engine.rank
    assert isinstance(group, RemoteGroup)
    processes = [rank.process for rank in group.ranks]
    lost: list[float] = []

    def strike() -> None:
        time.sleep(0.5)
        lost.append(time.monotonic())
        os.kill(processes[which].pid, how)

    threading.Thread(target=strike).start()
    with pytest.raises(EngineDeadError, match=r"rank [01] of 2"):
        while True:
            tokens(model, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    assert time.monotonic() - lost[0] < 5.5
    model.close()
    assert all(process.poll() is not None for process in processes)
    assert not Path(group._folder).exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("divided", LAYOUTS, ids=str)
def test_a_slow_rank_changes_no_token(divided: dict[str, Any]) -> None:
    """One that is stopped for less than the limit, again and again."""
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with llm(model=divided.get("model", "canary")) as one, llm(**divided) as several:
        wanted, done = tokens(one, long), threading.Event()
        group = several.engine.rank
        assert isinstance(group, RemoteGroup)

        def slow() -> None:
            for turn in range(1000):
                rank = group.ranks[turn % 2].process.pid
                os.kill(rank, signal.SIGSTOP)
                time.sleep(0.3)
                os.kill(rank, signal.SIGCONT)
                if done.wait(0.1):
                    return

        thread = threading.Thread(target=slow)
        thread.start()
        try:
            assert tokens(several, long) == wanted
        finally:
            done.set()
            thread.join()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Ranks become those of `tests/system/blocked_rank.py`, and a step may take 3 s."""
    def set_up(how: str) -> None:
        command = child.command
        monkeypatch.setattr(remote, "_STUCK", 3.0)
        monkeypatch.setattr(child, "command", lambda module: command(module.replace("penstock.worker.process",
                                                                                    "tests.system.blocked_rank")))
        monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
        monkeypatch.setenv("BLOCKED", how)

    return set_up


def test_ranks_that_wait_for_ever_are_lost(blocked: Callable[[str], None]) -> None:
    """One cannot send, because nobody reads, and says that it lives; the other waits for it."""
    blocked("full")
    model = llm(tensor_parallel_size=2)
    group = model.engine.rank
    assert isinstance(group, RemoteGroup)
    with pytest.raises(EngineDeadError, match=r"rank [01] of 2 has not ended a step for 3 s"):
        while True:
            began = time.monotonic()
            tokens(model)
    assert time.monotonic() - began < 12
    model.close()
    assert all(rank.process is not None and rank.process.poll() is not None for rank in group.ranks)


@pytest.mark.exhaustive
def test_ranks_that_compute_for_long_are_not_lost(blocked: Callable[[str], None]) -> None:
    with llm() as one:
        wanted = tokens(one)
    blocked("5")
    with llm(tensor_parallel_size=2) as model:
        took = []
        while max(took, default=0.0) < 5:
            began = time.monotonic()
            assert tokens(model) == wanted
            took.append(time.monotonic() - began)


def test_an_engine_does_not_wait_for_a_rank_that_stops_reading() -> None:
    """Whatever is sent to it waits in memory, until the rank is lost."""
    with llm(tensor_parallel_size=2) as model:
        group = model.engine.rank
        assert isinstance(group, RemoteGroup) and group.ranks[1].process is not None
        os.kill(group.ranks[1].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(64):
            group.ranks[1].tell("choose", encode(Masks(np.zeros((256, 1024), np.int32))))
        assert time.monotonic() - began < 1
        with pytest.raises(EngineDeadError, match="rank 1 of 2 is stopped"):
            while True:
                group.look(group.ranks[1])
        assert time.monotonic() - began < 5.5


@pytest.mark.exhaustive
def test_an_idle_server_notices_a_lost_rank() -> None:
    with served("canary", "--tensor-parallel-size", "2", "--max-model-len", "512", "--device", "cpu") as server:
        os.kill(_ranks_of(server)[0], signal.SIGKILL)
        assert server.ended(6) == 1
        assert "rank 0 of 2 was killed by SIGKILL" in server.log


def test_a_server_whose_rank_dies_tells_every_request() -> None:
    with served("canary", "--tensor-parallel-size", "2", "--max-model-len", "512", "--device", "cpu") as server:
        answers: list[Any] = []

        def ask() -> None:
            answers.append(server.post("/v1/completions", prompt="Once", max_tokens=400, temperature=0, ignore_eos=True))

        assert server.complete(prompt="Once", max_tokens=4)["usage"]["completion_tokens"] == 4
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill(_ranks_of(server)[1], signal.SIGSTOP)
        began = time.monotonic()
        for thread in threads:
            thread.join(20)
        assert time.monotonic() - began < 6 and len(answers) == 3
        assert any(answer.status_code in (500, 503) for answer in answers)
        assert all(answer.status_code in (200, 500, 503) for answer in answers)
        assert server.ended(20) == 1
        assert "rank 1 of 2" in server.log


def test_a_call_that_a_lost_rank_fails_is_refused_by_name() -> None:
    """With the status of requests whose engine is gone, not as a failure of the server."""
    from penstock.engine.process import Call, Loop

    class Lost:
        def load_adapter(self, folder: str) -> None:
            raise RankLostError(f"rank 1 of 2 was killed by SIGKILL while it read {folder}")

    said: list[Any] = []
    loop = Loop(Lost(), None, said.append)  # type: ignore[arg-type]
    assert not loop._answer(Call("load_adapter", "key", msgspec.Raw(msgspec.msgpack.encode("here"))))
    (refused,) = said
    assert (refused.status, refused.code, refused.key) == (503, "engine_dead", "key")
    assert refused.message == "the engine has stopped: rank 1 of 2 was killed by SIGKILL while it read here"


TWO = ("--tensor-parallel-size", "2")
LOST = [(which, how, flags) for flags in (
    TWO, ("--tensor-parallel-size", "3"), ("--pipeline-parallel-size", "3"), ("--context-parallel-size", "2"),
    (*TWO, "--speculate", "ngram", "--enable-lora"), (*TWO, "--offload-weights", "0.5"),
    (*TWO, "--cache-host-bytes", "4000000"))
    for which in (0, -1) for how in (signal.SIGKILL, signal.SIGSTOP)]


@pytest.mark.parametrize(("which", "how", "flags"), [
    pytest.param(*one, marks=[] if one == LOST[2] else [pytest.mark.exhaustive]) for one in LOST], ids=str)
def test_lost_ranks_are_started_again(which: int, how: signal.Signals, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Requests get their errors, the server stays, refuses while it has no engine, and answers as before. The other ranks stay,
    and do not read their weights again."""
    (tmp_path / "sitecustomize.py").write_text(_OPENED)
    weights = {str(path.resolve()) for path in find(canary.model_folder())}

    def readers() -> list[int]:
        """The process of each opening of a file of weights."""
        lines = [line.split(" ", 1) for line in (tmp_path / "opened").read_text().splitlines()]
        return [int(pid) for pid, path in lines if path in weights]

    flags = (*flags, "--max-model-len", "512", "--device", "cpu", "--dtype", "float32", "--restart", "ranks")
    with served("canary", *flags, environment={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}:{ROOT}",
                                               "OPENED": str(tmp_path / "opened")}) as server:
        before = server.complete(prompt="Once", max_tokens=8, temperature=0)["choices"][0]["text"]
        ranks, engine, opened = _ranks_of(server), server.engine_pid, readers()
        assert set(ranks) <= set(opened)
        lost = ranks[which]
        statuses: list[int] = []
        asking = threading.Thread(target=lambda: statuses.append(
            server.post("/v1/completions", prompt="Once", max_tokens=400, temperature=0, ignore_eos=True).status_code))
        asking.start()
        time.sleep(0.3)
        os.kill(lost, how)
        struck = time.monotonic()
        asking.join(10)
        assert statuses in ([500], [503]) and time.monotonic() - struck < 5.5
        assert server.post("/v1/completions", prompt="Once", max_tokens=4).status_code == 503
        assert server.http.get("/health").status_code == 503
        until = time.monotonic() + 90
        while server.http.get("/health").status_code != 200:
            assert time.monotonic() < until and server.process.poll() is None, server.log
            time.sleep(0.2)
        assert server.complete(prompt="Once", max_tokens=8, temperature=0)["choices"][0]["text"] == before
        after, opened = _ranks_of(server), readers()[len(opened):]
        assert server.engine_pid == engine and len(after) == len(ranks) and set(ranks) - {lost} == set(ranks) & set(after)
        assert set(after) - set(ranks) <= set(opened) and not set(ranks) & set(opened)
        assert ("killed by SIGKILL" if how == signal.SIGKILL else "SIGSTOP") in server.log


@pytest.mark.exhaustive
def test_a_rank_that_is_lost_again_and_again_ends_the_server() -> None:
    flags = ("--tensor-parallel-size", "2", "--max-model-len", "512", "--device", "cpu", "--restart", "ranks")
    with served("canary", *flags) as server:
        # Where no rank can be kept, that is one loss, too.
        for turn, which in enumerate(((0,), (0, 1), (0, 1), (1,))):
            ranks = _ranks_of(server)
            for rank in which:
                os.kill(ranks[rank], signal.SIGKILL)
            until = time.monotonic() + 60
            while server.process.poll() is None and server.http.get("/health").status_code == 200:
                assert time.monotonic() < until
                time.sleep(0.05)
            if turn < 3:
                while server.http.get("/health").status_code != 200:
                    assert time.monotonic() < until, server.log
                    time.sleep(0.1)
        assert server.ended(20) == 1


_OPENED = """
import os, sys

def opened(event, found):
    if event == "open" and isinstance(found[0], (str, bytes)):
        line = f"{os.getpid()} {os.path.realpath(os.fsdecode(found[0]))}\\n"
        os.write(file, line.encode())

file = os.open(os.environ["OPENED"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
sys.addaudithook(opened)
"""
"""Notes which process opens which file."""


def _ranks_of(server: Served) -> list[int]:
    """The rank processes below a server, in the order of their start."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    engines = [pid for pid, parent in parents.items() if parent == server.process.pid]
    return sorted(pid for pid, parent in parents.items() if parent in engines
                  and b"penstock.worker.process" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_states_of_any_retention_are_sent() -> None:
    from penstock.core.rank import Loaded
    from penstock.core.state import Ahead, Chunk, Everything, Field, Snapshot, StateSpec, Window

    page = (Field("s", (2,), "float32", per="page"),)
    states = [StateSpec((Field("k", (2, 4), "float32"),), keep) for keep in (Everything(), Window(5), Chunk(8), Ahead(2))]
    loaded = Loaded([*states, StateSpec(page, Snapshot())], 1, 2, 3, 4, None, "name", [("a", "b")])
    assert decoder(Loaded)(encode(loaded)) == loaded


def _listening(port: int) -> list[str]:
    """The addresses at which a TCP port of this computer is listened to, as the kernel writes them."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and int(line[1].partition(":")[2], 16) == port]


@pytest.mark.parametrize("axis", ["tensor", pytest.param("pipeline", marks=pytest.mark.exhaustive)])
def test_two_machines_serve_one_model(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, with a secret, on the given address alone; a rank of the other machine that is lost is noticed, and both start
    again. That machine has its place from torchrun's environment variables."""
    monkeypatch.setenv("PENSTOCK_SECRET", "a secret of this test")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = (f"--{axis}-parallel-size", "2", "--max-model-len", "512", "--device", "cpu", "--dtype", "float32", "--restart",
             "ranks")
    with llm() as one:
        wanted = tokens(one)[0]
    other = Served("canary", *flags, wait=False, fresh=True, environment={
        "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    try:
        with served("canary", *flags, "--nnodes", "2", "--master-port", str(port), wait=False) as server:
            server.wait_ready(120)

            def answered() -> list[int]:
                found = server.complete(prompt=PROMPTS[0], max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)
                return list(found["choices"][0]["token_ids"])

            assert answered() == wanted
            # Where ranks meet, and both sockets of the rank there.
            assert [_listening(at) for at in (port, port + 3, port + 4)] == [["0100007F"]] * 3
            (rank,) = Path(f"/proc/{other.process.pid}/task/{other.process.pid}/children").read_text().split()
            os.kill(int(rank), signal.SIGSTOP)
            lost = time.monotonic()
            while server.http.get("/health").status_code == 200:
                assert time.monotonic() - lost < 5.5
                time.sleep(0.1)
            os.kill(int(rank), signal.SIGKILL)
            until = time.monotonic() + 120
            while server.http.get("/health").status_code != 200:
                assert time.monotonic() < until and server.process.poll() is None, server.log + other.log
                time.sleep(0.2)
            assert answered() == wanted
            # Both are told to end at the same moment, as pods of one set are.
            long: list[Any] = []
            asking = threading.Thread(target=lambda: long.append(server.complete(
                prompt="Once", max_tokens=120, temperature=0, ignore_eos=True)["usage"]["completion_tokens"]))
            asking.start()
            time.sleep(0.5)
            for process in (other.process, server.process):
                process.send_signal(signal.SIGTERM)
            asking.join(60)
            assert long == [120] and server.ended(30) == 0, server.log
        assert other.ended(20) == 0, other.log
    finally:
        other.stop()


def test_machines_need_a_secret_and_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_SECRET", raising=False)
    with pytest.raises(ConfigError, match="PENSTOCK_SECRET"):
        llm(tensor_parallel_size=2, nnodes=2, master_addr="192.0.2.1")
    with pytest.raises(ConfigError, match="nnodes must divide the 3 ranks"):
        llm(tensor_parallel_size=3, nnodes=2)
    with pytest.raises(ConfigError, match="only machine 0 has the engine"):
        llm(tensor_parallel_size=2, nnodes=2, node_rank=1)
    with pytest.raises(ConfigError, match="possible are 1 to 65531"):
        llm(tensor_parallel_size=2, nnodes=2, master_port=65532)
    monkeypatch.setenv("PENSTOCK_SECRET", "a secret of this test")
    with pytest.raises(ConfigError, match=r"cannot listen: Cannot assign requested address .*192\.0\.2\.1:29502"):
        RemoteGroup(b"", list(places(Place(tensors=2, rendezvous="tcp://192.0.2.1:29501"))), 0)
    # The name of a pod is known some seconds after others have begun to ask for it.
    answers: list[str | None] = [None, "10.0.0.1"]

    def look_up(_: str) -> str:
        found = answers.pop(0)
        if found is None:
            raise OSError("not yet")
        return found

    monkeypatch.setattr(remote, "gethostbyname", look_up)
    named = Place(tensor=1, tensors=2, rendezvous="tcp://pod-0:29501")
    assert remote.address_of(named) == "tcp://10.0.0.1:29504"
    monkeypatch.setattr(remote, "_NAMELESS", 0.0)
    answers.append(None)
    with pytest.raises(ConfigError, match="master_addr is pod-0, which has no address: not yet"):
        remote.address_of(named)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[ray\]'"):
        llm(tensor_parallel_size=2, nnodes=2, distributed_executor_backend="ray")


def test_a_layout_found_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that hold the model together only."""
    size = sum(path.stat().st_size for path in find(canary.model_folder()))
    monkeypatch.setattr(layout, "_memories", lambda: [size] * 2)
    with llm() as one, llm(layout="auto", device="auto") as found:
        assert found.options.tensor_parallel_size == 2
        assert tokens(found) == tokens(one)
    with pytest.raises(ConfigError, match="layout auto decides tensor_parallel_size"):
        llm(layout="auto", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="possible is auto"):
        llm(layout="best")
