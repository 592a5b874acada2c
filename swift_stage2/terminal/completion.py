"""``swift-stage2 completion bash|zsh|tcsh``: a script that completes commands and options, made by shtab."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

import shtab

from swift_stage2.terminal.parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script; names of files are left to the shell."""
    parser = CommandParser(
        prog="swift-stage2 completion",
        description="Prints a script that completes commands and options. It takes seconds, so keep it in a file: "
        "swift-stage2 completion bash > ~/.swift-stage2.sh, and put `source ~/.swift-stage2.sh` into ~/.bashrc.",
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    print(completion_script(parser.parse_args(argv).shell))
    return 0


def completion_script(shell: str) -> str:
    cli = importlib.import_module("swift_stage2.cli")  # which names this file
    whole = cli.parser()
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    for name, module in cli.modules().items():
        commands.choices[name] = _parser_of(importlib.import_module(module))
    return str(shtab.complete(whole, shell))


class _Asked(Exception):
    """A command has made its parser and would read arguments now."""


def _parser_of(command: Any) -> argparse.ArgumentParser:
    """The parser that a command makes when it is called, before it does anything else."""

    def stop(parser: CommandParser, *_: object) -> NoReturn:
        raise _Asked(parser)

    parse_args = CommandParser.parse_args
    CommandParser.parse_args = stop  # type: ignore[method-assign, assignment]
    try:
        command.main([])
    except _Asked as asked:
        found: argparse.ArgumentParser = asked.args[0]
        return found
    finally:
        CommandParser.parse_args = parse_args  # type: ignore[method-assign]
    raise AssertionError(f"{command.__name__} reads its arguments with a CommandParser")
