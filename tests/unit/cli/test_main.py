"""The command `penstock` itself: finding subcommands, exit codes, and ends that leave no trace on the screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import COMMANDS, main


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    first = capsys.readouterr().out
    assert main([]) == 2
    text = capsys.readouterr().out
    assert text == first
    assert all(f"  {command} " in text and about in text for command, about in COMMANDS.items())
    for word in ("version", "--version"):
        assert main([word]) == 0
        assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_an_unknown_command_and_an_unknown_flag_get_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "serve", "--num-prompt", "3"])
    assert exit_.value.code == 2
    assert "did you mean --num-prompts?" in capsys.readouterr().err


def test_a_folder_of_several_models_takes_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert main(["serve", f"mine={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "leave out mine=" in said and str(tmp_path / "a") in said


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "/no/such/model"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("penstock: ")
    assert said.count("\n") == 1


def test_a_reader_that_leaves_is_no_crash() -> None:
    command = f"{sys.executable} -m penstock --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)


def test_running_it_as_a_module_and_as_a_script() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"penstock {penstock.__version__}\n"
