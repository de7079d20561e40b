"""The commands of docs/first-hour.md, run as they stand there; a served model here stands for those of the hub."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.served import NAME, ROOT, served

PAGE = (ROOT / "docs/first-hour.md").read_text()
FIRST, CHAT, OWN, BATCH = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)


def run(command: str, folder: Path, **known: str) -> str:
    """What a command prints; names that the page leaves open are filled in."""
    for name, value in known.items():
        command = re.sub(rf"{name}[-_]\.\.\.", value, command)
    command = command.replace(".venv/bin/penstock", f"{sys.executable} -m penstock")
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def commands(block: str) -> list[str]:
    return re.split(r"\n(?=\S)", block.strip())


def test_the_commands_of_the_first_hour(tmp_path: Path) -> None:
    assert [line.split("#")[0].strip() for line in commands(FIRST)] == ["make setup", "make serve"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in ("setup", "serve"))
    with served("canary", fresh=True) as server:
        assert "dog cat" in run(CHAT.replace("localhost:8000", server.url), tmp_path)
    pull, keys, serve = commands(OWN)
    assert "pull Qwen/Qwen3-0.6B --alias qwen" in pull and "--alias" in run(".venv/bin/penstock pull --help", tmp_path)
    key = run(keys.split("  #")[0], tmp_path).split()[-1]
    assert key.startswith("pk-")
    flags = serve.split(" serve qwen ")[1].split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with served("canary", *(str(tmp_path / flag) if not flag.startswith("-") else flag for flag in flags)) as server:
            answers: dict[str, str] = {"pk": key}
            for command in commands(BATCH.replace("localhost:8000", server.url)):
                until = time.monotonic() + 30
                while True:
                    said = run(command, tmp_path, **answers)
                    answers |= {name: found[0] for name in ("file", "batch") if (
                        found := re.search(rf"{name}[-_][0-9a-f]{{8,}}", said))}
                    waits = any(f'"status":"{state}"' in said for state in ("validating", "in_progress", "finalizing"))
                    if not waits or "-d" in command:
                        break
                    assert time.monotonic() < until, said
                    time.sleep(0.1)
            assert '"status":"completed"' in said and '"failed":0' in said, said
            assert server.http.get("/").status_code == 200 and NAME not in key
            figures = run(f"curl -s {server.url}/metrics -H 'Authorization: Bearer {key}'", tmp_path)
            assert "vllm:request_success_total" in figures
    assert (ROOT / "deploy/grafana/penstock.json").exists()
