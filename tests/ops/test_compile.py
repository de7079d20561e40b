"""Kernels are compiled before they are needed: what is recorded is what is launched, and what fails says so.

Everything runs in processes of its own, as Triton's interpreter may rule in this one. No GPU is needed: compiling needs none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Not imported here: once it is, it is too late for other tests to choose the interpreter.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PRELUDE = """
import json, sys
from contextlib import contextmanager
import torch
from penstock.core.rank import DeviceFacts
from penstock.ops import compile, registry, rows_triton
from penstock.ops.gpu import Chip

CHIP = Chip((9, 0), 132)
FACTS = DeviceFacts("cuda", "a GPU", 1 << 37, 16, frozenset(), (9, 0))
compile.watch()

def launch(width=64, dtype=torch.bfloat16, rows=(1, 5, 3000)):
    for count in rows:
        x, weight = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((count, width), (width,)))
        rows_triton.add_rms_norm(x, x, weight, 1e-6)
"""

COMPILE = PRELUDE + """
work = compile.Compilation([], CHIP.capability)
with compile.recording(CHIP, work.add) as jobs:
    launch()
    launch(width=96)
    launch()
work.finish(registry.bind(FACTS, torch.bfloat16))
again = compile.Compilation(jobs.values(), CHIP.capability)
again.finish(registry.bind(FACTS, torch.bfloat16))
print(json.dumps({"jobs": len(jobs), "compiled": work.compiled, "again": again.compiled, "here": compile.tally.compiled}))
"""

LAUNCH = PRELUDE + """
from triton import knobs
from triton.runtime.jit import JITFunction
run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **more: run(self, *args, grid=grid, warmup=True, **more)

with compile.recording(CHIP):
    knobs.runtime.jit_cache_hook = None  # Triton looks for the kernel as it does on a GPU, and only the launch is left out
    launch(rows=(1, 2, 77, 1055, 8192))
    launch(width=96, rows=(1, 300))
    known = compile.tally.compiled, compile.tally.loaded
    launch(width=80, rows=(1,))
print(json.dumps({"known": known, "other": compile.tally.compiled, "names": compile.tally.names}))
"""

SWEEP = PRELUDE + """
import logging, sys
from penstock import checkpoint, models
from penstock.worker import rehearsal
from penstock.worker.step import Bucket

spec = models.describe(checkpoint.read_config(checkpoint.resolve_folder("canary", None)))
options = dict(dtype=torch.bfloat16, tokens=2048, max_model_len=640, page=16, chip=CHIP)
steps = [(1, 1), (2, 1), (7, 7), (16, 16), (33, 5), (300, 3), (777, 16), (999, 1), (1500, 11), (2047, 16)]
forward = rehearsal._forward

def whole(model, bucket, known, tables, page, ends, *more, **named):
    "The last block computes a few of a step's rows, those before it all: here each computes all, too."
    for some in {ends, None}:
        forward(model, bucket, known, tables, page, some, *more, **named)

many = [(513, 513), (700, 300), (800, 799), (801, 801), (1024, 1024), (2000, 1000), (2048, 257)]
found = {}
for rows, graph_tokens in ((16, 0), (16, 256), (1024, 2048)):
    options["adapters"] = (3, 20) if graph_tokens == 256 else None
    for prefer in ({}, {"linear": "triton-invariant", "attention": "triton-invariant"}, {"*": "reference"}):
        kernels = registry.bind(FACTS, torch.bfloat16, prefer)
        jobs = rehearsal.rehearse(spec, kernels, rows=rows, graph_tokens=graph_tokens, **options)
        plain, rehearsal.buckets = rehearsal.buckets, lambda *sizes: [
            Bucket(tokens, segments) for tokens, segments in (steps + many if rows > 16 else steps)]
        rehearsal._forward = whole
        odd = rehearsal.rehearse(spec, kernels, rows=rows, graph_tokens=graph_tokens, **options)
        rehearsal.buckets, rehearsal._forward = plain, forward
        new = {(job.kernel, job.data) for job in odd} - {(job.kernel, job.data) for job in jobs}
        found[f"{rows} {graph_tokens} {prefer.get('*', prefer.get('linear', 'triton'))}"] = [
            sorted({part for job in jobs for part in (job.module.rpartition(".")[2], job.kernel)}),
            sorted({name for name, _ in new})]
print(json.dumps(found))
"""

ORDER = PRELUDE + """
from penstock.ops.sample_table import WIDTH
from penstock.ops.sample_triton import TritonSample

