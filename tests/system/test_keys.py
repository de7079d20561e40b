"""Keys from a file: made, listed and revoked while a server runs, and a sweep of every route without one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from penstock.server import keys
from tests.system.served import NAME, PLAIN, Served, served

HEALTH = {"/health", "/ready", "/ping"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.jsonl"


def add(file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["keys", "add", str(file), *flags]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def admin(file: Path) -> str:
    secret, key = keys.make("ops", "admin")
    keys.write(file, [key])
    return secret


@pytest.fixture(scope="module")
def server(file: Path, admin: str) -> Iterator[Served]:
    with served("canary", "--max-model-len", "512", "--keys-file", str(file)) as server:
        server.http.headers["authorization"] = f"Bearer {admin}"
        yield server


def ask(server: Served, secret: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    body = {"prompt": "Hi", "max_tokens": 2, **body} if path == "/v1/completions" else body
    return httpx.post(server.url + path, json=body, timeout=60, verify=PLAIN,
                      headers={"authorization": f"Bearer {secret}"} if secret else {})


def until(status: int, send: Any, seconds: float = 5.0) -> httpx.Response:
    """The answer once it has this status: a server looks at its file once a second."""
    end = time.monotonic() + seconds
    while (found := send()).status_code != status:
        assert time.monotonic() < end, found.text
        time.sleep(0.1)
    return found


def test_every_route_needs_a_key(server: Served) -> None:
    document = server.http.get("/openapi.json").json()
    assert len(document["paths"]) > 50
    swept = [(method, path) for path, methods in document["paths"].items() for method in methods]
    for method, path in [*swept, ("get", "/docs"), ("get", "/openapi.json"), ("get", "/nowhere"), ("post", "/v1/nothing")]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = httpx.request(method, server.url + re.sub(r"{\w+}", "x", path), headers=headers, verify=PLAIN,
                                   **({"json": {}} if method == "post" else {}))
            if path in HEALTH:
                assert answer.status_code == 200, path
            else:
                assert answer.status_code == 401, (method, path, answer.text)
                assert "key" in json.dumps(answer.json()["error"])
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            assert ("security" in described) == (path not in HEALTH), (method, path)


def test_keys_come_and_go_while_the_server_runs(server: Served, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = add(file, capsys, "--tenant", "team", "--note", "for tests")
    assert secret not in file.read_text() and file.stat().st_mode & 0o077 == 0
    until(200, lambda: ask(server, secret))
    assert main(["keys", "ls", str(file)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "tenant=team" in line]
    name = line.split()[0]
    assert "note=for tests" in line
    assert main(["keys", "revoke", str(file), name]) == 0
    refused = until(401, lambda: ask(server, secret))
    assert name in refused.json()["error"]["message"] and "revoked" in refused.json()["error"]["message"]
    assert main(["keys", "revoke", str(file), "key_none"]) == 1
    short = add(file, capsys, "--expires", "2s")
    until(200, lambda: ask(server, short))
    assert "expired" in until(401, lambda: ask(server, short)).json()["error"]["message"]


def test_a_slip_of_the_pen_locks_nobody_out(server: Served, file: Path, admin: str) -> None:
    good = file.read_bytes()
    file.write_bytes(good + b"{oops\n")
    end = time.monotonic() + 5
    while "the keys read before stay in force" not in server.log:
        assert ask(server, admin).status_code == 200 and time.monotonic() < end, server.log
        time.sleep(0.1)
    file.unlink()
    time.sleep(1.5)
    assert ask(server, admin).status_code == 200
    file.write_bytes(good)


def test_classes(server: Served, file: Path, admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    user, background = add(file, capsys), add(file, capsys, "--class", "background")
    until(200, lambda: ask(server, background))
    assert ask(server, user, "/reset_prefix_cache").status_code == 403
    assert ask(server, admin, "/reset_prefix_cache").status_code == 200
    assert ask(server, user, "/start_profile").status_code == 403
    assert ask(server, user, priority=-1).status_code == 403 and ask(server, admin, priority=-1).status_code == 200
    assert ask(server, background, priority=-5).status_code == 200, "it is served last whatever it asks"


def test_limits(server: Served, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = add(file, capsys, "--requests-per-minute", "3")
    until(200, lambda: ask(server, slow))
    found = [ask(server, slow).status_code for _ in range(4)]
    assert found.count(429) >= 1 and 200 in found
    small = add(file, capsys, "--max-tokens", "60")
    until(200, lambda: ask(server, small))
    both = {"prompt": ["one two three " * 10] * 8, "max_tokens": 400, "ignore_eos": True, "n": 16}
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {small}"}, timeout=60) as client, \
            client.stream("POST", "/v1/completions", json={**both, "stream": True}) as running:
        # A generator that nobody holds would close the stream.
        lines = running.iter_lines()
        next(lines)
        again = ask(server, small, **both)
    assert again.status_code == 429 and "at most 60" in again.json()["error"]["message"]


def test_tenants_share_objects_and_not_with_others(server: Served, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = (add(file, capsys, "--tenant", tenant) for tenant in ("red", "red", "blue"))
    until(200, lambda: ask(server, other))
    made = ask(server, one, "/v1/responses", input="Repeat: dog", model=NAME, max_output_tokens=4).json()["id"]

    def read(secret: str) -> int:
        return httpx.get(f"{server.url}/v1/responses/{made}", headers={"authorization": f"Bearer {secret}"}).status_code

    assert (read(one), read(two), read(other)) == (200, 200, 404)


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert main(["keys", "ls", str(path)]) == 1
    path.write_text('{"id": "a"}\n')
    assert main(["keys", "ls", str(path)]) == 1 and main(["keys", "add", str(path)]) == 1
    assert "line 1" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="line 1 of"):
        Served("canary", "--keys-file", str(path))
