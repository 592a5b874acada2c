"""The process: what it refuses, the port it takes, what it says while no server is there, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_rollout_server import Answer, FakeRolloutServer
from live_merger import LONGEST_WAIT_S, free_port, infer_body
from waiting import wait_for

from swift_stage2.cli import main


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--upstream", "127.0.0.1:8000"], "--upstream"),
        (["--upstream", "http://127.0.0.1:8000/infer"], "--upstream"),
        (["--upstream", "http://127.0.0.1"], "--upstream"),
        (["--upstream", "http://127.0.0.1:99999"], "--upstream"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", *arguments]) == 2
    error = capsys.readouterr().err
    assert names in error
    assert error.count("\n") == 1


def test_the_process_tells_its_callers_and_ends_soon_after_sigterm(
    tmp_path: Path, gate: threading.Event
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "log"
    with (
        FakeRolloutServer(on_infer=lambda call: Answer(after=gate)) as upstream,
        ThreadPoolExecutor(1) as caller,
    ):
        command = [
            sys.executable,
            "-m",
            "swift_stage2",
            "merge",
            "--upstream",
            upstream.url,
            "--port",
            str(port),
        ]
        environment = {**os.environ, "SWIFT_ROLLOUT_API_KEY": "sk-secret"}
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            wait_for(lambda: _is_listening(port, process, log))
            post = caller.submit(
                httpx.post,
                f"{url}/infer/",
                json=infer_body("a"),
                headers={"Authorization": "Bearer sk-secret"},
                timeout=LONGEST_WAIT_S,
                trust_env=False,
            )
            upstream.wait_until(lambda: len(upstream.infer_calls) == 1)
            process.send_signal(signal.SIGTERM)
            assert post.result(LONGEST_WAIT_S).status_code == 502
            assert process.wait(LONGEST_WAIT_S) == 0
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            process.kill()
            process.wait(LONGEST_WAIT_S)
            gate.set()
    assert "sk-secret" not in log.read_text()
    assert "Traceback" not in log.read_text()


def _is_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
