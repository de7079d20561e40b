"""Programs that others wrote: langchain's standard tests, instructor, pydantic-ai and litellm, and the official SDKs of
Anthropic, Ollama and Cohere, where they are installed (docs/tools.md says which versions were tried). Structured answers and
calls are constrained, so that canary's cannot be malformed, whatever they say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.served import NAME, Served, served

PYTHON = os.environ.get("PENSTOCK_TEST_CLIENTS", sys.executable)
"""An interpreter that has the clients; by default this one."""
# Or a folder that `pip install --target` filled: PENSTOCK_TEST_CLIENTS_PATH.
HERE = Path(__file__).parent / "clients"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("canary", "--max-model-len", "4096", "--max-num-seqs", "8") as found:
        yield found


@pytest.mark.parametrize(("module", "program"), [
    ("langchain_tests", "langchain_standard.py"), ("instructor", "instructor_models.py"), ("pydantic_ai", "pydantic_agents.py"),
    ("litellm", "litellm_calls.py"), ("anthropic", "anthropic_calls.py"), ("ollama", "ollama_calls.py"),
    ("cohere", "cohere_calls.py")])
def test_client(server: Served, module: str, program: str) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none", "PENSTOCK_MODEL": NAME,
                   "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": os.environ.get("PENSTOCK_TEST_CLIENTS_PATH", "")}
    if subprocess.run([PYTHON, "-c", f"import {module}"], env=environment, capture_output=True, check=False).returncode:
        pytest.skip(f"{module} is not installed")
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir",
                           str(HERE), str(HERE / program)], env=environment, capture_output=True, text=True, timeout=400,
                          check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
