"""Runs seeds: ``python -m tests.interleaving --seed N`` runs one again and prints its schedule.

``--seeds 0:20000`` runs many seeds, ``--failure 3`` one of the mistakes in ``mutations``. Exit status 1 if an invariant
does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from interleaving.mutations import FAILURES

    parser = argparse.ArgumentParser(prog="python -m tests.interleaving", description=__doc__)
    parser.add_argument(
        "--failure", type=int, choices=sorted(FAILURES), help="of the predecessor, put in again"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this one and print its schedule")
    which.add_argument("--seeds", metavar="FIRST:END", help="run all of these and print those that fail")
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.failure)
    first, _, end = options.seeds.partition(":")
    return _run_many(range(int(first), int(end)), options.failure)


def _runner(failure: int | None) -> Any:
    from functools import partial

    from interleaving.mutations import FAILURES
    from interleaving.scene import Parts, run_seed

    return partial(run_seed, parts=FAILURES[failure] if failure is not None else Parts)


def _replay(seed: int, failure: int | None) -> int:
    from interleaving.scene import virtual_world
    from interleaving.scheduler import Violation

    violation = None
    with virtual_world():
        try:
            counts, scheduler = _runner(failure)(seed, traced=True)
        except Violation as raised:
            violation, counts, scheduler = raised, Counter(), raised.scheduler  # type: ignore[attr-defined]
    for moment, strand, what in scheduler.trace:
        print(f"{moment:9.3f}  {strand:32} {what}")
    print(*(f"{name}: {count}" for name, count in sorted(counts.items())), sep="\n")
    if violation is None:
        return 0
    print(violation, *violation.__notes__, sep="\n")
    return 1


def _run_many(seeds: range, failure: int | None) -> int:
    from interleaving.scene import virtual_world
    from interleaving.scheduler import Violation

    run, counts, num_failed, num_points = _runner(failure), Counter[str](), 0, 0
    began, began_cpu = time.perf_counter(), time.process_time()
    with virtual_world():
        for seed in seeds:
            try:
                met, scheduler = run(seed)
            except Violation as violation:
                num_failed += 1
                print(f"seed {seed}: {str(violation).splitlines()[0]}", flush=True)
            else:
                counts += met
                num_points += scheduler.num_points
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    print(*(f"{name}: {count}" for name, count in sorted(counts.items())), sep="\n")
    print(
        f"{len(seeds)} seeds, {num_failed} failed, {num_points} yield points, {seconds:.1f} s ({cpu:.1f} s of CPU, "
        f"{1000 * cpu / max(1, len(seeds)):.2f} ms each)"
    )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
