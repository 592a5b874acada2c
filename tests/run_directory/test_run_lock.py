"""One run at a time in a run directory: real processes, and what the kernel leaves of them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.errors import ConfigError, UserError
from swift_stage2.run_directory import lock as run_lock
from swift_stage2.run_directory.lock import hold_run_directory, is_held

_DEADLINE_S = 60.0
_TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
_HOLD = """
import os, subprocess, sys
from pathlib import Path
from swift_stage2.errors import UserError
from swift_stage2.run_directory.lock import hold_run_directory
try:
    with hold_run_directory(Path(sys.argv[1]), sys.argv[2], os.environ):
        if len(sys.argv) > 3:
            subprocess.run([sys.executable, "-c", sys.argv[3], sys.argv[1], "rank 0"], timeout=60)
        print("held", flush=True)
        sys.stdin.read()
except UserError as error:
    print(f"refused: {error}", flush=True)
"""

_FORK = """
import os, signal, sys
from pathlib import Path
from swift_stage2.run_directory.lock import hold_run_directory
with hold_run_directory(Path(sys.argv[1]), "rank 0", {}):
    if not (first := os.fork()):
        os._exit(0)
    os.waitpid(first, 0)
    if not os.fork():
        print(os.getpid(), flush=True)
    signal.pause()
"""


class Holding:
    """A process that has said whether it holds the directory."""

    def __init__(self, run_dir: Path, role: str, variables: dict[str, str], *, below: str = "") -> None:
        command = [sys.executable, "-c", _HOLD, str(run_dir), role, *([below] if below else [])]
        self.process = subprocess.Popen(
            [*([] if variables.get("AGENT") is None else ["sh", "-c", '"$@"; exit', "sh"]), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ) | variables,
        )

    def word(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Its standard input closes, so that also what stands below a shell ends."""
        self.process.communicate(timeout=_DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Holding]]:
    started: list[Holding] = []

    def begin(role: str, variables: dict[str, str] | None = None, *, below: str = "") -> Holding:
        started.append(Holding(tmp_path, role, variables or {}, below=below))
        return started[-1]

    yield begin
    for holding in started:
        holding.end()


Start = Callable[..., Holding]


def test_a_second_run_is_refused_with_the_first_ones_identity(tmp_path: Path, start: Start) -> None:
    first = start("launch")
    assert first.word() == "held"
    with pytest.raises(UserError) as refused, hold_run_directory(tmp_path, "rank 0", {}):
        raise AssertionError("it was let in")
    told = str(refused.value)
    (file,) = tmp_path.glob("locks/*.lock")
    since = json.loads(file.read_text())["since"]
    for words in (
        f"got {tmp_path}, where another goes on",
        f"(launch, process {first.process.pid} on {os.uname().nodename} since {since}: ",
        "hold_run_directory",  # of its command
        f"end it (kill {first.process.pid}), or name another swift.output_dir",
    ):
        assert words in " ".join(told.split())
    assert [path.name for path in tmp_path.glob("locks/*")] == [file.name], "the refused one left something"


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_lock_ends_with_its_process(tmp_path: Path, start: Start, is_killed: bool) -> None:
    assert not is_held(tmp_path)
    first = start("launch")
    assert first.word() == "held"
    assert is_held(tmp_path)
    if is_killed:
        first.process.kill()
    first.end()
    assert len(list(tmp_path.glob("locks/*"))) == is_killed
    assert not is_held(tmp_path)
    with hold_run_directory(tmp_path, "launch", {}):
        (file,) = tmp_path.glob("locks/*")  # the dead one's is swept
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert list(tmp_path.glob("locks/*")) == []


