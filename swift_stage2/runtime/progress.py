"""Work that takes long, told while it goes on: lines with seconds, or a bar where stderr is a terminal.

A bar is on stderr, and gone when the work is done.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from swift_stage2.runtime.output import printable, say

_MOMENTS_S = (1.0, 5.0)
SAID = re.compile(r"swift-stage2 \w+: (?!error: )(.+)$")
"""The end of a line in which a process below a launch tells its user something; its group is what."""


@contextmanager
def going_on(
    command: str,
    what: str | Callable[[], str],
    tell: Callable[[str], object] | None = None,
    moments_s: tuple[float, float] = _MOMENTS_S,
) -> Iterator[None]:
    """Says what goes on within, after 1 s and every 5 s from then on (``moments_s``); of several ranks the first does.

    ``what`` may tell it anew for every line. ``tell`` gets the words, by default as ``command``'s line on stderr.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    tell = tell or partial(say_beside_bar, command)
    started, ended = time.monotonic(), threading.Event()

    def repeat() -> None:
        wait_s, every_s = moments_s
        while not ended.wait(wait_s):
            tell(f"{what() if callable(what) else what} … {time.monotonic() - started:.0f} s")
            wait_s = every_s

    thread = threading.Thread(target=repeat, name="going-on", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_MOMENTS_S[0])  # whoever reads what it writes may stand still


def say_beside_bar(command: str, text: str) -> None:
    """One line on stderr, above a progress bar that stands there."""
    from tqdm import tqdm

    with (
        suppress(OSError, ValueError),
        tqdm.external_write_mode(file=sys.stderr),
    ):  # nobody reads it, or a full disk
        say(f"swift-stage2 {command}: {text}", is_error=True)


@contextmanager
def progress_bar(total: float | None, description: str) -> Iterator[Callable[..., None]]:
    """Yields a function that is told how much of ``total`` is done, and what to write beside it, if that changes."""
    from tqdm import tqdm

    layout = "{desc} {percentage:3.0f}% {bar} {elapsed}" if total else "{desc} {elapsed}"
    with tqdm(total=total, desc=description, leave=False, disable=None, bar_format=layout) as bar:

        def move_to(completed: float, description: str = "") -> None:
            if description:
                bar.set_description_str(printable(description), refresh=False)
            bar.update(completed - bar.n)

        yield move_to
