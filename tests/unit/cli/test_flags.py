"""Flags are the schema: nothing lost, nothing invented, and a mistyped one is told what it may have meant."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from penstock.config.flags import Parser, add_flags, from_args, integer, number, pairs
from penstock.config.schema import EngineOptions, ServerOptions, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Options of every shape."""

    name: str | None = option(None, "a 100% documented name")
    kind: str = option("a", "one of two", ("a", "b"))
    size: int | None = option(None, "a size")
    share: float = option(0.5, "a share")
    fast: bool = option(False, "be fast")
    safe: bool = option(True, "be safe")
    names: list[str] = option([], "names")
    table: dict[str, str] = option({}, "a table")


def parse(*words: str, cls: type = Sample) -> object:
    parser = Parser(prog="sample")
    parser.add_argument("positional", nargs="?")
    add_flags(parser, cls, skip=("model",))
    return from_args(parser.parse_args(list(words)), cls)


def test_nothing_given_is_the_schema_s_defaults() -> None:
    assert parse() == Sample()
    assert parse(cls=EngineOptions) == EngineOptions()
    assert parse(cls=ServerOptions) == ServerOptions()


def test_every_shape() -> None:
    assert parse("--name", "x", "--kind=b", "--size", "4k", "--share", "0.25", "--fast", "--no-safe") == Sample(
        name="x", kind="b", size=4000, share=0.25, fast=True, safe=False)
    assert parse("--names", "a", "b", "--names", "c") == Sample(names=["a", "b", "c"])
    table = {"a": "1", "b": "2", "c": "x=y", "d": "4"}
    assert parse("--table", "a=1", "b=2,c=x=y", "--table", '{"d": "4"}') == Sample(table=table)


@pytest.mark.parametrize(("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2M", 2 << 20),
                                             ("1G", 1 << 30), ("-1", -1), ("8_192", 8192)])
def test_integers(text: str, value: int) -> None:
    assert integer(text) == value


@pytest.mark.parametrize("text", ["", "4.5", "k", "4kk", "0x10", "ten", "1e3", "1.0001k"])
def test_not_integers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        integer(text)


def test_not_numbers_and_pairs() -> None:
    for text in ("nan", "inf", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            number(text)
    for text in ("a", "=1", "a=", '{"a": [1]}', "{"):
        with pytest.raises(argparse.ArgumentTypeError):
            pairs(text)
    assert pairs('{"a": 1, "b": true, "c": "x", "d": null}') == {"a": "1", "b": "true", "c": "x"}


@pytest.mark.parametrize(("words", "expected"), [
    (["--max-model-length", "5"], "did you mean --max-model-len?"),
    (["--max-num-seq=5"], "did you mean --max-num-seqs?"),
    (["--dtype", "int3"], "invalid choice: 'int3'"),
    (["--max-num-seqs", "many"], "'many' is not an integer"),
    (["--zzzz"], "unknown flag --zzzz\n"),
    (["m", "extra"], "unexpected argument 'extra'"),
    (["--max-model", "5"], "did you mean --max-model-len?"),  # no abbreviations
])
def test_what_is_wrong_is_said(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*words, cls=EngineOptions)
    assert exit_.value.code == 2
    assert expected in capsys.readouterr().err


def test_help_holds_every_option_s_documentation_and_default() -> None:
    parser = Parser(prog="sample")
    add_flags(parser, Sample)
    add_flags(parser, ServerOptions)
    text = " ".join(parser.format_help().split())
    assert "a 100% documented name" in text
    assert "a share (default: 0.5)" in text
    for field in dataclasses.fields(ServerOptions):
        assert "--" + field.name.replace("_", "-") in text
        assert " ".join(field.metadata["doc"].split()) in text
