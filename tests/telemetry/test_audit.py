from __future__ import annotations

import json
import logging
import math
import os
import stat
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
from ledger_run import LedgerRun
from small_disk import SmallDisk

from swift_stage2.telemetry.audit import GAP, AuditLog, audit_path
from swift_stage2.telemetry.ledger_account import account_of
from swift_stage2.telemetry.reading import read_audit


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    colour: Colour


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = audit_path(tmp_path, 3)
    log = AuditLog(path, 3, now=lambda: 12.5)
    log.write(
        "step", step=1, loss=0.25, plan=Colour.RED, point=Point(2, Colour.RED), lags={1: (2, None)}, ok=True
    )
    assert read_audit(tmp_path / "audit" / "rank3.jsonl") == [
        {
            "kind": "step",
            "time": 12.5,
            "rank": 3,
            "sequence": 0,
            "step": 1,
            "loss": 0.25,
            "plan": "red",
            "point": {"x": 2, "colour": "red"},
            "lags": {"1": [2, None]},
            "ok": True,
        }
    ]
    log.close()


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a.jsonl")
    log.write(
        "odd",
        nan=math.nan,
        inf=-math.inf,
        path=tmp_path,
        array=np.arange(3),
        number=np.float32(0.5),
        text="a\nb\u2028",
    )
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line, _room = (tmp_path / "a.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record["nan"] == "nan"
    assert record["inf"] == "-inf"
    assert record["path"] == str(tmp_path)
    assert record["array"] == [0, 1, 2]
    assert record["number"] == 0.5
    assert record["text"] == "a\nb\u2028"


def test_a_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a.jsonl")
    for number in range(3):
        log.write("step", step=number)
        assert [record["step"] for record in read_audit(tmp_path / "a.jsonl")] == list(range(number + 1))
    log.close()


@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_torn_last_line_is_dropped_and_stepped_over(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.jsonl"
    log = AuditLog(path)
    log.write("step", step=0)
    whole = path.stat().st_size
    log.write("step", step=1)
    log.close()
    os.truncate(path, whole + kept)
    assert [record["step"] for record in read_audit(path)] == [0]

    resumed = AuditLog(path)
    resumed.write("step", step=2)
    resumed.close()
    assert [record["step"] for record in read_audit(path)] == [0, 2]


def test_a_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = AuditLog(path)
    log.write("step", step=0)
    log.close()
    os.truncate(path, path.stat().st_size - 1)
    resumed = AuditLog(path)
    resumed.write("step", step=1)
    resumed.close()
    assert [record["step"] for record in read_audit(path)] == [0, 1]


def test_a_full_disk_gives_one_warning_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            log.write("step", step=number)
        log.close()
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "training goes on" in record.getMessage()


def test_a_directory_that_cannot_be_made_gives_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "audit").write_text("a file where the directory should be")
    log = AuditLog(audit_path(tmp_path, 0))
    log.write("step", step=0)
    log.write("step", step=1)
    log.close()
    assert len(caplog.records) == 1


def test_records_go_on_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills in the middle of a record, stays full for two more, and has room again."""
    path = tmp_path / "a.jsonl"
    log = AuditLog(path)
    log.write("step", step=0)
    real_write, room = os.write, [10]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as full_disk:
        full_disk.setattr(AuditLog, "put", staticmethod(write))
        for number in (1, 2, 3):
            log.write("step", step=number)
    log.write("step", step=4)
    log.close()
    records = [
        (record["kind"], record.get("step"), record.get("records_lost")) for record in read_audit(path)
    ]
    assert records == [("step", 0, None), ("gap", None, 3), ("step", 4, None)]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = AuditLog(path)
    start = threading.Barrier(3)

    def work(name: str) -> None:
        start.wait(10)
        for number in range(200):
            log.write("step", who=name, step=number, padding="x" * 500)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    log.close()
    records = read_audit(path)
    for name in "abc":
        assert [record["step"] for record in records if record["who"] == name] == list(range(200))


def test_nothing_is_written_without_a_path_or_after_close(tmp_path: Path) -> None:
    AuditLog(None).write("step", step=0)
    log = AuditLog(tmp_path / "a.jsonl")
    log.write("step", step=0)
    log.close()
    log.close()
    log.write("step", step=1)
    assert [record["step"] for record in read_audit(tmp_path / "a.jsonl")] == [0]


def test_a_disk_that_stays_full_to_the_end_leaves_no_balanced_ledger(small_disk: SmallDisk) -> None:
    run = LedgerRun(small_disk.path, num_rows=100)
    run.train_drawn(2)
    small_disk.fill()
    for _ in range(20):
        run.train_drawn(2)
    run.ledger.close()
    account = run.account()
    assert account.num_records_lost > 50
    assert not account_of({0: run.records()}).is_provable


def test_room_that_comes_back_puts_the_gap_where_it_was(small_disk: SmallDisk) -> None:
    log = AuditLog(small_disk.path / "a.jsonl")
    log.write("step", step=0)
    small_disk.fill()
    for number in range(1, 200):
        log.write("step", step=number, padding="x" * 50)
    small_disk.make_room()
    log.write("step", step=200)
    log.close()
    records = read_audit(small_disk.path / "a.jsonl")
    kept = [record["step"] for record in records if record["kind"] == "step"]
    (gap,) = [record for record in records if record["kind"] == GAP]
    assert records[-2] is gap
    assert kept[-1] == 200
    assert kept[-2] + 1 + gap["records_lost"] == 200


def test_a_process_that_cannot_even_begin_marks_the_one_before(small_disk: SmallDisk) -> None:
    first = LedgerRun(small_disk.path)
    first.train_drawn(2)
    state = first.save("s1")
    assert account_of({0: first.records()}).is_balanced
    first.ledger.close()
    with first.path.open("ab") as file:  # a disk gives room by the page
        file.write(b"\n" * (-first.path.stat().st_size % 4096))
    before = first.path.stat().st_size
    small_disk.fill()
    second = LedgerRun(small_disk.path, run_id="second", state=state)
    second.train_drawn(1)
    second.ledger.close()
    assert first.path.stat().st_size == before
    assert not account_of({0: first.records()}).is_provable


def test_a_later_process_adds_to_the_gap_of_the_one_before(small_disk: SmallDisk) -> None:
    path = small_disk.path / "a.jsonl"
    for num_lost in (20, 1):
        log = AuditLog(path)
        if not path.exists():
            log.write("step")
            small_disk.fill()
        for _ in range(num_lost):
            log.write("step", padding="x" * 10_000)
        log.close()
    (gap,) = [record for record in read_audit(path) if record["kind"] == GAP]
    assert gap["records_lost"] == 21


def test_a_disk_that_is_full_from_the_start_proves_nothing(small_disk: SmallDisk) -> None:
    small_disk.fill()
    run = LedgerRun(small_disk.path)
    run.train_drawn(2)
    run.ledger.close()
    assert not account_of({0: run.records()}).is_balanced


def test_a_loss_that_a_resume_made_void_takes_no_proof_away(small_disk: SmallDisk) -> None:
    first = LedgerRun(small_disk.path, num_rows=40)
    first.train_drawn(2)
    state = first.save("s1")
    small_disk.fill()
    for _ in range(10):
        first.train_drawn(2)
    small_disk.make_room()
    first.train_drawn(1)
    first.ledger.close()
    second = LedgerRun(small_disk.path, run_id="second", num_rows=40, state=state)
    second.train_drawn(2)
    second.ledger.close()
    assert account_of({0: second.records()}).is_balanced


@pytest.mark.parametrize("folder", ["audit", "ledger", "matches"])
def test_what_holds_data_is_the_owners_alone(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "rank0.jsonl"
    log = AuditLog(path)
    log.write("k", text="secret")
    log.flush_to_disk()
    log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_record_is_numbered(tmp_path: Path) -> None:
    for _process in range(2):
        log = AuditLog(tmp_path / "a.jsonl")
        for _ in range(3):
            log.write("k")
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["sequence"] for line in lines if line["kind"] == "k"] == [0, 1, 2, 0, 1, 2]
