"""Programs that others wrote: langchain's standard tests, instructor, pydantic-ai and litellm, and the official SDKs of
Anthropic, Ollama and Cohere, where they are installed (docs/tools.md says which versions were tried), OpenAI's client for
JavaScript, and the calls of Open WebUI and Continue. Structured answers and calls are constrained, so that canary's cannot be
malformed, whatever they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.system.served import NAME, Served

pytestmark = pytest.mark.xdist_group("canary")

PYTHON = os.environ.get("PENSTOCK_TEST_CLIENTS", sys.executable)
"""An interpreter that has the clients; by default this one."""
# Or a folder that `pip install --target` filled: PENSTOCK_TEST_CLIENTS_PATH.
HERE = Path(__file__).parent / "clients"


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Served:
    return shared("canary", "--max-model-len", "4096")


@pytest.mark.parametrize(("module", "program"), [
    ("langchain_tests", "langchain_standard.py"), ("instructor", "instructor_models.py"), ("pydantic_ai", "pydantic_agents.py"),
    ("litellm", "litellm_calls.py"), ("anthropic", "anthropic_calls.py"), ("ollama", "ollama_calls.py"),
    ("cohere", "cohere_calls.py"), ("llama_index.llms.openai_like", "llama_index_calls.py")])
def test_client(server: Served, module: str, program: str) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none", "PENSTOCK_MODEL": NAME,
                   "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": os.environ.get("PENSTOCK_TEST_CLIENTS_PATH", "")}
    if subprocess.run([PYTHON, "-c", f"import {module}"], env=environment, capture_output=True, check=False).returncode:
        pytest.skip(f"{module} is not installed")
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir",
                           str(HERE), str(HERE / program)], env=environment, capture_output=True, text=True, timeout=400,
                          check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.exhaustive
def test_openai_for_javascript(server: Served, tmp_path: Path) -> None:
    """Installs the client with npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    (tmp_path / "package.json").write_text("{}")
    install = ["npm", "install", "--no-audit", "--no-fund", f"openai@{os.environ.get('PENSTOCK_TEST_OPENAI_JS', '7.57.0')}"]
    if subprocess.run(install, cwd=tmp_path, capture_output=True, timeout=200, check=False).returncode:
        pytest.skip("npm reaches no registry that has the client")
    shutil.copy(HERE / "openai_js.mjs", tmp_path)
    environment = {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "PENSTOCK_MODEL": NAME}
    done = subprocess.run(["node", "openai_js.mjs"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0 and done.stdout.count("passed ") == 11, done.stdout + done.stderr


CALLS: list[dict[str, Any]] = json.loads((HERE / "recorded.json").read_text())
"""Requests as Open WebUI and Continue write them: fields, headers and routes, and a path into the answer that they read."""


@pytest.mark.parametrize("call", CALLS, ids=[call["client"] for call in CALLS])
def test_calls_as_recorded(server: Served, call: dict[str, Any]) -> None:
    body = json.loads(json.dumps(call.get("body")).replace('"MODEL"', f'"{NAME}"'))
    answer = server.http.request(call["method"], call["path"], headers=call["headers"], json=body)
    assert answer.status_code == 200, answer.text
    if call["kind"] == "sse":
        *events, last = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
        assert last == "[DONE]"
        found = json.loads(events[0])
    elif call["kind"] == "ndjson":
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[-1]["done"] and lines[-1]["eval_count"]
        found = lines[0]
    else:
        found = answer.json()
    reduce(lambda value, step: value[step], call["has"], found)
