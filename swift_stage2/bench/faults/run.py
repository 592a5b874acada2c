"""``swift-stage2 bench faults``: one real job per fault against a real server, and the table of what became of it.

The table is computed from the audits and the last checkpoint of every job. Servers are ended and started only
where a row kills one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from swift_stage2.bench.faults import row_data
from swift_stage2.bench.faults.accounting import report
from swift_stage2.bench.faults.bench_options import bench_parser
from swift_stage2.bench.faults.fault_table import RowResult, as_json, markdown
from swift_stage2.bench.faults.leftovers import Leftovers
from swift_stage2.bench.faults.proxy import FaultProxy
from swift_stage2.bench.faults.rows import ORDER, ROWS, Row
from swift_stage2.bench.faults.scene import Scene
from swift_stage2.bench.faults.server import Program, TestedServer, lasting_port
from swift_stage2.bench.faults.switches import Switches
from swift_stage2.bench.faults.training_job import NUM_RANKS, JobSettings, TrainingJob
from swift_stage2.bench.servers import ServerKind, server_arguments
from swift_stage2.demo.demo_config import STAGE1, free_ports
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.launch.job import Job
from swift_stage2.launch.process_tree import adopt_orphans
from swift_stage2.launch.stop_signals import StopSignals
from swift_stage2.run_directory.output import claim_directory

_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows, prints the table and writes ``faults-SERVER.md`` and ``.json``; 0 when every row went well.

    Raises:
        UserError: an option is out of range, a package is missing, or the output directory cannot be used.
        KeyboardInterrupt: a signal asked for the end.
    """
    arguments = _parse(argv)
    server_arguments(arguments.server, STAGE1, 0, 1)  # refuses a server that is not installed
    directory = claim_directory(arguments.output, keep=arguments.keep)
    stem = directory / f"faults-{arguments.server}"
    started = time.monotonic()
    found: dict[str, RowResult] = {}
    left: int | None = None

    def write() -> list[RowResult]:
        """After every row, so that a bench that is ended keeps what it has measured."""
        results = [found[row.name] for row in ROWS if row.name in found]
        facts = {
            "server": str(arguments.server),
            "num_ranks": NUM_RANKS,
            "seconds": time.monotonic() - started,
            "left_at_the_end": left,
        }
        text = json.dumps(as_json(results, facts), indent=1) + "\n"
        stem.with_suffix(".json").write_text(text, encoding="utf-8")
        stem.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
        return results

    with FaultBench(arguments.server, directory) as bench:
        for row in _in_order(arguments.rows):
            found[row.name] = bench.run(row)
            write()
        left = bench.end()
    results = write()
    print(markdown(results))
    _say(f"took {time.monotonic() - started:.0f} s; {left} things left; {stem}.json")
    for result in results:
        for problem in result.problems:
            _say(f"{result.name}: {problem}")
    return _FAILED if left or any(result.problems for result in results) else 0


