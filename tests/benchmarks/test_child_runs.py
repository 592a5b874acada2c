"""Commands run at once and leave nothing behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.child_runs import Child, ChildRuns
from swift_stage2.demo.run import remaining_children
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.job import last_cause

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


def test_commands_run_one_after_another_each_with_its_environment_and_log(tmp_path: Path) -> None:
    with ChildRuns() as children:
        for word in ("one", "two"):
            command = _python(f"import os; print({word!r}, os.environ['EXTRA'])")
            extra = {"EXTRA": word * 2}
            children.run(word, command, log_dir=tmp_path, deadline_s=PATIENCE_S, environment=extra)
    assert (tmp_path / "one.log").read_text() == "one oneone\n"
    assert (tmp_path / "two.log").read_text() == "two twotwo\n"


def test_a_failure_names_status_cause_and_log(tmp_path: Path) -> None:
    with ChildRuns() as children:
        with pytest.raises(ChildFailed) as caught:
            children.run(
                "child", _python("raise RuntimeError('no luck')"), log_dir=tmp_path, deadline_s=PATIENCE_S
            )
    assert str(caught.value) == f"child ended with status 1: RuntimeError: no luck; see {tmp_path}/child.log"


def test_a_command_that_misses_its_deadline_is_ended_with_all_below_it(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="must end within 0 s"):
        with ChildRuns() as children:
            children.run("child", _python(STUBBORN), log_dir=tmp_path, deadline_s=0.0)
    assert remaining_children() == []


def test_a_signal_ends_everything_and_interrupts_the_caller(tmp_path: Path) -> None:
    log = tmp_path / "child.log"

    def interrupt_once_it_runs() -> None:
        if log.read_text().endswith("\n"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        with ChildRuns() as children:
            children.run(
                "child",
                _python(STUBBORN),
                log_dir=tmp_path,
                deadline_s=PATIENCE_S,
                each_moment=interrupt_once_it_runs,
            )
    assert not psutil.pid_exists(int(log.read_text()))
    assert remaining_children() == []


def test_the_caller_sees_the_last_moment_of_a_child(tmp_path: Path) -> None:
    """Files that a child wrote right before its end are there when each_moment is called for the last time."""
    file, seen = tmp_path / "file", [""]
    with ChildRuns() as children:
        children.run(
            "child",
            _python(f"open({str(file)!r}, 'w').write('last words')"),
            log_dir=tmp_path,
            deadline_s=PATIENCE_S,
            each_moment=lambda: seen.append(file.read_text() if file.exists() else ""),
        )
    assert seen[-1] == "last words"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "[learner] swift-stage2 train: error: a port must be free\nmore\n",
            "swift-stage2 train: error: a port must be free",
        ),
        ("[server0] swift-stage2 rollout: error: no model\nmore\n", "swift-stage2 rollout: error: no model"),
        ("[rank1]: Traceback (most\n[rank1]: ValueError: 7\n[rank1]: late\n", "ValueError: 7"),
        (
            "[launch] [learner] torch.OutOfMemoryError: big\nChildFailedError: 1\n",
            "torch.OutOfMemoryError: big",
        ),
        (
            "[rank0]: EOFError\n[rank0]: swift_stage2.errors.PreprocessorLost: it was killed\n",
            "swift_stage2.errors.PreprocessorLost: it was killed",
        ),
        ("first\nlast words\n\n", "last words"),
        ("", "it wrote nothing"),
    ],
)
def test_the_cause_is_the_first_line_that_states_an_error(tmp_path: Path, log: str, cause: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert last_cause(path) == cause


def test_a_log_that_is_not_there_has_a_cause_too(tmp_path: Path) -> None:
    assert "cannot be read" in last_cause(tmp_path / "none")


def test_several_run_at_once_each_on_its_cores(tmp_path: Path) -> None:
    """A pipe with a name opens only when a reader and a writer are there at the same time."""
    code = "import os, sys; open(sys.argv[1], sys.argv[2]); print(sorted(os.sched_getaffinity(0)))"
    core, pipe = max(os.sched_getaffinity(0)), tmp_path / "pipe"
    os.mkfifo(pipe)
    with ChildRuns() as children:
        children.run_together(
            [
                Child(name=name, argv=(*_python(code), str(pipe), mode), cores=frozenset({core}))
                for name, mode in (("reader", "r"), ("writer", "w"))
            ],
            log_dir=tmp_path,
            deadline_s=PATIENCE_S,
        )
    for name in ("reader", "writer"):
        assert (tmp_path / f"{name}.log").read_text() == f"[{core}]\n"


def test_the_first_of_several_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    cores = frozenset(os.sched_getaffinity(0))
    with pytest.raises(ChildFailed, match="second ended with status 3"):
        with ChildRuns() as children:
            children.run_together(
                [
                    Child(name="first", argv=_python(STUBBORN), cores=cores),
                    Child(name="second", argv=_python("raise SystemExit(3)"), cores=cores),
                ],
                log_dir=tmp_path,
                deadline_s=PATIENCE_S,
            )
    assert remaining_children() == []
