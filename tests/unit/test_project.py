"""Properties of the project as a whole: order of imports, quick starts, few dependencies, small files, true documents."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import COMMANDS, HOME
from penstock.config.schema import EngineOptions, ServerOptions

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "penstock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_order_of_imports_is_kept() -> None:
    """import-linter reads function-local imports as well as those at the top."""
    code = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.serial
@pytest.mark.parametrize("command", [["-c", "import penstock"], ["-m", "penstock", "--help"],
                                     ["-m", "penstock", "serve", "--help"]])
def test_starting_costs_nothing(command: list[str]) -> None:
    """Under 0.3 s of a processor, whatever else it does; a help text must not pay for torch."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


def test_torch_comes_only_when_it_is_needed() -> None:
    heavy = "{'torch', 'transformers', 'starlette', 'numpy', 'huggingface_hub'} & set(sys.modules)"
    code = ("import sys, penstock, penstock.cli.main; penstock.cli.main.main(['--help']); "
            f"found = {heavy}; sys.exit(str(found) if found else 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_frontend_process_needs_no_torch() -> None:
    """Only the engine's process pays for it, in memory and in time."""
    code = "import sys, penstock.server.run; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compiler_processes_need_no_torch() -> None:
    """Modules that import Triton at their top are those of kernels, and of the process that compiles them."""
    at_top = {name_of(path): set(top_imports(path)) for path in sources()}
    kernels = {name for name, found in at_top.items() if any(one.split(".")[0] == "triton" for one in found)}
    assert len(kernels) > 10
    for kernel in sorted(kernels):
        seen, waiting = set[str](), [kernel]
        while waiting:
            name = waiting.pop()
            assert name != "torch", f"{kernel} imports torch by way of {sorted(seen)}"
            if name in at_top and name not in seen:
                seen.add(name)
                waiting += [*at_top[name], name.rpartition(".")[0]]


def top_imports(path: Path) -> Iterator[str]:
    """The modules that a module imports as it is imported itself, not later."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"version"}))
def test_every_command_has_its_module_and_help(command: str) -> None:
    assert importlib.util.find_spec(f"penstock.cli.{HOME.get(command, command)}") is not None
    done = subprocess.run([sys.executable, "-m", "penstock", command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: penstock {command}")


def test_few_dependencies() -> None:
    assert len(PROJECT["project"]["dependencies"]) <= 16


def test_every_third_party_import_is_a_dependency() -> None:
    """A module imports only what `dependencies` installs, or what is optional and imported late."""
    known = {requirement.split(">")[0].split("<")[0].split("=")[0].lower().replace("-", "_")
             for requirement in PROJECT["project"]["dependencies"]}
    known |= {"zmq", "penstock"}  # pyzmq's module
    known.add("yaml")  # PyYAML, which huggingface_hub needs (decision 0095)
    known.add("anyio")  # which starlette needs (decision 0313)
    known.add("triton")  # comes with torch's builds for GPUs; only modules of kernels import it, and those only where it is
    known.add("transformers")  # the extra `fallback` (decision 0141), imported late by models/fallback.py and layers/foreign.py
    known.add("ray")  # the extra `ray` (decision 0240), imported late by engine/raycluster.py
    known.add("opentelemetry")  # the extra `otel` (decision 0154), imported late by server/access.py
    known |= {"grpc", "grpc_health", "grpc_reflection", "google"}  # the extra `grpc` (decision 0234), in server/kserve/ alone
    for path in sources():
        for imported in imports(path):
            top = imported.split(".")[0]
            assert top in sys.stdlib_module_names or top in known, f"{path} imports {imported}"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


@pytest.mark.parametrize(("options", "most"), [(EngineOptions, 80), (ServerOptions, 60)])
def test_options_are_few_and_documented(options: type, most: int) -> None:
    fields = dataclasses.fields(options)
    assert len(fields) <= most
    for field in fields:
        doc = field.metadata["doc"]
        assert len(doc) > 8 and doc.count("\n") == 0, field.name


def test_option_names_do_not_collide() -> None:
    """`serve` has the flags of both."""
    engine, server = ({field.name for field in dataclasses.fields(options)} for options in (EngineOptions, ServerOptions))
    assert not engine & server


def test_files_stay_small_and_say_what_they_are() -> None:
    for path in sources():
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} does not say what it owns"
        assert path.stem not in ("utils", "util", "helpers", "common", "misc"), path


COMPILES = """
import ast, pathlib, sys
standard = set(sys.argv[2].split(","))
for path in pathlib.Path(sys.argv[1]).rglob("*.py"):
    tree = ast.parse(path.read_text(), str(path))
    compile(tree, str(path), "exec", dont_inherit=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        else:
            continue
        for name in standard & {name.partition(".")[0] for name in names}:
            assert name in sys.stdlib_module_names, f"{path}: {name} is no module of Python {sys.version.split()[0]}"
"""


@pytest.mark.parametrize("minor", [14, *(pytest.param(minor, marks=pytest.mark.exhaustive) for minor in (12, 13))])
def test_other_versions_of_python_compile_it(minor: int) -> None:
    """Without a warning, and with standard modules that they have. Where such an interpreter is installed."""
    found = [*(Path.home() / ".pyenv/versions").glob(f"3.{minor}.*/bin/python"), shutil.which(f"python3.{minor}")]
    if not found[0]:
        pytest.skip(f"there is no Python 3.{minor} here")
    done = subprocess.run([found[0], "-W", "error", "-c", COMPILES, SOURCE, ",".join(sys.stdlib_module_names)],
                          capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert not done.returncode, done.stderr


def test_the_product_stays_small() -> None:
    """Lines with anything on them, in every language; docs/decisions/0224 says why these."""
    written = [path for kind in ("py", "cpp", "h", "js", "css", "html") for path in SOURCE.rglob(f"*.{kind}")]
    assert sum(bool(line.strip()) for path in written for line in path.read_text().splitlines()) < 60_000


def test_no_placeholders() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error", "X" * 3)
    for path in [*sources(), *(ROOT / "tests").rglob("*.py"), *SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h")]:
        text = path.read_text()
        assert not any(word in text for word in words), path


def test_imports_have_no_cycles() -> None:
    """Function-local imports included, so that no order of importing can fail; those of type checkers only are left out."""
    names = {name_of(path): path for path in sources()}
    edges = {name: {found for target in runtime_imports(path) for found in [_module(target, names)] if found and found != name}
             for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name):], name))
        if name not in done:
            for target in sorted(edges[name]):
                # A package's own __init__ may gather what its modules define.
                if not name.startswith(target + "."):
                    visit(target, (*trail, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


def runtime_imports(path: Path) -> Iterator[str]:
    """Imported modules, also as "package.name" for `from package import name`; without `if TYPE_CHECKING` blocks."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(target: str, names: dict[str, Path]) -> str | None:
    """The module of ours that importing `target` runs: itself, or the one that it is a name of."""
    parent = target.rpartition(".")[0]
    return next((name for name in (target, parent) if name in names), None)


def test_licence_and_version() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"]["text"] == "Apache-2.0"
    assert penstock.__version__ in (ROOT / "CHANGELOG.md").read_text()


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_documents_name_only_what_exists() -> None:
    """In backquotes, `folder/`, `folder/file.py` and `folder/file.py::Class.method` are places of this project."""
    for document in documents():
        for word in re.findall(r"`([^`\n]+)`", document.read_text()):
            place, _, symbol = word.partition("::")
            if not re.fullmatch(r"[\w./-]+(\.(py|cpp|h|md|toml)|/)", place) or place.startswith(("/", "..")):
                continue
            found = [base / place for base in (ROOT, SOURCE) if (base / place).exists()]
            assert found, f"{document.name} names {place}"
            for part in symbol.split(".") if symbol else ():
                defined = rf"^\s*(async def|def|class) {part}\b|^\s*{part}\b.* = "
                assert re.search(defined, found[0].read_text(), re.M), f"{document.name} names {word}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in documents():
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            assert "://" in target or (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_mutant_has_its_place() -> None:
    for mutant in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]:
        assert (SOURCE / mutant["file"]).read_text().count(mutant["old"]) == 1, mutant["name"]


def test_nothing_is_stored_twice() -> None:
    """Files of 10 kB or more that git tracks differ from each other; what is shared is a symbolic link."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    seen: dict[bytes, Path] = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_symlink() and path.is_file() and path.stat().st_size >= 10_000:
            digest = hashlib.blake2b(path.read_bytes()).digest()
            assert digest not in seen, f"{name} is the same as {seen[digest]}: make it a symbolic link"
            seen[digest] = path


def prose(path: Path) -> Iterator[str]:
    """Paragraphs of a document; docstrings and runs of comments of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        yield from re.split(r"\n\s*\n|\n[|#*-] *|\n\d+\. ", text)
    elif path.suffix == ".py":
        yield from (node.value.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        yield from (re.sub(r"^\s*# ?", "", run, flags=re.M) for run in re.findall(r"(?:^ *# .*\n)+", text, re.M))
    else:
        yield from (re.sub(r"^\s*// ?", "", run, flags=re.M) for run in re.findall(r"(?:^ *// .*\n)+", text, re.M))


def test_the_readme_is_read_in_two_minutes() -> None:
    """At most 500 words outside its tables and code, and no page is recommended by two features."""
    text = re.sub(r"^```.*?^```|^\|.*?$", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert len(re.sub(r"\]\([^)]*\)", "]", text).split()) <= 500
    links = re.findall(r"\]\((docs/[^)]+)\)", text[text.index("## Features"):text.index("## Performance")])
    assert len(links) == len(set(links))


def test_sentences_begin_with_a_subject() -> None:
    """None with a relative clause ("What a step reads is ..."), which a reader has to untangle. Questions may."""
    for path in [*documents(), *sources(), *SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h")]:
        for paragraph in prose(path):
            for sentence in re.split(r"(?<=[.:!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                begins = re.match(r"\W*(What|Whatever|That which|Which|Whichever|Who|Whoever|Whose|Those|How)\b", sentence)
                assert not begins or sentence.rstrip("*\"").endswith("?"), f"{path.relative_to(ROOT)}: {sentence[:100]}"
