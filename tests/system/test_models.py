"""Several models in one server, sleeping, new weights, and the commands for models at hand."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import canary
from penstock.cli.main import main
from penstock.core.errors import ModelError
from tests.system.served import ROOT, Served, error_of, served

ASSETS = ROOT / "tests/assets"
SMALL = ("--kv-cache-memory-bytes", "20M", "--max-num-seqs", "8")


def states(server: Served) -> dict[str, str]:
    return {one["id"]: one["state"] for one in server.http.get("/models").json()["data"]}


def say(server: Served, model: str | None, **more: Any) -> httpx.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Repeat: dog cat"}], "temperature": 0, "max_tokens": 8}
    return server.post("/v1/chat/completions", **body, **({"model": model} if model else {}), **more)


def until(server: Served, model: str, state: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while states(server)[model] != state:
        assert time.monotonic() < end, states(server)
        time.sleep(0.05)


def test_models_are_loaded_when_asked_for_and_make_room() -> None:
    with served("canary", "--max-loaded-models", "2", *SMALL,
                more=(f"window={ASSETS / 'canary-window'}", f"moe={ASSETS / 'canary-moe'}")) as server:
        assert states(server) == {"canary": "unloaded", "window": "unloaded", "moe": "unloaded"}
        assert server.http.get("/ready").status_code == 200 and server.http.get("/ready?model=moe").status_code == 503
        assert error_of(server.http.get("/server_info?model=moe"))["message"] == "the model is not loaded"
        assert [one["id"] for one in server.http.get("/v1/models").json()["data"]] == ["canary", "window", "moe"]
        assert say(server, "canary").json()["choices"][0]["message"]["content"] == "dog cat"
        assert say(server, "window").json()["model"] == "window"
        assert states(server) == {"canary": "ready", "window": "ready", "moe": "unloaded"}
        assert server.http.get("/ready?model=window").status_code == 200
        say(server, "canary")
        # The least recently used goes.
        assert say(server, "moe").status_code == 200
        assert states(server) == {"canary": "ready", "window": "unloaded", "moe": "ready"}
        metrics = server.http.get("/metrics").text
        assert 'vllm:generation_tokens_total{engine="0",model_name="moe"}' in metrics
        assert 'vllm:generation_tokens_total{engine="0",model_name="canary"}' in metrics
        assert metrics.count("# TYPE vllm:generation_tokens_total") == 1
        assert server.http.get("/server_info?model=moe").json()["model_path"].endswith("canary-moe")
        assert [one["name"] for one in server.http.get("/api/ps").json()["models"]] == ["canary", "moe"]
        assert error_of(say(server, "nobody"))["code"] == "model_not_found"
        # A busy model is not unloaded for another.
        long = {"model": "canary", "prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=long) as one:
            next(one.iter_lines())
            assert httpx.post(server.url + "/v1/completions", json={"model": "window", "prompt": "a", "max_tokens": 1},
                              timeout=60).status_code == 200
            assert states(server) == {"canary": "ready", "window": "ready", "moe": "unloaded"}
        # Ollama's keep_alive, and the commands.
        assert server.http.post("/api/generate", json={"model": "window:latest", "prompt": "", "keep_alive": 0}).json()[
            "done_reason"] == "unload"
        until(server, "window", "unloaded")
        assert main(["stop", "canary", "--url", server.url]) == 0
        assert states(server)["canary"] == "unloaded"
        assert server.post("/models/load", model="canary").status_code == 200 and states(server)["canary"] == "ready"


def test_a_client_that_leaves_does_not_break_the_load_that_it_began() -> None:
    with served("canary", *SMALL, more=(f"window={ASSETS / 'canary-window'}",)) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={"model": "window", "prompt": "a", "max_tokens": 1}, timeout=0.05)
        assert states(server)["window"] == "loading"
        until(server, "window", "ready")
        assert say(server, "window").status_code == 200


def test_the_commands_show_a_servers_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(ASSETS / "canary-window")
    with served(tmp_path, "--pin", "two", "--keep-alive", "0.2", *SMALL) as server:
        assert states(server) == {"one": "unloaded", "two": "ready"}
        say(server, "one")
        until(server, "one", "unloaded")
        assert states(server)["two"] == "ready"
        capsys.readouterr()
        assert main(["ps", "--url", server.url]) == 0
        lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
        assert lines == [["model", "state"], ["one", "unloaded"], ["two", "ready"]]
        assert main(["stop", "three", "--url", server.url]) == 1
        assert "'three' is not served here" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_versions_share_a_name() -> None:
    with served("chat=canary%3", *SMALL, more=(f"chat={ASSETS / 'canary-window'}%1",)) as server:
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "chat"
        for name in ("chat@1", "chat@2"):
            assert say(server, name).status_code == 200
        for _ in range(40):
            say(server, "chat")
        first, second = server.http.get("/models").json()["data"]
        assert first["path"] == "canary" and second["path"].endswith("canary-window")
        samples = [line.rpartition(" ") for line in server.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        assert len({name for name, _, _ in samples}) == len(samples), "a metric's labels name one sample"
        counts = [float(value) for name, _, value in samples if name.startswith("vllm:prompt_tokens_total")]
        assert len(counts) == 2 and min(counts) > 0
        assert (first["id"], second["id"]) == ("chat@1", "chat@2")
        assert main(["stop", "chat@2", "--url", server.url]) == 0
        assert states(server) == {"chat@1": "ready", "chat@2": "unloaded"}
        for number in ("3", "0", "\u00b2", "9" * 4000, "01", ""):
            assert error_of(say(server, f"chat@{number}"))["code"] == "model_not_found", number
        assert server.http.get("/ready", params={"model": "chat@" + "9" * 5000}).status_code == 404


def test_a_model_sleeps_wakes_and_gets_new_weights() -> None:
    with served("canary", *SMALL) as server:
        before = say(server, None).json()["choices"][0]["message"]["content"]
        pid = server.engine_pid
        assert server.http.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert not Path(f"/proc/{pid}").exists() and server.http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert 'engine_sleep_state{engine="0",model_name="stories",sleep_state="awake"} 0.0' in server.http.get("/metrics").text
        assert say(server, None).status_code == 503 and "sleeps" in error_of(say(server, None))["message"]
        assert server.http.get("/ready").status_code == 503
        assert 'sleep_state="weights_offloaded"} 1.0' in server.http.get("/metrics").text
        assert error_of(server.http.post("/wake_up?tags=head"))["param"] == "tags"
        # A part alone leaves it asleep; the other one wakes it.
        assert server.http.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
        assert say(server, None).status_code == 503
        assert server.http.post("/wake_up?tags=kv_cache").json() == {"is_sleeping": False}
        assert 'engine_sleep_state{engine="0",model_name="stories",sleep_state="awake"} 1.0' in server.http.get("/metrics").text
        assert say(server, None).json()["choices"][0]["message"]["content"] == before
        # A running stream keeps the old weights, a new request has the new ones.
        other = canary.model_folder()
        assert error_of(server.post("/update_weights_from_disk", model_path="/nowhere"))["code"] == "loading_failed"
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 600, "stream": True,
                                                                 "ignore_eos": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            answer = httpx.post(server.url + "/update_weights_from_disk", json={"model_path": str(ASSETS / "canary-window")},
                                timeout=60)
            assert answer.status_code == 200, answer.text
            assert httpx.get(server.url + "/server_info").json()["model_path"].endswith("canary-window")
            assert sum(line.startswith("data: {") for line in lines) > 0 and list(lines) == []
        assert server.post("/update_weights_from_disk", model_path=str(other)).status_code == 200
        assert say(server, None).json()["choices"][0]["message"]["content"] == before


def test_ollama_needs_no_content_type_but_refuses_other_sites(server: Served) -> None:
    body = json.dumps({"model": "stories", "prompt": "Repeat: dog", "stream": False}).encode()
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        assert server.http.post("/api/generate", content=body, headers=kind).status_code == 200
        for evil in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            assert server.http.post("/api/generate", content=body, headers={**kind, **evil}).status_code in (403, 415)
    assert server.http.post("/v1/completions", content=body, headers={"content-type": "text/plain"}).status_code == 415


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("canary", *SMALL) as one:
        yield one


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: the list of files, their headers, and ranges of them."""

    files: dict[str, bytes] = {}
    ranges: list[str] = []
    commit = "0" * 40

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            if "/tree/" in path:
                self._answer(json.dumps([{"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                                         for name, data in self.files.items()]).encode(), "application/json")
                return
            self._answer(json.dumps({"id": "tiny/canary", "sha": self.commit, "siblings": [
                {"rfilename": name} for name in self.files]}).encode(), "application/json")
            return
        data = self.files.get(path.rpartition("/")[2])
        if data is None:
            self.send_error(404)
            return
        self._answer(data, "application/octet-stream")

    def _answer(self, data: bytes, kind: str) -> None:
        wanted = self.headers.get("Range", "")
        start = int(wanted[6:].partition("-")[0]) if wanted.startswith("bytes=") else 0
        if start:
            type(self).ranges.append(wanted)
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", kind)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start:])

    def log_message(self, *_: Any) -> None:
        pass


def test_models_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub import constants

    Hub.files = {file.name: file.read_bytes() for file in canary.model_folder().iterdir() if file.is_file()}
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{hub.server_port}"
    for name, value in {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
                        "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("PENSTOCK_ALIASES", str(tmp_path / "aliases.json"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    try:
        # Half of the weights are there from an earlier try.
        weights = Hub.files["model.safetensors"]
        blobs = tmp_path / "hub/models--tiny--canary/blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{hashlib.sha256(weights).hexdigest()}.part").write_bytes(weights[:len(weights) // 2])
        assert main(["pull", "tiny/canary", "--alias", "tiny"]) == 0
        assert Hub.ranges == [f"bytes={len(weights) // 2}-"], Hub.ranges
    finally:
        hub.shutdown()
    capsys.readouterr()
    assert main(["ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"][0]["id"] == "tiny/canary" and found["aliases"] == {"tiny": "tiny/canary"}
    assert main(["ls"]) == 0 and "tiny/canary" in capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["show", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "tiny"
    assert main(["rm", "tiny"]) == 0 and main(["rm", "tiny/canary"]) == 0
    assert "deleted tiny/canary" in capsys.readouterr().out
    assert main(["rm", "tiny"]) == 1 and "there is no model 'tiny'" in capsys.readouterr().err
    assert main(["ls"]) == 0 and "no models yet; penstock pull" in capsys.readouterr().err
    (tmp_path / "aliases.json").write_text("[]")
    with pytest.raises(ModelError, match="must be a JSON object"):
        from penstock.checkpoint.hub import read_aliases

        read_aliases()


def test_adapters_of_a_folder_belong_to_the_model_that_they_name(tmp_path: Path) -> None:
    for name, base in (("pirate", "canary"), ("telegram", "hub/twin"), ("lost", "nobody")):
        shutil.copytree(ASSETS / f"canary-{'telegram' if name == 'telegram' else 'pirate'}", tmp_path / name)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/adapter_config.json").write_text('{"base_model_name_or_path": "canary"}')
    (tmp_path / "broken/adapter_model.safetensors").write_text("nothing")
    with served("canary", "--max-loaded-models", "1", "--enable-lora", "--lora-dir", str(tmp_path), *SMALL,
                more=(f"twin={canary.model_folder()}",)) as server:
        assert states(server) == {"canary": "unloaded", "twin": "unloaded"}
        # The adapter's name loads its model, and the adapter is there with it.
        answer = say(server, "pirate")
        assert answer.status_code == 200 and answer.json()["model"] == "pirate"
        assert states(server) == {"canary": "ready", "twin": "unloaded"}
        listed = {one["id"]: one.get("parent") for one in server.http.get("/v1/models").json()["data"]}
        assert listed["pirate"] == "canary" and "lost" not in listed
        assert say(server, "lost").status_code == 404 and say(server, "broken").status_code == 404
        assert say(server, "telegram").status_code == 200
        assert states(server) == {"canary": "unloaded", "twin": "ready"}
        assert say(server, "pirate").status_code == 200, "its model came back with it"


@pytest.mark.exhaustive
def test_a_batch_of_several_models_loads_each_once(tmp_path: Path) -> None:
    """Lines that take turns in the file do not take turns in memory."""
    lines = [{"custom_id": str(place), "method": "POST", "url": "/v1/completions", "body": {
        "model": ("canary", "canary-window")[place % 2], "prompt": "Once", "max_tokens": 2}} for place in range(12)]
    with served("canary", "--max-loaded-models", "1", "--store", str(tmp_path / "store"), *SMALL,
                more=(f"canary-window={ASSETS / 'canary-window'}",)) as server:
        file = server.http.post("/v1/files", files={"file": ("in.jsonl", "\n".join(map(json.dumps, lines)))},
                                data={"purpose": "batch"}).json()["id"]
        batch = server.post("/v1/batches", input_file_id=file, endpoint="/v1/completions", completion_window="24h").json()["id"]
        end = time.monotonic() + 90
        while (found := server.http.get(f"/v1/batches/{batch}").json())["status"] != "completed":
            assert time.monotonic() < end, found
            time.sleep(0.2)
        assert found["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        assert server.log.count(" loaded canary") == 2
