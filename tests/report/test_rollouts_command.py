"""The command as a process of its own beside a run, which this process holds as a learner does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from followed_run import FollowedRun

from swift_stage2.cli import main
from swift_stage2.report.rollouts_command import RunRollouts
from swift_stage2.runtime.run_directory import run_lock
from swift_stage2.telemetry.facade import Telemetry

_DEADLINE_S = 60.0
Follower = subprocess.Popen[str]


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., Follower]]:
    """Starts a follower of the run in ``tmp_path``."""
    started: list[Follower] = []

    def begin(*options: str) -> Follower:
        command = [sys.executable, "-m", "swift_stage2", "rollouts", "--follow", *options, str(tmp_path)]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
        )
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.communicate(timeout=_DEADLINE_S)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[ExitStack]:
    """The run goes on until this is closed."""
    with ExitStack() as held:
        held.enter_context(run_lock(tmp_path))
        yield held


def next_line(follower: Follower) -> str:
    assert follower.stdout is not None
    return follower.stdout.readline()


def texts(lines: str) -> list[str]:
    return [json.loads(line)["text"] for line in lines.splitlines()]


def test_rollouts_come_while_the_run_goes_on_and_its_end_ends_the_follower(
    tmp_path: Path, follow: Callable[..., Follower], held: ExitStack
) -> None:
    follower = follow("--json")
    assert follower.stderr is not None
    assert follower.stderr.readline() == (
        f"swift-stage2 rollouts: waits for the first rollouts of the run in {tmp_path}\n"
    )
    run = FollowedRun(tmp_path)
    first = run.finish(1)
    assert texts(next_line(follower)) == [run.text(first[0])]
    second = run.finish(1)
    assert texts(next_line(follower)) == [run.text(second[0])]
    last = run.finish(2)
    run.end()
    held.close()
    out, err = follower.communicate(timeout=_DEADLINE_S)
    assert texts(out) == [run.text(key) for key in last]
    assert (follower.returncode, err) == (
        0,
        "swift-stage2 rollouts: the run has ended on every rank: 4 rollouts\n",
    )


def test_without_follow_what_is_there_is_printed(
    tmp_path: Path, held: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FollowedRun(tmp_path)
    keys = run.finish(2)
    assert main(["rollouts", "--json", str(tmp_path)]) == 0  # it goes on
    out, err = capsys.readouterr()
    assert (texts(out), err) == ([run.text(key) for key in keys], "")
    told = [each.fields for each in RunRollouts(tmp_path).read()]
    assert [json.loads(line) for line in out.splitlines()] == json.loads(json.dumps(told))
    held.close()
    assert main(["rollouts", str(tmp_path)]) == 1
    assert "rank 0 told no end" in capsys.readouterr().err
    run.end()
    assert main(["rollouts", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_line_is_readable_and_a_terminal_obeys_nothing_in_it(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    run.text = lambda key: "\x1b[2J\x9b" + "é" * 200  # type: ignore[method-assign]
    run.finish(1)
    (found,) = RunRollouts(tmp_path).read()
    line = found.line
    assert line.isprintable()
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  rank 0  v1     0:0:\d        attempt 0  http://s     4 tokens  "
        r"1 matched, 0 false, 0 missed, IoU 0\.50  "
        r"'\\x1b\[2J\\x9bé{115}'…",
        line,
    )


@pytest.mark.parametrize("options", [(), ("--follow",)])
def test_a_run_without_channel_b_has_no_rollouts(
    tmp_path: Path, options: tuple[str, ...], held: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False, total_steps=5, queue_limit=None)
    telemetry.record_start(run_id="r", step=0)
    assert main(["rollouts", *options, str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"rollouts are read from a run with channel B, got {tmp_path}, whose run has none; name" in line
    telemetry.close()
