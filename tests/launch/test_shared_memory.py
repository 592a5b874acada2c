"""Shared memory that killed processes leave is removed; what anybody still uses is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swift_stage2.launch.shared_memory import SharedMemoryWatch, mapped_by

_DEADLINE_S = 60.0
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


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = _start()
    path = _path_of(process)
    yield process, path
    _kill(process)
    path.unlink(missing_ok=True)


def _start(*name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _HOLDER, *name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _path_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path("/dev/shm") / process.stdout.readline().strip()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=_DEADLINE_S)


def test_what_a_killed_process_had_mapped_is_removed(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = holder
    watch = SharedMemoryWatch()
    watch.look([psutil.Process(process.pid)])
    assert str(path) in watch.seen
    assert watch.unlink_abandoned() == []  # it is in use
    _kill(process)
    assert watch.unlink_abandoned() == [str(path)]
    assert not path.exists()
    assert watch.unlink_abandoned() == []


def test_what_another_process_has_mapped_stays(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = holder
    other = _start(path.name)
    try:
        assert _path_of(other) == path
        watch = SharedMemoryWatch()
        watch.look([psutil.Process(process.pid)])
        _kill(process)
        assert watch.unlink_abandoned() == []
        assert path.exists()
    finally:
        _kill(other)


def test_what_the_tree_never_mapped_stays(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = holder
    watch = SharedMemoryWatch()
    watch.look([psutil.Process(os.getpid())])
    _kill(process)
    assert watch.unlink_abandoned() == []
    assert path.exists()


def test_a_process_that_has_ended_holds_nothing(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = holder
    ended = psutil.Process(process.pid)
    _kill(process)
    assert mapped_by([ended]) == set()


def test_a_warden_that_ends_its_tree_leaves_no_segment() -> None:
    read_end, write_end = os.pipe()
    warden = subprocess.Popen(
        [
            *(sys.executable, "-m", "swift_stage2.launch.warden", f"--control-fd={read_end}", "--grace-s=5"),
            *("--", "sh", "-c", 'sleep 600 | "$0" -c "$1"', sys.executable, _HOLDER),
        ],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(read_end,),
    )
    os.close(read_end)
    path = _path_of(warden)
    try:
        assert path.exists()
        warden.terminate()  # it looks once more, and the holder dies of SIGTERM without a last word
        output, _ = warden.communicate(timeout=_DEADLINE_S)
        assert f"removed shared memory that killed processes left: {path}" in output
        assert not path.exists()
    finally:
        os.close(write_end)
        path.unlink(missing_ok=True)


def test_a_semaphore_that_only_its_name_ties_to_a_killed_process_is_removed(
    holder: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = holder
    semaphore = Path(f"/dev/shm/sem.loky-{process.pid}-x")
    semaphore.write_bytes(bytes(32))
    try:
        watch = SharedMemoryWatch()
        watch.look([psutil.Process(process.pid)])
        assert watch.unlink_abandoned() == []  # its owner lives
        _kill(process)
        assert watch.unlink_abandoned() == sorted((str(path), str(semaphore)))
    finally:
        semaphore.unlink(missing_ok=True)
