"""Shared memory that killed processes leave is removed; what anybody still uses, or may have put there, is not."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from swift_stage2.launch.warden import SharedMemoryWatch, mapped_by

_DEADLINE_S = 60.0
_SHM = Path("/dev/shm")
# The tracker, which would unlink the segment, is told to forget it: in a killed tree it is killed as well.
_HOLDER = """
import sys
from multiprocessing import resource_tracker, shared_memory
name = sys.argv[1] if len(sys.argv) > 1 else None
block = shared_memory.SharedMemory(name, create=name is None, size=4096)
resource_tracker.unregister(block._name, "shared_memory")
print(block.name, flush=True)
sys.stdin.read()
"""
# As safetensors does with a checkpoint.
_READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(sys.argv[1], flush=True)
sys.stdin.read()
"""


class Held:
    """A process that has one file of ``/dev/shm`` mapped."""

    def __init__(self, *arguments: str, code: str = _HOLDER) -> None:
        command = [sys.executable, "-c", code, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.path = _SHM / self.process.stdout.readline().strip()

    @property
    def tree(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid)]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=_DEADLINE_S)


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    started: list[Held] = []

    def start(*arguments: str, code: str = _HOLDER) -> Held:
        started.append(Held(*arguments, code=code))
        return started[-1]

    yield start
    for held in started:
        held.kill()
        held.path.unlink(missing_ok=True)


Hold = Callable[..., Held]


def test_what_a_killed_process_had_made_is_removed(hold: Hold) -> None:
    watch = SharedMemoryWatch()
    held = hold()
    watch.look(held.tree)
    assert watch.unlink_abandoned() == ([], [])  # it is in use
    held.kill()
    assert watch.unlink_abandoned() == ([str(held.path)], [])
    assert not held.path.exists()
    assert watch.unlink_abandoned() == ([], [])


def test_what_was_there_before_stays_whatever_its_name(hold: Hold) -> None:
    made = hold()
    watch = SharedMemoryWatch()
    made.kill()
    held = hold(made.path.name)
    watch.look(held.tree)
    held.kill()
    assert watch.unlink_abandoned() == ([], [])
    assert made.path.exists()


@pytest.mark.parametrize("folder", ["", "model-{}"])
def test_a_file_of_the_users_own_that_the_tree_read_stays(hold: Hold, folder: str) -> None:
    """Also one that was copied there after the watch began."""
    watch = SharedMemoryWatch()
    own = _SHM / folder.format(uuid.uuid4().hex) / f"{uuid.uuid4().hex}.safetensors"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(bytes(4096))
    try:
        held = hold(str(own), code=_READER)
        watch.look(held.tree)
        held.kill()
        assert watch.unlink_abandoned() == ([], [] if folder else [str(own)])
        assert own.exists()
    finally:
        own.unlink(missing_ok=True)
        if folder:
            own.parent.rmdir()


def test_what_another_process_held_when_it_was_first_seen_stays_and_is_told(hold: Hold) -> None:
    watch = SharedMemoryWatch()
    other = hold()
    held = hold(other.path.name)
    watch.look(held.tree)
    held.kill()
    assert watch.unlink_abandoned() == ([], [])  # the other uses it
    other.kill()
    assert watch.unlink_abandoned() == ([], [str(other.path)])
    assert other.path.exists()


def test_a_name_that_somebody_took_anew_stays(hold: Hold) -> None:
    watch = SharedMemoryWatch()
    held = hold()
    watch.look(held.tree)
    held.kill()
    anew = held.path.with_name(uuid.uuid4().hex)
    anew.write_bytes(b"another program's")
    anew.replace(held.path)
    assert watch.unlink_abandoned() == ([], [])
    assert held.path.read_bytes() == b"another program's"


def test_what_the_tree_never_mapped_stays(hold: Hold) -> None:
    watch = SharedMemoryWatch()
    held = hold()
    watch.look([psutil.Process(os.getpid())])
    held.kill()
    assert watch.unlink_abandoned() == ([], [])
    assert held.path.exists()


def test_a_process_that_has_ended_holds_nothing(hold: Hold) -> None:
    held = hold()
    (ended,) = held.tree
    held.kill()
    assert mapped_by([ended]) == set()


@pytest.mark.parametrize("is_users", [False, True])
def test_a_warden_that_ends_its_tree_leaves_no_segment_and_takes_no_file(is_users: bool) -> None:
    """The user's file is of an earlier day, and the tree has it mapped as it has its own segment."""
    own = _SHM / f"{uuid.uuid4().hex}.safetensors"
    own.write_bytes(bytes(4096))
    code, argument = (_READER, str(own)) if is_users else (_HOLDER, "")
    read_end, write_end = os.pipe()
    warden = subprocess.Popen(
        [
            *(sys.executable, "-m", "swift_stage2.launch.warden", f"--control-fd={read_end}", "--grace-s=5"),
            *("--", "sh", "-c", 'sleep 600 | "$0" -c "$1" $2', sys.executable, code, argument),
        ],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(read_end,),
    )
    os.close(read_end)
    assert warden.stdout is not None
    path = _SHM / warden.stdout.readline().strip()
    try:
        assert path.exists()
        warden.terminate()  # it looks once more, and the holder dies of SIGTERM without a last word
        output, _ = warden.communicate(timeout=_DEADLINE_S)
        told = f"removed shared memory that killed processes left: {path}" in output
        assert (path.exists(), told) == ((True, False) if is_users else (False, True))
    finally:
        os.close(write_end)
        own.unlink()
        if not is_users:
            path.unlink(missing_ok=True)


def test_a_semaphore_that_only_its_name_ties_to_a_killed_process_is_removed(hold: Hold) -> None:
    watch = SharedMemoryWatch()
    held = hold()
    semaphore = Path(f"/dev/shm/sem.loky-{held.process.pid}-x")
    semaphore.write_bytes(bytes(32))
    try:
        watch.look(held.tree)
        assert watch.unlink_abandoned() == ([], [])  # its owner lives
        held.kill()
        assert watch.unlink_abandoned() == (sorted((str(held.path), str(semaphore))), [])
    finally:
        semaphore.unlink(missing_ok=True)


_BLOCKED_LOOK = """
import select, sys, os
from swift_stage2.launch import warden
warden._LOOK_EVERY_S = 600.0
wait_for_end, is_last = warden._wait_for_end, False
def wait(*given):
    global is_last
    wait_for_end(*given)
    is_last = True
def look(self, processes):
    if is_last:  # /proc may block on a process that is stuck in the kernel
        (child,) = [process for process in processes if process.ppid() == os.getpid()] or [None]
        ended = child is None or bool(select.select([os.pidfd_open(child.pid)], [], [], 20.0)[0])
        print("ended first" if ended else "still running", flush=True)
warden._wait_for_end, warden.SharedMemoryWatch.look = wait, look
sys.exit(warden.main(sys.argv[1:]))
"""


def test_a_command_gets_its_signal_before_anything_is_read_of_its_tree() -> None:
    read_end, write_end = os.pipe()
    command = ["sh", "-c", "echo ready; exec sleep 600"]
    warden = subprocess.Popen(
        [sys.executable, "-c", _BLOCKED_LOOK, f"--control-fd={read_end}", "--grace-s=5", "--", *command],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(read_end,),
    )
    os.close(read_end)
    assert warden.stdout is not None
    assert warden.stdout.readline() == "ready\n"
    warden.terminate()
    output, _ = warden.communicate(timeout=_DEADLINE_S)
    os.close(write_end)
    assert output == "ended first\n"
