"""A process that works for a rank: how it is started, that it talks to its rank alone, and that it ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import run_python, speaking

from swift_stage2.runtime.worker import start_worker

PATIENCE_S = 60.0
ECHO = """
import os, sys
from swift_stage2.runtime.worker import serve_rank

if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    with serve_rank(descriptor, int(sys.argv[2])) as connection:
        files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        sockets = [name for name in files if os.path.lexists(name) and "socket:" in os.readlink(name)]
        word = {"environment": dict(os.environ), "stdin": os.readlink("/proc/self/fd/0")}
        connection.send(word | {"num_sockets": len(sockets), "inheritable": os.get_inheritable(descriptor)})
        while True:
            connection.send(connection.recv())
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_worker.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)


@contextmanager
def started() -> Iterator[tuple[subprocess.Popen[bytes], Connection, dict[str, Any]]]:
    """The process, the rank's connection to it, and its word of itself."""
    process, connection = start_worker("echo_worker")
    with process:
        try:
            with connection:
                assert connection.poll(PATIENCE_S)
                yield process, connection, connection.recv()
        finally:
            process.kill()


def test_it_hears_its_rank_knows_nothing_of_the_other_ranks_and_passes_its_socket_on_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SOMETHING", "else")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with started() as (_, connection, word):
        connection.send(["a message"])
        assert connection.poll(PATIENCE_S)
        assert connection.recv() == ["a message"]
    environment = word["environment"]
    assert [name for name, value in environment.items() if value == "7"] == []
    assert (environment["SOMETHING"], environment["OMP_NUM_THREADS"]) == ("else", "1")
    assert environment["LOG_LEVEL"] == "ERROR"
    assert word["stdin"] == "/dev/null"
    assert word["inheritable"] is False
    assert word["num_sockets"] == 1


@pytest.mark.parametrize("is_heard", [True, False])
def test_it_ends_quietly_when_its_rank_closes(capfd: pytest.CaptureFixture[str], is_heard: bool) -> None:
    """A message that the rank has not read makes the kernel reset the connection."""
    process, connection = start_worker("echo_worker")
    with process:
        with connection:
            assert connection.poll(PATIENCE_S)
            if is_heard:
                connection.recv()
        assert process.wait(PATIENCE_S) == 0
    assert capfd.readouterr().err == ""


def test_a_signal_that_comes_before_its_first_instruction_leaves_it_to_its_rank() -> None:
    process, connection = start_worker("echo_worker")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    with process, connection:
        assert connection.poll(PATIENCE_S)
        connection.recv()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the rank itself hears them"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_leaves_it_to_its_rank(number: signal.Signals) -> None:
    with started() as (process, connection, _):
        process.send_signal(number)
        connection.send("still there")
        assert connection.poll(PATIENCE_S)
        assert connection.recv() == "still there"


def test_the_kernel_ends_it_with_its_rank_although_another_process_holds_the_ranks_socket() -> None:
    """The descriptor of the rank's end is inherited by this test, so that no end of file comes."""
    rank = (
        "import os, sys, time\n"
        "from swift_stage2.runtime.worker import start_worker\n"
        "process, connection = start_worker('echo_worker')\n"
        "holder = os.fork()\n"
        "if not holder:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "assert connection.poll(30)\n"
        "print(process.pid, holder, flush=True)\n"
        "time.sleep(60)\n"
    )
    with speaking("-c", rank) as (process, said):
        worker, holder = (psutil.Process(int(pid)) for pid in said.split())
        process.kill()
        try:
            psutil.wait_procs([worker], timeout=PATIENCE_S)
            assert not worker.is_running()
            assert holder.is_running()
        finally:
            holder.kill()


def test_a_process_whose_rank_is_gone_already_does_not_begin() -> None:
    code = "from swift_stage2.runtime.worker import serve_rank\nwith serve_rank(0, 1): print('began')\n"
    ended = run_python("-c", code, timeout=PATIENCE_S, variables={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")


SPAWNED = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from swift_stage2.runtime.worker import begin_worker

def environment():
    return dict(os.environ)

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=begin_worker, initargs=(os.getpid(),))
    found = pool.submit(environment).result(60)
    names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LOG_LEVEL")
    print(*pool._processes, *(f"{name}={found.get(name)}" for name in names), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


def test_a_spawned_process_has_the_same_environment_and_is_ended_with_its_rank(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SPAWNED)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}
    with speaking(tmp_path / "rank.py", **variables) as (process, said):
        pid, *words = said.split()
        assert words == [
            "RANK=None", "WORLD_SIZE=None", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=3", "LOG_LEVEL=ERROR"
        ]  # fmt: skip
        worker = psutil.Process(int(pid))
        process.kill()
        psutil.wait_procs([worker], timeout=PATIENCE_S)
        assert not worker.is_running()
