"""``swift-stage2 bench faults``: one real job per fault against a real server, and the table of what became of it.

The table is computed from the audits and the last checkpoint of every job. Servers are ended and started only
where a row kills one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.faults.bench import FaultBench, check
from benchmarks.faults.fault_table import RowResult, as_json, markdown
from benchmarks.faults.rows import ORDER, ROWS
from benchmarks.faults.training_job import NUM_RANKS
from benchmarks.results import say
from benchmarks.servers import ServerKind

__all__ = ["check", "run"]
_FAILED = 1


def run(options: argparse.Namespace, directory: Path) -> int:
    """Writes ``faults-SERVER.md`` and ``.json`` after every row; 0 when every row went well and nothing is left."""
    stem = directory / f"faults-{options.server}"
    started = time.monotonic()
    found: dict[str, RowResult] = {}
    left: int | None = None

    def write() -> list[RowResult]:
        results = [found[row.name] for row in ROWS if row.name in found]
        facts = {
            "server": options.server,
            "num_ranks": NUM_RANKS,
            "seconds": time.monotonic() - started,
            "left_at_the_end": left,
        }
        text = json.dumps(as_json(results, facts), indent=1) + "\n"
        stem.with_suffix(".json").write_text(text, encoding="utf-8")
        stem.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
        return results

    with FaultBench(ServerKind(options.server), directory) as bench:
        for row in sorted(ROWS, key=lambda row: ORDER.index(row.name)):
            if row.name in options.rows:
                found[row.name] = bench.run(row)
                write()
        left = bench.end()
    results = write()
    print(markdown(results))
    say(f"took {time.monotonic() - started:.0f} s; {left} things left; {stem}.json")
    for result in results:
        for problem in result.problems:
            say(f"{result.name}: {problem}")
    return _FAILED if left or any(result.problems for result in results) else 0
