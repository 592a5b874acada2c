"""A rollout server that is started later joins a real job of two ranks by the real command, and outlives a resume.

The job is recorded, with a round that proves one server late, and a replay of it ends in the same bits.
"""

from __future__ import annotations

import operator
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_staging_server import FakeStagingServer
from launched_run import DEADLINE_S, LaunchedRun, write_launch_config
from torchrun_job import DROPOUT, LearnerRun, Server, assert_replays, free_port, run_learner, start_server

from swift_stage2.cli import main
from swift_stage2.run_directory.server_board import ServerBoard
from swift_stage2.telemetry.ledger import ledger_path
from swift_stage2.telemetry.ledger_account import account_of
from swift_stage2.telemetry.reading import read_audit, read_ledger, read_ledgers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Server]:
    started = start_server(tmp_path)
    yield started
    started.kill()


def _wait(holds: Callable[[], bool], run: LaunchedRun) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert run.process.poll() is None, run.output[-4000:]
        assert time.monotonic() < end, run.output[-4000:]
        time.sleep(0.2)  # bounded polling of another process


def _asked(directory: Path, rank: int, server: Server) -> list[dict[str, Any]]:
    path = ledger_path(directory, rank)
    records = read_ledger(path) if path.exists() else []
    return [record for record in records if record["kind"] == "sent" and record["server"] == server.base_url]


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["servers", "add", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def _versions(directory: Path) -> list[int]:
    """Of the weights that each server has proven."""
    found = [re.search(r"version (\d+)", each.proof) for each in ServerBoard.read(directory).servers]
    return [int(each[1]) for each in found if each is not None]


def _prove_late(server: Server, run: LaunchedRun) -> None:
    """A round in which ``server``, the second one, installs and proves long after the first has."""
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        _wait(lambda: operator.gt(*_versions(run.directory)), run)
        ahead = max(_versions(run.directory))
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    _wait(lambda: any(each["version"] == ahead for each in run.audit("round")), run)
    (record,) = [each for each in run.audit("round") if each["version"] == ahead]
    assert {name: report["proven"] for name, report in record["servers"].items()} == {"0": True, "1": True}


def test_a_server_that_is_added_is_asked_by_both_ranks_also_after_a_resume(
    tmp_path: Path, rows_file: Path, server: Server, late: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    address = {"base_url": server.base_url, "group_port": server.group_port}
    swift = {"save_strategy": "steps", "save_steps": 100_000}
    config = write_launch_config(directory, rows_file, address, {}, record=True, **swift, **DROPOUT)
    written = yaml.safe_load(config.read_text())
    written["launch"]["servers"], written["launch"]["learner"]["nproc_per_node"] = [], 2
    config.write_text(yaml.safe_dump(written))
    assert "has begun to train" in _refusal(capsys, str(directory), late.base_url)
    run = LaunchedRun(config, directory)
    try:
        _wait(lambda: (directory / "servers" / "board.json").exists(), run)
        _wait(lambda: ServerBoard.read(directory).servers[0].state == "proven", run)
        assert "which is in the run" in _refusal(capsys, str(directory), server.base_url)
        port = str(free_port())
        silent = _refusal(capsys, str(directory), f"http://127.0.0.1:{free_port()}", "--group-port", port)
        assert "a server must answer rank 0 before it is added" in silent
        with FakeStagingServer(()) as other:
            differing = _refusal(capsys, str(directory), other.url, "--group-port", port)
        assert "server and learner must hold the same tensors" in differing
        same_port = _refusal(capsys, str(directory), late.base_url, "--group-port", str(server.group_port))
        assert "every server needs a --group-port of its own" in same_port
        assert run.audit("server_added") == []

        command = [sys.executable, "-m", "swift_stage2", "servers", "add", str(directory), late.base_url]
        added = subprocess.run(
            [*command, "--group-port", str(late.group_port), "--timeout-s", "120"],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert added.returncode == 0, added.stderr + run.output[-4000:]
        assert added.stdout.startswith(f"{late.base_url} (added): proven, version ")
        _wait(lambda: all(_asked(directory, rank, late) for rank in (0, 1)), run)
        _prove_late(late, run)
    finally:
        if run.process.poll() is None:
            run.stop()
    assert main(["servers", "list", str(directory)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told] == ["http", "http", "the run has ended"]
    assert "has ended" in _refusal(capsys, str(directory), f"http://127.0.0.1:{free_port()}")
    for rank in (0, 1):
        audit = read_audit(directory / "audit" / f"rank{rank}.jsonl")
        (record,) = [each for each in audit if each["kind"] == "server_added"]
        assert (record["server"], record["base_url"]) == (1, late.base_url)
        before = [each for each in _asked(directory, rank, late) if each["time"] < record["time"]]
        assert before == []
    assert account_of(read_ledgers([directory])).is_balanced

    (num_steps,) = {len([each for each in audit if each["kind"] == "step"])}
    assert_replays(LearnerRun(0, run.output, directory), num_steps, tmp_path / "replay")
    num_sent = [len(_asked(directory, rank, late)) for rank in (0, 1)]
    written["swift"]["max_steps"] = num_steps + 40
    config.write_text(yaml.safe_dump(written))
    awaited = f"*:{num_steps + 20}:await_packs"
    resumed = run_learner(config, directory, ranks=2, options=("--resume",), inject=awaited)
    assert resumed.status == 0, resumed.output[-4000:]
    assert [len(resumed.audit(rank, "server_added")) for rank in (0, 1)] == [2, 2]
    assert all(len(_asked(directory, rank, late)) > num_sent[rank] for rank in (0, 1))
    assert main(["report", str(directory)]) == 0
    assert account_of(read_ledgers([directory])).is_balanced
    assert f"server added: {late.base_url}" in (directory / "report.html").read_text()
