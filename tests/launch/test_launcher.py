"""Nothing of a launch runs on, whatever way it ends: real processes, real signals, stand-in programs."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from free_port import free_port

from swift_stage2 import wire

HERE = Path(__file__).parent
SERVER = str(HERE / "stand_in_server.py")
LEARNER = str(HERE / "stand_in_learner.py")
TAG = "SWIFT_STAGE2_TEST_LAUNCH"
DEADLINE_S = 60.0


class RunningLaunch:
    """A launcher in a process of its own, everything below it recognisable by one environment variable."""

    def __init__(self, log_dir: Path, **spec: object) -> None:
        self.log_dir = log_dir
        self._tag = uuid.uuid4().hex
        self._seen = b""
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "stand_in_launch.py"), json.dumps({"log_dir": str(log_dir), **spec})],
            env=dict(os.environ) | {TAG: self._tag, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in the output so far, waiting for it."""
        assert self.process.stdout is not None
        end = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.output)):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert data, f"{pattern!r} did not come; output:\n{self.output}"
            self._seen += data
        return found

    def wait_until_up(self) -> None:
        self.wait_for("server0 answers")
        self.wait_for(r"learner process \d+ runs")

    def read_for(self, seconds: float) -> None:
        """Takes in what is written during that time."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            if select.select([self.process.stdout], [], [], left_s)[0]:
                self._seen += os.read(self.process.stdout.fileno(), 65536)

    def finish(self) -> int:
        """Exit status, once everything was written; nothing is left then."""
        rest, _ = self.process.communicate(timeout=DEADLINE_S)
        self._seen += rest
        assert self.alive() == []
        return self.process.returncode

    def stop(self) -> None:
        """SIGTERM, which ends everything."""
        self.process.terminate()
        assert self.finish() == 143

    @property
    def output(self) -> str:
        return self._seen.decode()

    def alive(self) -> list[psutil.Process]:
        """Every process of this launch, wherever it hangs by now."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(TAG) == self._tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def leaves_nothing(self) -> bool:
        """Whether all of it has ended, now or within the deadline."""
        psutil.wait_procs(self.alive(), timeout=DEADLINE_S)
        return not self.alive()


Launch = Callable[..., RunningLaunch]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[RunningLaunch] = []

    def start(
        *, learner: list[str] | None, server: str | None = "serve", grace_s: float = 30.0, **spec: object
    ) -> RunningLaunch:
        port = spec.pop("port", None) or free_port()
        inner_port = spec.get("upstream_port", port)
        servers = [] if server is None else [[port, SERVER, str(inner_port), server]]
        servers += [[other, SERVER, str(other), "serve"] for other in spec.pop("more_ports", [])]
        argv = learner if not learner or learner[0] == "-m" else [LEARNER, *learner]
        started.append(
            RunningLaunch(tmp_path / "logs", servers=servers, learner=argv, grace_s=grace_s, **spec)
        )
        started[-1].port = port
        return started[-1]

    yield start
    for running in started:
        for process in running.alive():
            with suppress(psutil.Error):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            running.process.communicate(timeout=DEADLINE_S)


def test_the_learners_end_ends_everything(launch: Launch) -> None:
    running = launch(learner=["exit", "0"], devices=["0"], learner_devices="0")
    assert running.finish() == 0
    order = [running.output.index(text) for text in ("server0 answers", "started learner", "learner ends")]
    assert order == sorted(order)
    assert "[server0] engine runs" in running.output
    assert "learner ends" in (running.log_dir / "learner.log").read_text()
    assert {path.stat().st_mode & 0o077 for path in running.log_dir.glob("*.log")} == {0}
    assert "engine runs" in (running.log_dir / "server0.log").read_text()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", running.port))


