"""``swift-stage2 gpu-check``: every stage in a process of its own, and what they found as one JSON and one page.

A stage that crashes, hangs or runs out of memory costs that stage only. Each has its own time, and those for which too
little is left are skipped, so that the whole check ends by its deadline; the report is written after each of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.command import Option
from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.stage import FIGURES_FILE, JSON_FILE, PAGE_FILE, STAGES, Stage, Status, write_report
from swift_stage2.errors import UserError
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.runtime.run_directory import make_directory

TOTAL_S = 600.0
_SIGNALLED = 128
_RESERVE_S = 60.0  # what a stage that has to be killed with all below it may take beyond its own deadline
_LEAST_STAGE_S = 30.0  # torch and CUDA alone take seconds to start
_NEEDED = ("psutil", "yaml")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "QWENVL_BBOX_FORMAT": "new",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer is not among the wheels, and vLLM takes it for granted
}  # fmt: skip
_CHECKOUT = Path(__file__).parents[2]
_NAMES = [stage.name for stage in STAGES]
_OUTPUT = "gets JSON, page and logs (default runs/gpu-check); an earlier check there is replaced"
_WHEELS = "folders that --collect made: what this machine lacks of them is unpacked for this check alone"
_COLLECT = f"only download the wheels, where a package registry is; at most {wheels.MOST_BYTES >> 20} MiB"
_VLLM = "with --collect: vLLM too, as folders part1, part2, … in DIR that travel one by one (minutes)"
_PYTHON = f"with --collect: the other machine's Python (default {wheels.PYTHON_VERSION}, on x86-64 Linux)"


def _stage(text: str) -> Stage:
    """Raises ArgumentTypeError: there is no such stage, or what stands behind ``=`` is no number of seconds."""
    name, _, seconds = text.partition("=")
    stage = next((each for each in STAGES if each.name == name), None)
    try:
        given = float(seconds) if seconds else math.inf
    except ValueError:
        given = 0.0
    if stage is None or not given > 0:
        raise argparse.ArgumentTypeError(f"NAME or NAME=SECONDS of {', '.join(_NAMES)}, got {text}")
    return replace(stage, seconds=given) if seconds else stage


_OPTIONS = (
    Option("output", Path("runs/gpu-check"), _OUTPUT, metavar="DIR"),
    Option("keep", False, "keep an earlier check; take DIR-2, DIR-3, … instead"),
    Option("wheels", [], _WHEELS, kind=Path, metavar="DIR"),
    Option("collect", None, _COLLECT, kind=Path, metavar="DIR"),
    Option("python", wheels.PYTHON_VERSION, _PYTHON, metavar="X.Y"),
    Option("vllm", False, _VLLM),
    Option("rehearse", False, "on the CPU with tiny shapes; shows no figure of a GPU"),
    Option(
        "stages",
        [],
        f"only these, =S: what each is given: {', '.join(_NAMES)}",
        kind=_stage,
        metavar="NAME[=S]",
    ),
    Option("deadline-s", TOTAL_S, f"of the whole check (default {TOTAL_S:g})", metavar="S"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check: 0 when all that could run passed, 1 when a stage failed.

    Raises:
        UserError: an option is out of range, there is no GPU, or a package is missing or cannot be installed.
        SystemExit: signal n ended the check, with 128 + n; the report has what was found until then.
    """
    options = _parse(argv)
    if options.collect is not None:
        collect = wheels.collect_with_vllm if options.vllm else wheels.collect
        for folder in collect(options.collect, options.python):
            print(f"{wheels.size_of(folder) / (1 << 20):.1f} MiB for Python {options.python} in {folder}")
        return 0
    started = time.monotonic()
    records: list[dict[str, Any]] = []
    chosen = [STAGES[0], *(stage for stage in options.stages or STAGES if stage.name != STAGES[0].name)]
    with _scratch_directory() as scratch:
        environment, logs = _environment(options, scratch), scratch / "logs"
        for index, stage in enumerate(chosen):
            left_s = options.deadline_s - _RESERVE_S - (time.monotonic() - started)
            deadline_s = time_for(stage, left_s)
            records.append(_run(stage, deadline_s, logs / stage.name, scratch, environment, options))
            if index == 0:  # the machine; only now, since it clears an earlier check
                if records[0]["status"] == Status.FAILED and not options.rehearse:
                    raise UserError(
                        f"a GPU check needs a GPU: {records[0]['why']}; run it where there is one, or with --rehearse"
                    )
                directory = make_directory(options.output, keep=options.keep)
                logs = shutil.copytree(logs, directory / "logs")
            finished, seconds = len(records) == len(chosen), time.monotonic() - started
            write_report(directory, records, rehearsal=options.rehearse, finished=finished, seconds=seconds)
    print(f"report: {directory / PAGE_FILE} and {JSON_FILE}")
    return 1 if any(record["status"] == Status.FAILED for record in records) else 0


