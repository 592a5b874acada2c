"""``swift-stage2 launch`` with our own server: killed in the middle of a run, restarted, proven again, nothing left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from launched_run import LaunchedRun, write_launch_config
from torchrun_job import DROPOUT, TEMPLATE, LearnerRun, assert_replays, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def launched(tmp_path: Path, rows_file: Path, **prefetch: Any) -> LaunchedRun:
    directory = tmp_path / "run"
    options = {
        "model-type": "stage2_tiny_vl", "external-plugins": str(TEMPLATE), "torch-dtype": "float32",
        "max-batch-size": 32, "num-threads": 1,
    }  # fmt: skip
    address = {"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}
    server = {"engine": "transformers", "args": options}
    path = write_launch_config(directory, rows_file, address, server, record=True, **DROPOUT)
    config = yaml.safe_load(path.read_text())
    config["stage2_ab"]["channel_b"]["prefetch"] |= prefetch
    path.write_text(yaml.safe_dump(config))
    return LaunchedRun(path, directory)


@pytest.mark.long
def test_channel_b_comes_back_after_the_server_was_killed_and_restarted(
    tmp_path: Path, rows_file: Path
) -> None:
    run = launched(tmp_path, rows_file)
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


def test_a_restarted_server_is_asked_again_before_the_next_round_is_due(
    tmp_path: Path, rows_file: Path
) -> None:
    """It gets the weights of the first round, though the learner has trained on, and answers at that version.

    A replay needs nothing of that.
    """
    run = launched(tmp_path, rows_file, sync_every_steps=50_000)
    try:
        run.wait_until(lambda: run.num_b_steps() >= 3, "channel B")
        (first_round,) = run.audit("round")
        run.process_of("swift_stage2", "rollout").kill()
        run.wait_until(lambda: "server0 listens again" in run.output, "the restarted server")
        run.wait_until(
            lambda: any(each["servers"]["0"]["proven"] for each in run.audit("catch_up")), "a proof"
        )
        caught_up = run.audit("catch_up")[-1]
        assert (caught_up["round_id"], caught_up["version"]) == (
            first_round["round_id"],
            first_round["version"],
        )
        assert caught_up["servers"]["0"]["proof"] == "checksums+canary"
        assert caught_up["servers"]["0"]["incarnation"] != first_round["servers"]["0"]["incarnation"]
        run.wait_until(
            lambda: any(
                each["num_rollouts"] and each["time"] > caught_up["time"] for each in run.audit("batch")
            ),
            "rollouts of the server that came late",
        )
        run.wait_until(
            lambda: any(
                each["channel"] == "B" and each["time"] > caught_up["time"] for each in run.audit("step")
            ),
            "channel B",
        )
        assert run.audit("round") == [first_round]
        assert {each["version"] for each in run.audit("step")} == {first_round["version"]}
        run.stop()
    finally:
        run.kill_everything()
    recorded = LearnerRun(0, run.output, run.directory)
    assert_replays(recorded, len(run.audit("step")), tmp_path / "replay")
