"""Real torchrun ranks, the real server process, the real tiny model: for tests that need a whole job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import pytest
import yaml
from free_port import free_port as free_port

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "swift_stage2" / "demo" / "stage1"
TEMPLATE = ROOT / "swift_stage2" / "demo" / "tiny_template.py"
RECORDER = ROOT / "tests" / "integration" / "recording_plugin.py"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "QWENVL_BBOX_FORMAT": "new",
}
DROPOUT = {"tuner_type": "lora", "lora_dropout": 0.2, "learning_rate": 1e-2}
"""Arguments for ms-swift. Every draw of a random number that a run and its replay do not share shows in the loss."""
_SERVER_START_S = 480
_RUN_S = 900


class Address(Protocol):
    """Where a server answers."""

    @property
    def base_url(self) -> str: ...

    @property
    def group_port(self) -> int: ...


@dataclass(frozen=True)
class Server:
    base_url: str
    group_port: int
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=60)


def start_server(directory: Path, *, torch_dtype: str = "float32", port: int | None = None) -> Server:
    port, group_port = port or free_port(), free_port()
    log = directory / f"server{port}.log"
    command = [
        sys.executable, "-m", "swift_stage2", "rollout", str(MODEL), "--model-type", "stage2_tiny_vl",
        "--external-plugins", str(TEMPLATE), "--port", str(port), "--torch-dtype", torch_dtype,
        "--max-batch-size", "32", "--num-threads", "1",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | ENVIRONMENT,
        )
    server = Server(f"http://127.0.0.1:{port}", group_port, process, log)
    end = time.monotonic() + _SERVER_START_S
    while True:
        try:
            if httpx.get(f"{server.base_url}/health/", trust_env=False, timeout=5).status_code == 200:
                return server
        except httpx.HTTPError:
            pass
        if process.poll() is not None or time.monotonic() >= end:
            server.kill()
            pytest.fail(log.read_text()[-2000:])
        time.sleep(0.2)  # bounded polling of another process's start


@dataclass(frozen=True)
class LearnerRun:
    """The output and files of one torchrun job."""

    status: int
    output: str
    directory: Path

    def audit(self, rank: int, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory / "events" / f"rank{rank}.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def recorded(self, rank: int) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.directory / "micro_steps" / f"rank{rank}.jsonl").read_text().splitlines()
        ]

    def micro_steps(self, rank: int) -> list[dict[str, Any]]:
        """Their channels and batches, in order."""
        return [record for record in self.recorded(rank) if "batch" in record]

    def last_weights(self, rank: int) -> dict[str, str]:
        """Digests by name, once training has ended."""
        (last,) = [record["weights"] for record in self.recorded(rank) if "weights" in record]
        return dict(last)


def write_config(
    directory: Path,
    rows: Path,
    server: Address | None,
    *,
    b_ratio: float,
    swift: dict[str, Any],
    record: bool = False,
    trace: bool = False,
    evaluation: dict[str, Any] | None = None,
    **channel_b: Any,
) -> Path:
    """A small run on the tiny model. ``swift`` and ``channel_b`` override single keys.

    Preprocessing is a thread's, which spares each rank eleven core-seconds of imports; jobs that are about what a user
    starts, or about the process, say ``preprocessing="process"``.
    """
    config: dict[str, Any] = {
        "swift": {
            "model": str(MODEL),
            "model_type": "stage2_tiny_vl",
            "template": "stage2_tiny_vl",
            "external_plugins": [str(TEMPLATE), str(RECORDER)],
            "dataset": [str(rows)],
            "output_dir": str(directory),
            "add_version": False,
            "tuner_type": "full",
            "torch_dtype": "float32",
            "use_cpu": True,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 3,
            "learning_rate": 1e-4,
            "logging_steps": 5,
            "save_strategy": "no",
            "split_dataset_ratio": 0,
            "load_from_cache_file": False,
            "report_to": ["none"],
            **swift,
        },
        "stage2_ab": {
            "schedule": {"b_ratio": b_ratio},
            "channel_b": {
                "preprocessing": "thread",
                "max_truncated_ratio": 1.0,
                "prefetch": {
                    "queue_limit": 6,
                    "version_window": 3,
                    "sync_every_steps": 4,
                    "prefetch_target_packs": 6,
                },
                "packing": {"packing_length": 256, "packing_min_fill_ratio": 0.5},
                **channel_b,
            },
        },
    }
    if evaluation is not None:
        config["stage2_ab"]["evaluation"] = evaluation
    config["telemetry"] = {"record": record, "log_probs": record, "trace": trace}
    if server is not None:
        config["rollout"] = {
            "servers": [{"base_url": server.base_url, "group_port": server.group_port}],
            "decoding": {"max_new_tokens": 100},
            "max_inflight_per_server": 24,
            "request_timeout_s": 60,
            "start_timeout_s": 30,
            "sync": {"timeout_s": 60},
        }
        config["control_timeout_s"] = 240
    path = directory.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return path


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """torchrun gives every rank a session of its own, so a signal to one group would leave the ranks behind."""
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(tree, timeout=60)


def run_learner(
    config: Path, directory: Path, *, ranks: int, inject: str = "", options: tuple[str, ...] = ()
) -> LearnerRun:
    """Runs torchrun to its end, within a deadline, and leaves no process behind."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
        "--master_port", str(free_port()), "-m", "swift_stage2", "train", str(config), *options,
    ]  # fmt: skip
    return _run(command, directory, inject=inject)


def run_replay(run_dir: Path, output: Path) -> LearnerRun:
    """Replays to its end, within a deadline, and leaves no process behind. No rollout server is told of to it."""
    command = [sys.executable, "-m", "swift_stage2", "replay", str(run_dir), "--output", str(output)]
    return _run(command, output)


def assert_replays(recorded: LearnerRun, num_steps: int, output: Path) -> None:
    """All steps of a run, from the first: every loss, every batch and the weights at the end are the same bits."""
    replay = run_replay(recorded.directory, output)
    assert replay.status == 0, replay.output[-3000:]
    assert f"equal: every loss of steps 0 to {num_steps - 1}" in replay.output
    for rank in range(len(list((recorded.directory / "events").iterdir()))):
        assert replay.micro_steps(rank) == recorded.micro_steps(rank)
        assert replay.last_weights(rank) == recorded.last_weights(rank)


def _run(command: list[str], directory: Path, *, inject: str = "") -> LearnerRun:
    record_dir = directory / "micro_steps"
    environment = os.environ | ENVIRONMENT | {"RECORD_DIR": str(record_dir), "INJECT": inject}
    log = directory.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            status = process.wait(timeout=_RUN_S)
        finally:
            _kill_tree(process)
    return LearnerRun(status, log.read_text(errors="replace"), directory)
