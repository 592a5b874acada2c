"""Output of commands: the last line of one that gives up, silent libraries, a reader that leaves before the end."""

from __future__ import annotations

import logging
import os
import select
import sys
from contextlib import suppress

_STDOUT = 1


def print_error(command: str, message: object) -> None:
    """Writes ``message`` to stderr as one line, whatever breaks it holds; progress bars end before it."""
    if "tqdm" in sys.modules:  # a bar that is closed later, at exit, would stand behind the error
        from tqdm import tqdm

        with suppress(OSError, ValueError):  # its stream is gone
            for bar in list(tqdm._instances):
                bar.close()
    print(f"swift-stage2 {command}: error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def quieten_libraries() -> None:
    """Silences ms-swift, Hugging Face and vLLM where a command's own words alone are asked for."""
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # ms-swift's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("swift").setLevel(logging.ERROR)


def has_lost_its_reader() -> bool:
    """Whether stdout is a pipe or socket that nobody can read any more."""
    poll = select.poll()
    poll.register(_STDOUT, 0)  # errors are told without being asked for
    return bool(poll.poll(0))


def let_go() -> None:
    """Writes what is buffered; without a reader it is thrown away, so that the interpreter's own flush cannot fail.

    Raises:
        OSError: it cannot be written for another reason.
    """
    if sys.stdout is None:  # the process was started without one
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        throw_away()


def throw_away() -> None:
    """Sends what is buffered and what comes nowhere; for a caller that has told otherwise that stdout takes nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDOUT)
    os.close(nowhere)