class FaultBench:
    """Owns every process that the rows start. SIGINT, SIGTERM and SIGHUP end them all."""

    def __init__(self, kind: ServerKind, directory: Path, program: Program | None = None) -> None:
        """``program`` serves in place of ``kind``'s."""
        self._kind = kind
        self._program = program
        self._directory = directory
        self._signals = StopSignals()
        self._job = Job(directory, self._signals, lambda line: None)
        self._rows: Path | None = None
        self._server: TestedServer | None = None

    def __enter__(self) -> FaultBench:
        adopt_orphans()
        self._signals.__enter__()
        self._job.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._job.__exit__(None, None, None)
        self._signals.__exit__(None, None, None)

    def run(self, row: Row) -> RowResult:
        """Runs one row; one that breaks says so in its result."""
        if why_not := row.why_not(self._kind):
            return RowResult(name=row.name, title=row.title, note=f"not possible here: {why_not}")
        _say(f"{self._kind}: {row.title}")
        started = time.monotonic()
        try:
            result = self._run(row, started)
        except ChildFailed as error:
            _say(f"{row.name} broke: {error}")
            if self._server is not None:
                self._server.kill()
            return RowResult(
                name=row.name, title=row.title, note=f"broke: {error}", seconds=time.monotonic() - started
            )
        _say(f"{row.name}: {'; '.join(result.problems) or 'as it should be'} ({result.seconds:.0f} s)")
        return result

    def ready_server(self) -> TestedServer:
        """The server, answering."""
        server = self._new_server() if self._server is None else self._server
        server.switches.clear_all()
        if not server.is_alive:
            server.start(STAGE1)
        server.wait_until_it_answers()
        return server

    def start_job(
        self, name: str, directory: Path, rows: Path, ports: tuple[int, int], settings: JobSettings
    ) -> TrainingJob:
        """A learner that is told ``ports``, of HTTP and of the weight group. Its caller ends it."""
        assert self._server is not None
        return TrainingJob(
            f"{self._kind}-learner-{name}",
            self._job,
            self._moment,
            directory,
            rows,
            ports,
            self._server.switches,
            settings,
        )

    def end(self) -> int:
        """Ends the server; returns how much it left behind."""
        if self._server is None:
            return 0
        self._server.end()
        return self._server.what_is_left().num

    def _run(self, row: Row, started: float) -> RowResult:
        server = self._ready_server(row)
        directory = self._directory / row.name
        with ExitStack() as stack:
            proxy = stack.enter_context(FaultProxy(server.port)) if row.through_proxy else None
            port = proxy.port if proxy else server.port
            (group_port,) = free_ports(1)
            job = self.start_job(row.name, directory, self._rows_of(row), (port, group_port), row.settings)
            stack.callback(job.end)
            scene = Scene(server, job, server.switches, proxy)
            if not row.foreign:
                scene.warm_up()
            row.commit(scene)
            scene.wait_until_healed()
            status = job.stop()
            job_left = job.what_is_left()
        return RowResult(
            name=row.name,
            title=row.title,
            report=report(job.records, job.account(), scene.moments),
            exit_status=status,
            left=_together(job_left, server.what_the_killed_left()),
            seconds=time.monotonic() - started,
        )

    def _ready_server(self, row: Row) -> TestedServer:
        server = self._new_server() if self._server is None else self._server
        server.switches.clear_all()
        if row.foreign and server.is_alive:
            server.kill()
        if not server.is_alive:
            server.start(row_data.write_foreign_model(self._directory) if row.foreign else STAGE1)
        server.wait_until_it_answers()
        return server

    def _new_server(self) -> TestedServer:
        switches = Switches(self._directory / "switches")
        self._server = TestedServer(
            self._kind, self._job, self._moment, lasting_port(), switches, self._program
        )
        return self._server

    def _rows_of(self, row: Row) -> Path:
        if self._rows is None:
            self._rows = row_data.write_rows(self._directory)
        return row_data.write_poisonous_rows(self._rows) if row.poison else self._rows

    def _moment(self) -> None:
        self._job.step()
        if self._signals.received is not None:
            raise KeyboardInterrupt


def _in_order(names: Sequence[str]) -> list[Row]:
    rows = {row.name: row for row in ROWS}
    return [rows[name] for name in ORDER if name in names]


def _together(*parts: Leftovers) -> Leftovers:
    return Leftovers(
        tuple(name for part in parts for name in part.processes),
        tuple(port for part in parts for port in part.ports),
        tuple(dict.fromkeys(name for part in parts for name in part.shared_memory)),
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(
        "faults",
        "Break a server in every way, under a real training job. All rows take roughly 15 minutes on two cores with "
        "the transformers server, 20 with vllm, an hour with stock. Exit status 0: every row went as it should and "
        "nothing was left.",
    )
    names = tuple(row.name for row in ROWS)
    parser.add_argument(
        "--rows",
        type=_row_names,
        default=names,
        metavar="NAME,…",
        help=f"of {', '.join(names)} (default all)",
    )
    return parser.parse_args(argv)


def _row_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    known = {row.name for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"--rows must name rows, got {', '.join(map(repr, unknown))}; choose among {', '.join(sorted(known))}"
        )
    return names


def _say(text: str) -> None:
    print(f"[bench] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
