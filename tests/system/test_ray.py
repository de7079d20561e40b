"""Ranks on other nodes of a Ray cluster: a real one, of several node processes on this machine. Needs the extra `ray`."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from tests.system.served import served
from tests.system.test_processes import PROMPTS, llm, tokens

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.exhaustive, pytest.mark.serial]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("PENSTOCK_SECRET", raising=False)
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    for _ in range(2):
        found.add_node(num_cpus=1, object_store_memory=80 << 20)
    found.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    found.shutdown()


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        found.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def raylets(cluster: Any) -> dict[int, Any]:
    return {node.all_processes["raylet"][0].process.pid: node for node in cluster.list_all_nodes()}


def placed(cluster: Any) -> tuple[int, Any]:
    """The rank that runs below a node's raylet, and that node."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and "penstock.worker.process" in _command(entry):
            for pid in ancestors(int(entry.name)):
                if pid in raylets(cluster):
                    return int(entry.name), raylets(cluster)[pid]
    raise AssertionError("no rank runs on a node")


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text()
    except OSError:
        return ""


def test_ranks_on_a_cluster_and_on_another_node_when_theirs_is_lost(cluster: Any) -> None:
    with llm() as one:
        wanted = tokens(one)[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with served("canary", "--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", str(port), "--max-model-len", "512",
                "--device", "cpu", "--dtype", "float32", "--restart", "ranks", "--distributed-executor-backend", "ray",
                wait=False, fresh=True) as server:
        server.wait_ready(180)

        def answered() -> list[int]:
            found = server.complete(prompt=PROMPTS[0], max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)
            return list(found["choices"][0]["token_ids"])

        def again() -> None:
            lost = time.monotonic()
            while server.http.get("/health").status_code == 200:
                assert time.monotonic() - lost < 10
                time.sleep(0.1)
            while server.http.get("/health").status_code != 200:
                assert time.monotonic() - lost < 180 and server.process.poll() is None, server.log
                time.sleep(0.2)
            assert answered() == wanted

        assert answered() == wanted
        rank, _ = placed(cluster)
        os.kill(rank, signal.SIGKILL)
        again()
        rank, node = placed(cluster)
        cluster.remove_node(node, allow_graceful=False)
        os.kill(rank, signal.SIGKILL)  # the node's machine, with all that runs there
        again()
        assert placed(cluster)[1] is not node


def test_too_few_nodes(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine import raycluster

    monkeypatch.setattr(raycluster, "_NODE_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="nnodes is 4, but Ray's cluster has 2 other nodes"):
        llm(tensor_parallel_size=4, nnodes=4, distributed_executor_backend="ray")
    ray.shutdown()
