"""``swift-stage2 bench soak``: one long two-rank run, faults of every kind at random steps, and what it came to.

The run ends by itself after its last step. Faults come one after another, each once the one before has healed; memory,
threads and file descriptors of both ranks, the courier and the server are looked at every few steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.accounting import SampleCount
from benchmarks.faults.bench import FaultBench, check, write_rows
from benchmarks.faults.commit import Switch, stopped
from benchmarks.faults.proxy import FaultProxy, ReplyFault
from benchmarks.faults.rows import kill_courier
from benchmarks.faults.scene import START_S, Scene
from benchmarks.faults.server import TestedServer
from benchmarks.faults.soak_plan import FaultKind, PlannedFault, plan_faults
from benchmarks.faults.soak_report import (
    CommittedFault,
    ProcessSample,
    SoakReport,
    kind_reports,
    num_trained_twice,
    parts_of,
    trends_of,
)
from benchmarks.faults.training_job import JobSettings, TrainingJob, Victim
from benchmarks.results import publish, say
from benchmarks.servers import ServerKind
from swift_stage2.errors import ChildFailed
from swift_stage2.telemetry.ledger_account import RunAccount, account_of
from swift_stage2.telemetry.reading import read_ledgers

__all__ = ["check", "run"]
_SAMPLE_EVERY_STEPS = 10
_LONGEST_STEP_S = 10.0  # on average, while the soak waits for a step
_END_DEADLINE_S = 180.0  # of the last save and the shutdown
_NUM_SAVES = 4
_KILL_ROOM_STEPS = {
    ServerKind.TRANSFORMERS: 100,
    ServerKind.VLLM: 300,  # it loads for minutes beside two ranks on two cores
    ServerKind.STOCK: 300,
}
_REPLY_FAULTS = {
    FaultKind.LATE_REPLIES: ReplyFault.DELAY,
    FaultKind.HTTP_500: ReplyFault.HTTP_500,
    FaultKind.CUT_REPLY: ReplyFault.CUT,
}


def run(options: argparse.Namespace, directory: Path) -> int:
    """Soaks; 0 when nothing was lost and nothing rises. Raises ChildFailed when the server did not answer at first."""
    kind = ServerKind(options.server)
    faults = plan_faults(options.seed, options.steps, kill_room_steps=_KILL_ROOM_STEPS[kind])
    started = time.monotonic()
    with FaultBench(kind, directory) as bench, ExitStack() as stack:
        server = bench.ready_server()
        proxy = stack.enter_context(FaultProxy(server.port))
        sync = {"on_pending": options.on_pending}
        settings = JobSettings(swift=_swift_arguments(options.steps), sync=sync)
        job = bench.start_job("soak", directory / "job", write_rows(directory), settings, proxy.port)
        soak = _Soak(server, proxy, stack.enter_context(job), options.steps)
        soak.run(faults)
        report = soak.report(len(faults), bench.end_server)
    problems = report.problems(options.steps)
    facts = {
        "server": options.server,
        "seed": options.seed,
        "on_pending": options.on_pending,
        "seconds": time.monotonic() - started,
        "problems": problems,
        "plan": [asdict(fault) for fault in faults],
        "faults": [asdict(fault) for fault in soak.committed],
        "samples": [asdict(sample) for sample in soak.samples],
        **asdict(report),
    }
    publish(directory, "soak", facts, *parts_of(report))
    for problem in problems:
        say(problem)
    say(f"took {facts['seconds']:.0f} s")
    return 1 if problems else 0


def _swift_arguments(num_steps: int) -> dict[str, Any]:
    return {
        "max_steps": num_steps,
        "save_steps": max(1, num_steps // _NUM_SAVES),
        "save_total_limit": 2,
        "learning_rate": 1e-4,  # the model must still answer well after the last step
    }


class _Soak:
    def __init__(self, server: TestedServer, proxy: FaultProxy, job: TrainingJob, num_steps: int) -> None:
        self.committed: list[CommittedFault] = []
        self.samples: list[ProcessSample] = []
        self._server, self._proxy, self._job, self._num_steps = server, proxy, job, num_steps
        job.watch = self._sample
        self._next_sample = 1
        self._exit_status: int | None = None
        self._broke = ""

    def run(self, faults: Sequence[PlannedFault]) -> None:
        """Trains to the last step; a run that hangs or ends early is ended, and ``report`` tells of it."""
        try:
            for number, fault in enumerate(faults, 1):
                self._wait_for_step(fault.step)
                self._suffer(fault)
                say(f"{number} of {len(faults)}: {fault.kind} at step {self.committed[-1].step}, healed")
            left_s = (self._num_steps - self._job.num_steps) * _LONGEST_STEP_S
            self._exit_status = self._job.wait_until_it_ends(left_s + _END_DEADLINE_S)
        except ChildFailed as error:
            self._broke, self._exit_status = str(error), self._job.exit_status
            self._job.end()

    def report(self, num_planned: int, end_server: Callable[[], int]) -> SoakReport:
        records = self._job.records
        left = self._job.what_is_left().num + self._server.what_the_killed_left().num + end_server()
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
            lost=SampleCount.of(account.ranks).lost if account else 0,
            trained_twice=num_trained_twice(ledgers),
            num_disagreements=num_disagreements,
            broke=self._broke,
        )

    def _wait_for_step(self, step: int) -> None:
        timeout_s = START_S + max(0, step - self._job.num_steps) * _LONGEST_STEP_S
        self._job.wait_for(lambda: self._job.num_steps > step, f"step {step} begins", timeout_s)

    def _suffer(self, fault: PlannedFault) -> None:
        scene = Scene(self._server, self._job, self._proxy)
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
        ranks = {f"rank {rank}": [each] for rank, each in enumerate(self._job.processes_of(Victim.BOTH))}
        looked_at = ranks | {"courier": self._job.courier, "server": self._server.processes}
        for name, processes in looked_at.items():
            with suppress(psutil.NoSuchProcess, IndexError):  # it is ending, or not there
                self.samples.append(_sample_of(name, step, processes))


def _sample_of(name: str, step: int, processes: Sequence[psutil.Process]) -> ProcessSample:
    memory = [process.memory_full_info() for process in processes]
    return ProcessSample(
        process=name,
        pid=processes[0].pid,
        step=step,
        rss=sum(each.rss for each in memory),
        uss=sum(each.uss for each in memory),
        num_threads=sum(process.num_threads() for process in processes),
        num_fds=sum(process.num_fds() for process in processes),
    )


def commit(fault: PlannedFault, scene: Scene) -> None:
    """Returns once nothing stands in the way of a proof any more.

    Raises ChildFailed: the learner ended, or what the fault waits for did not come.
    """
    match fault.kind:
        case FaultKind.KILL_SERVER:
            scene.server.kill()
            scene.job.wait_for_steps(fault.count)
            scene.start_server()
        case FaultKind.LATE_REPLIES | FaultKind.HTTP_500 | FaultKind.CUT_REPLY:
            goal = len(scene.proxy.committed) + fault.count
            for _ in range(fault.count):
                scene.proxy.commit_next(_REPLY_FAULTS[fault.kind], delay_s=fault.seconds)
            scene.wait_for(lambda: len(scene.proxy.committed) >= goal, f"{fault.count} replies are disturbed")
        case FaultKind.SLOW_DISK:
            scene.switches.set(Switch.SLOW_DISK, str(fault.seconds))
            try:
                scene.job.wait_for_steps(fault.count)
            finally:
                scene.switches.clear(Switch.SLOW_DISK)
        case FaultKind.STOP_RANK:
            with stopped(scene.job.processes_of((Victim.RANK_0, Victim.RANK_1)[fault.rank])):
                scene.job.wait_s(fault.seconds)
        case FaultKind.STOP_SERVER:
            with stopped(scene.server.processes):
                scene.job.wait_s(fault.seconds)
        case FaultKind.KILL_COURIER:
            kill_courier(scene, fault.seconds)
    scene.mark(healed=time.time())
