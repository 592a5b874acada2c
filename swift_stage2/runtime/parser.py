"""argparse as every command has it: ``--help`` ends with the exit statuses, a misspelt word names the nearest one."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from swift_stage2.errors import closest
from swift_stage2.runtime.output import printable

_FOR_ALL = "2 the user's mistake, told in one line; 130 interrupted."
_UNKNOWN = re.compile(r"unrecognized arguments: (?:.*?\s)?(?P<word>--[\w-]+)")
_NO_CHOICE = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<choices>.*)\)")

_MOST = 10**18  # of an option that knows no smaller one


class CommandParser(argparse.ArgumentParser):
    """``exit_statuses`` are those that only this command has, ``0 …`` among them. No option may be abbreviated."""

    def __init__(
        self, *, exit_statuses: str = "0 done; 1 a process of its own failed", **options: Any
    ) -> None:
        super().__init__(epilog=f"exit status: {exit_statuses}; {_FOR_ALL}", allow_abbrev=False, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's own, but what a sub-command does not know is told in that command's name."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            below = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
            asked = below[0].choices[getattr(options, below[0].dest)] if below else self
            asked.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        near = self._nearest(message)
        message = printable(" ".join(message.split()))  # whatever breaks an option's value holds
        remedy = f"did you mean {near}?" if near else f"{self.prog} --help lists what there is"
        self.exit(2, f"{self.prog}: error: {message}; {remedy}\n")

    def _nearest(self, message: str) -> str | None:
        if unknown := _UNKNOWN.search(message):
            return closest(unknown["word"], tuple(self._option_string_actions))
        if refused := _NO_CHOICE.search(message):
            return closest(refused["word"], tuple(word.strip(" '") for word in refused["choices"].split(",")))
        return None


def whole_number(least: int, most: int = _MOST) -> Callable[[str], int]:
    """The type of an option whose value is a whole number from ``least`` to ``most``."""
    rule = f"at least {least}" if most == _MOST else f"from {least} to {most}"

    def parse(text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number, {rule}, got {text[:40]!r}")
        return int(text)

    return parse


def real_number(what: str, below: float = math.inf) -> Callable[[str], float]:
    """The type of an option whose value is a number above 0 and ``below`` another; ``what`` says so."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := float(text)) < below:
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return parse
