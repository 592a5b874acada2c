"""One parser for every bench: its own options, ``--output`` and ``--keep``, and a directory for what it finds.

A bench is a module with ``run(options, directory)``, which returns the exit status, and where its options are not all
there is to refuse, ``check(options)``, called before anything is written. ``benches`` declares them without importing.
"""

from __future__ import annotations

import argparse
import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.run_directory.claim import claim_directory
from swift_stage2.terminal.output import print_error
from swift_stage2.terminal.parser import CommandParser

_HOLDS = {"above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}
_DESCRIPTION = (
    "Measure speed, learning, and what faults cost. Exit status 0: everything was measured and nothing was lost; a "
    "missed budget is told in the table. NAME --help tells the options, and of most how long they take."
)


@dataclass(frozen=True, slots=True)
class Option:
    """``--name``. A list as ``default``: several values after it; a bool: it takes none. Bounds are of every value."""

    name: str
    default: Any
    help: str
    _: KW_ONLY
    kind: Callable[[str], Any] | None = None
    """Reads one value; None: the default's own type. It raises UserError, or ArgumentTypeError for a usage error."""
    metavar: str | None = None
    choices: Sequence[str] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    remedy: str = ""
    """A remedy in place of the default one; empty: the default."""

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        if isinstance(self.default, bool):
            parser.add_argument(f"--{self.name}", action="store_true", help=self.help)
            return
        several = isinstance(self.default, list)
        is_told = self.default in (None, "", (), []) or "(default " in self.help
        shown = "" if is_told else f" (default {_shown(self.default)})"
        parser.add_argument(
            f"--{self.name}",
            type=self.kind or type(self.default[0] if several else self.default),
            default=self.default,
            nargs="+" if several else None,
            metavar=self.metavar or ("N" if several and self.choices is None else None),
            choices=self.choices,
            help=(self.help + shown).replace("%", "%%"),
        )

    def check(self, options: argparse.Namespace) -> None:
        """Raises UserError when a bound does not hold."""
        given = [(word, bound) for word in _HOLDS if (bound := getattr(self, word.split()[-1])) is not None]
        value = getattr(options, self.name.replace("-", "_"))
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not all(_HOLDS[word](number, bound) for word, bound in given):
                rule = " and ".join(f"{word} {bound:g}" for word, bound in given)
                remedy = self.remedy or f"write {_shown(self.default)}"
                raise UserError(f"--{self.name} must be {rule}, got {number}; {remedy}")


class Turn(NamedTuple):
    """Options and minutes that ``bench all`` gives a bench, in full and with ``--quick``."""

    minutes: int
    quick_minutes: int
    quick: str
    full: str = ""
    without_vllm: str | None = None
    """Instead of ``full`` where vLLM is not installed; None: the same."""
    needs_vllm: bool = False
    """Left out where vLLM is not installed, unless it is asked for by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    name: str
    module: str = ""
    """Below ``benchmarks``; empty: that of its name."""
    purpose: str
    detail: str = ""
    takes: str
    """Its usual duration on two cores."""
    succeeds: str = "everything was measured"
    """The meaning of exit status 0."""
    options: tuple[Option, ...] = ()
    output: str = ""
    """Where results go; empty: ``runs/bench-NAME``, which is cleared of what an earlier run of it left."""
    turn: Turn

    @property
    def path(self) -> str:
        return f"benchmarks.{self.module or self.name}"

    @property
    def description(self) -> str:
        purpose = self.purpose[0].upper() + self.purpose[1:]
        end = "" if purpose.endswith("?") else "."
        said = f"{purpose}{end} {self.detail}".rstrip()
        return f"{said} On two cores it takes {self.takes}. Exit status 0: {self.succeeds}."


def one_of(*known: str) -> Callable[[str], str]:
    """Reads one word; another one is a usage error."""

    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {text!r}")
        return text

    return read


def comma_list(option: str, what: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads ``NAME,…``, each once; refuses what is not known."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise UserError(
                f"--{option} must name {what}, got {', '.join(map(repr, unknown))}; choose among {', '.join(known)}"
            )
        return names

    return read


def number_list(
    name: str, kind: type[int] | type[float], most: float, example: str
) -> Callable[[str], tuple[float, ...]]:
    """Reads different numbers of 0 to ``most`` with commas between."""
    bounds = f"in the range 0..{most:g}" if most < float("inf") else "from 0 on"

    def read(text: str) -> tuple[float, ...]:
        try:
            numbers = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise UserError(
                f"--{name} must be {'whole ' if kind is int else ''}numbers with commas between, got {text!r}; "
                f"write {example}"
            ) from None
        if not all(0 <= number <= most for number in numbers) or len(set(numbers)) != len(numbers):
            raise UserError(f"--{name} must be different numbers {bounds}, got {text!r}; write {example}")
        return numbers

    return read


def parse(bench: Bench, argv: Sequence[str]) -> argparse.Namespace:
    """The bench's options, each within its bounds. Raises UserError."""
    statuses = f"0 {bench.succeeds}; 1 that is not so, or a process of its own failed"
    parser = CommandParser(
        prog=f"swift-stage2 bench {bench.name}", description=bench.description, exit_statuses=statuses
    )
    for option in bench.options:
        option.add_to(parser)
    output = Path(bench.output or f"runs/bench-{bench.name}")
    words = "gets what was found" + ("" if bench.output else "; earlier results there are replaced")
    Option("output", output, words, metavar="DIR").add_to(parser)
    if not bench.output:
        Option("keep", False, "keep earlier results; take DIR-2, … instead").add_to(parser)
    options = parser.parse_args(argv)
    for option in bench.options:
        option.check(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one bench; returns its exit status, 1 where a process of its own failed.

    Raises:
        UserError: an option is out of range, a package is missing, or the output directory cannot be used.
        KeyboardInterrupt: a signal asked for the end.
    """
    from benchmarks.benches import BENCHES

    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = CommandParser(prog="swift-stage2 bench", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, bench in BENCHES.items():
        commands.add_parser(name, help=bench.purpose, add_help=False)
    # Every bench has a parser of its own for what follows its name.
    bench = BENCHES[parser.parse_args(arguments[:1]).bench]
    options = parse(bench, arguments[1:])
    module = importlib.import_module(bench.path)
    try:
        if hasattr(module, "check"):
            module.check(options)
        directory = options.output if bench.output else claim_directory(options.output, keep=options.keep)
        return int(module.run(options, directory))
    except ChildFailed as error:
        print_error("bench", error)
        return 1


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
