"""One rank around its training: holds its run directory, begins where it may, and tells who started it how it ended.

torchrun replaces every failure by 1. So a rank leaves its status and cause in a file whose room the launcher takes at
the start, so that a full disk cannot hide its own name.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from swift_stage2.checks.checks import CheckStage, run_checks
from swift_stage2.config import Stage2Config
from swift_stage2.errors import ChannelBStarved, UserError, exit_status_of
from swift_stage2.launch.plan import EXIT_STATUS_FILE
from swift_stage2.runtime.output import going_on, print_error, say
from swift_stage2.runtime.run_directory import resumed, run_lock, written_directory

_FAILED = 1
_ROOM_BYTES = 4096
_MOST_CHARACTERS = 1000  # of a cause; four bytes each at most


def as_rank(command: str, work: Callable[[], int]) -> int:
    """Returns what ``work`` does; its status, and the cause if it raised, are left for who started this rank.

    The cause is also told as the last line of ``command``, but for the user's mistake, which is raised.
    """
    status, cause = _FAILED, ""
    try:
        status = work()
    except Exception as error:  # the top of a rank: what failed stands last, below all that was told
        status, cause = exit_status_of(error), cause_of(error)
        if isinstance(error, UserError):
            raise
        if not isinstance(error, ChannelBStarved):
            traceback.print_exc()
        print_error(command, cause)
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


def end_left_in(path: Path) -> tuple[int, str] | None:
    """The status and cause that a rank left; None if none did."""
    with suppress(OSError, ValueError):
        status, _, cause = path.read_text(encoding="utf-8").strip().partition("\n")
        return int(status), cause
    return None


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


def train_rank(config: Stage2Config, *, resume: bool) -> int:
    """Trains to the end; returns the exit status. ``resume``: from the last whole checkpoint in the run directory.

    Raises:
        UserError: another run goes on in the run directory, or an earlier one would be written over.
    """
    rank = os.environ.get("RANK", "0")
    with ExitStack() as held:
        if rank == "0" and (run_dir := written_directory(config.swift)) is not None:
            held.enter_context(run_lock(run_dir))
        config, notes = resumed(config) if resume else (config, ())
        run_checks(config, CheckStage(run_directory=not resume))  # a resume has seen what is there
        if rank == "0" and EXIT_STATUS_FILE not in os.environ:  # else the launcher has said it
            for note in (*(f"warning: {warning}" for warning in config.warnings), *notes):
                say(f"swift-stage2 train: {note}", is_error=True)
        with going_on("train", "loading torch"):
            sft = importlib.import_module("swift_stage2.training.sft")
        # Else launch has just checked every row, once for all ranks of this machine.
        return int(sft.train(config, checks_rows=EXIT_STATUS_FILE not in os.environ))
