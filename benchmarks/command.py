"""One parser for every bench: its own options, ``--output`` and ``--keep``, and a directory for what it finds.

A bench is a module with ``run(options, directory)``, which returns the exit status, and where its options are not all
there is to refuse, ``check(options)``, called before anything is written. ``benches`` declares them without importing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.runtime.output import print_error
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.runtime.run_directory import make_directory

_DESCRIPTION = (
    "Measure speed, learning, and what faults cost. Exit status 0: everything was measured and nothing was lost; a "
    "missed budget is told in the table. NAME --help tells the options, and how long it takes."
)


@dataclass(frozen=True, slots=True)
class Option:
    """``--name``. A list as ``default``: several values after it; a bool: it takes none. Bounds are of every value."""

    name: str
    default: Any
    help: str
    _: KW_ONLY
    kind: Callable[[str], Any] | None = None
    """Reads one value; None: the default's own type."""
    metavar: str = "N"
    choices: Sequence[str] | None = None
    least: float | None = None
    most: float = float("inf")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        if isinstance(self.default, bool):
            parser.add_argument(f"--{self.name}", action="store_true", help=self.help)
            return
        several = isinstance(self.default, list)
        values = self.default if several else [self.default]
        is_told = "(default " in self.help or values in ([], [None])
        shown = "" if is_told else f" (default {' '.join(map(str, values))})"
        parser.add_argument(
            f"--{self.name}",
            type=self.kind or type(values[0]),
            default=self.default,
            nargs="+" if several else None,
            choices=self.choices,
            metavar=None if self.choices else self.metavar,
            help=f"{self.help}{shown}".replace("%", "%%"),
        )

    def check(self, options: argparse.Namespace) -> None:
        """Raises UserError when a bound does not hold."""
        if self.least is None:
            return
        value = getattr(options, self.name.replace("-", "_"))
        for number in value if isinstance(value, list) else [value]:
            if not self.least <= number <= self.most:
                most = "" if self.most == float("inf") else f" and at most {self.most:g}"
                raise UserError(
                    f"--{self.name} must be at least {self.least:g}{most}, got {number}; leave it out for the default"
                )


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

    @property
    def path(self) -> str:
        return f"benchmarks.{self.module or self.name}"


def parse(bench: Bench, argv: Sequence[str]) -> argparse.Namespace:
    """The bench's options, each within its bounds. Raises UserError."""
    parser = CommandParser(
        prog=f"swift-stage2 bench {bench.name}",
        description=f"{bench.purpose}. {bench.detail} On two cores it takes {bench.takes}.".replace(
            "  ", " "
        ),
        exit_statuses=f"0 {bench.succeeds}; 1 that is not so, or a process of its own failed",
    )
    for option in bench.options:
        option.add_to(parser)
    output = Path(f"runs/bench-{bench.name}")
    parser.add_argument(
        "--output",
        type=Path,
        default=output,
        metavar="DIR",
        help=f"gets the table and all logs; earlier results there are replaced (default {output})",
    )
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    options = parser.parse_args(argv)
    for option in bench.options:
        option.check(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one bench; returns its exit status, 1 where a process of its own failed.

    Raises:
        UserError: an option is out of range, a bench or a package is missing, or the output directory cannot be used.
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
        return int(module.run(options, make_directory(options.output, keep=options.keep)))
    except ChildFailed as error:
        print_error("bench", error)
        return 1
