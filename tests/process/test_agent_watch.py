"""Ranks whose torchrun is killed end: real torchrun, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from swift_stage2.process.agent_watch import AgentWatch

_DEADLINE_S = 90.0
_RANK = """
import os, pathlib, signal, sys
from swift_stage2.process.agent_watch import AgentWatch
folder, manner, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
def save(*_):
    (folder / f"saved{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save if manner == "saves" else signal.SIG_IGN)
with AgentWatch(os.environ, 300.0 if manner == "saves" else 0.5):
    (folder / f"{os.getpid()}.rank").touch()
    while True:
        signal.pause()
"""

_AT_FIRST_SLOW_IMPORT = """
import importlib.abc, os, pathlib, sys
class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "swift_stage2.launch.rank":
            files = list(pathlib.Path("/proc/self/fdinfo").iterdir())
            print(*[line for file in files if file.exists() for line in file.read_text().splitlines()], sep="\\n")
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Look())
from swift_stage2 import cli
cli.main(["train", "none.yaml"])
"""
_AGENT_ENDS_FIRST = """
import os, sys
from swift_stage2.process import agent_watch
from swift_stage2.errors import UserError
if not os.fork():
    agent, open_pidfd = os.getppid(), os.pidfd_open
    def open_late(pid):
        opened = open_pidfd(pid)
        while os.getppid() == agent:
            pass
        return opened
    os.pidfd_open = open_late
    try:
        with agent_watch.AgentWatch({"TORCHELASTIC_RUN_ID": "none"}, 1.0):
            print("watched", flush=True)
    except UserError as error:
        print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("manner", ["saves", "ignores SIGTERM"])
def test_ranks_end_with_a_torchrun_that_was_killed(tmp_path: Path, manner: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    torchrun = subprocess.Popen([sys.executable, *command, str(tmp_path), manner], start_new_session=True)
    end, pause = time.monotonic() + _DEADLINE_S, threading.Event()
    ranks: list[psutil.Process] = []
    try:
        while len(list(tmp_path.glob("*.rank"))) < 2:
            assert torchrun.poll() is None
            assert time.monotonic() < end
            pause.wait(0.1)
        ranks = [psutil.Process(int(path.stem)) for path in tmp_path.glob("*.rank")]
        torchrun.kill()
        torchrun.wait(timeout=_DEADLINE_S)
        _, left = psutil.wait_procs(ranks, timeout=_DEADLINE_S)
        assert left == []
        assert len(list(tmp_path.glob("saved*"))) == (2 if manner == "saves" else 0)
    finally:
        for process in (psutil.Process(torchrun.pid), *ranks) if torchrun.poll() is None else ranks:
            if process.is_running():
                process.send_signal(signal.SIGKILL)


def test_a_rank_knows_its_agent_before_anything_slow_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AT_FIRST_SLOW_IMPORT],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "none"},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    assert f"Pid:\t{os.getpid()}" in done.stdout.splitlines()


def test_a_rank_whose_agent_ended_while_it_looked_for_it_ends_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AGENT_ENDS_FIRST], capture_output=True, text=True, timeout=_DEADLINE_S
    )
    assert done.stdout.startswith("a rank ends with its torchrun"), done.stdout + done.stderr


def test_a_process_that_torchrun_did_not_start_is_not_watched() -> None:
    before = threading.active_count()
    with AgentWatch({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, 1.0):
        assert threading.active_count() == before


def test_the_watch_ends_with_its_block() -> None:
    with AgentWatch({"TORCHELASTIC_RUN_ID": "none"}, 1.0):
        assert any(thread.name == "agent-watch" for thread in threading.enumerate())
    assert not any(thread.name == "agent-watch" for thread in threading.enumerate())