def test_a_lock_ends_with_its_owner_whatever_forked_children_outlive_it(tmp_path: Path) -> None:
    """As a killed rank's DataLoader workers do, for seconds."""
    owner = subprocess.Popen([sys.executable, "-c", _FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"kill {owner.pid}"), hold_run_directory(tmp_path, "rank 0", {}):
            raise AssertionError("a child's end has released it")
        owner.kill()
        owner.wait(timeout=_DEADLINE_S)
        with hold_run_directory(tmp_path, "rank 0", {}):
            os.kill(child, 0)  # it is there
    finally:
        owner.kill()
        os.kill(child, signal.SIGKILL)
        owner.communicate(timeout=_DEADLINE_S)


def test_of_many_that_start_at_once_at_most_one_goes_on(start: Start) -> None:
    words = [each.word() for each in [start(f"rank {number}") for number in range(6)]]
    assert words.count("held") <= 1
    assert all(word == "held" or "one run at a time" in word for word in words)


def test_ranks_of_one_torchrun_are_one_run_and_those_of_another_are_not(start: Start) -> None:
    ranks = [start(f"rank {rank}", _TORCHRUN) for rank in range(3)]
    assert [each.word() for each in ranks] == ["held"] * 3
    assert "rank 0, process" in start("rank 3", _TORCHRUN | {"AGENT": "another"}).word()
    assert "one run at a time" in start("rank 3", _TORCHRUN | {"MASTER_PORT": "29501"}).word()


def test_a_rank_below_a_launch_is_of_its_run(start: Start) -> None:
    below = _HOLD.replace("        sys.stdin.read()\n", "")
    launch = start("launch", below=below)
    assert [launch.word(), launch.word()] == ["held", "held"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with (
        pytest.raises(ConfigError, match=r"swift\.output_dir must be a writable directory, got .*file"),
        hold_run_directory(file, "launch", {}),
    ):
        raise AssertionError("it was let in")


def test_a_disk_that_is_full_is_told_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", rename)
    with (
        pytest.raises(
            ConfigError, match=r"swift\.output_dir must be a writable directory, got .*No space left"
        ),
        hold_run_directory(tmp_path, "launch", {}),
    ):
        raise AssertionError("it was let in")
    assert list(tmp_path.glob("locks/*")) == []


def test_a_run_that_is_alone_holds_its_directory_once(tmp_path: Path, start: Start) -> None:
    """A rank of ``train`` holds what ms-swift's trainer holds again; the outer one ends it."""
    with hold_run_directory(tmp_path, "rank 0", {}):
        with hold_run_directory(tmp_path, "rank 0", {}, is_alone=True):
            assert len(list(tmp_path.glob("locks/*"))) == 1
        assert is_held(tmp_path)
        assert "rank 0, process" in start("rank 0").word()
    with hold_run_directory(tmp_path, "rank 0", {}, is_alone=True):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def rewrite(tmp_path: Path, *, age_s: float, **fields: str) -> None:
    """As the one holder's file would be, were these true of its host."""
    (file,) = tmp_path.glob("locks/*.lock")
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    now = file.stat().st_mtime
    os.utime(file, (now, now - age_s))


def enter(tmp_path: Path, role: str, variables: dict[str, str] | None = None) -> str:
    try:
        with hold_run_directory(tmp_path, role, variables or {}):
            return "held"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_lock_that_cannot_be_seen_from_here_counts_while_its_file_is_touched(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    """Another host's where locks are seen on their own host alone, and anyone's where there are none."""
    first = start("launch")
    assert first.word() == "held"
    if has_locks:
        first.process.kill()  # a file without a lock, as the other host's is seen here
        first.end()
        rewrite(tmp_path, age_s=30, boot_id="another")
    else:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    told = enter(tmp_path, "rank 0")
    assert f"(launch, process {first.process.pid} on {os.uname().nodename} since " in told
    assert f"if it was killed wait for 60 s, else wait for its end, end it (kill {first.process.pid})" in told
    assert len(list(tmp_path.glob("locks/*"))) == 1
    rewrite(tmp_path, age_s=30)
    assert is_held(tmp_path)
    rewrite(tmp_path, age_s=90)
    assert not is_held(tmp_path)
    assert enter(tmp_path, "rank 0") == "held"
    assert list(tmp_path.glob("locks/*")) == []


def no_locks(descriptor: int, kind: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_holder_touches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_TOUCHED_EVERY_S", 0.01)
    touched, real = threading.Event(), os.utime
    monkeypatch.setattr(os, "utime", lambda path: (real(path), touched.set()))
    with hold_run_directory(tmp_path, "launch", {}):
        assert touched.wait(_DEADLINE_S)
    assert "run-lock" not in {thread.name for thread in threading.enumerate()}


def test_two_hosts_of_one_name_are_two_and_may_be_one_run(tmp_path: Path, start: Start) -> None:
    """Each has a torchrun of its own above its ranks."""
    first = start("rank 0", _TORCHRUN | {"AGENT": "another"})
    assert first.word() == "held"
    assert "one run at a time" in enter(tmp_path, "rank 1", _TORCHRUN)
    rewrite(tmp_path, age_s=0, boot_id="another")
    assert enter(tmp_path, "rank 1", _TORCHRUN) == "held"
    assert "one run at a time" in enter(tmp_path, "rank 1", _TORCHRUN | {"MASTER_PORT": "29501"})


def test_a_run_has_each_rank_and_each_launch_once(tmp_path: Path, start: Start) -> None:
    """Else two runs of one file that meet at one rendezvous would be taken for one."""
    assert start("launch.node1", _TORCHRUN).word() == "held"
    rewrite(tmp_path, age_s=0, host="another")
    assert "launch.node1, process" in enter(tmp_path, "launch.node1", _TORCHRUN)
    assert enter(tmp_path, "launch.node0", _TORCHRUN) == "held"
