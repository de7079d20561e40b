"""Building and loading the libraries, and the thread pool under bad conditions."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.ops import native
from penstock.ops.cpu import CpuOperations
from penstock.ops.registry import bind
from penstock.platform.facts import DeviceFacts, detect
from tests.ops.kernels import random
from tests.sampling import sampled

HERE = next(isa for isa in native.INSTRUCTION_SETS if isa.needs <= detect("cpu").flags)


QUICK = {"PENSTOCK_CPU_ISA": "portable", "CXXFLAGS": "-O0"}
"""The quickest build, where a test has to build."""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True,
                          timeout=120, check=False)


BIND = """
import logging, torch
logging.basicConfig()
from penstock.ops.registry import bind
from penstock.platform.facts import detect
kernels = bind(detect("cpu"), torch.float32)
kernels = bind(detect("cpu"), torch.float32)
print(kernels.chosen["linear"].name, kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).sum().item())
"""


@pytest.mark.parametrize("compiler", sampled(["/nowhere/g++", "false", "sh -c 'exit 3'"], 3))
def test_without_a_compiler_the_reference_serves(tmp_path: Path, compiler: str) -> None:
    done = run(BIND, CXX=compiler, XDG_CACHE_HOME=str(tmp_path), **QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["reference", "4.0"]
    assert done.stderr.count("WARNING") == 1
    assert compiler.split()[0] in done.stderr


@pytest.mark.exhaustive
def test_unwritable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "penstock").write_text("a file where the folder should be")
    done = run(BIND, XDG_CACHE_HOME=str(tmp_path), **QUICK)
    assert done.stdout.split() == ["cpu-portable", "4.0"], done.stderr


def test_starts_at_once_share_one_folder(tmp_path: Path) -> None:
    """One process compiles, the other waits and takes its result."""
    code = BIND.replace("logging.basicConfig()", "logging.basicConfig(level=logging.INFO)")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), **QUICK}
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=environment) for _ in range(2)]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [printed.split() for printed, _ in outputs] == [["cpu-portable", "4.0"]] * 2
    assert sum(logged.count("compiling kernels-portable") for _, logged in outputs) == 1
    assert [p.suffix for p in (tmp_path / "penstock").iterdir()] == [".so"]


def test_choice_by_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = detect("cpu")
    monkeypatch.delenv("PENSTOCK_CPU_ISA", raising=False)
    assert bind(facts, torch.bfloat16).chosen["linear"].name == f"cpu-{HERE.name}"
    plain = DeviceFacts("cpu", "old", facts.memory, 1)
    assert bind(plain, torch.bfloat16).chosen["attention"].name == "cpu-portable"
    assert bind(facts, torch.float64).chosen["attention"].name == "reference"
    assert bind(facts, torch.float32, {"*": "reference"}).chosen["linear"].name == "reference"
    monkeypatch.setenv("PENSTOCK_CPU_ISA", "portable")
    assert bind(facts, torch.float32).chosen["linear"].name == "cpu-portable"
    monkeypatch.setenv("PENSTOCK_CPU_ISA", "avx1024")
    with pytest.raises(ConfigError, match=r"avx1024.*avx512, avx2, portable"):
        bind(facts, torch.float32)


def _loaded() -> CpuOperations:
    found = CpuOperations(HERE)
    assert found.supports(detect("cpu"), torch.float32) is None
    return found


@pytest.fixture
def operations() -> CpuOperations:
    return _loaded()


@pytest.mark.serial
def test_busy_neighbour(operations: CpuOperations) -> None:
    """With as many spinning processes as cores, products are still right and take a fair share's time, not timeslices."""
    cores = len(os.sched_getaffinity(0))
    packed = operations.linear.pack(random(2048, 2048, dtype=torch.bfloat16))
    x = random(1, 2048, dtype=torch.bfloat16)
    wanted = operations.linear.apply(x, packed)

    def median() -> float:
        times = []
        for _ in range(60):
            begin = time.perf_counter()
            assert torch.equal(operations.linear.apply(x, packed), wanted)
            times.append(time.perf_counter() - begin)
        return sorted(times)[30]

    quiet = median()
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores - 1)]
    try:
        time.sleep(0.3)
        busy = median()
    finally:
        for child in neighbours:
            child.kill()
            child.wait()
    assert busy < 4 * quiet + 2e-3, (quiet, busy)


def test_callers_at_once(operations: CpuOperations) -> None:
    """The pool has one caller at a time; another does its work alone."""
    packed = operations.linear.pack(random(300, 512))
    inputs = [random(40, 512, seed=i) for i in range(4)]
    wanted = [operations.linear.apply(x, packed) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(100):
            if not torch.equal(operations.linear.apply(inputs[i], packed), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_threads(operations: CpuOperations, count: int) -> None:
    packed = operations.linear.pack(random(300, 512))
    x = random(40, 512)
    wanted = operations.linear.apply(x, packed)
    before = operations.lib.penstock_threads()
    try:
        native.set_threads(count)
        assert operations.lib.penstock_threads() == count
        for _ in range(50):
            assert torch.equal(operations.linear.apply(x, packed), wanted)
    finally:
        native.set_threads(before)


def _child(queue: multiprocessing.Queue) -> None:
    found = _loaded()
    packed = found.linear.pack(random(300, 512))
    queue.put(found.linear.apply(random(40, 512), packed).double().sum().item())


def test_after_a_fork(operations: CpuOperations) -> None:
    """A forked child has none of its parent's threads and starts its own."""
    packed = operations.linear.pack(random(300, 512))
    wanted = operations.linear.apply(random(40, 512), packed).double().sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get(timeout=30) == wanted
    child.join(10)
    assert child.exitcode == 0
