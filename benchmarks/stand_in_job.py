"""Training runs of the tiny model beside a stand-in server: its start, their configurations, what their clocks read.

One rank, one torch thread, everything on loopback. Called by the benches interference, overlap and peer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.servers import BenchServers
from benchmarks.thread_times import CLOCK_FILE, CLOCK_NAME, DIRECTORY_VARIABLE
from swift_stage2.config import Preprocessing, load_config
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, STAGE1, DemoJob, config_of, free_ports
from swift_stage2.demo.training import DEADLINE_PER_STEP_S, START_DEADLINE_S
from swift_stage2.launch.cores import split_cores, started_on
from swift_stage2.telemetry.audit import Record, audit_path

PLUGINS = Path(__file__).parent
CLOCK_PLUGIN = PLUGINS / "thread_clock.py"
STAND_IN = "benchmarks.stand_in_server"
UNATTENDED: Mapping[str, Any] = {
    "save_strategy": "no",
    "report_to": ["none"],
    "lr_scheduler_type": "constant",
}
"""ms-swift's arguments of a run that only its clock watches."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One training run. ``ports`` are those of the server's HTTP and of its weight group."""

    name: str
    directory: Path
    rows: Path
    num_steps: int
    b_ratio: float
    ports: tuple[int, int]
    plugin: Path | None = None
    """Besides the clock."""
    prefetch: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the demo's section ``prefetch``."""
    preprocessing: Preprocessing = Preprocessing.PROCESS
    swift: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArmRecords:
    """What one run left behind."""

    clock: Mapping[str, list[int]]
    """Nanoseconds at the end of every step, by name: see ``thread_times``."""
    audit: list[Record]

    def of_kind(self, kind: str) -> list[Record]:
        """Audit records of one kind, oldest first."""
        return [record for record in self.audit if record["kind"] == kind]


def stand_in_arguments(
    rows: Path, latency_s: float, model: Path, port: int, program: str = STAND_IN
) -> list[str]:
    """What follows ``python`` on the stand-in's command line."""
    place = ["--model", str(model), "--port", str(port), "--rows", str(rows)]
    return ["-m", program, *place, "--latency-s", str(latency_s)]


def start_stand_in(
    servers: BenchServers, rows: Path, latency_s: float, program: str = STAND_IN
) -> tuple[int, int]:
    """Starts the server on the cores that are not the learner's, and returns its ports once it answers.

    Raises:
        ChildFailed: it did not answer in time.
    """
    port, group_port = free_ports(2)
    argv = (sys.executable, "-u", *stand_in_arguments(rows, latency_s, STAGE1, port, program))
    with started_on(split_cores()[1]):
        tree = servers.start_process(program.rpartition(".")[2], argv)
    servers.await_answer(f"http://127.0.0.1:{port}", tree)
    return port, group_port


def run_arm(children: ChildRuns, arm: Arm) -> ArmRecords:
    """Trains to the end.

    Raises:
        ChildFailed: it did not end well, or not in time.
    """
    config_path = write_arm_config(arm)
    children.run(
        arm.name,
        (*TORCHRUN, "swift_stage2", "train", str(config_path)),
        log_dir=arm.directory / "logs",
        deadline_s=START_DEADLINE_S + DEADLINE_PER_STEP_S * arm.num_steps,
        environment={**CHILD_ENVIRONMENT, DIRECTORY_VARIABLE: str(arm.directory), **arm.environment},
    )
    clock = json.loads((arm.directory / CLOCK_FILE).read_text(encoding="utf-8"))
    lines = audit_path(arm.directory / "run", 0).read_text(encoding="utf-8").splitlines()
    return ArmRecords(clock, [json.loads(line) for line in lines])


def write_arm_config(arm: Arm) -> Path:
    """The run's YAML, checked."""
    job = DemoJob(
        directory=arm.directory,
        rows=arm.rows,
        num_steps=arm.num_steps,
        b_ratio=arm.b_ratio,
        num_ranks=1,
        plugins=(CLOCK_PLUGIN, *([arm.plugin] if arm.plugin else [])),
        swift={"callbacks": [CLOCK_NAME], **UNATTENDED, **arm.swift},
    )
    config = config_of(job, arm.ports)
    config["launch"].pop("servers", None)
    if arm.b_ratio > 0:
        config["stage2_ab"]["channel_b"]["prefetch"] |= arm.prefetch
        config["stage2_ab"]["channel_b"]["preprocessing"] = arm.preprocessing.value
        # The stand-in answers no canary as a model does; what it holds is proven tensor by tensor.
        config["rollout"]["sync"] = {"timeout_s": 60.0, "proof": "checksum"}
    job.directory.mkdir(parents=True, exist_ok=True)
    job.config_path.write_text(write_yaml(config), encoding="utf-8")
    load_config(job.config_path)
    return job.config_path
