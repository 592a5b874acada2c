"""``swift-stage2 launch`` with the unmodified server behind a merger: killed, its orphans ended, restarted, proven."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from launched_run import LaunchedRun, write_launch_config
from live_server import free_port
from stock_server import CPU_PLUGIN, ENVIRONMENT, TEMPLATE

from swift_stage2.demo.scenes import SceneKind, Split, write_dataset

pytestmark = pytest.mark.timeout(1800)

OPTIONS = {
    "model_type": "stage2_tiny_vl",
    "template": "stage2_tiny_vl",
    "external_plugins": [str(TEMPLATE), str(CPU_PLUGIN)],
    "torch_dtype": "float32",
    "vllm_enforce_eager": True,
    "vllm_max_model_len": 1024,
}


def engine_processes(run: LaunchedRun) -> list[psutil.Process]:
    return [each for each in run.descendants() if " ".join(each.cmdline()).startswith("VLLM::")]


def test_a_stock_server_behind_its_merger_comes_back_and_leaves_no_orphan(tmp_path: Path) -> None:
    rows = write_dataset(tmp_path / "data", SceneKind.SHAPES, 62, Split.TRAIN, 3)
    directory = tmp_path / "run"
    port, inner = free_port(), free_port()
    server = {
        "engine": "swift", "merge": True, "upstream_port": inner, "args": OPTIONS, "env": dict(ENVIRONMENT),
    }  # fmt: skip
    address = {"base_url": f"http://127.0.0.1:{port}", "group_port": free_port()}
    run = LaunchedRun(write_launch_config(directory, rows, address, server), directory)
    try:
        run.wait_until(lambda: run.num_b_steps() >= 3, "channel B")
        first = run.process_of("swift.cli.rollout")
        old_engine = engine_processes(run)
        assert old_engine
        first.kill()
        run.wait_until(lambda: "server0 ended with status 137" in run.output, "the end of the server")
        num_rounds, num_steps = len(run.audit("round")), len(run.audit("step"))
        run.wait_until(lambda: "server0 listens again" in run.output, "the restarted server")
        assert not any(each.is_running() for each in old_engine)
        for module, where in ((("swift.cli.rollout",), inner), (("swift_stage2", "merge"), port)):
            held = run.process_of(*module).net_connections("tcp")
            assert where in [each.laddr.port for each in held if each.status == "LISTEN"]
        run.wait_for_b_after_a_proven_round(num_rounds, num_steps)
        steps = run.audit("step")
        assert [each["step"] for each in steps] == list(range(len(steps)))  # channel A ran all the time
        run.stop()
    finally:
        run.kill_everything()
