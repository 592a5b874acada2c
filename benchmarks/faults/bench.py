"""``swift-stage2 bench faults``: the part that is asked for, one server, and one learner after another.

Every part is a function that returns tables and notes, and whether all went as it should.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.kills import run_kills
from benchmarks.faults.outage import run_outage
from benchmarks.faults.server import TestedServer
from benchmarks.faults.soak import run_soak
from benchmarks.faults.table import run_table
from benchmarks.faults.training_job import JobSettings, TrainingJob
from benchmarks.results import publish
from benchmarks.servers import BenchServers, ServerKind, server_arguments
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset

_NUM_SCENES = 1024


class FaultBench(BenchServers):
    def __init__(self, kind: ServerKind, directory: Path, *, phases: bool = False) -> None:
        super().__init__(directory / "logs")
        self.kind, self.phases = kind, phases
        self.directory = directory
        self.rows = write_dataset(directory / "scenes", SceneKind.SHAPES, _NUM_SCENES, Split.TRAIN, 0)
        self._server = TestedServer(kind, self, sleeps=phases)

    def ready_server(self) -> TestedServer:
        """The server, answering."""
        if not self._server.is_alive:
            self._server.start()
        self._server.wait_until_it_answers()
        return self._server

    def start_job(self, name: str, place: Path, settings: JobSettings) -> TrainingJob:
        """A learner that asks the server."""
        settings = replace(settings, phases=self.phases)
        return TrainingJob(name, self, place, self.rows, self._server.port, settings)

    def end_server(self) -> tuple[str, ...]:
        """Ends it; names what it left behind."""
        return self._server.end()


def check(options: argparse.Namespace) -> None:
    """Raises UserError when what the server needs is not installed."""
    server_arguments(ServerKind(options.server), STAGE1, 0)


def run(options: argparse.Namespace, directory: Path) -> int:
    """0 when all went as it should and nothing was left. Raises ChildFailed when the run did not go on."""
    with FaultBench(ServerKind(options.server), directory, phases=options.phases) as bench:
        match options.part:
            case "table":
                parts, is_sound = run_table(bench, options.faults)
            case "kills":
                parts, is_sound = run_kills(bench, options.points, options.seed)
            case "outage":
                parts, is_sound = run_outage(bench, options.steps, options.cycles)
            case _:
                parts, is_sound = run_soak(bench, options.steps, options.seed)
        left = bench.end_server()
    publish(directory, "faults", *parts, f"Left by servers: {', '.join(left) or 'nothing'}.")
    return 0 if is_sound and not left else 1
