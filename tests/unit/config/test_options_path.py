"""The way of the options: few files carry them from the command line to their last reader, and none hands them back up."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock

SOURCE = Path(penstock.__file__).parent
CARRIERS = {"EngineOptions", "EngineConfig"}
ORDER = ("cli", "server", "engine", "worker")
"""From the command line down; config/ stands beside all of them."""


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


TREES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
ON_THE_WAY = [path for path, tree in TREES.items() if _names(tree) & CARRIERS]


def test_few_files_carry_options() -> None:
    """Thirty did. Any one command begins the way; then come the config room, the server, the engine and a rank."""
    below = [path for path in ON_THE_WAY if path.parts[0] != "cli"]
    assert 1 + len(below) < 15, sorted(map(str, below))
    assert {path.parts[0] for path in ON_THE_WAY} == {"config", *ORDER}


def test_options_never_go_back_up() -> None:
    """Nothing below the commands returns options, keeps them in what it reports, or has its own read by a room above."""
    for path in ON_THE_WAY:
        if path.parts[0] in ("cli", "config"):
            continue
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
                assert not _names(node.returns) & CARRIERS, f"{path}::{node.name} returns options"
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("options", "config"):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                assert owner not in ("engine", "rank", "worker"), f"{path}:{node.lineno} reads {owner}.{node.attr}"
