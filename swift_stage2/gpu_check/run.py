"""``swift-stage2 gpu-check``: every stage in a process of its own, and what they found as one JSON and one page.

A stage that crashes, hangs or runs out of memory costs that stage only. The time that is left is divided among the
stages that are left, so that the whole check ends by its deadline; the report is written after each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.gpu_check import wheels
from swift_stage2.gpu_check.page import page
from swift_stage2.gpu_check.stage import FigureLog, Stage, Status
from swift_stage2.gpu_check.stages import STAGES
from swift_stage2.run_directory.claim import claim_directory
from swift_stage2.terminal.parser import CommandParser
from swift_stage2.whole_file import write_whole

TOTAL_S = 600.0
JSON_FILE = "gpu-check.json"
PAGE_FILE = "gpu-check.md"
_FAILED = 1
_GRACE_S = 10.0
_LEAST_STAGE_S = 5.0
_MACHINE = "machine"
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "QWENVL_BBOX_FORMAT": "new"}
_CHECKOUT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check: 0 when all that could run passed, 1 when a stage failed.

    Raises:
        UserError: an option is out of range, there is no GPU, or wheels cannot be used.
        KeyboardInterrupt: a signal asked for the end; the report has what was found until then.
    """
    options = _parse(argv)
    if options.collect is not None:
        num_bytes = wheels.collect(options.collect, options.python)
        print(f"{num_bytes / (1 << 20):.1f} MiB of wheels for Python {options.python} in {options.collect}")
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swift-stage2-gpu-check-") as scratch:
        environment = _environment(options, Path(scratch))
        directory = claim_directory(options.output, keep=options.keep)  # only now: it clears an earlier check
        report = Report(directory, rehearsal=options.rehearse, started=started)
        run_stages(_wanted(options.stages), report, environment, Path(scratch), options.deadline_s)
    print(f"report: {directory / PAGE_FILE} and {JSON_FILE}")
    return _FAILED if report.num_failed else 0


class Report:
    """Collects the findings so far and writes both files with every stage."""

    def __init__(self, directory: Path, *, rehearsal: bool, started: float) -> None:
        self.directory = directory
        self._rehearsal = rehearsal
        self._started = started
        self._records: list[dict[str, Any]] = []

    @property
    def num_failed(self) -> int:
        """Stages that failed."""
        return sum(record["status"] == Status.FAILED for record in self._records)

    @property
    def rehearsal(self) -> bool:
        """True when nothing here is about a GPU."""
        return self._rehearsal

    @property
    def elapsed_s(self) -> float:
        """Seconds since the check began."""
        return time.monotonic() - self._started

    def add(self, record: dict[str, Any], *, finished: bool) -> None:
        """One more stage, and whether it was the last."""
        self._records.append(record)
        whole = {
            "rehearsal": self._rehearsal,
            "finished": finished,
            "seconds": round(self.elapsed_s, 1),
            "stages": self._records,
        }
        write_whole(self.directory / JSON_FILE, json.dumps(whole, indent=1) + "\n")
        write_whole(self.directory / PAGE_FILE, page(whole))


def run_stages(
    stages: Sequence[Stage], report: Report, environment: Mapping[str, str], scratch: Path, total_s: float
) -> None:
    """One after the other, each for its share of the time that is left.

    Raises:
        UserError: the first stage finds no device; the others would say it again.
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP came.
    """
    # Needs psutil, which --wheels may have to bring; so not before.
    from swift_stage2.gpu_check.child_stage import run_child

    for index, stage in enumerate(stages):
        left_s = max(_LEAST_STAGE_S, total_s - report.elapsed_s)
        share = stage.weight / sum(each.weight for each in stages[index:])
        print(f"{stage.name} …", flush=True)
        results = report.directory / "logs" / stage.name
        results.mkdir(parents=True)
        began = time.monotonic()
        status, why = run_child(
            stage, results, scratch, environment,
            deadline_s=left_s * share, rehearsal=report.rehearsal, grace_s=_GRACE_S,
        )  # fmt: skip
        record = {
            "name": stage.name,
            "proves": stage.proves,
            "status": status.value,
            "why": why,
            "seconds": round(time.monotonic() - began, 1),
            "figures": FigureLog.read(results / "figures.json"),
        }
        report.add(record, finished=index + 1 == len(stages))
        print(f"{stage.name}: {status.value}{f', {why}' if why else ''}", flush=True)
        if stage.name == _MACHINE and status is Status.FAILED and not report.rehearsal:
            raise UserError(f"a GPU check needs a GPU: {why}; run it where there is one, or with --rehearse")


def _environment(options: argparse.Namespace, scratch: Path) -> dict[str, str]:
    """Of every stage: the checkout can be imported, and what the machine lacks, from a private directory."""
    places = [str(_CHECKOUT)]
    if options.wheels is not None:
        private = scratch / "packages"
        names = wheels.install_missing(options.wheels, private)
        print(f"installed for this check alone: {', '.join(names) or 'nothing, all is there'}", flush=True)
        places.append(str(private))
        sys.path.append(str(private))
    places += [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    threads = {"OMP_NUM_THREADS": "1"} if options.rehearse else {}  # the machine is shared while tests run
    return {**os.environ, **_ENVIRONMENT, **threads, "PYTHONPATH": os.pathsep.join(places)}


def _wanted(names: Sequence[str]) -> list[Stage]:
    return [stage for stage in STAGES if not names or stage.name in (_MACHINE, *names)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 gpu-check",
        description="Run on a GPU, in at most ten minutes, what no CPU can show: one JSON and one page.",
        exit_statuses="0 all that could run passed; 1 a stage failed",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu-check"), metavar="DIR",
        help="gets JSON, page and logs (default %(default)s); an earlier check there is replaced",
    )  # fmt: skip
    parser.add_argument(
        "--keep", action="store_true", help="keep an earlier check; take DIR-2, DIR-3, … instead"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR",
        help="a folder that --collect made: what this machine lacks of it is installed for this check alone",
    )  # fmt: skip
    parser.add_argument(
        "--collect", type=Path, metavar="DIR",
        help="only download the wheels, where a package registry is; at most 64 MiB",
    )  # fmt: skip
    parser.add_argument(
        "--python", default=wheels.PYTHON_VERSION, metavar="X.Y",
        help="with --collect: the other machine's Python (default %(default)s, on x86-64 Linux)",
    )  # fmt: skip
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU with tiny shapes; shows no figure of a GPU"
    )
    parser.add_argument(
        "--stages", nargs="+", default=[], choices=[stage.name for stage in STAGES], metavar="NAME",
        help=f"only these: {', '.join(stage.name for stage in STAGES)}",
    )  # fmt: skip
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=TOTAL_S,
        metavar="S",
        help="of the whole check (default %(default)g)",
    )
    options = parser.parse_args(argv)
    if not 10 <= options.deadline_s <= 3600:
        raise UserError(f"--deadline-s must be in the range 10..3600, got deadline_s={options.deadline_s:g}")
    if options.wheels is not None and not options.wheels.is_dir():
        raise UserError(f"--wheels must be a folder, got {options.wheels}; make it with --collect")
    return options