@pytest.mark.parametrize(
    ("devices", "in_turn"), [("0", True), pytest.param("0,1", True, marks=pytest.mark.slow), ("", False)]
)
def test_servers_on_one_device_load_one_after_the_other(launch: Launch, devices: str, in_turn: bool) -> None:
    """vLLM would take the other's memory for its own while it measures."""
    running = launch(learner=["run"], more_ports=[free_port()], devices=[devices, devices[:1]])
    running.wait_for("server1 answers")
    running.wait_for("server0 answers")
    events = ["started server0", "server0 answers", "started server1", "started learner", "server1 answers"]
    order = [running.output.index(event) for event in events]
    assert (order[1] < order[2]) is in_turn
    assert order[2] < order[3] < order[4]
    running.stop()


@pytest.mark.parametrize(("learner_devices", "beside"), [("0", False), ("1", True), ("", True)])
def test_the_learner_loads_beside_servers_on_other_devices(
    launch: Launch, learner_devices: str, beside: bool
) -> None:
    running = launch(learner=["run"], devices=["0"], learner_devices=learner_devices)
    running.wait_for(r"learner process \d+ runs")
    running.wait_for("server0 answers")
    assert (running.output.index("started learner") < running.output.index("server0 answers")) is beside
    running.stop()


@pytest.mark.parametrize(
    ("learner", "status"), [(["exit", "3"], 3), (["exit", "1", "2"], 2), (["exit", "0", "2"], 0)]
)
def test_the_learners_status_is_the_launchs(launch: Launch, learner: list[str], status: int) -> None:
    running = launch(learner=learner, server=None)
    assert running.finish() == status


def test_a_mistake_that_a_rank_told_is_told_again_as_the_last_line(launch: Launch) -> None:
    """Also while servers load, of which this one never answers."""
    mistake = ["exit", "1", "2\nthe model must exist, got “x”; check it"]
    running = launch(learner=mistake, server="mute", start_timeout_s=3600.0)
    assert running.finish() == 2
    assert running.output.splitlines()[-1] == "refused: the model must exist, got “x”; check it"


@pytest.mark.parametrize("status", [0, 1])
def test_a_check_begins_once_all_servers_answer_is_shown_whole_and_its_status_is_the_launchs(
    launch: Launch, status: int, tmp_path: Path
) -> None:
    of_a_run = tmp_path / "logs" / "status"  # which may go on beside it
    of_a_run.parent.mkdir()
    of_a_run.write_text("75 WeightSyncHang")
    check = {"is_check": True, "verbose": False, "devices": ["0", "1"], "learner_devices": ""}
    running = launch(learner=["exit", str(status)], more_ports=[free_port()], **check)
    assert running.finish() == status
    told = running.output
    assert max(told.index("server0 answers"), told.index("server1 answers")) < told.index("started learner")
    assert "[learner] learner ends" in told
    assert "engine runs" not in told
    assert told.splitlines()[-1] == "[learner] learner ends"
    assert of_a_run.read_text() == "75 WeightSyncHang"


def test_servers_alone_are_served_until_a_signal(launch: Launch) -> None:
    running = launch(learner=None)
    running.wait_for("all servers of this machine are up")
    assert "server0 answers" in running.output
    running.stop()


@pytest.mark.slow
def test_servers_alone_are_restarted_and_end_the_launch_when_none_is_left(launch: Launch) -> None:
    restart = {"policy": "on_failure", "max_restarts": 1, "backoff_s": 0.1}
    running = launch(learner=None, restart=restart)
    for ready in ("all servers of this machine are up", "server0 listens again"):
        running.wait_for(ready)
        with suppress(httpx.TransportError):  # it ends without an answer
            httpx.post(f"http://127.0.0.1:{running.port}/exit/", json={}, trust_env=False, timeout=DEADLINE_S)
    assert running.finish() == 1
    assert "no server is left on this machine" in running.output


def test_a_server_that_ends_before_it_answers_is_named(launch: Launch) -> None:
    running = launch(learner=["run"], server="die")
    assert running.finish() == 2
    assert re.search(r"refused: server0 .*exit status=1; see .*server0\.log", running.output)
    assert "no such model" in running.output


