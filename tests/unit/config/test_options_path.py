"""The way of the options: few files carry them from the command line to their last reader, and none hands them back up."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import penstock
from penstock.config.resolve import EngineConfig
from penstock.config.schema import EngineOptions, ServerOptions

SOURCE = Path(penstock.__file__).parent
CARRIERS = {"EngineOptions", "EngineConfig"}
FIELDS = {kind: {field.name for field in dataclasses.fields(kind)} for kind in (EngineOptions, EngineConfig, ServerOptions)}
ORDER = ("cli", "server", "engine", "worker")
"""From the command line down; config/ stands beside all of them."""


def _names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


Trees = dict[Path, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Every file. Made here, because each test process imports this module, whatever it runs."""
    return {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@pytest.fixture(scope="module")
def on_the_way(trees: Trees) -> list[Path]:
    """The files that name a carrier."""
    return [path for path, tree in trees.items() if _names(tree) & CARRIERS]


def visited(trees: Trees, *kinds: type) -> list[str]:
    """The files that an object of these kinds visits: those that name its type or read a field of it. Of the commands only
    `serve`, because a run of one command passes one."""
    names = {kind.__name__ for kind in kinds}
    fields = set().union(*(FIELDS[kind] for kind in kinds))
    found = []
    for path, tree in trees.items():
        if path.parts[0] == "cli" and path.name != "serve.py":
            continue
        reads = any(isinstance(node, ast.Attribute) and node.attr in fields
                    and re.fullmatch(r"(\w+\.)*_?(engine_)?options", ast.unparse(node.value)) for node in ast.walk(tree))
        defines = any(isinstance(node, ast.ClassDef) and node.name in names for node in ast.walk(tree))
        if reads or defines or _names(tree) & names:
            found.append(str(path))
    return found


@pytest.mark.parametrize("kinds", [(EngineOptions, EngineConfig), (ServerOptions,)])
def test_few_files_carry_options(kinds: tuple[type, ...], trees: Trees) -> None:
    """From the command line to the last file that reads one. Parts below the doors get only the values that they need
    (decision 0102)."""
    files = visited(trees, *kinds)
    assert len(files) < 15, files


def test_of_the_workers_half_only_the_rank_has_engine_options(trees: Trees, on_the_way: list[Path]) -> None:
    above = ("cli", "config", "server", "engine")
    assert [file for file in visited(trees, EngineOptions) if file.split("/")[0] not in above] == ["worker/rank.py"]
    # The server hands them on, in a `Wanted` for each model, and reads none.
    assert {path.parts[0] for path in on_the_way} == {"config", *ORDER} - {"server"}


def test_options_never_go_back_up(trees: Trees, on_the_way: list[Path]) -> None:
    """Nothing below the commands returns options, keeps them in what it reports, or has its own read by a room above."""
    for path in on_the_way:
        if path.parts[0] in ("cli", "config"):
            continue
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
                assert not _names(node.returns) & CARRIERS, f"{path}::{node.name} returns options"
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("options", "config"):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                assert owner not in ("engine", "rank", "worker"), f"{path}:{node.lineno} reads {owner}.{node.attr}"
