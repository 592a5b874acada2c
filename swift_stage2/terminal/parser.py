"""argparse as every command has it: ``--help`` ends with the exit statuses, a misspelt word names the nearest one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from swift_stage2.nearest_word import closest

_FOR_ALL = (
    "2 the user's mistake, told in one line; 130 interrupted; 141 nobody reads what it prints any more."
)
_UNKNOWN = re.compile(r"unrecognized arguments: (?:.*?\s)?(?P<word>--[\w-]+)")
_NO_CHOICE = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<choices>.*)\)")


class CommandParser(argparse.ArgumentParser):
    """``exit_statuses`` are those that only this command has, ``0 …`` among them. No option may be abbreviated."""

    def __init__(
        self, *, exit_statuses: str = "0 done; 1 a process of its own failed", **options: Any
    ) -> None:
        super().__init__(epilog=f"exit status: {exit_statuses}; {_FOR_ALL}", allow_abbrev=False, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's own, but what a sub-command does not know is told with that command's usage."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            below = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
            asked = below[0].choices[getattr(options, below[0].dest)] if below else self
            asked.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        near = self._nearest(message)
        super().error(f"{message}; did you mean {near}?" if near else message)

    def _nearest(self, message: str) -> str | None:
        if unknown := _UNKNOWN.search(message):
            return closest(unknown["word"], tuple(self._option_string_actions))
        if refused := _NO_CHOICE.search(message):
            return closest(refused["word"], tuple(word.strip(" '") for word in refused["choices"].split(",")))
        return None


def rank_count(text: str) -> int:
    """An option's value as a number of ranks."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a number of ranks, at least 1, got {text!r}")
    return value
