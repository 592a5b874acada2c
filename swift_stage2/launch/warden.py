"""A program that runs one command and takes its whole process tree with it when it ends, shared memory included.

It ends when the command ends, on a signal, or when the pipe to the launcher closes. The command gets
SIGTERM first and its grace; whatever it leaves behind is ended after it. Exit status: the command's.

Python and vLLM unlink their shared memory on the way out, which SIGKILL cuts off. Users keep models and data in the
same directory. So only what the tree has mapped, what was not there before it, what bears a name that libraries draw
for themselves and what nobody else held is ever removed.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from swift_stage2.launch.process_tree import StopSignals, adopt_orphans, end_descendants

_LONGEST_STRAY_PATIENCE_S = 10.0
_KILL_DEADLINE_S = 10.0
_LONGEST_WAIT_S = 60.0
_LOOK_EVERY_S = 5.0  # segments that are younger when their process is killed are not known


def main(argv: Sequence[str]) -> int:
    """Runs the command to its end; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="swift_stage2.launch.warden")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    adopt_orphans()
    with StopSignals() as signals:
        memory = SharedMemoryWatch()
        try:
            child = subprocess.Popen(options.command, stdin=subprocess.DEVNULL)
        except OSError as exc:
            print(
                f"the command must be a program that can be started, got {options.command[0]!r}: {exc}",
                flush=True,
            )
            return 127
        pidfd = os.pidfd_open(child.pid)
        try:
            _wait_for_end(child, pidfd, signals, options.control_fd, memory)
            deadline = time.monotonic() + options.grace_s
            if child.poll() is None:
                child.terminate()
            memory.look(psutil.Process().children(recursive=True))  # reads /proc, which may take long
            _end(child, pidfd, signals, deadline)
        finally:
            os.close(pidfd)
            left = end_descendants(min(options.grace_s, _LONGEST_STRAY_PATIENCE_S))
            removed, kept = memory.unlink_abandoned()
    if removed:
        print(f"removed shared memory that killed processes left: {', '.join(removed)}", flush=True)
    if kept:
        print(
            f"left in place, because it may be somebody else's: {', '.join(kept)}; remove it when nobody needs it",
            flush=True,
        )
    if left:
        print(f"processes that SIGKILL did not end: {left}", flush=True)
    status = child.returncode
    return status if status >= 0 else 128 - status


def _wait_for_end(
    child: subprocess.Popen[bytes],
    pidfd: int,
    signals: StopSignals,
    control_fd: int,
    memory: SharedMemoryWatch,
) -> None:
    """Until the command has ended, a signal came, or the launcher closed the pipe (it never writes)."""
    while child.poll() is None and signals.received is None:
        memory.look(psutil.Process().children(recursive=True))
        signals.wait(_LOOK_EVERY_S, also=(pidfd, control_fd))
        if child.poll() is None and _is_closed(control_fd):
            return


def _is_closed(control_fd: int) -> bool:
    os.set_blocking(control_fd, False)
    try:
        return os.read(control_fd, 1) == b""
    except BlockingIOError:
        return False


def _end(child: subprocess.Popen[bytes], pidfd: int, signals: StopSignals, deadline: float) -> None:
    while child.poll() is None and (left_s := deadline - time.monotonic()) > 0:
        signals.wait(min(left_s, _LONGEST_WAIT_S), also=(pidfd,))
    if child.poll() is None:
        child.kill()
        child.wait(timeout=_KILL_DEADLINE_S)


_DIRECTORY = "/dev/shm/"
_DELETED = " (deleted)"
# Of Python's SharedMemory (vLLM's rings, too) and semaphores, joblib, torch, NCCL, CUDA, OpenMP, vLLM's named buffers.
_DRAWN_NAME = re.compile(
    r"psm_[0-9a-f]{8}|sem\.(?:mp|loky)-.+|torch_\d+_\d+_\d+|nccl-\w{6}|cuda\.shm\.[\w.]+"
    r"|__KMP_REGISTERED_LIB_\d+\w*|VLLM_\w+_[0-9a-f-]{8,}"
)


class SharedMemoryWatch:
    """Remembers the segments that processes had mapped, to remove those of their making that nobody uses any more."""

    def __init__(self) -> None:
        """Segments that exist by now are somebody else's for ever: construct it before the processes start."""
        self._before = {(name, _inode(name)) for name in glob.glob(f"{_DIRECTORY}*")}
        self._inodes: dict[str, int | None] = {}
        self._foreign: set[str] = set()

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Notes what these processes have mapped now."""
        tree = list(processes)
        found = {
            name: inode
            for name, inode in _segments_of(tree).items()
            if "/" not in name.removeprefix(_DIRECTORY) and (name, inode) not in self._before
        }
        new = found.keys() - self._inodes.keys()
        self._inodes |= found
        if new:  # whoever else holds a segment this early may have made it
            self._foreign |= new & mapped_by(_outside({process.pid for process in tree}))

    def unlink_abandoned(self) -> tuple[list[str], list[str]]:
        """Removes segments that were seen, are of the processes' making, still exist and are mapped by no process.

        Returns:
            Paths of those, and of such as were made while the processes ran, but perhaps not by them: they stay.
        """
        candidates = {name for name, inode in self._inodes.items() if inode and _inode(name) == inode}
        candidates -= mapped_by(psutil.process_iter()) if candidates else set()
        removed: list[str] = []
        kept: list[str] = []
        for name in sorted(candidates):
            if name in self._foreign or not _DRAWN_NAME.fullmatch(os.path.basename(name)):
                kept.append(name)
                continue
            try:
                os.unlink(name)
            except OSError:
                continue  # somebody else was quicker
            removed.append(name)
        return removed, kept


def mapped_by(processes: Iterable[psutil.Process]) -> set[str]:
    """Paths below ``/dev/shm`` that these processes have mapped or named after themselves."""
    return set(_segments_of(processes))


def _segments_of(processes: Iterable[psutil.Process]) -> dict[str, int | None]:
    """Paths and inodes of what these processes have mapped or named after themselves."""
    found: dict[str, int | None] = {}
    for process in processes:
        semaphores = glob.glob(f"{_DIRECTORY}sem.loky-{process.pid}-*")
        found.update((name, _inode(name)) for name in semaphores)
        try:
            lines = (
                Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            )
        except OSError:
            continue  # it has ended, or is another user's
        for line in lines:
            fields, is_segment, name = line.partition(_DIRECTORY)
            if is_segment and not name.endswith(_DELETED):
                found[_DIRECTORY + name] = int(fields.split()[4])
    return found


def _outside(tree: Collection[int]) -> Iterator[psutil.Process]:
    """Processes that are not of the tree, nor were started by it since it was looked at."""
    for process in psutil.process_iter():
        try:
            if process.pid not in tree and not any(parent.pid in tree for parent in process.parents()):
                yield process
        except psutil.Error:
            continue  # it has ended


def _inode(name: str) -> int | None:
    """Of a file of this user's; None where there is none."""
    try:
        found = os.lstat(name)
    except OSError:
        return None
    return found.st_ino if found.st_uid == os.getuid() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