@pytest.mark.slow
def test_a_server_that_never_loads_is_named_with_its_last_answer(launch: Launch) -> None:
    running = launch(learner=["run"], server="mute", start_timeout_s=8.0)
    assert running.finish() == 2
    assert re.search(r"refused: server0 .*start_timeout_s=8, got: .*status 503", running.output)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_lets_the_learner_save_and_ends_everything(launch: Launch, number: int, status: int) -> None:
    running = launch(learner=["run"])
    running.wait_for(r"learner process \d+ runs")
    running.process.send_signal(number)
    assert running.finish() == status
    assert "checkpoint saved" in (running.log_dir / "learner.log").read_text()


def test_a_signal_while_servers_start_ends_everything(launch: Launch) -> None:
    running = launch(learner=["run"], server="mute")
    running.wait_for("engine runs")
    running.stop()


def test_kill_9_of_the_launcher_leaves_nothing_and_the_learner_still_saves(launch: Launch) -> None:
    running = launch(learner=["run"])
    running.wait_for(r"learner process \d+ runs")
    running.process.kill()
    assert running.leaves_nothing()
    assert "checkpoint saved" in (running.log_dir / "learner.log").read_text()


@pytest.mark.parametrize("victim", [pytest.param("command", marks=pytest.mark.slow), "supervisor"])
def test_kill_9_of_the_learner_or_its_supervisor_leaves_nothing(launch: Launch, victim: str) -> None:
    running = launch(learner=["run"])
    learner = psutil.Process(int(running.wait_for(r"learner process (\d+) runs")[1]))
    supervisor = learner.parent()
    assert supervisor is not None
    (learner if victim == "command" else supervisor).kill()
    assert running.finish() == 137


