"""Results are told three times: tables on the terminal, the same tables as Markdown, all numbers as JSON.

A cell is text that the bench wrote; numbers for other programs are in the JSON alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.estimates import Spread

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
_WIDTH_OF_A_LOG = 180


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

    def rich(self) -> Table:
        table = Table(title=self.title or None, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Title, blank line, table, with a newline at the end."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        body = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
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


def publish(
    directory: Path, name: str, facts: Mapping[str, Any] | Sequence[Any], *parts: ResultTable | str
) -> None:
    """Prints tables and one-line notes, in order, and writes ``NAME.json`` and ``NAME.md`` into ``directory``."""
    (directory / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    paragraphs = [part.markdown() if isinstance(part, ResultTable) else f"{part}\n" for part in parts]
    (directory / f"{name}.md").write_text("\n".join(paragraphs), encoding="utf-8")
    # In a log, rows that are broken over lines cannot be read.
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_LOG)
    for part in parts:
        if isinstance(part, ResultTable):
            console.print(part.rich())
        else:
            print(part)
    say(f"{directory / name}.json")


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
