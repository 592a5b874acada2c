"""``launch --check`` on the tiny model: both sides compared by the real doctor, and nothing left, whatever ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launched_run import DEADLINE_S, LaunchedRun, write_launch_config
from torchrun_job import TEMPLATE, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def check(tmp_path: Path, rows_file: Path) -> LaunchedRun:
    options = {
        "model-type": "stage2_tiny_vl", "external-plugins": str(TEMPLATE), "torch-dtype": "float32", "num-threads": 1,
    }  # fmt: skip
    address = {"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}
    server = {"engine": "transformers", "args": options}
    path = write_launch_config(tmp_path / "run", rows_file, address, server)
    return LaunchedRun(path, tmp_path / "run", "--check", "--step-seconds", "5")


@pytest.mark.ci
def test_a_check_shows_the_doctors_table_has_its_status_and_leaves_no_process_and_no_run(
    tmp_path: Path, rows_file: Path
) -> None:
    run = check(tmp_path, rows_file)
    status = run.process.wait(timeout=DEADLINE_S)
    assert run.alive() == []
    told = " ".join(run.output.replace("[doctor]", "").split())  # as one line, which the table breaks
    assert status == 0, run.output
    for text in ("dry sync round ok", "proven by checksums+canary", "at 5 s the servers are busy"):
        assert text in told
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"logs"}


def test_a_signal_ends_servers_and_doctor(tmp_path: Path, rows_file: Path) -> None:
    run = check(tmp_path, rows_file)
    run.wait_until(lambda: "started doctor" in run.output, "the doctor")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=DEADLINE_S) == 128 + signal.SIGINT
    assert run.alive() == []
