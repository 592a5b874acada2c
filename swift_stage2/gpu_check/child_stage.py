"""One stage as a child process under a warden: it ends by its deadline with everything below it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from swift_stage2.gpu_check.stage import Stage, Status, one_line
from swift_stage2.launch.descendants import adopt_orphans
from swift_stage2.launch.job import Job
from swift_stage2.launch.last_cause import last_cause
from swift_stage2.launch.process_tree import Command
from swift_stage2.launch.stop_signals import StopSignals

PROGRAM = "swift_stage2.gpu_check.stage_process"
_SIGNALLED = 128


def run_child(
    stage: Stage,
    results: Path,
    scratch: Path,
    environment: Mapping[str, str],
    *,
    deadline_s: float,
    rehearsal: bool,
    grace_s: float,
) -> tuple[Status, str]:
    """Returns the end of the stage, and why in one line unless it passed; its files are in ``results``.

    Raises:
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP came; the stage has been ended.
    """
    argv = (
        sys.executable, "-u", "-m", PROGRAM, stage.name,
        "--results", str(results), "--scratch", str(scratch), "--deadline-s", str(deadline_s),
        *(["--rehearse"] if rehearsal else []),
    )  # fmt: skip
    adopt_orphans()
    end = time.monotonic() + deadline_s
    with StopSignals() as signals, Job(results, signals, lambda line: None, shows_logs=False) as job:
        tree = job.start(Command(name="stage", argv=argv, environment=environment, grace_s=grace_s))
        while tree.poll() is None and time.monotonic() < end:
            job.step()
            if signals.received is not None:
                raise KeyboardInterrupt
        status = tree.poll()
    record = results / "record.json"
    if record.exists():
        told = json.loads(record.read_text(encoding="utf-8"))
        return Status(told["status"]), str(told["why"])
    if status is None:
        return Status.FAILED, f"it did not end within {deadline_s:.0f} s"
    how = f"signal {status - _SIGNALLED}" if status > _SIGNALLED else f"status {status}"
    cause = one_line(last_cause(tree.log_path, tree.log_offset))
    return Status.FAILED, f"its process ended with {how}: {cause}"
