"""Output of commands: text that no terminal obeys, a last line, silent libraries, and what takes long, told meanwhile.

A bar is on stderr, and gone when the work is done.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from swift_stage2.errors import UserError

# Controls, lone surrogates, and what turns the direction of a line: a terminal obeys or refuses them.
_OBEYED = (
    range(0x20),
    range(0x7F, 0xA0),
    range(0x2028, 0x202F),
    range(0x2066, 0x206A),
    range(0xD800, 0xE000),
)
_SHOWN = {code: "\N{REPLACEMENT CHARACTER}" for codes in _OBEYED for code in codes}


def printable(text: str) -> str:
    """One line that a terminal obeys nowhere: text from outside may hold anything."""
    return text.translate(_SHOWN)


class SafeConsole(Console):
    """Rich's, without the control characters of what it shows: paths, labels and words of servers are others'."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else "\n".join(map(printable, text.split("\n"))), style, control)


def say(*lines: object, is_error: bool = False) -> None:
    """Prints each as one line of printable text, on stderr if it ``is_error`` or goes beside what a program reads."""
    for line in lines:
        stream = sys.stderr if is_error else sys.stdout
        stream.write(f"{printable(str(line))}\n")  # one write, since ranks share a log
        stream.flush()


def print_error(command: str, message: object) -> None:
    """Writes ``message`` to stderr as one line, whatever breaks it holds; progress bars end before it."""
    if "tqdm" in sys.modules:  # a bar that is closed later, at exit, would stand behind the error
        from tqdm import tqdm

        with suppress(OSError, ValueError):  # its stream is gone
            for bar in list(tqdm._instances):
                bar.close()
    say(f"swift-stage2 {command}: error: {' '.join(str(message).split())}", is_error=True)


def quieten_libraries() -> None:
    """Silences ms-swift, Hugging Face and vLLM where a command's own words alone are asked for."""
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # ms-swift's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in ("swift", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def check_new_file(path: Path, *, force: bool, sources: Iterable[Path]) -> None:
    """Makes the folder of a file that will be written.

    Raises:
        UserError: the file exists and nobody said --force, it is one of ``sources``, or its folder cannot be made.
    """
    is_there = os.path.exists(path)  # Path.exists raises for names that are too long
    if is_there and any(os.path.exists(source) and source.samefile(path) for source in sources):
        raise UserError("--output must not be a file that is read", got=str(path), remedy="name another one")
    if is_there and not force:
        raise UserError(
            "--output must be a new file",
            got=f"{path}, which exists",
            remedy="name another one or add --force",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "--output must be a file that can be written", got=str(error), remedy="name another"
        ) from error


def exit_at_once(status: int) -> NoReturn:
    """Ends this process, whatever its threads still do; what was printed is written if anybody takes it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):
            stream.flush()
    os._exit(status)


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
