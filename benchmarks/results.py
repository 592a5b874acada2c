"""Results are tables and one-line notes, printed and written as one page of Markdown. Also: whose turn it is."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from benchmarks.estimates import Spread

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
_GIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Cells by row, all rows as long as ``columns``. The first column is the row's name; a title may be empty."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @classmethod
    def of(
        cls, title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], str]]
    ) -> ResultTable:
        """One row per item; a column is its heading and the cell that it makes of an item."""
        rows = [tuple(cell(item) for cell in columns.values()) for item in items]
        return cls(title, tuple(columns), rows)

    def markdown(self) -> str:
        """Title, blank line and table, whose columns are as wide as their longest cell."""
        lines = [tuple(cell.replace("|", "/") for cell in line) for line in (self.columns, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, tuple("-" * width for width in widths))
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        body = "".join(f"| {' | '.join(line)} |\n" for line in padded)
        return f"{self.title}\n\n{body}" if self.title else body


def spread_table(
    title: str,
    first: str,
    rows: Mapping[str, Sequence[Item]],
    columns: Mapping[str, tuple[int, Callable[[Item], float]]],
) -> ResultTable:
    """One row per name: the median (quartiles) of every column over the row's items.

    A column is a number of digits and what it takes of an item.
    """

    def cell(digits: int, value: Callable[[Item], float]) -> Callable[[tuple[str, Sequence[Item]]], str]:
        return lambda row: Spread.of([value(item) for item in row[1]]).words(digits)

    cells = {name: cell(*column) for name, column in columns.items()}
    return ResultTable.of(title, rows.items(), {first: lambda row: row[0], **cells})


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, keys and items in the order in which they come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def publish(directory: Path, name: str, *parts: ResultTable | str) -> None:
    """Prints tables and notes, in order, and writes them into ``directory`` as ``NAME.md``, below what was run."""
    paragraphs = [part.markdown() if isinstance(part, ResultTable) else f"{part}\n" for part in parts]
    page = "\n".join([f"{_stamp(name)}\n", *paragraphs])
    (directory / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)
    say(f"{directory / name}.md")


def _stamp(name: str) -> str:
    """The command, its time, the state of the project and the machine, which figures depend on."""
    command = shlex.join(["swift-stage2", "bench", name, *sys.argv[2:]])
    now = datetime.datetime.now().astimezone().isoformat(timespec="minutes")
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    packages = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "ms-swift"))
    return f"`{command}`, {now}, state {project_state()}; {platform.machine()}, {cores}; {packages}"


def project_state() -> str:
    """The commit, told where files differ from it; without git the version."""
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version("swift_stage2")


def cpu_model() -> str:
    """As Linux names it, which names none on some architectures."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def in_turns(arms: Iterable[Item], repeats: int) -> Iterator[tuple[int, Item]]:
    """Every arm once per repetition, with its number; who goes first alternates, so that no drift favours an arm."""
    order = list(arms)
    for number in range(repeats):
        for arm in order if number % 2 == 0 else order[::-1]:
            say(f"repetition {number + 1} of {repeats}: {arm}")
            yield number, arm


def say(text: str) -> None:
    """One line of a bench's own, at once."""
    print(f"[bench] {text}", flush=True)
