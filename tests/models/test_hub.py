"""From what the user wrote to a folder, without a network and with one that says no."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from penstock.checkpoint import resolve_folder
from penstock.core.errors import ModelError


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.mark.usefixtures("no_socket")
def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_folder(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_folder("~/org") == tmp_path / "org"


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "../missing/model", "a/b/c", "~/missing-model", "a model"])
def test_a_missing_folder(model: str) -> None:
    with pytest.raises(ModelError, match=r"there is no folder /.*hub id such as"):
        resolve_folder(model)


@pytest.mark.usefixtures("no_socket")
def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a file"):
        resolve_folder(str(file))


def resolve(model: str, revision: str | None = None, **environment: str) -> str:
    """The result in a fresh process: the folder or the error. huggingface_hub reads its environment once, on import."""
    code = ("import sys; from penstock.checkpoint import resolve_folder; from penstock.core.errors import ModelError\n"
            "try: print(resolve_folder(sys.argv[1], sys.argv[2] or None))\n"
            "except ModelError as error: print('refused:', error)")
    done = subprocess.run([sys.executable, "-c", code, model, revision or ""], capture_output=True, text=True, check=True,
                          env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", **environment})
    return done.stdout.strip()


def test_offline(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--cached"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    assert resolve("org/cached", **offline) == str(snapshot)
    missing = resolve("org/missing", "v2", **offline)
    assert missing.startswith("refused: there is no folder")
    for word in ("HF_HUB_OFFLINE is set", "org/missing at revision v2", str(tmp_path), "hf download org/missing"):
        assert word in missing


class NotFound(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_hub_that_does_not_have_it(hub: str, tmp_path: Path) -> None:
    answer = resolve("org/typo", HF_ENDPOINT=hub, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="0", NO_PROXY="127.0.0.1")
    assert answer.startswith("refused: there is no folder")
    assert "the hub does not give org/typo" in answer
    assert "HF_TOKEN" in answer


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
    answer = resolve("org/name", HF_ENDPOINT=closed, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="0", NO_PROXY="127.0.0.1")
    assert answer.startswith("refused: there is no folder")
    assert "Check the network" in answer
