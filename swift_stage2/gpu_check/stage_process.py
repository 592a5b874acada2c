"""Runs one stage in this process: ``python -m swift_stage2.gpu_check.stage_process NAME …``.

Leaves its figures as they come and at last one record, {"status", "why"}. Whoever started it tells a process that
ended without a record, by a signal for instance.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from swift_stage2.errors import CheckSkipped
from swift_stage2.gpu_check.stage import Context, FigureLog, Stage, Status, one_line
from swift_stage2.gpu_check.stages import STAGES
from swift_stage2.whole_file import write_whole

RECORD_FILE = "record.json"
FIGURES_FILE = "figures.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stage; 0 whatever it found, since that is in the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--deadline-s", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(argv)
    stage = next(stage for stage in STAGES if stage.name == options.name)
    context = Context(
        rehearsal=options.rehearse,
        scratch=options.scratch,
        logs=options.results,
        deadline_s=options.deadline_s,
        figures=FigureLog(options.results / FIGURES_FILE),
    )
    status, why = run_stage(stage, context)
    write_whole(options.results / RECORD_FILE, json.dumps({"status": status.value, "why": why}))
    return 0


def run_stage(stage: Stage, context: Context) -> tuple[Status, str]:
    """Returns its end, and in one line why, unless it passed."""
    missing = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Status.SKIPPED, f"needs {', '.join(missing)}, not installed here"
    try:
        importlib.import_module(stage.module).run(context, **stage.arguments)
    except CheckSkipped as reason:
        return Status.SKIPPED, one_line(str(reason))
    except Exception as error:  # the top of the process: whatever a stage raises is its result
        traceback.print_exc()
        return Status.FAILED, one_line(f"{type(error).__name__}: {error}")
    return Status.PASSED, ""


if __name__ == "__main__":
    sys.exit(main())
