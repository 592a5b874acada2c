"""``swift-stage2 bench faults``: one real job per fault against a real server, and the table of what became of it.

The table is computed from the audits and the last checkpoint of every job. Servers are ended and started only where a
row kills one. ``FaultBench`` owns what the other fault benches start, too.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.accounting import report
from benchmarks.faults.commit import Switches
from benchmarks.faults.fault_table import RowResult, as_json, markdown
from benchmarks.faults.proxy import FaultProxy
from benchmarks.faults.rows import ROWS, Row
from benchmarks.faults.scene import Scene
from benchmarks.faults.server import Leftovers, Program, TestedServer
from benchmarks.faults.small_disk import SmallDisk
from benchmarks.faults.training_job import NUM_RANKS, JobSettings, TrainingJob
from benchmarks.results import say
from benchmarks.servers import BenchServers, ServerKind, server_arguments
from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.config import Stage2Config, Transport
from swift_stage2.config.binding import bind
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.errors import ChildFailed
from swift_stage2.process.ports import free_ports

NUM_SCENES = 1024
POISON_POSITION = 45
"""Where rank 0's stream meets the poisonous row: late enough for the job to be warm."""
_SEED = 0
_FOREIGN_WIDTH = 192  # half of the demo's model
_SMALL_DISK = "48m"  # three rounds of 7 MB lie there at most


def check(options: argparse.Namespace) -> None:
    """Raises UserError when what the server needs is not installed."""
    server_arguments(ServerKind(options.server), STAGE1, 0, 1)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Writes ``faults-SERVER.md`` and ``.json`` after every row; 0 when every row went well and nothing is left."""
    stem = directory / f"faults-{options.server}"
    started = time.monotonic()
    found: list[RowResult] = []
    left: int | None = None

    def write() -> None:
        facts = {"server": options.server, "num_ranks": NUM_RANKS, "seconds": time.monotonic() - started}
        text = json.dumps(as_json(found, facts | {"left_at_the_end": left}), indent=1) + "\n"
        stem.with_suffix(".json").write_text(text, encoding="utf-8")
        stem.with_suffix(".md").write_text(markdown(found), encoding="utf-8")

    with FaultBench(ServerKind(options.server), directory) as bench:
        rows = write_rows(directory)
        for row in ROWS:
            if row.name in options.rows:
                found.append(bench.run(row, rows))
                write()
        left = bench.end_server()
    write()
    print(markdown(found))
    say(f"took {time.monotonic() - started:.0f} s; {left} things left; {stem}.json")
    for result in found:
        for problem in result.problems:
            say(f"{result.name}: {problem}")
    return 1 if left or any(result.problems for result in found) else 0


class FaultBench(BenchServers):
    """Owns every process that the fault benches start: one server, and one learner after another."""

    def __init__(self, kind: ServerKind, directory: Path, program: Program | None = None) -> None:
        """``program`` serves in place of ``kind``'s."""
        super().__init__(directory)
        self.kind = kind
        self._directory = directory
        self._server = TestedServer(kind, self, Switches(directory / "switches"), program)
        self._other = TestedServer(kind, self, Switches(directory / "switches_of_other"), program)

    def ready_server(self, *, foreign: bool = False, other: bool = False) -> TestedServer:
        """The server, or the ``other`` one of a row with two, answering; ``foreign``: with another model."""
        server = self._other if other else self._server
        server.switches.clear_all()
        if foreign and server.is_alive:
            server.kill()
        if not server.is_alive:
            server.start(write_foreign_model(self._directory) if foreign else STAGE1)
        server.wait_until_it_answers()
        return server

    def start_job(
        self, name: str, directory: Path, rows: Path, settings: JobSettings, *ports: int
    ) -> TrainingJob:
        """A learner that asks the server, or what stands before servers on ``ports``."""
        ports = ports or (self._server.port,)
        told = list(zip(ports, free_ports(len(ports)), strict=True))
        name = f"{self.kind}-learner-{name}"
        return TrainingJob(name, self, directory, rows, told, self._server.switches, settings)

    def end_server(self) -> int:
        """Ends both servers; returns how much they left behind."""
        return self._server.end().num + self._other.end().num

    def run(self, row: Row, rows: Path) -> RowResult:
        """Runs one row on a data set; one that breaks says so in its result."""
        if why_not := row.why_not(self.kind):
            return RowResult(name=row.name, title=row.title, note=f"not possible here: {why_not}")
        say(f"{self.kind}: {row.title}")
        started = time.monotonic()
        try:
            result = self._run(row, write_poisonous_rows(rows) if row.poison else rows)
        except ChildFailed as error:
            result = RowResult(name=row.name, title=row.title, note=f"broke: {error}")
            for server in (self._server, self._other):
                if server.is_alive:
                    server.kill()
        result = replace(result, seconds=time.monotonic() - started)
        say(f"{row.name}: {'; '.join(result.problems) or 'as it should be'} ({result.seconds:.0f} s)")
        return result

    def _run(self, row: Row, rows: Path) -> RowResult:
        server = self.ready_server(foreign=row.foreign)
        servers = [server, self.ready_server(other=True)] if row.with_other else [server]
        with ExitStack() as stack:
            ports = [each.port for each in servers]
            proxy = stack.enter_context(FaultProxy(ports[-1])) if row.through_proxy else None
            if proxy:
                ports[-1] = proxy.port
            place, settings, disk = self._directory / row.name, row.settings, None
            if row.by_disk:
                by_disk = {"transport": Transport.DISK.value, "disk_directory": str(server.weights_root)}
                settings = replace(settings, sync={**settings.sync, **by_disk})
            if row.small_disk:
                disk = SmallDisk(server.weights_root, _SMALL_DISK)
                stack.callback(disk.unmount)
            job = stack.enter_context(self.start_job(row.name, place, rows, settings, *ports))
            scene = Scene(server, job, proxy, disk)
            scene.other = servers[-1]
            if not row.foreign:
                scene.warm_up()
            row.commit(scene)
            scene.wait_until_healed()
            status = job.stop()
        left, killed = job.what_is_left(), server.what_the_killed_left()
        return RowResult(
            name=row.name,
            title=row.title,
            report=report(job.records, job.account(), scene.moments),
            exit_status=status,
            left=Leftovers(
                left.processes + killed.processes,
                left.ports,
                tuple(dict.fromkeys(left.shared_memory + killed.shared_memory)),
            ),
        )


