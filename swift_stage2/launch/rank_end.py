"""How a rank ends, told to the launcher in a file: torchrun replaces every failure by 1."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from swift_stage2.errors import UserError
from swift_stage2.launch.plan import EXIT_STATUS_FILE

USER_MISTAKE = 2
_FAILED = 1


def as_rank(work: Callable[[], int]) -> int:
    """What ``work`` returns; its status, or the user's mistake that it raised, is left for the launcher."""
    status, mistake = _FAILED, ""
    try:
        status = work()
    except UserError as error:
        status, mistake = USER_MISTAKE, " ".join(str(error).split())
        raise
    finally:
        _leave(status, mistake)
    return status


def _leave(status: int, mistake: str) -> None:
    """The first rank that fails has the say.

    A user's mistake follows on a second line: the launcher tells it again below torchrun's traceback.
    """
    path = os.environ.get(EXIT_STATUS_FILE)
    if path and status != 0:
        with suppress(OSError), open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{status}\n{mistake}" if mistake else str(status))
