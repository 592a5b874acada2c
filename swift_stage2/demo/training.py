"""Trains one job with ``swift-stage2 launch`` and scores checkpoints, each in processes of its own.

Both show nothing but progress and raise with cause and log when a child fails. Called by the demo and the benches.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from swift_stage2.config import load_config
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob
from swift_stage2.demo.detection_score import DetectionScore
from swift_stage2.demo.evaluation import evaluation_command, read_scores
from swift_stage2.launch.run_view import WaitNotice
from swift_stage2.telemetry.live_view import LiveView
from swift_stage2.telemetry.run_progress import RunProgress

START_DEADLINE_S = 600.0
DEADLINE_PER_STEP_S = 10.0
_EVALUATION_DEADLINE_S = 300.0
_LAUNCHER = "[launch] [launch] "
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def train(
    children: ChildRuns, job: DemoJob, view: LiveView, *, environment: Mapping[str, str] | None = None
) -> None:
    """Runs the job to its end; ``view`` shows how far it is, and is closed. ``environment`` is added to the children's.

    Raises:
        ChildFailed: it did not end well.
    """
    config = load_config(job.config_path)
    progress = RunProgress(
        job.run_dir,
        job.num_ranks,
        job.num_steps,
        b_enabled=config.b_enabled,
        queue_limit=config.stage2_ab.channel_b.prefetch.queue_limit if config.b_enabled else None,
    )

    notice = WaitNotice(lambda text: print(f"[demo] {text}", flush=True))

    def show() -> None:
        state = progress.refresh()
        if state.step:
            view.update(state)
        else:
            notice.remind("no step yet: servers and learner load")

    command = (sys.executable, "-m", "swift_stage2", "launch", "--verbose", str(job.config_path))
    deadline_s = START_DEADLINE_S + DEADLINE_PER_STEP_S * job.num_steps
    try:
        children.run(
            "launch",
            command,
            log_dir=job.directory / "logs",
            deadline_s=deadline_s,
            environment={**CHILD_ENVIRONMENT, **(environment or {})},
            each_moment=show,
        )
    finally:
        view.close()


def score(
    children: ChildRuns, held_out: Path, out: Path, checkpoints: Sequence[Path]
) -> tuple[DetectionScore, ...]:
    """Scores checkpoints alike, in one process.

    Raises:
        ChildFailed: it did not end well.
    """
    command = evaluation_command(held_out, out, checkpoints)
    deadline_s = _EVALUATION_DEADLINE_S * len(checkpoints)
    logs = out.parent / "logs"
    children.run("evaluation", command, log_dir=logs, deadline_s=deadline_s, environment=CHILD_ENVIRONMENT)
    return read_scores(out)


def words_of_launcher(line: str) -> str | None:
    """What the launcher itself said; None for a line of a server or a rank, which is in the log."""
    plain = _COLOUR.sub("", line)
    return plain.removeprefix(_LAUNCHER) if plain.startswith(_LAUNCHER) else None
