"""One run at a time in a run directory: rank 0, and every ``launch``, hold locks that the kernel releases at their end.

Whoever only reads a run learns there whether it goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from swift_stage2.errors import ConfigError, UserError
from swift_stage2.whole_file import read_regular, write_whole

logger = logging.getLogger(__name__)

RANK_0 = "rank0"
_LOCK = "run.{}.lock"
_HOLDER = "run.{}.holder"  # beside it, and left there: who holds the lock, or held it last
_LOOKED_AT_S = 2.0  # somebody may just be looking whether it is free


@contextmanager
def hold_run_directory(run_dir: Path, role: str = RANK_0) -> Iterator[None]:
    """The directory's lock of one ``role``, for as long as it is entered; the process that has it may enter again.

    A ``launch``, on each host of several one of its own, also sees to it that no rank 0 is there yet.

    Raises:
        UserError: another run goes on there.
        ConfigError: the directory cannot be written.
    """
    # No object of one thread: the trainer may be driven by another than the one that checked the start.
    lock = FileLock(run_dir / _LOCK.format(role), is_singleton=True, thread_local=False)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOOKED_AT_S)
        if lock.lock_counter == 1:
            write_whole(run_dir / _HOLDER.format(role), _this_process())
    except Timeout as error:
        raise _other_run(run_dir, role) from error
    except NotImplementedError:
        logger.warning("the file system of %s has no locks: start no second run there", run_dir)
    except OSError as error:
        lock.release()
        raise ConfigError(
            f"swift.output_dir must be a writable directory, got {run_dir} ({error}); name another one"
        ) from error
    try:
        if role != RANK_0 and _is_locked(run_dir / _LOCK.format(RANK_0)):
            raise _other_run(run_dir, RANK_0)
        yield
    finally:
        lock.release()


def is_held(run_dir: Path) -> bool:
    """Whether a run goes on in the directory; False where the file system has no locks."""
    return os.path.isdir(run_dir) and any(map(_is_locked, run_dir.glob(_LOCK.format("*"))))


def held_below(folder: Path) -> Iterator[Path]:
    """The directories in the folder, at any depth, where a run goes on."""
    return (lock.parent for lock in folder.rglob(_LOCK.format("*")) if _is_locked(lock))


def _is_locked(path: Path) -> bool:
    with suppress(OSError, NotImplementedError):  # nobody may lock it
        if path.is_file():
            try:
                with FileLock(path, timeout=0):
                    return False
            except Timeout:
                return True
    return False


def _other_run(run_dir: Path, role: str) -> UserError:
    holder = "its process is not named"
    with suppress(OSError, UnicodeDecodeError):
        holder = read_regular(run_dir / _HOLDER.format(role)).decode()
    return UserError(
        f"a run directory has one run at a time, got {run_dir}, where another goes on ({holder}); wait for its end, "
        "end it, or name another swift.output_dir"
    )


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