def empty(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")

ops, logits = TritonSample(), empty(3, 1000, dtype=torch.float32)
calls = [lambda: ops.choose(logits, empty(9, WIDTH), empty(9, 50), empty(3), empty(3)), launch,
         lambda: ops.threshold(logits, empty(9, WIDTH), empty(3)),
         lambda: ops.edit(logits, empty(9, WIDTH), empty(99), empty(9, 50), empty(3), empty(3), empty(3)),
         lambda: ops.penalize(logits, empty(9, WIDTH), empty(9, 50), empty(3), empty(3), empty(3)),
         lambda: ops.score(logits, empty(3), 5)]
with compile.recording(CHIP) as jobs:
    for call in calls:
        call()
names = list(dict.fromkeys((job.module, job.kernel) for job in jobs.values()))
print(json.dumps([[*name, getattr(sys.modules[name[0]], name[1]).cache_key] for name in names]))
"""

ALONE = """
import json, os
from penstock.ops.compile_worker import import_kernels
print(json.dumps([[*name, getattr(import_kernels(name[0]), name[1]).cache_key] for name in json.loads(os.environ["NAMES"])]))
"""

QUICK = PRELUDE + """
from penstock import checkpoint, models
from penstock.ops import attention_library
from penstock.worker import rehearsal

spec = models.describe(checkpoint.read_config(checkpoint.resolve_folder("canary", None)))
attention_library.available, call, called = lambda: True, attention_library._call, []
attention_library._call = lambda *arguments, **more: called.append(1) or call(*arguments, **more)
rehearsal.rehearse(spec, registry.bind(FACTS, torch.bfloat16), dtype=torch.bfloat16, rows=16, tokens=2048, max_model_len=4096,
                   page=16, graph_tokens=256, chip=CHIP)
print(json.dumps([bool(called), [name for name in ("torch._dynamo", "sympy") if name in sys.modules]]))
"""

MANIFEST = PRELUDE + """
from dataclasses import asdict
from penstock.platform.kept import Kept

with compile.recording(CHIP) as jobs:
    launch()
kept, other = (Kept(compile.kept_folder() / "manifests", name) for name in ("a model", "another"))
found = [kept.read()]
kept.write([asdict(job) for job in jobs.values()])
found += [[compile.Job(**job) for job in kept.read()] == list(jobs.values()), other.read()]
print(json.dumps(found))
"""

BROKEN = PRELUDE + """
from pathlib import Path
job = compile.Job("penstock.ops.rows_kernels", "missing", "{}", Path("nowhere"), "penstock.ops.rows_triton")
try:
    compile.Compilation([job], CHIP.capability).finish(registry.bind(FACTS, torch.bfloat16))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


TREES = PRELUDE + """
import numpy as np
from penstock.ops.attention import Geometry, Tree
from penstock.ops.attention_triton import INVARIANT, TRITON

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def attend(attention, counts, tree):
    counts, size = np.array(counts, np.int32), Geometry(32, 8, 128, 16)
    tokens, segments, ints = int(counts.sum()), len(counts), torch.int32
    work = torch.from_numpy(attention.prepare(size, counts, counts + 300, segments, tokens)).to("meta")
    attention.apply(empty(tokens, 32, 128), *[empty(100, 8, 16, 128)] * 2, empty(segments, 30, dtype=ints),
                    empty(segments + 1, dtype=ints), empty(segments, dtype=ints), 0.1, work=work,
                    tree=Tree(empty(segments, dtype=ints), empty(tokens, dtype=torch.int64)) if tree else None)

with compile.recording(CHIP) as jobs:
    attend(TRITON, [17, 17], False)
    attend(TRITON, [200, 17], True)
    attend(INVARIANT, [17, 17], True)
work = compile.Compilation(jobs.values(), CHIP.capability)
work.finish(registry.bind(FACTS, torch.bfloat16))
print(json.dumps([len(jobs), work.compiled]))
"""

ONES = PRELUDE + """
from penstock.ops import linear_invariant, linear_triton
from penstock.ops.linear import Weight

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

with compile.recording(CHIP) as jobs:
    one = Weight(empty(1, 64), 1, 64, torch.bfloat16)
    for rows in (1, 5):
        linear_triton.TritonLinear.apply(empty(rows, 64), one)
    linear_invariant.InvariantLinear.apply(empty(5, 1), Weight(empty(1, 1), 1, 1, torch.bfloat16))
    cache = empty(9, 2, 1, 1, 1)
    rows_triton.rope_write(*(empty(3, 1, 1) for _ in range(3)), empty(3, dtype=torch.int32), empty(3, dtype=torch.int64),
                           cache[:, 0], cache[:, 1])
work = compile.Compilation(jobs.values(), CHIP.capability)
work.finish(registry.bind(FACTS, torch.bfloat16))
print(json.dumps(sorted(job.kernel for job in jobs.values())))
"""


USED = PRELUDE + """
import re, subprocess
from pathlib import Path
import triton
from triton import knobs
from triton.runtime.jit import JITFunction
from penstock.ops import linear_invariant, linear_triton
from penstock.ops.linear import Weight

made, run = [], JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **more: made.append(run(self, *args, grid=grid, warmup=True, **more))

def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

found, tool = {}, Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
with compile.recording(CHIP):
    knobs.runtime.jit_cache_hook = None
    for n, k, kind in ((1024, 3072, None), (3072, 1024, "silu")):
        size = n if kind is None else 2 * n
        weight = Weight(empty(size, k), size, k, torch.bfloat16)
        for rows in (8, 64, 128, 256, 1024, 8192):
            tile = linear_invariant.choose(rows, n, k, torch.bfloat16, kind is not None, True)
            linear_triton.launch(tile, empty(rows, k), weight, None, torch.bfloat16, kind)
            file = Path("kernel.cubin")
            file.write_bytes(made[-1].asm["cubin"])
            ask = lambda option: subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout
            stack, code = re.search("STACK:([0-9]+)", ask("-res-usage"))[1], ask("-sass")
            found[f"{tile} {kind}"] = [int(stack), made[-1].metadata.shared, code.count("HGMMA"),
                                       len(re.findall("HGMMA.*gsb0", code))]
print(json.dumps(found))
"""


def python(script: str, cache: Path, **more: str) -> tuple[Any, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240,
                          env=environment | {"TRITON_CACHE_DIR": str(cache)} | more)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_compiled_once_and_found(tmp_path: Path) -> None:
    """Two kernels (of two widths) are compiled elsewhere as they are found, and found in the cache by their launch."""
    first, _ = python(COMPILE, tmp_path)
    assert first["jobs"] == first["compiled"] == 2 and first["again"] == 0
    assert first["here"] == 0, "nothing is compiled in the process that will serve"
    then, _ = python(LAUNCH, tmp_path)
    assert then["known"] == [0, 2], "any number of rows launches the two kernels that are in the cache"
    assert then["other"] == 1 and then["names"] == ["normalise"], "a width that was not recorded is noticed"


def test_attention_of_draft_trees_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter lets names change their types, the compiler does not."""
    (jobs, compiled), _ = python(TREES, tmp_path)
    assert jobs == compiled >= 4


def test_sizes_of_one_compile(tmp_path: Path) -> None:
    """Triton makes constants of arguments that are 1, which the interpreter does not: a single output, head, number, slot."""
    found, _ = python(ONES, tmp_path)
    assert found == ["matvec", "rope_write", "tiles", "tiles"]


def test_invariant_products_keep_their_sums_in_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper: nothing is spilled, blocks fit, and no matrix instruction waits for the one before, as happens if sums are
    looked at while they are added to."""
    monkeypatch.chdir(tmp_path)
    found, _ = python(USED, tmp_path)
    assert len(found) > 8
    for tile, (stack, shared, products, waited_for) in found.items():
        assert stack == 0 and shared <= 227 << 10, (tile, stack, shared)
        assert products > waited_for * 3 > 0, (tile, products, waited_for)


def test_steps_of_any_size_launch_what_was_rehearsed(tmp_path: Path) -> None:
    found, _ = python(SWEEP, tmp_path)
    for route, (parts, new) in found.items():
        assert new == [], f"{route}: {new} would be compiled after start"
        if "reference" in route:
            assert parts == []
        else:
            assert {"normalise", "rope_write", "build_step", "linear_kernels", "attention_kernel"} <= set(parts), route


def test_keys_do_not_depend_on_what_came_first(tmp_path: Path) -> None:
    """Each compiler begins with another kernel than the process that launches them."""
    launched, _ = python(ORDER, tmp_path)
    assert len(launched) > 8
    for first in range(0, len(launched), 3):
        names = [name[:2] for name in launched[first:] + launched[:first]]
        alone, _ = python(ALONE, tmp_path, NAMES=json.dumps(names))
        assert sorted(alone) == sorted(launched)


def test_manifest_is_of_one_model(tmp_path: Path) -> None:
    found, _ = python(MANIFEST, tmp_path)
    assert found == [None, True, None]


def test_rehearsal_is_quick(tmp_path: Path) -> None:
    """Nothing that it does makes torch import its own compiler, which takes seconds."""
    (called, loaded), _ = python(QUICK, tmp_path)
    assert called and not loaded


def test_failure_names_kernel_and_way_out(tmp_path: Path) -> None:
    (kind, message), _ = python(BROKEN, tmp_path)
    assert kind == "ConfigError"
    for part in ("penstock.ops.rows_kernels.missing", "compute capability 9.0", "AttributeError",
                 "--kernels add_rms_norm=reference", "--kernels rms_norm=reference"):
        assert part in message, message


LATE = PRELUDE + """
from triton.runtime.errors import OutOfResources

said = []
for error in (OutOfResources(200_000, 99_000, "shared memory"), ValueError("not Triton's")):
    try:
        with compile.explained((8, 6)):
            raise error
    except Exception as found:
        said.append([type(found).__name__, str(found)])
print(json.dumps(said))
"""


def test_failure_at_the_first_launch_is_explained(tmp_path: Path) -> None:
    (kind, message), other = python(LATE, tmp_path)[0]
    assert kind == "ConfigError" and "99000" in message and "8.6" in message and "--kernels *=reference" in message
    assert other == ["ValueError", "not Triton's"]


def test_dead_compiler_is_noticed(tmp_path: Path) -> None:
    """A process that cannot even start (here: Triton's own folder is unreadable to it) is an error, not a wait."""
    broken = tmp_path / "triton.py"
    broken.write_text("raise SystemExit(3)")
    script = BROKEN.replace("try:", f"sys.path.insert(0, {str(tmp_path)!r})\ntry:")
    (kind, message), _ = python(script, tmp_path)
    assert kind == "ConfigError" and "ended with status" in message
