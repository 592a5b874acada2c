"""Servers that do not sleep, whatever they do instead, are told in one line, and end where that is wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
from free_port import free_port
from hostile_server import HostileServer
from stopped_process import stop_process
from test_server_call import KEY, OK, raw

from swift_stage2 import wire
from swift_stage2.runtime.network import is_free
from swift_stage2.servers.sleeper import Sleeper

AMPLE_S = 60.0
SHORT_S = 0.5
# Listens, has a child of its own, tells both process ids, and answers every call the same.
_SERVER = r"""
import os, socket, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(os.getpid(), child.pid, flush=True)
held = []
while True:
    held.append(listener.accept()[0])
    if answer := sys.argv[3].encode():
        held[-1].recv(65536)
        held[-1].sendall(answer)
        held[-1].shutdown(socket.SHUT_WR)  # closed with bytes unread it would reset what was sent
"""
ANSWERS = {
    "silent": (b"", "no whole answer in time"),
    "500": (raw(b"HTTP/1.1 500 Oh", body=b'{"detail": "no\nsleep"}'), "status 500"),
    "awake": (raw(OK, body=b'{"state": "serving\\n"}'), "must sleep, got state='serving\\n'"),
    "another program": (raw(OK, body=b"[]"), "an answer: Input should be a valid dictionary"),
    "names a process": (raw(OK, body=b'{"state": "awake", "pid": 1}'), "must sleep"),
}


@contextmanager
def listening(
    port: int, answer: bytes = b"", host: str = "127.0.0.1", *, program: str = "swift_stage2"
) -> Iterator[list[psutil.Process]]:
    """Server and child, below a supervisor as the launcher's are; its exit status is looked at in the end."""
    words = [sys.executable, "-c", _SERVER, host, str(port), answer.decode(), program, "rollout"]
    started = subprocess.Popen(
        [sys.executable, "-m", "swift_stage2.runtime.supervisor", "--grace-s=1", "--", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert started.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in started.stdout.readline().split()]
    try:
        yield processes
        if not any(process.is_running() for process in processes):
            assert started.wait(AMPLE_S) == 137  # what the launcher starts again
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        started.terminate()
        started.wait(AMPLE_S)
        started.stdout.close()


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("how", ANSWERS)
def test_who_does_not_say_that_it_sleeps_is_told_and_ended_with_all_below_it_and_nobody_else_is(
    how: str,
) -> None:
    port, other = free_port(), free_port()
    answer, told = ANSWERS[how]
    with (
        listening(port, answer) as ended,
        listening(port, host="127.0.0.2") as elsewhere,
        listening(other, answer) as spared,
    ):
        timeout_s = SHORT_S if how == "silent" else AMPLE_S
        first, second = Sleeper([url_of(port), url_of(other)], None, timeout_s, [True, False])()
        assert not any(process.is_running() for process in ended)
        assert is_free("127.0.0.1", port)
        assert all(process.is_running() for process in (*elsewhere, *spared))
        assert first is not None
        assert second is not None
        assert told in first
        assert told in second
        assert first.endswith(f"; process {ended[0].pid} was ended")
        assert "\n" not in first + second


def test_another_program_that_has_got_the_port_is_left_alone() -> None:
    port = free_port()
    with listening(port, ANSWERS["500"][0], program="another") as processes:
        (told,) = Sleeper([url_of(port)], None, AMPLE_S, [True])()
        assert str(told).endswith("; no server of this user listens there")
        assert all(process.is_running() for process in processes)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_stopped_process_and_its_stopped_child_end_too(host: str) -> None:
    port = free_port()
    with listening(port, host=host) as processes:
        for process in processes:
            stop_process(process.pid)
        began = time.monotonic()
        (told,) = Sleeper([url_of(port)], None, SHORT_S, [True])()
        assert time.monotonic() - began < AMPLE_S
        assert f"process {processes[0].pid} was ended" in str(told)
        assert not any(process.is_running() for process in processes)


def test_all_are_asked_at_once_with_the_key_and_who_sleeps_is_left_alone() -> None:
    both = threading.Barrier(2)
    body = json.dumps({"state": wire.ASLEEP_STATE}).encode()

    def answer(path: str) -> Iterator[bytes]:
        both.wait(AMPLE_S)
        yield raw(OK, body=body)

    with HostileServer(answer) as one, HostileServer(answer) as two:
        nobody = url_of(free_port())
        *asleep, absent = Sleeper([one.url, two.url, nobody], KEY, AMPLE_S, [True, True, True])()
        assert asleep == [None, None]
        assert absent is not None
        assert absent.startswith(f"{nobody}{wire.SLEEP}: ConnectError")
        assert absent.endswith("; no server of this user listens there")
        for server in (one, two):
            (head,) = server.calls
            assert head.startswith(f"POST {wire.SLEEP} ".encode())
            assert f"Authorization: Bearer {KEY}".encode() in head


def test_a_server_inside_this_process_does_not_end_it() -> None:
    with HostileServer(lambda path: [raw(b"HTTP/1.1 500 Oh")]) as server:
        (told,) = Sleeper([server.url], None, AMPLE_S, [True])()
    assert "no server of this user listens there" in str(told)
