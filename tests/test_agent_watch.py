"""Ranks whose torchrun is killed end: real torchrun, real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from swift_stage2.agent_watch import AgentWatch

_DEADLINE_S = 90.0
_RANK = """
import os, pathlib, signal, sys
from swift_stage2.agent_watch import AgentWatch
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


def test_a_process_that_torchrun_did_not_start_is_not_watched() -> None:
    before = threading.active_count()
    with AgentWatch({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, 1.0):
        assert threading.active_count() == before


def test_the_watch_ends_with_its_block() -> None:
    with AgentWatch({"TORCHELASTIC_RUN_ID": "none"}, 1.0):
        assert any(thread.name == "agent-watch" for thread in threading.enumerate())
    assert not any(thread.name == "agent-watch" for thread in threading.enumerate())
