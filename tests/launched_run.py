"""A ``swift-stage2 launch`` in a process of its own, watched from a test through its log and its events."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from torchrun_job import ENVIRONMENT, write_config

TAG = "SWIFT_STAGE2_TEST_LAUNCHED"
DEADLINE_S = 600.0


def write_launch_config(
    directory: Path,
    rows: Path,
    address: dict[str, Any],
    server: dict[str, Any],
    *,
    record: bool = False,
    **swift: Any,
) -> Path:
    """One rank and one server that is restarted when it fails; the run goes on until it is stopped."""
    swift = {"max_steps": 100_000, **swift}
    path = write_config(directory, rows, None, b_ratio=0.5, swift=swift, record=record)
    config = yaml.safe_load(path.read_text())
    config["rollout"] = {
        "servers": [address],
        "decoding": {"max_new_tokens": 60},
        "max_inflight_per_server": 24,
        "request_timeout_s": 60,
        "start_timeout_s": 600,
        "sync": {"timeout_s": 60},
    }
    config["launch"] = {
        "servers": [server],
        "learner": {"nproc_per_node": 1, "shutdown_timeout_s": 60},
        "restart": {"policy": "on_failure", "max_restarts": 2, "backoff_s": 0.5},
    }
    config["control_timeout_s"] = 240
    path.write_text(yaml.safe_dump(config))
    return path


class LaunchedRun:
    """A launcher in a process of its own; what it left behind is found by one environment variable."""

    def __init__(self, config: Path, directory: Path, *options: str) -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log")
        self.tag = directory.name + str(os.getpid())
        environment = os.environ | ENVIRONMENT | {"RECORD_DIR": str(directory / "micro_steps"), TAG: self.tag}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swift_stage2", "launch", str(config), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def audit(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "events" / "rank0.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may be half written
                records.append(json.loads(line))
        return [record for record in records if record["kind"] == kind]

    def descendants(self) -> list[psutil.Process]:
        """Processes that hang below the launcher: also vLLM's, which overwrite their environment with a title."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def stop(self) -> None:
        """SIGTERM to the launcher; everything ends."""
        started = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=DEADLINE_S) == 128 + signal.SIGTERM, self.output[-4000:]
        assert self.alive() == []
        assert not [each for each in started if each.is_running()]

    def alive(self) -> list[psutil.Process]:
        """Processes that carry this launch's mark in their environment, wherever they hang by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(TAG) == self.tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def process_of(self, *module: str) -> psutil.Process:
        """The one process that runs ``python -u -m`` with these words."""
        found = [
            each for each in self.alive() if each.cmdline()[1 : 3 + len(module)] == ["-u", "-m", *module]
        ]
        assert len(found) == 1, [each.cmdline() for each in self.alive()]
        return found[0]

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not holds():
            assert self.process.poll() is None, self.output[-4000:]
            assert time.monotonic() < end, f"{what} did not come:\n{self.output[-4000:]}"
            pause.wait(0.2)

    def kill_everything(self) -> None:
        for process in [*self.descendants(), *self.alive()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(timeout=60)

    def num_b_steps(self) -> int:
        return sum(each["channel"] == "B" for each in self.audit("step"))

    def wait_for_b_after_a_proven_round(self, num_rounds: int, num_steps: int) -> None:
        """A round later than the first ``num_rounds`` is proven, and channel B runs at its version."""

        def proven() -> list[dict[str, Any]]:
            return [each for each in self.audit("round")[num_rounds:] if each["committed"]]

        self.wait_until(lambda: bool(proven()), "a proven round")
        version = proven()[0]["version"]
        self.wait_until(
            lambda: any(
                each["channel"] == "B" and each["version"] >= version
                for each in self.audit("step")[num_steps:]
            ),
            "channel B after the proven round",
        )
