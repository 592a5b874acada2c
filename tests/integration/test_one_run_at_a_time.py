"""A real torchrun job that loses its torchrun, is run into, and goes on: nothing of it is trained over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from commands import run_command
from torchrun_job import ENVIRONMENT, free_port, run_learner, write_config

from swift_stage2.runtime.checkpoints import checkpoint_step, why_not_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
_DEADLINE_S = 300.0


def wait_until(holds: Callable[[], object], what: str, log: Path) -> None:
    end, pause = time.monotonic() + _DEADLINE_S, threading.Event()
    while not holds():
        assert time.monotonic() < end, f"{what} did not come:\n{log.read_text(errors='replace')[-3000:]}"
        pause.wait(0.2)


def test_a_killed_torchrun_takes_its_ranks_along_and_the_run_goes_on_by_resume(
    tmp_path: Path, rows_file: Path
) -> None:
    directory, log = tmp_path / "run", tmp_path / "torchrun.log"
    swift = {"max_steps": 100_000, "save_strategy": "steps", "save_steps": 100_000}
    config = write_config(directory, rows_file, None, b_ratio=0, swift=swift)
    environment = os.environ | ENVIRONMENT | {"RECORD_DIR": str(directory / "micro_steps"), "INJECT": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), "-m", "swift_stage2", "train", str(config)]
    audit = directory / "events" / "rank0.jsonl"
    with log.open("wb") as output:
        torchrun = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    ranks: list[psutil.Process] = []
    try:
        wait_until(lambda: audit.exists() and b'"kind":"step"' in audit.read_bytes(), "a step", log)
        ranks = psutil.Process(torchrun.pid).children()
        assert len(ranks) == 2
        for words in (["train", str(config)], ["train", "--resume", str(config)], ["launch", str(config)]):
            second = run_command(*words, env=environment, timeout=_DEADLINE_S)
            assert (second.returncode, second.stderr.count("\n")) == (2, 1), second.stderr[-3000:]
            assert "a run directory has one run at a time" in second.stderr
            assert any(f"process {rank.pid} on" in second.stderr for rank in ranks)
        torchrun.kill()
        torchrun.wait(timeout=_DEADLINE_S)
        _, left = psutil.wait_procs(ranks, timeout=_DEADLINE_S)
        assert left == []
    finally:
        for process in ranks or psutil.Process(torchrun.pid).children():
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        if torchrun.poll() is None:
            torchrun.kill()
    (saved,) = [each for each in directory.glob("checkpoint-*") if checkpoint_step(each) is not None]
    step = checkpoint_step(saved)
    assert step is not None
    assert why_not_whole(saved, needs_stage2=True) == ""

    content = yaml.safe_load(config.read_text())
    content["swift"] |= {"max_steps": step + 2}
    config.write_text(yaml.safe_dump(content))
    refused = run_learner(config, directory, ranks=2)
    assert refused.status != 0
    assert f"with checkpoint-{step}; go on with that run by --resume" in refused.output
    resumed = run_learner(config, directory, ranks=2, options=("--resume",))
    assert resumed.status == 0, resumed.output[-3000:]
    assert f"resuming from {saved}" in resumed.output
    steps = [json.loads(line)["step"] for line in audit.read_text().splitlines() if '"kind":"step"' in line]
    assert steps == list(range(step + 2)), "a step was lost or trained twice"
