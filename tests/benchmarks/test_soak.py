"""A soak consists, beside its plan and its trends, of what disturbs a learner, its report, its command line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_records import batch, step, sync_round, taken
from ledger_run import LedgerRun

from benchmarks.estimates import Verdict
from benchmarks.faults.accounting import Moments, SampleCount
from benchmarks.faults.commit import LONGEST_WRITE_S, SlowDisk, Switch, Switches, stopped
from benchmarks.faults.soak_plan import FaultKind
from benchmarks.faults.soak_report import (
    CommittedFault,
    ProcessSample,
    Quantity,
    SoakReport,
    kind_reports,
    num_trained_twice,
    parts_of,
    trends_of,
)
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.ledger_account import RunAccount, account_of
from swift_stage2.telemetry.reading import read_audit, read_ledgers

_NOTHING = RunAccount(ranks=(), violations=())


# --- what disturbs a learner ----------------------------------------------------------------------


def test_a_disk_is_slow_while_the_switch_is_on_and_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches, log = Switches(tmp_path / "switches"), AuditLog(tmp_path / "a.jsonl")
    monkeypatch.setattr(AuditLog, "put", staticmethod(SlowDisk(switches).write))
    log.write("step", step=0)
    switches.set(Switch.SLOW_DISK, "1000")
    started = time.monotonic()
    log.write("step", step=1)
    took_s = time.monotonic() - started
    switches.clear(Switch.SLOW_DISK)
    log.write("step", step=2)
    log.close()
    assert LONGEST_WRITE_S <= took_s < 1000  # what the switch asks for has a limit
    assert [record["step"] for record in read_audit(tmp_path / "a.jsonl")] == [0, 1, 2]


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield psutil.Process(child.pid)
        child.kill()


def wait_for_status(process: psutil.Process, *, stopped: bool) -> None:
    end = time.monotonic() + 20
    while (process.status() == psutil.STATUS_STOPPED) is not stopped:
        assert time.monotonic() < end


def test_a_stopped_process_runs_again_also_when_the_block_raises(process: psutil.Process) -> None:
    def fail_while_it_is_stopped() -> None:
        with stopped([process]):
            wait_for_status(process, stopped=True)
            raise RuntimeError("the job ended")

    with pytest.raises(RuntimeError, match="the job ended"):
        fail_while_it_is_stopped()
    wait_for_status(process, stopped=False)


def test_a_process_that_ended_meanwhile_does_no_harm(process: psutil.Process) -> None:
    with stopped([process]):
        process.kill()
        process.wait(20)


# --- the report -----------------------------------------------------------------------------------


def audit(rank: int, num_steps: int, *, waits_at: int | None = None, failed_at: int | None = None) -> Any:
    """A step every second, every other one on channel B, a committed round every four."""
    records: list[dict[str, Any]] = []
    for number in range(num_steps):
        waiting_s = 3.0 if number - 1 == waits_at else 0.1  # told by the later record
        spent = {"busy": 1, "waiting": int(waiting_s * 1e9)}
        channel = "AB"[number % 2]
        records.append(
            step(number, float(number), channel, rank=rank, version=number // 4, activity_ns=spent)
        )
        if number % 4 == 0:
            records.append(sync_round(number + 0.5, seconds=0.1))
        records.append(batch(number + 0.75, 4, *(["error_answer"] if number == failed_at else [])))
        records.append(taken(number + 0.75, 4))
    return records


def fault(kind: FaultKind, at: float, **moments: float) -> CommittedFault:
    return CommittedFault(
        kind=kind, step=int(at), moments=Moments(**{"fault": at, "healed": at + 1.0} | moments)
    )


def test_a_step_that_ranks_began_on_both_sides_of_a_fault_is_no_disagreement() -> None:
    late = [{**record, "time": record["time"] + 0.1} for record in audit(1, 60)]
    faults = [fault(FaultKind.HTTP_500, 18.2), fault(FaultKind.STOP_RANK, 42.05)]
    assert kind_reports([audit(0, 60), late], faults, _NOTHING)[1] == 0
    next(record for record in late if record.get("step") == 50)["version"] = 99
    assert kind_reports([audit(0, 60), late], faults, _NOTHING)[1] == 1


def test_what_becomes_of_a_fault_is_looked_for_up_to_the_next() -> None:
    records = [audit(0, 60, failed_at=20), audit(1, 60, waits_at=42)]
    faults = [fault(FaultKind.HTTP_500, 18.2), fault(FaultKind.STOP_RANK, 41.2)]
    (refused, stopping), num_disagreements = kind_reports(records, faults, _NOTHING)
    assert num_disagreements == 0
    assert (refused.kind, refused.times, refused.hangs) == (FaultKind.HTTP_500, 1, 0)
    assert refused.failed_posts == {"error_answer": 1}
    assert refused.longest_wait_s == pytest.approx(0.0)
    assert refused.steps_to_proof == (2,)
    assert stopping.failed_posts == {}
    assert stopping.longest_wait_s == pytest.approx(2.9)  # rank 1's, though rank 0 did not wait


def test_a_stop_that_the_clock_takes_for_computing_shows_in_the_longest_step_of_either_channel() -> None:
    records = [audit(0, 60), audit(1, 60)]
    for part in records:
        for record in part:
            record["time"] += 5.0 * (record["time"] > 43.9)  # step 43 is of channel B
    (stopping,), _ = kind_reports(records, [fault(FaultKind.STOP_RANK, 43.2)], _NOTHING)
    assert stopping.longest_step_s == pytest.approx(6.0)
    assert stopping.longest_wait_s == pytest.approx(0.0)


def test_rollouts_of_a_server_that_nobody_proved_are_counted() -> None:
    killed = fault(FaultKind.KILL_SERVER, 21.2, restarted=22.2, healed=22.9)
    (found,), _ = kind_reports([audit(0, 60), audit(1, 60)], [killed], _NOTHING)
    assert found.unproven_rollouts == 2 * 4 * 2  # of both ranks, until the round at 24.5


def test_a_hang_is_counted_with_its_kind() -> None:
    hung = replace(fault(FaultKind.CUT_REPLY, 21.2), hung=True)
    (found,), _ = kind_reports([audit(0, 60), audit(1, 60)], [hung], _NOTHING)
    assert found.hangs == 1


def samples(rank: int, leak_per_step: float) -> list[ProcessSample]:
    return [
        ProcessSample(
            process=f"rank {rank}",
            pid=rank,
            step=step,
            rss=int((1000 + leak_per_step * step) * (1 << 20)),
            uss=900 << 20,
            num_threads=30,
            num_fds=40,
        )
        for step in range(0, 2000, 10)
    ]


def test_a_leak_of_one_rank_is_found_on_that_rank_alone() -> None:
    trends = trends_of([audit(0, 2000), audit(1, 2000)], samples(0, 0.0) + samples(1, 0.05))
    rising = [
        (rank, quantity)
        for rank, of in trends.items()
        for quantity, each in of.items()
        if each is None or each.verdict is not Verdict.FLAT
    ]
    assert rising == [("rank 1", Quantity.RSS)]
    leak = trends["rank 1"][Quantity.RSS]
    assert leak is not None
    assert leak.drift == pytest.approx(100, rel=0.01)


def test_of_couriers_that_faults_put_in_each_others_place_the_one_that_was_seen_for_longest_is_judged() -> (
    None
):
    def couriers(leak_per_step: float) -> list[ProcessSample]:
        every = [replace(each, process="courier", pid=1) for each in samples(0, leak_per_step)]
        return [replace(each, pid=0, rss=each.step << 20) if each.step < 900 else each for each in every]

    found = {leak: trends_of([audit(0, 2000)], couriers(leak))["courier"] for leak in (0.0, 0.05)}
    assert {each.verdict for each in found[0.0].values() if each} == {Verdict.FLAT}
    assert found[0.0].keys() == {Quantity.RSS, Quantity.USS, Quantity.THREADS, Quantity.FDS}
    leak = found[0.05][Quantity.RSS]
    assert leak is not None
    assert (leak.verdict, leak.drift) == (Verdict.RISING, pytest.approx(100, rel=0.01))


def whole(tmp_path: Path) -> SoakReport:
    for rank in (0, 1):
        LedgerRun(tmp_path, rank=rank, world_size=2, num_rows=21).train_drawn(3)
    account = account_of(read_ledgers([tmp_path]))
    records = [audit(0, 2000), audit(1, 2000)]
    kinds, _ = kind_reports(records, [fault(FaultKind.SLOW_DISK, 100.2)], account)
    return SoakReport(
        num_planned=1,
        num_steps=2000,
        exit_status=0,
        left=0,
        kinds=kinds,
        trends=trends_of(records, samples(0, 0.0) + samples(1, 0.0)),
        account=account,
        lost=SampleCount.of(account.ranks).lost,
        trained_twice=num_trained_twice(read_ledgers([tmp_path])),
        num_disagreements=0,
    )


def test_a_sound_soak_has_no_problem_and_its_tables_say_so(tmp_path: Path) -> None:
    report = whole(tmp_path)
    assert report.problems(2000) == []
    text = "\n".join(part if isinstance(part, str) else part.markdown() for part in parts_of(report))
    assert "| slow disk | 1 | 0 |" in text
    assert "Samples lost: 0. Samples trained twice: 0. Things left: 0." in text
    assert text.count("| flat |") == 2 * len(Quantity)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_steps": 1990}, "steps trained: 1990 instead of 2000"),
        ({"exit_status": 1}, "exit status: 1 instead of 0"),
        ({"exit_status": None}, "exit status: None instead of 0"),
        ({"num_planned": 2}, "faults committed: 1 instead of 2"),
        ({"lost": 1}, "samples lost: 1"),
        ({"trained_twice": 3}, "samples trained twice: 3"),
        ({"left": 1}, "things left: 1"),
        ({"num_disagreements": 1}, "ranks disagree: 1"),
        ({"account": None}, "does not balance"),
        ({"broke": "step 7 begins: it did not happen"}, "step 7 begins"),
    ],
)
def test_whatever_must_not_be_is_a_problem(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (problem,) = replace(whole(tmp_path), **change).problems(2000)
    assert words in problem


def test_what_rises_is_a_problem(tmp_path: Path) -> None:
    trends = trends_of([audit(0, 2000)], samples(0, 0.05))
    assert replace(whole(tmp_path), trends=trends).problems(2000) == ["RSS, MiB of rank 0 rises"]


def test_a_long_soak_without_samples_shows_nothing_and_a_short_one_need_not(tmp_path: Path) -> None:
    report = replace(whole(tmp_path), trends=trends_of([audit(0, 2000)], []))
    missing = [f"{quantity} of rank 0: too few values" for quantity in list(Quantity)[:4]]
    assert report.problems(2000) == missing
    assert replace(report, num_steps=150).problems(150) == []


def test_a_sample_that_was_trained_twice_is_counted(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path, rank=0, world_size=1, num_rows=21)
    trained = run.train_drawn(2)
    assert num_trained_twice(read_ledgers([tmp_path])) == 0
    run.train(trained)
    assert num_trained_twice(read_ledgers([tmp_path])) == 2


# --- the command line -----------------------------------------------------------------------------
