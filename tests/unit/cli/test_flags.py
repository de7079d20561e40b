"""Flags are the schema: nothing lost, nothing invented, and a mistyped one is told what it may have meant."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from penstock.cli import serve
from penstock.cli.api import model_of
from penstock.cli.main import main
from penstock.config.flags import Parser, add_flags, from_args, integer, number, pairs, with_flags
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
    whole: list[str] = option([], "texts that may hold commas", commas=False)
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
    assert parse("--names", "a,b", "--names", "c") == Sample(names=["a", "b", "c"])
    assert parse("--whole", "a,b", "--whole=c") == Sample(whole=["a,b", "c"])
    table = {"a": "1", "b": "2", "c": "x=y", "d": "4"}
    assert parse("--table", "a=1,b=2,c=x=y", "--table", '{"d": "4"}') == Sample(table=table)


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
    (["m", "--kernels", "a=b", "c=d"], "repeat it, or put commas between several"),
    (["--max-model", "5"], "did you mean --max-model-len?"),  # no abbreviations
])
def test_what_is_wrong_is_said(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*words, cls=EngineOptions)
    assert exit_.value.code == 2
    assert expected in capsys.readouterr().err


def test_flags_of_vllm_that_ask_for_what_is_done_anyway(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="penstock serve")
    serve.add(parser)
    words = ["m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--runner", "pooling", "--api-server-count=1",
             "--max_model_len", "5000", "--structured-outputs-config.backend", "xgrammar", "--disable-frontend-multiprocessing",
             "-tp", "2", "-q", "fp8", "--dtype", "half", "--no-enable-log-requests", "--async-scheduling",
             "--enable-request-id-headers", "--model-impl", "auto", "--logprobs-mode=raw_logprobs", "--response-role=assistant",
             "--config_format", "auto", "--chat-template-content-format=auto", "--max-num-partial-prefills", "1"]
    found = from_args(parser.parse_args(words), EngineOptions)
    assert (found.tool_call_parser, found.max_model_len, found.dtype) == ("hermes", 5000, "float16")
    assert (found.tensor_parallel_size, found.quantization) == (2, "fp8")
    assert "frontend-multiprocessing" not in parser.format_help()
    for words in (["--runner", "draft"], ["--no-enable-auto-tool-choice"], ["--api-server-count", "2"],
                  ["--logprobs-mode", "processed_logits"], ["--enable_nothing"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
    assert "unknown flag --enable_nothing" in capsys.readouterr().err


def test_help_holds_every_option_s_documentation_and_default() -> None:
    parser = Parser(prog="sample")
    add_flags(parser, Sample)
    add_flags(parser, ServerOptions)
    text = unwrapped(parser.format_help())
    assert "a 100% documented name" in text
    assert "a share (default: 0.5)" in text
    for field in dataclasses.fields(ServerOptions):
        assert "--" + field.name.replace("_", "-") in text
        assert unwrapped(field.metadata["doc"]) in text


def test_every_option_has_its_costs_written_down() -> None:
    text = (Path(__file__).parents[3] / "docs" / "options.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`--([a-z-]+)", cell)]
    fields = {field.name.replace("_", "-") for cls in (EngineOptions, ServerOptions) for field in dataclasses.fields(cls)}
    assert sorted(named) == sorted(fields), set(named) ^ fields


def unwrapped(text: str) -> str:
    """Without line ends, of which some are behind a word's own hyphen."""
    return re.sub(r"(?<=\w-) (?=\w)", "", " ".join(text.split()))


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--admin-api-key", "--allowed-origins", "--kernels"])
def test_a_list_flag_leaves_the_model_alone(flag: str) -> None:
    """`serve --api-key SECRET canary` used to take canary as a second key, which then opened the server."""
    parser = Parser(prog="penstock serve")
    serve.add(parser)
    value = "linear=reference" if flag == "--kernels" else "secret"
    for words in ([flag, value, "some/model"], ["some/model", flag, value], [f"{flag}={value}", "some/model"]):
        args = parser.parse_args(words)
        assert args.model == "some/model"
        found = getattr(args, flag[2:].replace("-", "_"))
        assert found == ({"linear": "reference"} if flag == "--kernels" else ["secret"])


def test_every_option_has_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    headings = ["Model:", "Memory:", "Cache:", "Scheduling:", "Speculative decoding:", "Adapters:", "Execution:",
                "Several devices:", "Server:", "Limits:", "Observability:"]
    places = [text.index(f"\n{heading}\n") for heading in headings if heading != "Observability:"]
    assert places == sorted(places)
    assert "\nObservability:\n" in text
    for cls in (EngineOptions, ServerOptions):
        named = [field.metadata["group"] for field in dataclasses.fields(cls)]
        assert named[0] and {f"{group}:" for group in named if group} <= set(headings), "those that name none follow the last"


def test_a_yaml_file_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("""
model: some/model
port: 8001
max-model-len: 8K
served_model_name: [a, b]
enable-prefix-caching: false
enforce-eager: true
kernels: {linear: reference}
chat-template: null
""")
    parser = Parser(prog="penstock serve")
    serve.add(parser)
    args = parser.parse_args(["--config", str(path), "--port", "8002", "--served-model-name", "c"])
    assert model_of(args) == "some/model"
    engine, server = from_args(args, EngineOptions), from_args(args, ServerOptions)
    assert (server.port, server.served_model_name) == (8002, ["c"])  # the command line wins
    assert (engine.max_model_len, engine.enable_prefix_caching, engine.enforce_eager) == (8192, False, True)
    assert (engine.kernels, engine.chat_template) == ({"linear": "reference"}, None)
    assert model_of(parser.parse_args(["--config", str(path), "other/model"])) == "other/model"


@pytest.mark.parametrize(("text", "said"), [
    ("max-model-length: 5", "did you mean --max-model-len?"), ("- a\n- b", "must map flags to values"),
    ("a: [", "is not YAML"), ("port: many", "'many' is not an integer"), (None, "cannot be read")])
def test_a_bad_yaml_file(text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    try:
        status = main(["serve", "--config", str(path)])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status
    assert said in capsys.readouterr().err


def test_errors_name_the_flag_that_was_typed() -> None:
    said = "max_model_len is 9; raise it, or lower max_num_seqs ('max_num_seqs' stays, and so does my_block_size)"
    assert with_flags(said, EngineOptions) == ("--max-model-len is 9; raise it, or lower --max-num-seqs ('max_num_seqs' stays, "
                                               "and so does my_block_size)")
    assert with_flags("seed is 'x'; a seed is an integer", EngineOptions) == "--seed is 'x'; a seed is an integer"
    assert with_flags("the model's dtype is odd", EngineOptions) == "the model's dtype is odd"


def test_without_words_a_parser_reads_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As argparse does: scripts call it without any."""
    parser = Parser()
    parser.add_argument("--some-number", type=int)
    monkeypatch.setattr("sys.argv", ["script", "--some_number", "3"])
    assert parser.parse_args().some_number == 3 and parser.parse_args([]).some_number is None
