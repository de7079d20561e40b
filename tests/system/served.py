"""A server in a process of its own, as a user starts it, and what tests ask of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.system import forked

forked.begin()
ROOT = Path(__file__).resolve().parents[2]

TEMPLATE = ("{% for message in messages %}{{ message['content'] }}{% endfor %}"
            "{% if tools %} {{ tools[0]['function']['name'] }}{% endif %}{% if add_generation_prompt %} Then{% endif %}")
"""A chat template for models that were trained on stories and have none."""

NAME = "stories"

PATIENT = {"x-penstock-wait": "true"}
"""For crowds whose answers are checked: on a busy machine some of them may have to wait for more than their class promises."""

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of servers without TLS: reading the machine's certificates takes each client 57 ms."""


class Served:
    """A started server. `log` is all that it has printed. `more` are further models. `fresh`: by exec, as a user starts it,
    in place of a fork (forked.py)."""

    def __init__(self, model: Path | str, *flags: str, engine: str | None = None, wait: bool = True, more: tuple[str, ...] = (),
                 environment: dict[str, str] | None = None, fresh: bool = False) -> None:
        head = ["-m", "tests.system.launch", engine] if engine else ["-m", "penstock.cli.main", "serve"]
        self._file = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *head, str(model), *more, "--port", "0", "--served-model-name", NAME, *flags], cwd=ROOT,
            stdout=self._file, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}/src:{ROOT}", **(environment or {}),
                 **({forked.BY_EXEC: "1"} if fresh else {})})
        self.url = ""
        if wait:
            self.wait_ready()

    @property
    def log(self) -> str:
        return Path(self._file.name).read_text()

    def wait_ready(self, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = re.search(r"ready at (http://\S+)", self.log)
            if found:
                self.url = found[1]
                self.http = httpx.Client(base_url=self.url, timeout=60.0, verify=PLAIN)
                return
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready after {seconds} s:\n{self.log}")

    @property
    def engine_pid(self) -> int:
        """The engine process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(next(pid for pid in children if b"penstock.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()))

    def resident(self) -> int:
        """Bytes of memory of the server and its engine together."""
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (self.process.pid, self.engine_pid)) * 4096

    def metrics(self) -> dict[str, float]:
        """Samples by name, with the labels that tell them apart: 'vllm:request_success_total{stop}'."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            match = re.fullmatch(r'([a-z0-9_:]+)(?:\{(.*)\})? (\S+)', line)
            if match and "le=" not in (match[2] or ""):
                label = re.search(r'finished_reason="(\w+)"', match[2] or "")
                found[match[1] + (f"{{{label[1]}}}" if label else "")] = float(match[3])
        return found

    def settle(self, seconds: float = 10.0) -> dict[str, float]:
        """The metrics once nothing runs or waits any more."""
        until = time.monotonic() + seconds
        while True:
            found = self.metrics()
            if not (found["vllm:num_requests_running"] or found["vllm:num_requests_waiting"] or found["penstock:requests_live"]
                    or found["penstock:plans_in_flight"]):
                return found
            assert time.monotonic() < until, f"something runs on: {found}"
            time.sleep(0.05)

    def reconnect(self) -> None:
        """A new connection for `http`."""
        self.http.close()
        self.http = httpx.Client(base_url=self.url, timeout=60.0, verify=PLAIN)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = 15.0) -> int:
        """The exit status."""
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.url:
            self.http.close()
        self._file.close()


@contextlib.contextmanager
def served(model: Path | str, *flags: str, **options: Any) -> Iterator[Served]:
    """A server for the length of a block."""
    server = Served(model, *flags, **options)
    try:
        yield server
    finally:
        server.stop()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object of a refusal, whose shape is checked."""
    body = answer.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"], error
    assert isinstance(error["type"], str), error
    return error
