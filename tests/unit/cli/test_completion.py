"""`penstock completion`: the scripts know every command and flag, and bash can run its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.cli.completion import SHELLS, words
from penstock.cli.main import COMMANDS, main

CASES = [("penstock se", {"serve"}), ("penstock serve --dtype bf", {"bfloat16"}),
         ("penstock serve --cache-w", {"--cache-write"}),
         ("penstock serve --max-n", {"--max-num-seqs", "--max-num-batched-tokens", "--max-num-queued-reqs"}),
         ("penstock bench la", {"latency"}), ("penstock bench serve --good", {"--goodput"}),
         ("penstock serve my/model --port 80 --enf", {"--enforce-eager"}), ("penstock eval ca", {"canary"}),
         ("penstock cache ve", {"verify"})]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for line, _ in CASES:
        script += (f"\nCOMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); _penstock; "
                   'echo "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [set(line.split()) for line in done.stdout.splitlines()] == [expected for _, expected in CASES]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    dashes = "-l " if shell == "fish" else "--"
    for one in words():
        assert all(name in script for name in one.subcommands)
        assert all(f"{dashes}{flag[2:]}" in script for flag in one.flags)
    assert set(COMMANDS) <= {one.command for one in words()} | {"version"}
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True)  # parses it, runs nothing
