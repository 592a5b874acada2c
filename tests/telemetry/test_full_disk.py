"""Records that a real full disk does not take are told, whether there is room again or not."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from ledger_run import LedgerRun
from small_disk import SmallDisk

from swift_stage2.telemetry.audit import GAP, AuditLog, read_audit
from swift_stage2.telemetry.ledger_account import account_of


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
