"""What a bench starts runs where and as it should, and nothing of it is left."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import Processes
from swift_stage2.errors import ChildFailed

PATIENCE_S = 60.0
# Never ends, and leaves a grandchild in a session of its own, as torchrun does.
STUBBORN = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
signal.pause()
"""


def _python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def before() -> set[psutil.Process]:
    """Processes of other tests."""
    return set(psutil.Process().children(recursive=True))


def test_a_failure_names_status_cause_and_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes, pytest.raises(ChildFailed) as caught:
        processes.run("child", _python("raise RuntimeError('no luck')"), deadline_s=PATIENCE_S)
    assert str(caught.value) == f"child ended with status 1: RuntimeError: no luck; see {tmp_path}/child.log"


def test_a_command_that_misses_its_deadline_is_ended_with_all_below_it(
    tmp_path: Path, before: set[psutil.Process]
) -> None:
    with pytest.raises(ChildFailed, match="it did not happen within 0 s"), Processes(tmp_path) as processes:
        processes.run("child", _python(STUBBORN), deadline_s=0.0)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_first_of_several_that_fails_ends_the_others_and_is_named(
    tmp_path: Path, before: set[psutil.Process]
) -> None:
    with Processes(tmp_path) as processes:
        first = processes.start_process("first", _python(STUBBORN))
        second = processes.start_process("second", _python("raise SystemExit(3)"))
        with pytest.raises(ChildFailed, match="second ended with status 3"):
            processes.wait_for_all([first, second], PATIENCE_S)
    assert set(psutil.Process().children(recursive=True)) <= before