def write_rows(directory: Path) -> Path:
    """Sound scenes; returns their JSONL."""
    return write_dataset(directory / "scenes", SceneKind.SHAPES, NUM_SCENES, Split.TRAIN, _SEED)


def write_poisonous_rows(rows: Path) -> Path:
    """The same scenes, but that one row's image is no image; returns another JSONL beside the first."""
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    task = DetectionTask.from_config(bind(Stage2Config, {"stage2_ab": {"schedule": {"b_ratio": 0}}}))
    source = SampleSource(lines, task, rank=0, world_size=NUM_RANKS, seed=_SEED)
    index = source.draw(POISON_POSITION + 1)[-1].index
    image = rows.parent / "poison.png"
    whole = Path(lines[index]["images"][0]).read_bytes()
    middle = len(whole) // 2  # head and end are sound, so that no check at the start refuses it
    image.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    lines[index]["images"] = [str(image)]
    poisoned = rows.parent / "poisoned_rows.jsonl"
    poisoned.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return poisoned


def write_foreign_model(directory: Path) -> Path:
    """An untrained model of the same family with another width; returns its directory."""
    from benchmarks.tiny_model import build_model, build_processor, build_tokenizer, save_model

    foreign, tokenizer = directory / "foreign_model", build_tokenizer()
    model = build_model(_SEED, vocab_size=len(tokenizer), text={"intermediate_size": _FOREIGN_WIDTH})
    save_model(model, build_processor(tokenizer), foreign)
    return foreign
