"""The calls of docs/endpoints.md, run as they stand there: every route has one, and answers have the fields that are shown."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from penstock.server.ollama.dialect import MANAGED
from tests.system.served import NAME, ROOT, served

PAGE = (ROOT / "docs/endpoints.md").read_text()
START, SHELL, *BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)


def calls() -> list[tuple[str, str]]:
    """(command, the answer shown behind it), in their order."""
    found: list[tuple[str, str]] = []
    for line in "".join(BLOCKS).splitlines():
        if line.startswith("# "):
            found[-1] = (found[-1][0], line.removeprefix("# "))
        elif line.startswith("  "):
            found[-1] = (found[-1][0] + "\n" + line, "")
        else:
            found.append((line, ""))
    return found


def route(command: str) -> tuple[str, str]:
    """(method, path) of a command's call, with shell variables left in the path."""
    address = re.search(r"\$URL(/\S*?)(?=[ )|]|$)", command, re.M)
    assert address is not None, command
    method = re.search(r"-X (\w+)", command)
    return (method[1] if method else "POST" if re.search(r" -[dF] ", command) else "GET").lower(), address[1]


def test_every_route_has_a_call(tmp_path: Path) -> None:
    asked = {route(command) for command, _ in calls() if "$URL" in command}
    refused = {(method.lower(), path) for path, method in MANAGED.items() if f"`{path}`" in PAGE}
    with served("canary", "--enable-lora", "--torch-profiler-dir", str(tmp_path)) as server:
        document = server.http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        pattern = re.compile(re.sub(r"\\{\w+\\}", r"(\\$\\w+|canary)", re.escape(path)))
        for method in methods:
            assert (method, path) in refused or any(method == one and pattern.fullmatch(place) for one, place in asked), (
                f"docs/endpoints.md has no call of {method.upper()} {path}")


def test_the_calls(tmp_path: Path) -> None:
    """Each answers with its status and every field that is shown of it."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    flags = START.partition("#")[0].replace("traces", str(tmp_path / "traces")).split()[3:]
    with served("canary", "--served-model-name", "canary", *flags) as server:
        written = ["set -o pipefail", SHELL.replace("http://localhost:8000", server.url),
                   "curl() { command curl -sS -w '\\n@status %{http_code}\\n' \"$@\"; }"]
        for place, (command, _) in enumerate(calls()):
            written += [f"echo '@call {place}'", command]
        done = subprocess.run(["bash", "-c", "\n".join(written)], cwd=tmp_path, capture_output=True, text=True, check=False,
                              timeout=240)
    said = dict(re.findall(r"^@call (\d+)\n(.*?)(?=^@call|\Z)", done.stdout, re.M | re.S))
    assert len(said) == len(calls()), done.stderr[-2000:]
    for place, (command, shown) in enumerate(calls()):
        if not shown:
            continue
        # The fixture's server has another name before this one.
        answer = said[str(place)].replace(NAME, "canary")
        status = re.match(r"[0-9]{3}(?= )", shown)
        if "|" not in command:
            assert f"@status {status[0] if status else 200}\n" in answer, (command, answer, done.stderr[-500:])
        for name in re.findall(r'"(\w+)":', shown):
            assert f'"{name}":' in answer, (command, name, answer[:2000])
        for text in re.findall(r'"\w+":("[^".]+"|true|false|[0-9]+)(?=[,}])', shown):
            assert text in answer, (command, text, answer[:2000])

