"""``swift-stage2 launch`` with our own server: killed in the middle of a run, restarted, proven again, nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_run import LaunchedRun, write_launch_config
from torchrun_job import TEMPLATE, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_channel_b_comes_back_after_the_server_was_killed_and_restarted(
    tmp_path: Path, rows_file: Path
) -> None:
    directory = tmp_path / "run"
    options = {
        "model-type": "stage2_tiny_vl", "external-plugins": str(TEMPLATE), "torch-dtype": "float32",
        "max-batch-size": 32, "num-threads": 1,
    }  # fmt: skip
    address = {"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}
    server = {"engine": "transformers", "args": options}
    run = LaunchedRun(write_launch_config(directory, rows_file, address, server), directory)
    try:
        run.wait_until(lambda: run.num_b_steps() >= 3, "channel B")
        first = run.process_of("swift_stage2", "rollout")
        first.kill()
        run.wait_until(lambda: "server0 ended with status 137" in run.output, "the end of the server")
        num_rounds, num_steps = len(run.audit("round")), len(run.audit("step"))
        run.wait_until(lambda: "server0 listens again" in run.output, "the restarted server")
        assert run.process_of("swift_stage2", "rollout").pid != first.pid
        run.wait_for_b_after_a_proven_round(num_rounds, num_steps)
        steps = run.audit("step")
        assert [each["step"] for each in steps] == list(range(len(steps)))  # channel A ran all the time
        run.stop()
    finally:
        run.kill_everything()
