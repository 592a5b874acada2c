"""Training runs of the tiny model beside a stand-in server, ours and ms-swift's own GRPO, and what their clocks read.

One rank, one torch thread, everything on loopback. Called by the benches overlap and peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clocks import DIRECTORY_VARIABLE, PLUGINS, THREAD_CLOCK, Clock, read_clock
from benchmarks.processes import DEADLINE_PER_STEP_S, START_DEADLINE_S, Processes, torchrun
from benchmarks.servers import write_job
from swift_stage2.config import Mode, Objective
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo.demo_config import GRADIENT_ACCUMULATION_STEPS, DemoJob, config_of
from swift_stage2.demo.scenes import SceneKind, write_scenes
from swift_stage2.telemetry.event_log import RankEvents, event_path, read_events

GRPO_CLOCK = "stage2_grpo_clock"
"""Of the callback in ``plugins/grpo.py``."""
REWARD = "stage2_detection"
ROLLOUT_NS = "rollout_ns"
"""Column of GRPO's clock: main thread in the rollout call, or waiting for one that another thread made."""
PUSH_NS = "push_ns"
"""Column of GRPO's clock: main thread in ms-swift's push of weights."""
TOKENS = "tokens"
"""Column of GRPO's clock: completions' tokens that had a loss."""
MICRO_BATCH = 7
"""Completions of a forward, all of one row: on average channel B's packs of 512 tokens hold 6 to 8 of the tiny
model's."""
COMPLETIONS_PER_STEP = MICRO_BATCH * GRADIENT_ACCUMULATION_STEPS
NUM_WARMUP = 8
"""Steps that no bench counts."""
_NUM_ROWS = 512
_UNATTENDED: Mapping[str, Any] = {
    "save_strategy": "no",
    "report_to": ["none"],
    "lr_scheduler_type": "constant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One training run. ``ports`` are those of the server's HTTP and of its weight group."""

    name: str
    directory: Path
    rows: Path
    num_steps: int
    ports: tuple[int, int]
    max_new_tokens: int = 128
    packing_length: int = 512
    more_ports: tuple[tuple[int, int], ...] = ()
    """Of servers beside the first, for ours."""
    max_inflight: int = 64
    """Rollouts that each of our servers may have at once."""
    b_ratio: float = 0.0
    mode: Mode = Mode.ASYNC
    objective: Objective = Objective.CORRECTED_TARGET
    prefetch: Mapping[str, Any] = field(default_factory=dict)
    """Differences from the demo's section ``prefetch``."""


@dataclass(frozen=True, slots=True)
class ArmRecords:
    clock: Clock
    events: RankEvents


def write_rows(directory: Path) -> Path:
    """The scenes that every arm trains on."""
    return write_scenes(directory, SceneKind.SHAPES, num_train=_NUM_ROWS, num_held_out=1, seed=0).train


def run_arm(processes: Processes, arm: Arm) -> ArmRecords:
    """Trains ours to the end. Raises ChildFailed: it did not end well, or not in time."""
    _train(processes, arm, "swift_stage2", "train", str(write_arm_config(arm)))
    return ArmRecords(
        read_clock(arm.directory), RankEvents(0, [read_events(event_path(arm.directory / "run", 0))])
    )


def run_grpo(processes: Processes, arm: Arm, *, asynchronous: bool) -> Clock:
    """Trains ms-swift's GRPO to the end, by its ``async_generate`` or not. Raises as ``run_arm``."""
    words = as_argv(grpo_arguments(arm, asynchronous=asynchronous))
    _train(processes, arm, "benchmarks.swift_program", "rlhf", *words)
    return read_clock(arm.directory)


def write_arm_config(arm: Arm) -> Path:
    job = _job(arm, "clocks.py", {"callbacks": [THREAD_CLOCK]})
    if arm.b_ratio == 0:
        return write_job(job, arm.ports)
    # The stand-in answers no canary as a model does; what it holds is proven tensor by tensor.
    rollout: dict[str, Any] = {
        "servers": [
            {"base_url": f"http://127.0.0.1:{port}", "group_port": group_port}
            for port, group_port in (arm.ports, *arm.more_ports)
        ],
        "max_inflight_per_server": arm.max_inflight,
        "sync": {"timeout_s": 60.0, "proof": "checksum"},
    }
    if arm.objective is not Objective.CORRECTED_TARGET:
        rollout["num_generations"] = MICRO_BATCH
    channel_b = {"prefetch": arm.prefetch, "packing": {"packing_length": arm.packing_length}}
    return write_job(job, arm.ports, {"stage2_ab": {"channel_b": channel_b}, "rollout": rollout})


def grpo_arguments(arm: Arm, *, asynchronous: bool) -> dict[str, Any]:
    """ms-swift's arguments: the demo's where they mean the same, and of GRPO only what it cannot run without."""
    port, group_port = arm.ports
    swift = {
        "callbacks": [GRPO_CLOCK],
        "rlhf_type": "grpo",
        "per_device_train_batch_size": MICRO_BATCH,
        "num_generations": MICRO_BATCH,
        "reward_funcs": [REWARD],
        "temperature": 1.0,  # as ours where it compares rollouts
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_host": ["127.0.0.1"],
        "vllm_server_port": [port],
        "vllm_server_group_port": [group_port],
        "async_generate": asynchronous,
    }
    job = _job(arm, "grpo.py", swift)
    arguments: dict[str, Any] = config_of(job, arm.ports)["swift"]
    return arguments | {"max_completion_length": job.max_new_tokens}


def _job(arm: Arm, plugin: str, swift: Mapping[str, Any]) -> DemoJob:
    return DemoJob(
        directory=arm.directory,
        rows=arm.rows,
        num_steps=arm.num_steps,
        b_ratio=arm.b_ratio,
        num_ranks=1,
        max_new_tokens=arm.max_new_tokens,
        mode=arm.mode,
        objective=arm.objective,
        plugins=(PLUGINS / plugin,),
        swift={**_UNATTENDED, **swift},
    )


def _train(processes: Processes, arm: Arm, *words: str) -> None:
    arm.directory.mkdir(parents=True, exist_ok=True)
    processes.run(
        arm.name,
        torchrun(1, *words),
        deadline_s=START_DEADLINE_S + DEADLINE_PER_STEP_S * arm.num_steps,
        environment={DIRECTORY_VARIABLE: str(arm.directory)},
    )
