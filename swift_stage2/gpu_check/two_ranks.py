"""Stage *two-ranks*: DDP and every decision of two ranks over gloo, with CUDA tensors of one device in every hook.

Rank 1 is asked to end when the first rounds are proven; both must stop after the same step.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import psutil

from benchmarks.servers import BenchServers
from swift_stage2.demo.demo_config import STAGE1, DemoJob
from swift_stage2.errors import CheckFailed
from swift_stage2.gpu_check.job import account, await_end, start_learner, start_server, write_job
from swift_stage2.gpu_check.stage import Context
from swift_stage2.launch.process_tree import ProcessTree
from swift_stage2.telemetry.audit import audit_path

_STOP_AFTER_ROUNDS = 2
_MOST_STEPS = 2000


def run(context: Context) -> None:
    """Raises ``CheckFailed`` where the ranks disagree, a round is not proven or SIGTERM does not end both alike."""
    end = time.monotonic() + 0.9 * context.deadline_s
    with BenchServers(context.logs) as servers:
        server = start_server(context, servers, STAGE1)
        job = write_job(
            context, "run-two-ranks", STAGE1, server, num_steps=_MOST_STEPS, sync_every_steps=4, num_ranks=2,
            swift={"ddp_backend": "gloo", "lr_scheduler_type": "constant"},
        )  # fmt: skip
        learner = start_learner(context, servers, job)
        asked: list[float] = []

        def look() -> None:
            if not asked and len(_records(job, 0, "round")) >= _STOP_AFTER_ROUNDS:
                _rank_below(learner, "1").send_signal(signal.SIGTERM)
                asked.append(time.monotonic())

        await_end(learner, end, look)
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
