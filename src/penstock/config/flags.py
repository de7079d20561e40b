"""Command line flags made from the option dataclasses of `config/schema.py`, and the parser that reports a mistyped one.

A flag's name, type, choices, heading, help and default are a field's. Nothing here resolves an option or knows one by name."""

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, get_origin, get_type_hints

from penstock.config.schema import ACCEPTED, checked, unwrapped
from penstock.core.errors import ConfigError

Options = TypeVar("Options")

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def integer(text: str) -> int:
    """An integer, plain or in vLLM's human form: 4k is 4,000, 4K is 4,096, 1.5k is 1,500; likewise m/M, g/G, t/T."""
    match = re.fullmatch(r"([+-]?[0-9]+)(\.[0-9]+)?([kmgtKMGT]?)", text.replace("_", ""))
    if match is None or (match[2] and not match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer; possible are 4096, 4k (4,000) and 4K (4,096)")
    scaled = (float(match[1] + match[2]) if match[2] else int(match[1])) * _UNITS.get(match[3], 1)
    if scaled != int(scaled):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(scaled)


def number(text: str) -> float:
    """A finite real number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def pairs(text: str) -> dict[str, str]:
    """`key=value`, several with commas between, or a JSON object of texts, numbers and true or false, all taken as texts.

    Keys whose value is null are left out."""
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
        if any(isinstance(v, dict | list) for v in value.values()):
            raise argparse.ArgumentTypeError(f"the values of {text!r} must not be lists or objects")
        return {k: v if isinstance(v, str) else json.dumps(v) for k, v in value.items() if v is not None}
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form key=value")
        found[key] = value
    return found


class Collect(argparse.Action):
    """Adds the flag's one value to those of earlier occurrences: lists are joined, mappings merged.

    A list's flag takes one value and not as many as follow: `--api-key SECRET MODEL` must leave MODEL alone."""

    def __call__(self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 _option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        if isinstance(values, dict):
            setattr(namespace, self.dest, {**(earlier or {}), **values})
        elif earlier is None or earlier is self.default:
            setattr(namespace, self.dest, list(values))
        else:
            setattr(namespace, self.dest, [*earlier, *values])


def listed(read: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """A reader of several values with commas between."""
    def values(text: str) -> list[Any]:
        return [read(part.strip()) for part in text.split(",")]

    return values


class Parser(argparse.ArgumentParser):
    """argparse, without abbreviations, and with the nearest flag named when one is unknown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        found, unknown = self.parse_known_args([self._dashed(word) for word in words], namespace)
        if unknown:
            self.error(self._unknown(unknown))
        path = getattr(found, "config", None)
        return found if path is None else self._completed(found, path)

    def _dashed(self, word: str) -> str:
        """The word, with dashes where a known flag was written with underscores."""
        flag, equals, value = word.partition("=")
        dashed = flag.replace("_", "-")
        return dashed + equals + value if flag.startswith("--") and dashed in self.flags() else word

    def _completed(self, given: argparse.Namespace, path: str) -> argparse.Namespace:
        """`given`, and from the file that --config names what the command line leaves open."""
        found, unknown = self.parse_known_args(words_of(path))
        if unknown:
            self.error(f"{path}: {self._unknown(unknown)}")
        for name, value in vars(found).items():
            if not hasattr(given, name) or getattr(given, name) is self.get_default(name):
                setattr(given, name, value)
        return given

    def _unknown(self, unknown: Sequence[str]) -> str:
        name = next((word for word in unknown if word.startswith("-")), None)
        if name is None:
            return f"unexpected argument {unknown[0]!r}; a flag takes one value: repeat it, or put commas between several"
        flag = name.partition("=")[0]
        return f"unknown flag {flag}{nearest(flag, self.flags())}"

    def format_help(self) -> str:
        """argparse's help, with a first line that names the arguments; the flags are listed below it anyway."""
        if self.usage is None:
            given = [(action.metavar or action.dest, action.nargs) for action in self._actions if not action.option_strings]
            words = [f"[{name}]" if nargs == "?" else str(name) for name, nargs in given]
            self.usage = " ".join([self.prog, *words, "[flags]"]).replace("%", "%%")
        return super().format_help()

    def arguments(self) -> list[argparse.Action]:
        """Every argument but subcommands."""
        return [action for action in self._actions if not isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001

    def subcommands(self) -> "dict[str, Parser]":
        return {name: parser for action in self._actions
                if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 (argparse has no public name for it)
                for name, parser in action.choices.items() if isinstance(parser, Parser)}

    def flags(self) -> list[str]:
        """Every flag of this parser and of its subparsers."""
        found = [flag for action in self.arguments() for flag in action.option_strings]
        return found + [flag for parser in self.subcommands().values() for flag in parser.flags()]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n  see {self.prog} --help\n")


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the known word most like `word`, or nothing if none is like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def flag_name(field_name: str) -> str:
    """The flag of an option: max_model_len -> --max-model-len."""
    return "--" + field_name.replace("_", "-")


def at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """ConfigError for one of these options that is given and below `least`."""
    for name in names:
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigError(f"{flag_name(name)} must be at least {least}, got {value}")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], skip: Iterable[str] = ()) -> None:
    """Adds a flag for every field of the dataclass `cls` that is not in `skip`, under its group's heading.

    bool: --flag and --no-flag. list: one value or several with commas, and the flag may be repeated. dict: see `pairs`, may be
    repeated. int: see `integer`. A flag that is not given leaves no trace in the namespace: the dataclass has the defaults."""
    leave_out = set(skip)
    hints = get_type_hints(cls)
    groups = {group.title: group for group in parser._action_groups}  # noqa: SLF001 (argparse has no public name for them)
    title = "Options"
    for field in dataclasses.fields(cls):
        title = field.metadata["group"] or title
        if field.name in leave_out:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(flag_name(field.name), *filter(None, [field.metadata["short"]]), default=argparse.SUPPRESS,
                                   dest=field.name, help=_help(field), **_shape(field, hints[field.name]))


def add_accepted(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags that ask for what is done anyway, left out of the help."""
    for name, values in ACCEPTED.items():
        if flag_name(name) not in parser._option_string_actions:  # noqa: SLF001 (argparse has no public name for it)
            shape: dict[str, Any] = {"action": "store_true"} if values[0] is True else {"choices": [str(one) for one in values]}
            parser.add_argument(flag_name(name), dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **shape)


def from_args(args: argparse.Namespace, cls: type[Options], **more: Any) -> Options:
    """The checked dataclass from the command line; `more` gives fields that were positional. ConfigError as `checked`."""
    given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return checked(cls(**{name: value for name, value in {**given, **more}.items() if value is not None}))


def with_flags(message: str, *classes: type[Any]) -> str:
    """An error message in which options of `classes` are called as on the command line: max_model_len -> --max-model-len.

    Names of one word (seed, dtype) are common words as well, and are options only where the message begins with them."""
    names = [field.name for cls in classes for field in dataclasses.fields(cls)]
    compound = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    simple = "|".join(name for name in names if "_" not in name)
    message = re.sub(rf"(?<![\w.'\"-])({compound})(?![\w'\"-])", lambda found: flag_name(found[1]), message)
    return re.sub(rf"^({simple}) (?=is |must )", lambda found: flag_name(found[1]) + " ", message)


def words_of(path: str) -> list[str]:
    """The command line that a YAML file stands for: a mapping of flags, without their dashes, to values.

    Lists repeat the flag, mappings become JSON, true and false --flag and --no-flag, and what is null is left out. ConfigError
    if the file cannot be read or is no such mapping."""
    import yaml  # type: ignore[import-untyped]  # late: only --config needs it

    try:
        with open(path) as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must map flags to values, as in `port: 8001`")
    words: list[str] = []
    for key, value in content.items():
        flag = flag_name(str(key))
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words.append(f"{flag}={json.dumps(value)}")
        else:
            words += [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
    return words


def _shape(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Returns argparse's arguments for a field of this type."""
    kind = unwrapped(hint)
    choices = field.metadata["choices"] or None
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    origin = get_origin(kind) or kind
    if origin is list:
        commas = field.metadata["commas"]
        return {"action": Collect, "type": listed() if commas else lambda text: [text],
                "metavar": "TEXT[,TEXT]" if commas else "TEXT"}
    if origin is dict:
        return {"action": Collect, "type": pairs, "metavar": "KEY=VALUE"}
    read, metavar = {int: (integer, "N"), float: (number, "X"), str: (str, "TEXT")}[kind]
    return {"type": read, "choices": choices, **({} if choices else {"metavar": metavar})}


def _help(field: dataclasses.Field[Any]) -> str:
    """The option's documentation and default, safe for argparse's own % formatting."""
    default = "" if field.default in (None, "", dataclasses.MISSING) else f" (default: {field.default})"
    return f"{field.metadata['doc']}{default}".replace("%", "%%")
