"""Stages *learner-lora* and *learner-full*: the whole path on one device, with weights of real widths."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.servers import BenchServers
from swift_stage2.errors import CheckFailed
from swift_stage2.gpu_check.job import account, await_end, start_learner, start_server, write_job
from swift_stage2.gpu_check.models import WIDE_4_LAYERS, checkpoint
from swift_stage2.gpu_check.stage import Context

NUM_STEPS = 12
_LEAST_ROUNDS = 3
_LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 8, "target_modules": ["all-linear"],
                         "freeze_vit": True, "freeze_aligner": True}  # fmt: skip


def run(context: Context, tuner: str, swift: dict[str, Any] | None = None) -> None:
    """Trains to the end beside a server.

    Raises:
        CheckFailed: a process did not end well, or the run was not what it must be.
    """
    end = time.monotonic() + 0.9 * context.deadline_s
    model = checkpoint(WIDE_4_LAYERS, context)
    with BenchServers(context.logs) as servers:
        server = start_server(context, servers, model)
        job = write_job(
            context, f"run-{context.logs.name}", model, server, num_steps=NUM_STEPS, sync_every_steps=3,
            swift={**(_LORA if tuner == "lora" else {}), **(swift or {})},
        )  # fmt: skip
        started = time.monotonic()
        await_end(start_learner(context, servers, job), end)
        context.figures.note("learner_start_to_end_s", time.monotonic() - started)
    summary = account(context, job, least_rounds=_LEAST_ROUNDS)
    if summary.num_steps != NUM_STEPS:
        raise CheckFailed(f"the learner must take {NUM_STEPS} steps, got {summary.num_steps}")
