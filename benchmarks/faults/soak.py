"""``swift-stage2 bench soak``: one long two-rank run, faults of every kind at random steps, and what it came to.

The run ends by itself after its last step. Faults come one after another, each once the one before has healed; memory,
threads and file descriptors of both ranks are looked at every few steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks.faults import row_data
from benchmarks.faults.bench_options import bench_parser
from benchmarks.faults.proxy import FaultProxy
from benchmarks.faults.run import FaultBench
from benchmarks.faults.scene import START_S, Scene
from benchmarks.faults.server import TestedServer
from benchmarks.faults.soak_commit import commit
from benchmarks.faults.soak_plan import FEWEST_STEPS, PlannedFault, plan_faults
from benchmarks.faults.soak_report import (
    CommittedFault,
    RankSample,
    SoakReport,
    kind_reports,
    markdown,
    num_lost,
    num_trained_twice,
    trends_of,
)
from benchmarks.faults.training_job import NUM_RANKS, JobSettings, TrainingJob, Victim
from benchmarks.servers import ServerKind, server_arguments
from swift_stage2.demo.demo_config import STAGE1, free_ports
from swift_stage2.errors import ChildFailed
from swift_stage2.output_directory import claim_directory
from swift_stage2.telemetry.ledger import read_ledgers
from swift_stage2.telemetry.ledger_account import RunAccount, account_of

_FAILED = 1
_SAMPLE_EVERY_STEPS = 10
_LONGEST_STEP_S = 10.0  # on average, while the soak waits for a step
_END_DEADLINE_S = 180.0  # of the last save and the shutdown
_NUM_SAVES = 4
_KILL_ROOM_STEPS = {
    ServerKind.TRANSFORMERS: 100,
    ServerKind.VLLM: 300,  # it loads for minutes beside two ranks on two cores
    ServerKind.STOCK: 300,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks, prints both tables and writes ``soak.md`` and ``.json``; 0 when nothing was lost and nothing rises.

    Raises:
        UserError: an option is out of range, a package is missing, or the output directory cannot be used.
        ChildFailed: the server did not answer at the start.
        KeyboardInterrupt: a signal asked for the end.
    """
    options = _parse(argv)
    faults = plan_faults(
        options.seed,
        options.steps,
        num_ranks=NUM_RANKS,
        kill_room_steps=_KILL_ROOM_STEPS[options.server],
    )
    server_arguments(options.server, STAGE1, 0, 1)  # refuses a server that is not installed
    directory = claim_directory(options.output, keep=options.keep)
    started = time.monotonic()
    with FaultBench(options.server, directory) as bench, _Soak(bench, directory, options.steps) as soak:
        soak.run(faults)
        report = soak.report(len(faults))
    problems = report.problems(options.steps)
    facts = {
        "server": str(options.server),
        "seed": options.seed,
        "seconds": time.monotonic() - started,
        "problems": problems,
        "plan": [asdict(fault) for fault in faults],
        "faults": [asdict(fault) for fault in soak.committed],
        "samples": [asdict(sample) for sample in soak.samples],
        **asdict(report),
    }
    (directory / "soak.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    table = markdown(report)
    (directory / "soak.md").write_text(table, encoding="utf-8")
    print(table)
    for problem in problems:
        _say(problem)
    _say(f"took {facts['seconds']:.0f} s; {directory / 'soak.json'}")
    return _FAILED if problems else 0


class _Soak:
    """The run, its server and the proxy between them."""

    def __init__(self, bench: FaultBench, directory: Path, num_steps: int) -> None:
        self.committed: list[CommittedFault] = []
        self.samples: list[RankSample] = []
        self._bench = bench
        self._num_steps = num_steps
        self._server: TestedServer = bench.ready_server()
        self._proxy = FaultProxy(self._server.port)
        (group_port,) = free_ports(1)
        swift = {
            "max_steps": num_steps,
            "save_steps": max(1, num_steps // _NUM_SAVES),
            "save_total_limit": 2,
            "learning_rate": 1e-4,  # the model must still answer well after the last step
        }
        self._job: TrainingJob = bench.start_job(
            "soak",
            directory / "job",
            row_data.write_rows(directory),
            (self._proxy.port, group_port),
            JobSettings(swift=swift),
        )
        self._job.watch = self._sample
        self._next_sample = 1
        self._exit_status: int | None = None
        self._broke = ""

    def __enter__(self) -> _Soak:
        self._proxy.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._job.end()
        self._proxy.__exit__(None, None, None)

    def run(self, faults: Sequence[PlannedFault]) -> None:
        """Trains to the last step; a run that hangs or ends early is ended, and ``report`` tells of it."""
        try:
            for number, fault in enumerate(faults, 1):
                self._wait_for_step(fault.step)
                self._suffer(fault)
                _say(f"{number} of {len(faults)}: {fault.kind} at step {self.committed[-1].step}, healed")
            left_s = (self._num_steps - self._job.num_steps) * _LONGEST_STEP_S
            self._exit_status = self._job.wait_until_it_ends(left_s + _END_DEADLINE_S)
        except ChildFailed as error:
            self._broke, self._exit_status = str(error), self._job.exit_status
            self._job.end()

    def report(self, num_planned: int) -> SoakReport:
        """What the ended run came to. Ends the server."""
        records = self._job.records
        left = self._job.what_is_left().num + self._server.what_the_killed_left().num + self._bench.end()
        has_ledger = any((self._job.run_dir / "ledger").glob("rank*.jsonl"))
        ledgers = read_ledgers([self._job.run_dir]) if has_ledger else {}
        account = account_of(ledgers) if has_ledger else None
        kinds, num_disagreements = kind_reports(
            records, self.committed, account or RunAccount(ranks=(), violations=())
        )
        return SoakReport(
            num_planned=num_planned,
            num_steps=self._job.num_steps,
            exit_status=self._exit_status,
            left=left,
            kinds=kinds,
            trends=trends_of(records, self.samples),
            account=account,
            lost=num_lost(account) if account else 0,
            trained_twice=num_trained_twice(ledgers),
            num_disagreements=num_disagreements,
            broke=self._broke,
        )

    def _wait_for_step(self, step: int) -> None:
        timeout_s = START_S + max(0, step - self._job.num_steps) * _LONGEST_STEP_S
        self._job.wait_for(lambda: self._job.num_steps > step, f"step {step} begins", timeout_s)

    def _suffer(self, fault: PlannedFault) -> None:
        scene = Scene(self._server, self._job, self._server.switches, self._proxy)
        step, hung = self._job.num_steps - 1, False
        try:
            commit(fault, scene)
            scene.wait_until_healed()
        except ChildFailed:
            hung = self._job.exit_status is None
            raise
        finally:
            self.committed.append(
                CommittedFault(kind=fault.kind, step=step, moments=scene.moments, hung=hung)
            )

    def _sample(self) -> None:
        step = self._job.num_steps
        if step < self._next_sample:
            return
        self._next_sample = step + _SAMPLE_EVERY_STEPS
        for rank, process in enumerate(self._job.processes_of(Victim.BOTH)):
            try:
                self.samples.append(_sample_of(rank, step, process))
            except psutil.NoSuchProcess:
                return  # the run is ending


def _sample_of(rank: int, step: int, process: psutil.Process) -> RankSample:
    memory = process.memory_full_info()
    return RankSample(
        rank=rank,
        step=step,
        rss=memory.rss,
        uss=memory.uss,
        num_threads=process.num_threads(),
        num_fds=process.num_fds(),
    )


def _say(text: str) -> None:
    print(f"[bench] {text}", flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(
        "soak",
        "Train for long on two ranks under random faults: what is lost, and what grows? Takes roughly 15 minutes on "
        "two cores with the transformers server, more with the others. Exit status 0: nothing was lost, trained twice "
        "or left behind, and nothing rises.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2000,
        help=f"optimizer steps, at least {FEWEST_STEPS}; fewer than 500 behind the first fifth show no trend "
        "(default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