def time_for(stage: Stage, left_s: float) -> float | None:
    """Seconds for a stage of what is left of the whole; None where that is too little to begin."""
    return min(left_s, stage.seconds) if left_s >= min(_LEAST_STAGE_S, stage.seconds) else None


def _run(
    stage: Stage, deadline_s: float | None, results: Path, scratch: Path,
    environment: Mapping[str, str], options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Returns the record of one stage, which is skipped without a deadline. Raises as ``run_child``."""
    # Needs psutil, which --wheels may have to bring; so not before.
    from benchmarks.gpu_check.stage_process import run_child

    print(f"{stage.name} …", flush=True)
    results.mkdir(parents=True)
    began = time.monotonic()
    if deadline_s is None:
        status, why = Status.SKIPPED, f"too little of --deadline-s {options.deadline_s:g} is left"
    else:
        status, why = run_child(
            stage.name, results, scratch, environment, deadline_s=deadline_s, rehearsal=options.rehearse
        )
    figures = results / FIGURES_FILE
    print(f"{stage.name}: {status.value}{f', {why}' if why else ''}", flush=True)
    return {
        "name": stage.name,
        "proves": stage.proves,
        "status": status.value,
        "why": why,
        "seconds": round(time.monotonic() - began, 1),
        "figures": json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {},
    }


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    """A directory that is gone afterwards, even when a signal ends the check, which raises SystemExit."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_SIGNALLED + number)

    before = {n: signal.signal(n, end) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    directory = Path(tempfile.mkdtemp(prefix="swift-stage2-gpu-check-"))
    try:
        yield directory
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not end the removal
        shutil.rmtree(directory, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(options: argparse.Namespace, scratch: Path) -> dict[str, str]:
    """Of every stage: the checkout can be imported, and what the machine lacks, from a private directory.

    Raises UserError: wheels cannot be used, or the check itself lacks a package.
    """
    places = [str(_CHECKOUT)]
    if options.wheels:
        private = scratch / "packages"
        names = wheels.install_missing(options.wheels, private)
        print(f"installed for this check alone: {', '.join(names) or 'nothing, all is there'}", flush=True)
        places.append(str(private))
        sys.path.append(str(private))
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"gpu-check needs {' and '.join(missing)}, not installed here; bring what is missing with --wheels DIR, "
            "a folder that --collect DIR makes where a package registry is"
        )
    places += [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    threads = {"OMP_NUM_THREADS": "1"} if options.rehearse else {}  # the machine is shared while tests run
    return {**os.environ, **_ENVIRONMENT, **threads, "PYTHONPATH": os.pathsep.join(places)}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 gpu-check",
        description="Run on a GPU, in at most ten minutes, what no CPU can show: one JSON and one page.",
        exit_statuses="0 all that could run passed; 1 a stage failed",
    )
    for option in _OPTIONS:
        option.add_to(parser)
    options = parser.parse_args(argv)
    own = ("collect", "python", "vllm")
    alone = [name for name, value in vars(options).items() if (name in own) != (options.collect is not None)
             and value != parser.get_default(name)]  # fmt: skip
    if alone:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in alone)
        told = "only --python and --vllm go" if options.collect else "this goes only"
        raise UserError(f"{told} with --collect, got {words}; leave it out")
    least_s = _RESERVE_S + _LEAST_STAGE_S
    if not least_s <= options.deadline_s <= 3600:
        raise UserError(
            f"--deadline-s must be in the range {least_s:g}..3600, got deadline_s={options.deadline_s:g}"
        )
    for folder in options.wheels:
        if not folder.is_dir():
            raise UserError(f"--wheels must be a folder, got {folder}; make it with --collect")
    return options
