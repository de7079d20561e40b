"""Print a script that completes commands and flags in a shell: `penstock completion bash`, `zsh` or `fish`.
Load it from the shell's start file: eval "$(penstock completion bash)", or in fish: penstock completion fish | source"""

import argparse
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from penstock.config.flags import Parser

SHELLS = ("bash", "zsh", "fish")


class Words(NamedTuple):
    """The words that may follow a command: subcommands, flags, and the values of flags that have few."""

    command: str
    """Without "penstock"; empty for the first word."""
    subcommands: dict[str, str]
    """With what they do."""
    flags: dict[str, str]
    choices: dict[str, list[str]]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(args: argparse.Namespace) -> int:
    tree = list(words())
    print(_fish(tree) if args.shell == "fish" else _bash(tree, zsh=args.shell == "zsh"))
    return 0


def words() -> Iterator[Words]:
    from penstock.cli.main import COMMANDS, parser_of  # late: main knows this module by name

    yield Words("", COMMANDS, {"--help": "show the commands"}, {})
    for name in COMMANDS:
        if name != "version":
            yield from _of(name, parser_of(name))


def _of(command: str, parser: Parser) -> Iterator[Words]:
    found = Words(command, dict.fromkeys(parser.subcommands(), ""), {}, {})
    for action in parser.arguments():
        choices = [str(choice) for choice in action.choices or ()]
        if not action.option_strings:
            found.subcommands.update(dict.fromkeys(choices, ""))
        for flag in action.option_strings:
            if flag.startswith("--") and action.help != argparse.SUPPRESS:
                found.flags[flag] = (action.help or "").replace("%%", "%")
                if choices:
                    found.choices[flag] = choices
    yield found
    for name, one in parser.subcommands().items():
        yield from _of(f"{command} {name}", one)


def _bash(tree: list[Words], zsh: bool) -> str:
    """A function for bash's `complete`, which zsh's bashcompinit understands as well."""
    lines = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    lines += ["_penstock() {",
              '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" possible="" i',
              "  for ((i = 1; i < COMP_CWORD; i++)); do",
              '    case "$command ${COMP_WORDS[i]}" in']
    nested = [one.command for one in tree if one.command]
    lines += [f"      {shlex.quote(' ' + command)}) command={shlex.quote(' ' + command)} ;;" for command in nested]
    lines += ["    esac", "  done", '  case "$command" in']
    for one in tree:
        lines.append(f"    {shlex.quote(' ' + one.command if one.command else '')})")
        lines += [f'      [[ "$before" == {flag} ]] && possible="{" ".join(words)}"' for flag, words in one.choices.items()]
        every = " ".join([*one.subcommands, *one.flags])
        lines += [f'      [[ -z "$possible" ]] && possible="{every}" ;;']
    lines += ["  esac", '  COMPREPLY=($(compgen -W "$possible" -- "$word"))',
              # A path is possible nearly everywhere: MODEL, a file, a folder.
              '  [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=($(compgen -f -- "$word"))', "}",
              "complete -o filenames -F _penstock penstock"]
    return "\n".join(lines)


def _fish(tree: list[Words]) -> str:
    lines = []
    for one in tree:
        parts = [f"__fish_seen_subcommand_from {part}" for part in one.command.split()]
        when = "; and ".join(parts) or "__fish_use_subcommand"
        lines += [f"complete -c penstock -n {shlex.quote(when)} -a {name} -d {shlex.quote(about)}"
                  for name, about in one.subcommands.items()]
        for flag, about in one.flags.items():
            values = f" -x -a {shlex.quote(' '.join(one.choices[flag]))}" if flag in one.choices else ""
            lines.append(f"complete -c penstock -n {shlex.quote(when)} -l {flag[2:]} -d {shlex.quote(about)}{values}")
    return "\n".join(lines)
