"""Learner and servers take turns on one set of devices, as ``launch`` starts them: two ranks and two real servers.

In one run a server is killed while it sleeps, another is stopped so that it neither wakes nor sleeps, one is killed in
the middle of its wake, and the run gets SIGTERM while packs are made. Others get it while a server wakes, and while all
sleep. Main memory stands in for the device's.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from launched_run import LaunchedRun, write_launch_config
from torchrun_job import DROPOUT, RECORDER, TEMPLATE, LearnerRun, assert_replays, free_port

from swift_stage2 import wire
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import read_logs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_PLUGIN = RECORDER.with_name("stops_as_it_wakes.py")
_PHASE_STEPS = 3
_IN_PHASE = {"syncing", "filling", "switching"}


@contextlib.contextmanager
def launched(directory: Path, rows_file: Path, b_ratio: float) -> Iterator[LaunchedRun]:
    """A server stops itself as it wakes, once there is ``stop_file`` of this run."""
    options = {
        "model-type": "stage2_tiny_vl", "external-plugins": [str(TEMPLATE), str(_PLUGIN)],
        "torch-dtype": "float32", "num-threads": 1,
    }  # fmt: skip
    environment = {"STOPS_AS_IT_WAKES": str(stop_file(directory))}
    server = {"engine": "transformers", "args": options, "env": environment}
    path = write_launch_config(directory, rows_file, {}, server, record=True, **DROPOUT)
    config = yaml.safe_load(path.read_text())
    config["rollout"]["servers"] = [
        {"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()} for _ in range(2)
    ]
    config["rollout"]["sync"] = {"timeout_s": 20, "backoff_steps": 1}
    config["launch"] |= {"servers": [server, server], "share_devices": True}
    # One that is started again has 0.8 of that time for loading, which a busy machine may exceed, and tries again.
    config["launch"]["restart"]["max_restarts"] = 10
    config["launch"]["learner"]["nproc_per_node"] = 2
    config["stage2_ab"] |= {"mode": "inline", "phase_steps": _PHASE_STEPS, "schedule": {"b_ratio": b_ratio}}
    path.write_text(yaml.safe_dump(config))
    run = LaunchedRun(path, directory)
    try:
        yield run
    finally:
        run.kill_everything()


def stop_file(directory: Path) -> Path:
    return directory.with_suffix(".stops")


def servers(run: LaunchedRun) -> dict[int, psutil.Process]:
    """By port."""
    found = {}
    for process in run.alive():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[1:5] == ["-u", "-m", "swift_stage2", "rollout"]:
                found[int(words[words.index("--port") + 1])] = process
    return found


def proven_by(run: LaunchedRun) -> list[tuple[int, ...]]:
    """By version, the servers that have proven it."""
    return [
        tuple(int(server) for server, report in each["servers"].items() if report["proven"])
        for each in run.audit("round")
    ]


def until_later(run: LaunchedRun, holds: Callable[[tuple[int, ...]], bool], what: str) -> None:
    """A version that is not begun yet is proven by servers of which ``holds`` is true, and feeds a B step."""
    num_known = len(proven_by(run))
    run.wait_until(lambda: any(map(holds, proven_by(run)[num_known:])), what)
    num_b = run.num_b_steps()
    run.wait_until(lambda: run.num_b_steps() > num_b, "channel B")


def stopped_halfway(run: LaunchedRun) -> psutil.Process:
    """A server that stands still in the middle of its wake; the learner waits for what it was sent to be proven."""
    stop_file(run.directory).touch()

    def stopped() -> list[psutil.Process]:
        return [each for each in servers(run).values() if each.status() == psutil.STATUS_STOPPED]

    run.wait_until(lambda: bool(stopped()), "a server that wakes")
    (found,) = stopped()
    return found


def stopped_steps(run: LaunchedRun) -> list[dict[str, Any]]:
    """Of a run that gets SIGTERM now: it ends in time, nothing is left of it, and nothing was lost."""
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=120) == 128 + signal.SIGTERM, run.output[-4000:]
    assert run.alive() == []
    steps = run.audit("step")
    assert [each["step"] for each in steps] == list(range(len(steps)))
    assert {each["infer_in_flight"] for each in steps} == {0}
    account = account_of(read_logs([run.directory]))
    assert account.is_balanced, account.violations
    return steps


def test_a_run_goes_on_whatever_becomes_of_its_servers_and_loses_nothing(
    tmp_path: Path, rows_file: Path
) -> None:
    with launched(tmp_path / "faults", rows_file, 0.5) as run:
        run.wait_until(lambda: len(proven_by(run)) >= 2, "two phases")
        assert set(proven_by(run)) == {(0, 1)}
        first, second = (servers(run)[port] for port in sorted(servers(run)))
        first.kill()  # asleep, or in any other part of a phase
        run.wait_until(lambda: "listens again" in run.output, "the restarted server")
        again = next(each for each in servers(run).values() if each.pid not in (first.pid, second.pid))
        assert "--load-when-asked" in again.cmdline()
        until_later(run, lambda proven: proven == (0, 1), "a phase with both servers")

        second.suspend()  # neither wakes nor sleeps by its deadline
        run.wait_until(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE, "its end")
        until_later(run, lambda proven: proven == (0, 1), "a phase with both servers")

        stopped_halfway(run).kill()
        until_later(run, lambda proven: proven == (0, 1), "a phase with both servers")
        told = [report["error"] or "" for each in run.audit("round") for report in each["servers"].values()]
        assert [each for each in told if wire.INSTALL in each and "in time" not in each], told

        def is_filling() -> bool:
            """A round is told before the packs of its phase are made, and their step after it."""
            rounds, steps = run.audit("round"), run.audit("step")
            return bool(rounds) and rounds[-1]["step"] > steps[-1]["step"]

        run.wait_until(is_filling, "a phase")
        steps = stopped_steps(run)

    rounds = [each["step"] for each in run.audit("round")]
    wanted = [each["step"] for each in steps if each["channel"] == "B" or each["skip_reason"]]
    between = [sum(one <= step < other for step in wanted) for one, other in pairwise(rounds)]
    assert max(between) <= _PHASE_STEPS
    assert_replays(LearnerRun(0, run.output, run.directory), len(steps), tmp_path / "replay")


def test_a_stop_wakes_no_server_that_sleeps_and_waits_for_one_that_wakes_no_longer_than_for_a_push(
    tmp_path: Path, rows_file: Path
) -> None:
    """Two runs beside each other, since most of their time is that of loading and of deadlines."""
    with (
        launched(tmp_path / "asleep", rows_file, 0.125) as asleep,
        launched(tmp_path / "wakes", rows_file, 0.5) as wakes,
    ):
        asleep.wait_until(lambda: bool(proven_by(asleep)), "a phase")
        (only,) = asleep.audit("round")
        asleep.wait_until(lambda: asleep.audit("step")[-1]["step"] > only["step"] + 1, "steps behind it")
        steps = stopped_steps(asleep)[only["step"] + 1 :]
        assert asleep.audit("round") == [only]
        assert not [step for step in steps if _IN_PHASE & step["activity_ns"].keys()]

        wakes.wait_until(lambda: bool(proven_by(wakes)), "a phase")
        stopped_halfway(wakes)
        rounds = wakes.audit("round")
        steps = stopped_steps(wakes)
        *before, last = wakes.audit("round")
        assert (before, last["step"]) == (rounds, steps[-1]["step"])
        (error,) = filter(None, (report["error"] for report in last["servers"].values()))
        assert f"{wire.INSTALL}: no whole answer in time" in error
        assert "did not go to sleep" in wakes.output
