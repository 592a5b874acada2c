"""Stages *learner-lora*, *learner-full*, *zero3* and *two-ranks*: the whole path on one device, learner and server.

Weights of real widths with one rank; the demo's with two, over gloo, with CUDA tensors of one device in every hook.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import psutil

from benchmarks.gpu_check.job import account, start_learner, start_server, write_job
from benchmarks.gpu_check.models import WIDE_4_LAYERS, checkpoint
from benchmarks.gpu_check.processes import StageProcesses
from benchmarks.gpu_check.stage import Context
from swift_stage2.demo.demo_config import STAGE1, DemoJob
from swift_stage2.errors import CheckFailed, CheckSkipped
from swift_stage2.launch.process_tree import ProcessTree
from swift_stage2.telemetry.audit import audit_path

NUM_STEPS = 12
_LEAST_ROUNDS = 3
_LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 8, "target_modules": ["all-linear"],
                         "freeze_vit": True, "freeze_aligner": True}  # fmt: skip
_STOP_AFTER_ROUNDS = 2
_MOST_STEPS = 2000


def one_rank(context: Context, tuner: str, swift: dict[str, Any] | None = None) -> None:
    """Trains to the end beside a server.

    Raises:
        CheckFailed: a process did not end well, or the run was not what it must be.
    """
    end = time.monotonic() + 0.9 * context.deadline_s
    model = checkpoint(WIDE_4_LAYERS, context)
    with StageProcesses(context.logs) as processes:
        server = start_server(context, processes, model)
        job = write_job(
            context, f"run-{context.logs.name}", model, server, num_steps=NUM_STEPS, sync_every_steps=3,
            swift={**(_LORA if tuner == "lora" else {}), **(swift or {})},
        )  # fmt: skip
        started = time.monotonic()
        processes.await_end(start_learner(context, processes, job), end)
        context.figures.note("learner_start_to_end_s", time.monotonic() - started)
    summary = account(context, job, least_rounds=_LEAST_ROUNDS)
    if summary.num_steps != NUM_STEPS:
        raise CheckFailed(f"the learner must take {NUM_STEPS} steps, got {summary.num_steps}")


def zero3(context: Context) -> None:
    """Every parameter partitioned over one rank, as DeepSpeed holds it.

    Raises:
        CheckSkipped: DeepSpeed cannot be imported. Also what ``one_rank`` raises.
    """
    try:
        import deepspeed  # noqa: F401
    except Exception as error:  # it builds and probes while it is imported, and raises whatever that raises
        raise CheckSkipped(f"DeepSpeed cannot be imported: {type(error).__name__}: {error}") from error
    one_rank(context, "full", {"deepspeed": "zero3"})


def two_ranks(context: Context) -> None:
    """Rank 1 is asked to end when the first rounds are proven; both must stop after the same step.

    Raises:
        CheckFailed: the ranks disagree, a round is not proven, or SIGTERM does not end both alike.
    """
    end = time.monotonic() + 0.9 * context.deadline_s
    with StageProcesses(context.logs) as processes:
        server = start_server(context, processes, STAGE1)
        job = write_job(
            context, "run-two-ranks", STAGE1, server, num_steps=_MOST_STEPS, sync_every_steps=4, num_ranks=2,
            swift={"ddp_backend": "gloo", "lr_scheduler_type": "constant"},
        )  # fmt: skip
        learner = start_learner(context, processes, job)
        asked: list[float] = []

        def look() -> None:
            if not asked and len(_records(job, 0, "round")) >= _STOP_AFTER_ROUNDS:
                _rank_below(learner, "1").send_signal(signal.SIGTERM)
                asked.append(time.monotonic())

        processes.await_end(learner, end, look)
        if not asked:
            raise CheckFailed("both ranks ended before anybody asked them to")
        context.figures.note("sigterm_to_end_s", time.monotonic() - asked[0])
    last = [_records(job, rank, "step")[-1]["step"] for rank in range(2)]
    if last[0] != last[1] or last[0] >= _MOST_STEPS - 1:
        raise CheckFailed(f"both ranks must stop after the same step, got last steps {last}")
    account(context, job, least_rounds=_STOP_AFTER_ROUNDS)


def _records(job: DemoJob, rank: int, kind: str) -> list[dict[str, Any]]:
    """Whole records of a rank's audit so far."""
    path = audit_path(job.run_dir, rank)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in whole if record["kind"] == kind]


def _rank_below(tree: ProcessTree, rank: str) -> psutil.Process:
    """The process of one rank below a torchrun below a warden.

    Raises:
        CheckFailed: it is not there.
    """
    for process in psutil.Process(tree.pid).children(recursive=True):
        try:
            # A rank's own children have its environment too; parents come first.
            if process.environ().get("RANK") == rank:
                return process
        except psutil.Error:
            continue
    raise CheckFailed(f"rank {rank}, which is to be asked to end, is not there")
