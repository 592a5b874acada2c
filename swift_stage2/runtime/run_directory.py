"""Directories that are written into: one run at a time, never over an earlier one, never over others' files.

``launch`` and every rank ask where a run may begin before anything starts, and come to the same answer because nobody
writes there meanwhile: rank 0, and every ``launch``, hold locks that the kernel releases at their end. Whoever only
reads a run learns there whether it goes on.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from swift_stage2.errors import ConfigError, UserError
from swift_stage2.runtime.checkpoints import checkpoints_in, was_saved, why_not_whole
from swift_stage2.whole_file import read_regular, regular_lines, write_whole

if TYPE_CHECKING:
    from swift_stage2.config import Stage2Config  # loads yaml, which a GPU check may have to ask for first

_NO = ("false", "f", "no", "n", "0")  # as the parser of ms-swift's command line reads them
_MARKER = ".swift-stage2"
RANK_0 = "rank0"
_LOCK = "run.{}.lock"
_HOLDER = "run.{}.holder"  # beside it, and left there: who holds the lock, or held it last
_LOOKED_AT_S = 2.0  # somebody may just be looking whether it is free

logger = logging.getLogger(__name__)


def written_directory(swift: Mapping[str, Any]) -> Path | None:
    """The directory that a run writes into and an earlier one may have; None where ms-swift makes a new folder."""
    place = _output_dir(swift)
    return place if str(swift.get("add_version")).lower() in _NO else None


def refuse_earlier_run(swift: Mapping[str, Any]) -> None:
    """Refuses a run that would write over an earlier one; a run may go on from its own checkpoint.

    Raises:
        ConfigError: names what the earlier one has left.
    """
    given, written = swift.get("resume_from_checkpoint"), written_directory(swift)
    if written is None or (
        given and Path(str(given)).expanduser().resolve().is_relative_to(written.resolve())
    ):
        return
    if found := what_was_trained(written):
        raise ConfigError(
            "swift.add_version: false writes into output_dir itself, which must hold no earlier run",
            got=f"output_dir={str(written)!r} with {found}",
            remedy="go on with that run by --resume, or name another output_dir",
        )


def what_was_trained(run_dir: Path) -> str:
    """The traces of a run that has trained here, in a few words; empty if there are none."""
    if steps := checkpoints_in(run_dir):
        return f"checkpoint-{max(steps)}"
    for path in sorted(run_dir.glob("events/rank*.jsonl")):
        if any(b'"kind":"step"' in line for line in regular_lines(path)):
            return f"the steps in {path.relative_to(run_dir)}"
    log = run_dir / "logging.jsonl"  # ms-swift also writes a line without a loss where a start fails
    return "the losses in logging.jsonl" if log.is_file() and b'loss"' in read_regular(log) else ""


def resumed(config: Stage2Config) -> tuple[Stage2Config, tuple[str, ...]]:
    """``config`` that goes on from the last whole checkpoint in ``swift.output_dir``, and lines for the user.

    Where no save came to its end it begins at step 0, also over the steps of a run that ended before.

    Raises:
        ConfigError: a checkpoint is named already, or none is whole although one was saved.
    """
    if given := config.swift.get("resume_from_checkpoint"):
        raise ConfigError(
            "--resume finds the last whole checkpoint by itself",
            got=f"resume_from_checkpoint={given!r}, too",
            remedy="remove one of the two",
        )
    place = _output_dir(config.swift)
    runs = [place] if written_directory(config.swift) else [place, *place.glob("v*-*")]
    # The newest run first: one that was begun anew beside another has fewer steps, but is the last.
    found = [(run.stat().st_mtime, step, path) for run in runs for step, path in checkpoints_in(run).items()]
    passed_over: list[str] = []
    for *_, path in sorted(found, reverse=True):
        if not (reason := why_not_whole(path, needs_stage2=config.b_enabled)):
            swift = {**config.swift, "resume_from_checkpoint": str(path)}
            return replace(config, swift=swift), (*passed_over, f"resuming from {path}")
        passed_over.append(f"{path} is passed over: {reason}")
    if any(was_saved(path) for *_, path in found):  # a new run would rotate away what may be mended
        raise ConfigError(
            "--resume needs a whole checkpoint",
            got="; ".join(passed_over),
            remedy="name another output_dir to begin anew",
        )
    trained = next((f"{run} with {words}" for run in runs if (words := what_was_trained(run))), "")
    words = (
        f"no checkpoint was saved whole in {trained}" if trained else f"nothing was trained in {place} yet"
    )
    return config, (*passed_over, f"{words}: begins at step 0")


def _output_dir(swift: Mapping[str, Any]) -> Path:
    # As ms-swift does.
    place = swift.get("output_dir") or f"output/{Path(str(swift.get('model') or '')).name}"
    if str(place).startswith("$") or "${" in str(place):
        raise ConfigError(
            "swift.output_dir is taken as it is written",
            got=f"output_dir={place!r}, whose variable nobody replaces",
            remedy="write the path itself (~ is the home directory)",
        )
    path = Path(str(place)).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(
            "swift.output_dir must be a directory", got=f"output_dir={place!r}", remedy="name another"
        )
    return path


def make_directory(path: Path, *, keep: bool) -> Path:
    """An empty directory: ``path``, cleared of an earlier claim, or with ``keep`` the first free ``path-N``.

    Only what an earlier claim covers is ever cleared, and never while a run works in it.

    Raises:
        UserError: the directory holds something that no claim covers, or a run works in it, or it cannot be written.
    """
    directory, number = path.absolute(), 1
    try:
        while keep:
            with suppress(FileExistsError):
                directory.mkdir(parents=True)
                break
            number += 1
            directory = directory.with_name(f"{path.name}-{number}")
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()) and not (directory / _MARKER).exists():
            raise UserError(
                "--output must be a new directory or one that an earlier run of such a command made",
                got=f"{directory} with other files",
                remedy="name another one",
            )
        for lock in directory.rglob(_LOCK.format("*")):
            if _is_locked(lock):
                raise UserError(
                    "--output must be a directory that no run works in",
                    got=f"{directory} with a run in {lock.parent}",
                    remedy="wait for its end, or name another one",
                )
        (directory / _MARKER).touch()
        for entry in directory.iterdir():
            if entry.name != _MARKER:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    except OSError as error:
        raise UserError(
            "--output must be a directory that can be written",
            got=f"{directory} ({error})",
            remedy="name another one",
        ) from error
    return directory


@contextmanager
def run_lock(run_dir: Path, role: str = RANK_0) -> Iterator[None]:
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
            begun = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = f"process {os.getpid()} on {socket.gethostname()} since {begun}"
            write_whole(run_dir / _HOLDER.format(role), holder)
    except Timeout as error:
        raise _other_run(run_dir, role) from error
    except NotImplementedError:
        logger.warning("the file system of %s has no locks: start no second run there", run_dir)
    except OSError as error:
        lock.release()
        raise ConfigError(
            "swift.output_dir must be a writable directory",
            got=f"{run_dir} ({error})",
            remedy="name another one",
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
        "a run directory has one run at a time",
        got=f"{run_dir}, where another goes on ({holder})",
        remedy="wait for its end, end it, or name another swift.output_dir",
    )
