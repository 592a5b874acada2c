"""A program that supervises itself leaves nothing behind, whichever of its real processes is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swift_stage2.runtime.supervisor import StopSignals

GONE_S = 60.0
# A server with a child in a session of its own that ignores SIGTERM and holds shared memory, and a grandchild.
SERVER = """
import os, subprocess, sys
from multiprocessing.shared_memory import SharedMemory
from swift_stage2.runtime.supervisor import supervise_this_program
STUBBORN = '''
import signal, subprocess, sys
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
block = SharedMemory(create=True, size=4096)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(block.name, grandchild.pid, flush=True)
grandchild.wait(timeout=600)
'''
supervise_this_program(2.0)
child = subprocess.Popen(
    [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, start_new_session=True
)
print(child.stdout.readline().strip(), child.pid, os.getpid(), os.getppid(), flush=True)
if len(sys.argv) > 1:
    sys.exit(7)
child.wait(timeout=600)
"""


@pytest.mark.parametrize("end", ["supervisor", "server", "terminated", "ends"])
def test_nothing_outlives_a_program_that_supervises_itself(tmp_path: Path, end: str) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    words = [sys.executable, str(tmp_path / "server.py"), *(["ends"] if end == "ends" else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    supervisor = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert supervisor.stdout is not None
    segment, *pids = supervisor.stdout.readline().split()
    assert int(pids[-1]) == supervisor.pid
    below = [psutil.Process(int(pid)) for pid in pids[:3] if end != "ends" or psutil.pid_exists(int(pid))]
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        if end in ("supervisor", "server"):
            os.kill(int(pids[3 if end == "supervisor" else 2]), signal.SIGKILL)
        elif end == "terminated":
            supervisor.terminate()
        expected = {"supervisor": -9, "server": 137, "terminated": 143, "ends": 7}
        assert supervisor.wait(GONE_S) == expected[end]
        if end == "supervisor":  # the kernel has told the server, which ends by itself
            below = below[2:]
        _, left = psutil.wait_procs(below, timeout=GONE_S)
        assert not left, [each.cmdline() for each in left]
        assert bystander.poll() is None
        assert end == "supervisor" or not Path("/dev/shm", segment).exists()
    finally:
        for process in (supervisor, bystander, *map(int, pids)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process if isinstance(process, int) else process.pid, signal.SIGKILL)
        bystander.wait(GONE_S)
        supervisor.stdout.close()


@pytest.mark.parametrize(
    ("before", "received"), [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, None)], ids=["heard", "nohup"]
)
def test_a_terminal_that_closes_sends_its_signal_twice_and_asks_once_unless_nohup_ignores_it(
    before: signal.Handlers, received: signal.Signals | None
) -> None:
    tests_own = signal.signal(signal.SIGHUP, before)  # they may run under nohup
    try:
        with StopSignals() as signals:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
            assert (signals.received, signals.wants_haste) == (received, False)
    finally:
        signal.signal(signal.SIGHUP, tests_own)
