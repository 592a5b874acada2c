"""A bar on a terminal, nothing elsewhere: on stderr, and gone when the work is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class MoveTo(Protocol):
    """How much is done, and what to write beside it, if that changes."""

    def __call__(self, completed: float, description: str | None = None) -> None: ...


@contextmanager
def progress_bar(total: float | None, description: str) -> Iterator[MoveTo]:
    """Yields a function that is told how much of ``total`` is done; None where nobody knows the total."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    from rich.progress import Progress

    from swift_stage2.terminal.console import SafeConsole

    with Progress(console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def move_to(completed: float, description: str | None = None) -> None:
            bar.update(task, completed=completed, description=description)

        yield move_to


def _ignore(completed: float, description: str | None = None) -> None:
    pass
