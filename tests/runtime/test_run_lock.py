"""One run at a time in a run directory: real processes, and what the kernel leaves of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from commands import speaking

from swift_stage2.errors import ConfigError, UserError
from swift_stage2.runtime.run_directory import RANK_0, is_held, run_lock

pytestmark = [pytest.mark.slow, pytest.mark.ci]

_DEADLINE_S = 60.0
_HOLD = """
import sys
from pathlib import Path
from swift_stage2.errors import UserError
from swift_stage2.runtime.run_directory import run_lock
try:
    with run_lock(Path(sys.argv[1]), sys.argv[2]):
        print("held", flush=True)
        sys.stdin.read()
except UserError as error:
    print(f"refused: {error}", flush=True)
"""
_FORK = """
import os, signal, sys
from pathlib import Path
from swift_stage2.runtime.run_directory import run_lock
with run_lock(Path(sys.argv[1])):
    if not (first := os.fork()):
        os._exit(0)
    os.waitpid(first, 0)
    if not os.fork():
        print(os.getpid(), flush=True)
    signal.pause()
"""


class Holding:
    """A process that has said whether it holds the directory."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(run_dir), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def word(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=_DEADLINE_S)


Start = Callable[[str], Holding]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Holding] = []

    def begin(role: str) -> Holding:
        started.append(Holding(tmp_path, role))
        return started[-1]

    yield begin
    for holding in started:
        holding.end()


@pytest.mark.parametrize("role", [RANK_0, "launch"])
def test_a_second_run_is_refused_with_the_first_ones_identity(
    tmp_path: Path, start: Start, role: str
) -> None:
    first = start(RANK_0)
    assert first.word() == "held"
    with pytest.raises(UserError) as refused, run_lock(tmp_path, role):
        raise AssertionError("it was let in")
    for words in (
        f"got {tmp_path}, where another goes on (process {first.process.pid} on {os.uname().nodename} since ",
        "end it, or name another swift.output_dir",
    ):
        assert words in str(refused.value)
    assert is_held(tmp_path)


def test_a_launch_is_followed_by_its_rank_and_refuses_a_second_launch(tmp_path: Path, start: Start) -> None:
    launch = start("launch")
    assert launch.word() == "held"
    assert is_held(tmp_path), "whoever follows the run waits for its rank"
    assert start(RANK_0).word() == "held"
    assert f"process {launch.process.pid} " in start("launch").word()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_lock_ends_with_its_process(tmp_path: Path, start: Start, is_killed: bool) -> None:
    assert not is_held(tmp_path)
    first = start(RANK_0)
    assert first.word() == "held"
    if is_killed:
        first.process.kill()
    first.end()
    assert not is_held(tmp_path)
    with run_lock(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_a_lock_ends_with_its_owner_whatever_forked_children_outlive_it(tmp_path: Path) -> None:
    """As a killed rank's DataLoader workers do, for seconds."""
    with speaking("-c", _FORK, tmp_path) as (owner, child):
        try:
            assert is_held(tmp_path), "a child's end has released it"
            owner.kill()
            owner.wait(timeout=_DEADLINE_S)
            with run_lock(tmp_path):
                os.kill(int(child), 0)  # it is there
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with (
        pytest.raises(ConfigError, match=r"swift\.output_dir must be a writable directory, got .*file"),
        run_lock(file, "launch"),
    ):
        raise AssertionError("it was let in")
    assert not is_held(file)


def test_the_process_that_holds_it_enters_again(tmp_path: Path, start: Start) -> None:
    """A rank of ``train`` holds what ms-swift's trainer holds again; the outer one ends it."""
    with run_lock(tmp_path):
        with run_lock(tmp_path):
            pass
        assert is_held(tmp_path)
        assert "one run at a time" in start(RANK_0).word()
    assert not is_held(tmp_path)


def test_a_file_system_without_locks_holds_no_run_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def acquire(*_: Any, **options: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with run_lock(tmp_path):
        assert "has no locks: start no second run there" in caplog.text
        assert not is_held(tmp_path)
