"""One stage as a process of its own: ``run_child`` starts it under a supervisor, ``main`` is what runs in it.

It leaves its figures as they come and at last one record, {"status", "why"}. ``run_child`` tells a process that ended
without a record, by a signal for instance, and ends it by its deadline with everything below it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.gpu_check.stage import (
    FIGURES_FILE,
    STAGES,
    CheckSkipped,
    Context,
    Stage,
    Status,
    last_part,
    one_line,
)
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.runtime.supervisor import Command, StopSignals, adopt_orphans
from swift_stage2.whole_file import write_whole

PROGRAM = "benchmarks.gpu_check.stage_process"
_RECORD_FILE = "record.json"
_SIGNALLED = 128
_GRACE_S = 10.0


def run_child(
    name: str,
    results: Path,
    scratch: Path,
    environment: Mapping[str, str],
    *,
    deadline_s: float,
    rehearsal: bool,
) -> tuple[Status, str]:
    """Returns the end of the stage, and why in one line unless it passed; its files are in ``results``.

    Raises SystemExit: signal n came, SIGINT, SIGTERM or SIGHUP; the stage has been ended. Its code is 128 + n.
    """
    words = (name, str(results), str(scratch), str(deadline_s), *(["rehearse"] if rehearsal else []))
    argv = (sys.executable, "-u", "-m", PROGRAM, *words)
    adopt_orphans()
    end = time.monotonic() + deadline_s
    with StopSignals() as signals, Job(results, signals, lambda line: None, shows_logs=False) as job:
        tree = job.start(Command(name="stage", argv=argv, environment=environment, grace_s=_GRACE_S))
        while tree.poll() is None and time.monotonic() < end and signals.received is None:
            job.step()
        status = tree.poll()
        stood = _where_it_stood(results) if status is None else ""  # logs say more later, of being ended
    if signals.received is not None:
        raise SystemExit(_SIGNALLED + signals.received)
    record = results / _RECORD_FILE
    if record.exists():
        told = json.loads(record.read_text(encoding="utf-8"))
        return Status(told["status"]), str(told["why"])
    if status is None:
        return Status.FAILED, one_line(f"it did not end within {deadline_s:.0f} s; {stood}")
    how = f"signal {status - _SIGNALLED}" if status > _SIGNALLED else f"status {status}"
    cause = one_line(last_cause(tree.log_path, tree.log_offset))
    return Status.FAILED, f"its process ended with {how}: {cause}"


def _where_it_stood(results: Path) -> str:
    """The part that a stage was at last, and the last line of the log that was written last."""
    figures = results / FIGURES_FILE
    part = last_part(json.loads(figures.read_text(encoding="utf-8"))) if figures.exists() else ""
    log = max(results.glob("*.log"), key=lambda path: path.stat().st_mtime)
    return f"{part or 'before its first part'}, then {log.name}: {last_cause(log)}"


def main(argv: Sequence[str]) -> int:
    """Runs the stage in this process; 0 whatever it found, since that is in the record."""
    name, results, scratch, deadline_s, *rehearsal = argv
    stage = next(stage for stage in STAGES if stage.name == name)
    context = Context(
        rehearsal=bool(rehearsal),
        scratch=Path(scratch),
        logs=Path(results),
        deadline_s=float(deadline_s),
        began=psutil.Process().create_time(),
    )
    status, why = run_stage(stage, context)
    write_whole(context.logs / _RECORD_FILE, json.dumps({"status": status.value, "why": why}))
    return 0


def run_stage(stage: Stage, context: Context) -> tuple[Status, str]:
    """Returns its end, and in one line why, unless it passed."""
    missing = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Status.SKIPPED, f"needs {', '.join(missing)}, not installed here"
    module, _, function = stage.work.partition(":")
    try:
        work = getattr(importlib.import_module(module), function)
        context.at("imports")
        work(context, **stage.arguments)
    except CheckSkipped as reason:
        return Status.SKIPPED, one_line(str(reason))
    except Exception as error:  # the top of the process: whatever a stage raises is its result
        traceback.print_exc()
        return Status.FAILED, one_line(f"{type(error).__name__}: {error}")
    return Status.PASSED, ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
