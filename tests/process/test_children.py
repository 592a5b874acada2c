"""Processes below a server do not outlive it, however the server ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from commands import run_python

GONE_S = 60.0
# A server with a child in a session of its own that ignores SIGTERM, and a grandchild; then it waits.
SERVER = """
import subprocess, sys
from swift_stage2.process.children import ServerChildren
STUBBORN = '''
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
grandchild.wait(timeout=600)
'''
with ServerChildren():
    child = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    print(child.pid, child.stdout.readline().strip(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None], ids=["killed", "interrupted", "ends"])
def test_children_end_with_their_server(end: signal.Signals | None) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    below = [psutil.Process(int(text)) for text in server.stdout.readline().split()]
    assert len(below) == 2
    below += psutil.Process(server.pid).children()  # the watcher too
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        if end is None:
            server.stdin.close()
        else:
            os.kill(server.pid, end)
        server.wait(GONE_S)
        _, left = psutil.wait_procs(below, timeout=GONE_S)
        assert not left, [each.cmdline() for each in left]
        assert bystander.poll() is None
    finally:
        for process in (server, bystander, *below):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        bystander.wait(GONE_S)
        server.stdout.close()


def test_what_the_server_starts_is_not_forked_from_it() -> None:
    """A fork would show an environment without the mark, and would be overlooked."""
    program = (
        "import os\nfrom swift_stage2.process.children import ServerChildren\n"
        "with ServerChildren():\n    print(os.environ['VLLM_WORKER_MULTIPROC_METHOD'])"
    )
    environment = dict(os.environ) | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    done = run_python("-c", program, env=environment, timeout=GONE_S, check=True)
    assert done.stdout.strip() == "spawn"
