"""A server among others: systemd's notifications, logs for machines, and a restart that loses no request."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.data import MODELS, need
from tests.system.served import Served, served

BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 8, "temperature": 0}


def test_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        with served(need(MODELS / "stories260k"), environment={"NOTIFY_SOCKET": str(tmp_path / "notify")},
                    fresh=True) as server:
            ready = manager.recv(1000).decode().splitlines()
            assert ready[0] == "READY=1" and f"MAINPID={server.process.pid}" in ready and server.url in ready[1]
            server.signal()
            assert manager.recv(1000) == b"STOPPING=1" and server.ended() == 0


def test_logs_as_json() -> None:
    with served(need(MODELS / "stories260k"), "--log-format", "json") as server:
        server.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
        server.signal()
        server.ended()
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line.get("request_id") == "mine"]
    assert (line["method"], line["path"], line["status"], line["level"], line["complete"]) == (
        "POST", "/v1/completions", 200, "info", True)
    assert line["output_tokens"] == 8 and line["finish_reasons"] == ["length"]
    assert line["seconds"] > 0 and line["prompt_tokens"] > 0
    assert "Once" not in json.dumps(lines) and "stopped after" in lines[-1]["message"]


def test_a_new_server_takes_over() -> None:
    """Requests go on while the old server is stopped: none is refused, and a running stream comes to its end."""
    folder = need(MODELS / "stories260k")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ("--reuse-port", "--max-model-len", "512")
    stop, statuses = threading.Event(), list[int]()

    def ask() -> None:
        while not stop.is_set():
            # A connection each, as a balancer would make.
            statuses.append(httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, timeout=30).status_code)

    # The last --port counts.
    old = Served(folder, *flags, "--port", port)
    new: Served | None = None
    try:
        asking = threading.Thread(target=ask)
        asking.start()
        new = Served(folder, *flags, "--port", port)
        # One socket listens, with one queue: closing another one would lose what waits in its queue.
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert sum(line[1].endswith(f":{int(port):04X}") and line[3] == "0A" for line in listening) == 1
        with httpx.stream("POST", f"{old.url}/v1/completions", timeout=30, json={
                **BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            before = len(statuses)
            old.signal()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert old.ended() == 0
        while len(statuses) < before + 20:
            assert asking.is_alive()
            stop.wait(0.01)
        stop.set()
        asking.join()
        assert set(statuses) == {200}, statuses
    finally:
        stop.set()
        old.stop()
        if new is not None:
            new.stop()
