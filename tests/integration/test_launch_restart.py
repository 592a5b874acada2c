"""``swift-stage2 launch`` with our own server: killed in the middle of a run, restarted, proven again, nothing left.

Or it cannot be restarted, and the run says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched_run import DEADLINE_S, LaunchedRun, write_launch_config
from torchrun_job import (
    DROPOUT,
    ENVIRONMENT,
    MODEL,
    TEMPLATE,
    LearnerRun,
    Server,
    assert_replays,
    free_port,
    start_server,
)

from swift_stage2.runtime.checkpoints import why_not_whole

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


def started_by_init(
    tmp_path: Path, rows_file: Path, max_steps: int, server: Server | None = None
) -> LaunchedRun:
    """Two ranks on the tiny model, all else as ``init`` writes it; ``server`` takes the place of the one in it."""
    directory, path = tmp_path / "run", tmp_path / "run.yaml"
    swift = {
        "model_type": "stage2_tiny_vl", "template": "stage2_tiny_vl", "external_plugins": TEMPLATE,
        "torch_dtype": "float32", "max_steps": max_steps, "output_dir": directory,
    }  # fmt: skip
    keys = ["stage2_ab.channel_b.packing.packing_length=512", "rollout.decoding.max_new_tokens=128"]
    keys.append("launch.learner.nproc_per_node=2")
    options = {
        "data": rows_file, "model": MODEL, "learner-gpus": "none", "rollout-gpus": "none", "output": path,
        "b-ratio": 0.5,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    words += [
        *(f"--swift={name}={value}" for name, value in swift.items()),
        *(f"--set={key}" for key in keys),
    ]
    init = [sys.executable, "-m", "swift_stage2", "init", *words]
    subprocess.run(init, check=True, timeout=300, env=os.environ | ENVIRONMENT)
    if server is not None:
        config = yaml.safe_load(path.read_text())
        config["rollout"]["servers"] = [{"base_url": server.base_url, "group_port": server.group_port}]
        del config["launch"]["servers"]
        path.write_text(yaml.safe_dump(config))
    return LaunchedRun(path, directory)


def test_channel_b_comes_back_after_the_server_of_a_run_as_init_writes_it_was_killed(
    tmp_path: Path, rows_file: Path
) -> None:
    run = started_by_init(tmp_path, rows_file, max_steps=100_000)
    try:
        run.wait_until(lambda: run.num_b_steps() >= 1, "channel B")
        first = run.process_of("swift_stage2", "rollout")
        first.kill()
        run.wait_until(lambda: "restart 1 of 3" in run.output, "the end of the server")
        run.wait_until(lambda: "server0 listens again" in run.output, "the restarted server")
        assert run.process_of("swift_stage2", "rollout").pid != first.pid

        def proven() -> list[float]:
            found = [*run.audit("round"), *run.audit("catch_up")]
            told = [each["time"] for each in run.audit("warning") if "suspect until" in each["message"]]
            return [
                each["time"] for each in found if each["servers"]["0"]["proven"] and each["time"] > told[0]
            ]

        run.wait_until(lambda: bool(proven()), "a proof of the restarted server")
        since = min(proven())
        run.wait_until(
            lambda: any(each["channel"] == "B" and each["time"] > since for each in run.audit("step")),
            "channel B",
        )
        steps = run.audit("step")
        assert [each["step"] for each in steps] == list(range(len(steps)))  # channel A ran all the time
        run.stop()
    finally:
        run.kill_everything()


def test_a_run_whose_server_dies_for_good_trains_to_its_end_and_says_so_by_its_status(
    tmp_path: Path, rows_file: Path
) -> None:
    """A server that ``launch`` did not start, and so cannot start again."""
    server = start_server(tmp_path)
    run = started_by_init(tmp_path, rows_file, max_steps=40, server=server)
    try:
        run.wait_until(lambda: run.num_b_steps() >= 1, "channel B")
        server.kill()
        assert run.process.wait(timeout=DEADLINE_S) == 3, run.output[-4000:]
    finally:
        run.kill_everything()
        server.kill()
    steps = run.audit("step")
    assert len(steps) == 40
    *_, said, last = run.output.splitlines()
    assert said.startswith("[launch] ended with status 3; run directory ")
    assert last.startswith("swift-stage2 launch: error: ChannelBStarved: channel B ran at ")
    assert not why_not_whole(run.directory / "checkpoint-40", needs_stage2=True)


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
        assert caught_up["version"] == first_round["version"]
        assert caught_up["servers"]["0"]["proof"] == "checksums+canary"
        run.wait_until(
            lambda: any(
                each["end"] == "answered" and each["time"] > caught_up["time"]
                for each in run.audit("finished")
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
