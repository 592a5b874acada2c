"""Two ranks and one tensor-parallel server take turns on one set of devices, as ``launch`` starts them, on vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from launched_run import LaunchedRun, write_launch_config
from stock_server import ENVIRONMENT
from test_launch_stock import OPTIONS, engine_processes
from torchrun_job import DROPOUT, LearnerRun, assert_replays, free_port

from swift_stage2.demo.scenes import SceneKind, Split, write_dataset
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import read_logs

pytestmark = pytest.mark.timeout(1800)


def test_ranks_share_a_tensor_parallel_server_and_end_all_its_workers_when_it_hangs(tmp_path: Path) -> None:
    rows = write_dataset(tmp_path / "data", SceneKind.SHAPES, 62, Split.TRAIN, 3)
    directory = tmp_path / "run"
    options = OPTIONS | {"vllm_tensor_parallel_size": 2}
    server = {"engine": "vllm", "args": options, "env": dict(ENVIRONMENT)}
    address = {"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}
    path = write_launch_config(directory, rows, address, server, record=True, **DROPOUT)
    config = yaml.safe_load(path.read_text())
    config["rollout"]["sync"] |= {"backoff_steps": 1}
    config["launch"] |= {"share_devices": True}
    config["launch"]["learner"]["nproc_per_node"] = 2
    config["stage2_ab"] |= {"mode": "inline", "phase_steps": 2}
    path.write_text(yaml.safe_dump(config))

    run = LaunchedRun(path, directory)
    try:
        run.wait_until(lambda: len(run.audit("round")) >= 2 and run.num_b_steps() >= 3, "two phases")
        top, engines = run.process_of("swift_stage2", "rollout"), engine_processes(run)
        assert sorted(name_of(each) for each in engines) == [
            "VLLM::EngineCore",
            "VLLM::Worker_TP0",
            "VLLM::Worker_TP1",
        ]
        top.suspend()  # neither wakes nor sleeps by its deadline
        psutil.wait_procs([top, *engines], timeout=300)
        assert not any(each.is_running() for each in (top, *engines))
        num_rounds, num_steps = len(run.audit("round")), len(run.audit("step"))
        run.wait_for_b_after_a_proven_round(num_rounds, num_steps)
        run.stop()
    finally:
        run.kill_everything()

    steps: list[dict[str, Any]] = run.audit("step")
    assert [each["step"] for each in steps] == list(range(len(steps)))
    assert {each["infer_in_flight"] for each in steps} == {0}
    account = account_of(read_logs([directory]))
    assert account.is_balanced, account.violations
    assert_replays(LearnerRun(0, run.output, directory), len(steps), tmp_path / "replay")


def name_of(process: psutil.Process) -> str:
    """The title that vLLM gives itself."""
    return "".join(process.cmdline()).strip()
