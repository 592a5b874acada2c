"""How a rank ends and why, told to who started it: torchrun replaces every failure by 1.

To the launcher in a file whose room it takes at the start, so that a full disk cannot hide its own name; to torchrun in
the error file that it names, so that its last words name the cause.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.launch.plan import EXIT_STATUS_FILE

USER_MISTAKE = 2
_FAILED = 1
_TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
_ROOM_BYTES = 4096
_MOST_CHARACTERS = 1000  # of a cause; four bytes each at most


def as_rank(work: Callable[[], int]) -> int:
    """What ``work`` returns; its status, and the cause if it raised, is left for who started this rank."""
    status, cause = _FAILED, ""
    try:
        status = work()
    except Exception as error:
        status = USER_MISTAKE if isinstance(error, UserError) else _FAILED
        cause = cause_of(error)
        raise
    finally:
        _leave(status, cause)
    return status


def cause_of(error: BaseException) -> str:
    """One line that names an error; what we raise on purpose names itself."""
    words = " ".join(str(error).split())
    if not isinstance(error, UserError):
        words = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]} …"


def take_room(path: Path) -> None:
    """Begins the file in which the first rank that fails leaves its end. Raises OSError if there is no room for it."""
    path.write_bytes(b" " * _ROOM_BYTES)


def end_left_in(path: Path) -> tuple[int, str]:
    """The status and cause that a rank left.

    Raises:
        OSError, ValueError: none did.
    """
    status, _, cause = path.read_text(encoding="utf-8").strip().partition("\n")
    return int(status), cause


def _leave(status: int, cause: str) -> None:
    """The first rank that fails has the say; torchrun asks each of them."""
    if status == 0:
        return
    if path := os.environ.get(EXIT_STATUS_FILE):
        words = f"{status}\n{cause}" if cause else str(status)
        with suppress(OSError), open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held for one short write
            if not file.read().strip():
                file.seek(0)
                file.write(words.encode(errors="backslashreplace"))
    if cause and (path := os.environ.get(_TORCHRUN_FILE)):
        extra = {"py_callstack": cause, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": cause, "extraInfo": extra}}))