def test_a_server_that_dies_later_is_told_of_once_and_the_learner_runs_on(launch: Launch) -> None:
    running = launch(learner=["run"])
    running.wait_for("server0 answers")
    learner = psutil.Process(int(running.wait_for(r"learner process (\d+) runs")[1]))
    with suppress(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{running.port}/exit/", json={}, timeout=60, trust_env=False)
    running.wait_for("server0 ended with status .* the learner runs on without it; start it on the same port")
    assert {process.pid for process in running.alive()} == {
        running.process.pid, learner.pid, learner.ppid(), *(child.pid for child in learner.children())
    }  # fmt: skip
    running.stop()
    assert running.output.count("server0 ended") == 1


def test_a_learner_that_ignores_sigterm_is_killed_after_its_grace(launch: Launch) -> None:
    running = launch(learner=["stubborn"], server=None, grace_s=0.5)
    running.wait_for(r"learner process \d+ runs")
    running.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_second_signal_does_not_wait_for_the_grace(launch: Launch, number: int) -> None:
    running = launch(learner=["stubborn"], grace_s=3600.0)
    running.wait_for(r"learner process \d+ runs")
    running.process.send_signal(number)
    running.wait_for(f"ending everything after signal {number:d}")
    # One that comes at once is the same request; once it is heard no more come, for the last moments heed none.
    while "learner is killed" not in running.output and running.process.poll() is None:
        running.process.send_signal(signal.SIGTERM)
        running.read_for(0.5)
    assert running.finish() == 128 + number
    assert "learner is killed" in running.output


def test_an_exception_in_the_launcher_ends_everything(launch: Launch) -> None:
    running = launch(learner=["run"], break_at="learner process")
    assert running.finish() == 1
    assert "the launcher itself breaks" in running.output


def test_a_program_that_cannot_be_started_is_said_in_the_log(launch: Launch) -> None:
    running = launch(learner=["-m", "no_such_module"], server=None)
    assert running.finish() == 1
    assert "No module named no_such_module" in running.output


@pytest.mark.slow
@pytest.mark.parametrize("by_slurm", [False, True])
def test_ranks_of_a_real_torchrun_may_save_and_are_gone_afterwards(
    launch: Launch, tmp_path: Path, by_slurm: bool
) -> None:
    """Slurm signals every process of a step, so that torchrun hears of it from its supervisor, too."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "def save(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    time.sleep({12 * by_slurm})\n"  # longer than what a supervisor gives to strays
        f"    pathlib.Path({str(tmp_path)!r}, 'saved' + rank).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        # One write: two ranks share the pipe, and print writes each argument by itself.
        "os.write(1, f'rank {rank} is ready\\n'.encode())\n"
        "while True: time.sleep(0.1)\n"  # pause() would miss a signal that comes right before it
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--shutdown-timeout=60"]
    running = launch(learner=[*torchrun, str(script)], server=None)
    running.wait_for("rank 0 is ready")
    running.wait_for("rank 1 is ready")
    for process in running.alive() if by_slurm else ():
        if process.pid != running.process.pid:  # which a second signal makes hurry
            process.terminate()
    running.stop()
    assert {file.name for file in tmp_path.glob("saved*")} == {"saved0", "saved1"}


# --- restarts ------------------------------------------------------------------------------------


def engines(running: RunningLaunch) -> list[psutil.Process]:
    return [process for process in running.alive() if "SIG_IGN" in " ".join(process.cmdline())]


def kill_server(running: RunningLaunch, number: int, *, supervisor: bool = False) -> None:
    """SIGKILL to the server's process of the ``number``-th start, or to its supervisor alone."""
    running.wait_for(r"(?s)" + r"server process \d+.*" * number)
    pids = re.findall(r"server process (\d+)", running.output)
    server = psutil.Process(int(pids[number - 1]))
    victim = server.parent() if supervisor else server
    assert victim is not None
    victim.kill()


@pytest.mark.slow
@pytest.mark.ci
def test_a_server_that_fails_is_started_again_and_what_it_left_is_ended_first(launch: Launch) -> None:
    restart = {"policy": "on_failure", "max_restarts": 2, "backoff_s": 0.1}
    running = launch(learner=["run"], restart=restart)
    running.wait_until_up()
    for number in (1, 2):
        kill_server(running, number, supervisor=number == 2)
        running.wait_for(
            rf"server0 ended with status 137 \(was killed by SIGKILL\); .*started again in .* \(restart {number} of 2\)"
        )
        running.wait_for(r"(?s)" + r"server0 listens again at .*" * number)
        assert len(engines(running)) == 1
        reply = httpx.post(
            f"http://127.0.0.1:{running.port}/infer/",
            json={"infer_requests": [1]},
            timeout=60,
            trust_env=False,
        )
        assert reply.status_code == 200
    kill_server(running, 3)
    running.wait_for(
        r"server0 ended with status 137 .*; the learner runs on without it; it was started again 2 times; start it"
    )
    running.stop()
    assert running.output.count("started server0") == 3


@pytest.mark.slow
def test_a_restart_does_not_come_up_beside_another_process_on_its_port(launch: Launch) -> None:
    running = launch(learner=["run"], restart={"policy": "on_failure", "max_restarts": 1, "backoff_s": 1.0})
    running.wait_until_up()
    kill_server(running, 1)
    running.wait_for("it is started again in 1 s")
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", running.port))
        thief.listen()
        running.read_for(2.5)
        assert running.output.count("started server0") == 1
    running.wait_for("server0 listens again")
    running.stop()


@pytest.mark.slow
def test_a_server_and_its_merger_start_answer_and_are_restarted_together(launch: Launch) -> None:
    inner = free_port()
    running = launch(
        learner=["run"],
        upstream_port=inner,
        restart={"policy": "on_failure", "max_restarts": 1, "backoff_s": 0.1},
    )
    running.wait_until_up()
    assert "started merger0" in running.output
    asked = {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}]}
    for port in (inner, running.port):
        reply = httpx.post(f"http://127.0.0.1:{port}/infer/", json=asked, timeout=60, trust_env=False)
        assert reply.status_code == 200
    kill_server(running, 1)
    running.wait_for(r"server0 ended .*restart 1 of 1")
    running.wait_for("server0 listens again")
    assert running.output.count("started merger0") == 2
    url = f"http://127.0.0.1:{running.port}"
    for path, status in ((wire.INFER, 502), (wire.PROCESS_WEIGHTS, 200), (wire.INFER, 200)):
        reply = httpx.post(url + path, json=asked, timeout=60, trust_env=False)
        assert reply.status_code == status  # nobody believes a new server before it has been given weights
    running.stop()
