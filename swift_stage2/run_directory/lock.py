"""One run at a time in a run directory: each process of a run holds a lock that the kernel releases at its end.

A holder's file appears below ``RUN_DIR/locks`` locked and written, so one that is not locked is of a process that has
ended, and one that is tells whose it is. ``launch`` and every rank hold one; the ranks of one torchrun are one run,
with the launch above them. Whoever only reads a run learns there whether it goes on.

Some network file systems have no locks, or show one to its own host alone. So every holder also touches its file, and
where the kernel cannot know, a file is of a process that has ended once it has been left alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from swift_stage2.errors import ConfigError, UserError
from swift_stage2.whole_file import open_regular

_FOLDER = "locks"
_SUFFIX = ".lock"
_LONGEST_COMMAND = 300
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_TOUCHED_EVERY_S = 10.0
_LEFT_ALONE_S = 60.0
_held: dict[int, Path] = {}  # descriptor → directory, of this process's locks


def _let_go_in_child() -> None:
    """A lock lasts as long as any copy of its descriptor, and forked DataLoader workers outlive a killed rank."""
    while _held:
        os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_let_go_in_child)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One process that works in a run directory."""

    role: str
    """``launch``, on each host of several ``launch.nodeN``, or ``rank N``: a run has each once."""
    pid: int
    host: str
    boot_id: str
    """Of its kernel, for two hosts may have one name; empty where the kernel tells none."""
    since: str
    """Local time."""
    command: str
    agent_pid: int
    """Its parent: torchrun's agent, for a rank."""
    rendezvous: str
    """The same on all machines for the ranks of one torchrun; empty outside of torchrun."""

    def describe(self) -> str:
        return f"{self.role}, process {self.pid} on {self.host} since {self.since}: {self.command}"


@contextmanager
def hold_run_directory(
    run_dir: Path, role: str, environment: Mapping[str, str], *, is_alone: bool = False
) -> Iterator[None]:
    """Makes this process one of the directory's run for as long as it is entered.

    ``is_alone``: nobody else is looked for, for the directory was made for this run or this process holds it already;
    then it is held as before.

    Raises:
        UserError: another run goes on there.
        ConfigError: the directory cannot be written.
    """
    if is_alone and run_dir.resolve() in _held.values():
        yield
        return
    me = _this_process(role, environment)
    folder = run_dir / _FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, unnamed = tempfile.mkstemp(dir=folder, prefix=".")
    except OSError as error:
        raise _not_writable(run_dir, error) from error
    _held[descriptor] = run_dir.resolve()
    # Never a name that an earlier process had: whoever finds that one abandoned removes it by its name.
    path = folder / f"{me.host}-{me.pid}{Path(unnamed).name}{_SUFFIX}"
    ended = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, ended), name="run-lock", daemon=True)
    try:
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, json.dumps(asdict(me)).encode())
            os.fchmod(descriptor, 0o644)  # another user's run reads it, too
            os.rename(unnamed, path)
        except OSError as error:
            raise _not_writable(run_dir, error) from error
        if not is_alone:
            _refuse_others(folder, path, me)
        toucher.start()
        yield
    finally:
        ended.set()
        if toucher.is_alive():
            toucher.join(_TOUCHED_EVERY_S)
        for name in (Path(unnamed), path):
            name.unlink(missing_ok=True)
        _held.pop(descriptor, None)
        os.close(descriptor)


def _not_writable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"swift.output_dir must be a writable directory, got {run_dir} ({error}); name another one"
    )


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_TOUCHED_EVERY_S):
        with suppress(OSError):  # a moment's trouble: the file may stay untouched for longer
            os.utime(path)


def _this_process(role: str, environment: Mapping[str, str]) -> Holder:
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return Holder(
        role=role,
        pid=os.getpid(),
        host=socket.gethostname(),
        boot_id=_boot_id(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        command=shlex.join(psutil.Process().cmdline())[:_LONGEST_COMMAND],
        agent_pid=os.getppid(),
        rendezvous=" ".join(environment[name] for name in names if name in environment),
    )


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def is_held(run_dir: Path) -> bool:
    """Whether a process of a run works there; for one that holds nothing itself, and nothing is changed.

    Of another host's the clocks must agree to within a minute.
    """
    if not os.path.isdir(run_dir / _FOLDER):  # glob raises for names that are too long
        return False
    for path in (run_dir / _FOLDER).glob(f"*{_SUFFIX}"):
        with suppress(OSError), open_regular(path) as file:  # else its holder has ended meanwhile
            if not _see(file, boot_id=_boot_id(), now=time.time()).has_ended:
                return True
    return False


@dataclass(frozen=True, slots=True)
class _Sight:
    """One holder's file, as it is seen from here."""

    holder: Holder | None
    is_certain: bool
    """Whether the kernel knows whose process has ended; else the file's age tells."""
    has_ended: bool


def _see(file: BinaryIO, *, boot_id: str, now: float) -> _Sight:
    """``boot_id`` is of this host; ``now``, Unix seconds, by the clock that gave the file its time."""
    holder = _read(file.read())
    try:
        # Shared, so that two who look at once do not take each other for the holder.
        has_locks, is_locked = _lock(file.fileno(), fcntl.LOCK_SH), False
    except BlockingIOError:
        has_locks, is_locked = True, True
    is_certain = has_locks and (holder is None or holder.boot_id == boot_id)
    is_left_alone = now - os.fstat(file.fileno()).st_mtime > _LEFT_ALONE_S
    return _Sight(holder, is_certain, has_ended=not is_locked and (is_certain or is_left_alone))


def _lock(descriptor: int, kind: int) -> bool:
    """False where the file system has no locks. Raises BlockingIOError when another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _refuse_others(folder: Path, own: Path, me: Holder) -> None:
    now = own.stat().st_mtime  # by the clock that also gave the others theirs
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        if path == own:
            continue
        try:
            with open_regular(path) as file:
                sight = _see(file, boot_id=me.boot_id, now=now)
                if sight.has_ended:
                    path.unlink(missing_ok=True)
                    continue
        except OSError:
            continue  # its holder has ended meanwhile, or it is another user's to remove
        holder = sight.holder
        if holder is None or not _is_same_run(me, holder):
            who = holder.describe() if holder else f"a process that {path} does not name"
            remedy = f"wait for its end, end it (kill {holder.pid}), or" if holder else "wait for its end, or"
            if not sight.is_certain:
                remedy = f"if it was killed wait for {_LEFT_ALONE_S:g} s, else {remedy}"
            raise UserError(
                f"a run directory has one run at a time, got {folder.parent}, where another goes on ({who}); "
                f"{remedy} name another swift.output_dir"
            )


def _read(text: bytes) -> Holder | None:
    with suppress(ValueError, TypeError):
        return Holder(**json.loads(text))
    return None


def _is_same_run(me: Holder, other: Holder) -> bool:
    if other.role == me.role:
        return False
    if (other.host, other.boot_id) != (me.host, me.boot_id):
        return bool(me.rendezvous) and other.rendezvous == me.rendezvous
    if me.rendezvous and (other.rendezvous, other.agent_pid) == (me.rendezvous, me.agent_pid):
        return True
    return other.pid in {parent.pid for parent in psutil.Process().parents()}
