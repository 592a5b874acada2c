"""One GRPO run of ms-swift's own trainer on the tiny model, beside a stock stand-in server; what its clock read.

One rank, one torch thread, the demo's arguments where they mean the same. Called by ``bench peer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stand_in_job import PLUGINS, TORCHRUN, UNATTENDED
from benchmarks.thread_times import CLOCK_FILE, DIRECTORY_VARIABLE
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, GRADIENT_ACCUMULATION_STEPS, DemoJob, config_of
from swift_stage2.demo.training import DEADLINE_PER_STEP_S, START_DEADLINE_S

GRPO_CLOCK = "stage2_grpo_clock"
"""Of the callback in ``grpo_plugin``."""
REWARD = "stage2_object_count"
ROLLOUT_NS = "rollout_ns"
"""Column of the clock: main thread in the rollout call, or waiting for one that another thread made."""
PUSH_NS = "push_ns"
"""Column of the clock: main thread in ms-swift's push of weights."""
MICRO_BATCH = 7
"""Completions of a forward: on average channel B's packs of 512 tokens hold 6 to 8 of the tiny model's."""
COMPLETIONS_PER_STEP = MICRO_BATCH * GRADIENT_ACCUMULATION_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoArm:
    """One run. ``ports`` are those of the server's HTTP and of its weight group."""

    name: str
    directory: Path
    rows: Path
    num_steps: int
    ports: tuple[int, int]
    asynchronous: bool
    """ms-swift's ``async_generate``."""


def run_grpo(children: ChildRuns, arm: GrpoArm) -> Mapping[str, list[int]]:
    """Trains to the end; returns nanoseconds at the end of every step, by column.

    Raises:
        ChildFailed: it did not end well, or not in time.
    """
    arm.directory.mkdir(parents=True, exist_ok=True)
    children.run(
        arm.name,
        (*TORCHRUN, "benchmarks.grpo_program", *as_argv(grpo_arguments(arm))),
        log_dir=arm.directory / "logs",
        deadline_s=START_DEADLINE_S + DEADLINE_PER_STEP_S * arm.num_steps,
        environment={**CHILD_ENVIRONMENT, DIRECTORY_VARIABLE: str(arm.directory)},
    )
    clock: dict[str, list[int]] = json.loads((arm.directory / CLOCK_FILE).read_text(encoding="utf-8"))
    return clock


def grpo_arguments(arm: GrpoArm) -> dict[str, Any]:
    """ms-swift's arguments: the demo's, and of GRPO only what it cannot run without."""
    job = DemoJob(
        directory=arm.directory,
        rows=arm.rows,
        num_steps=arm.num_steps,
        b_ratio=0.0,
        num_ranks=1,
        plugins=(PLUGINS / "grpo_plugin.py",),
        swift={
            "callbacks": [GRPO_CLOCK],
            **UNATTENDED,
            "rlhf_type": "grpo",
            "per_device_train_batch_size": MICRO_BATCH,
            "num_generations": MICRO_BATCH,
            "reward_funcs": [REWARD],
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_host": "127.0.0.1",
            "vllm_server_port": arm.ports[0],
            "vllm_server_group_port": arm.ports[1],
            "async_generate": arm.asynchronous,
        },
    )
    arguments: dict[str, Any] = config_of(job, arm.ports)["swift"]
    return arguments | {"max_completion_length": job.max_new_tokens}
