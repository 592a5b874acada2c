"""A ledger is compared with the audit and with the checkpoints on disk; what it lacks is told by rank and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ledger_run import LedgerRun

from swift_stage2.report.run_data import Checkpoint, doubts_of
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.ledger_account import RunAccount, account_of
from swift_stage2.telemetry.reading import effective_histories


def _run(directory: Path) -> LedgerRun:
    run = LedgerRun(directory, num_rows=20)
    for _ in range(3):
        run.train_drawn(2)
    run.save("s1")
    run.ledger.close()
    return run


def _account(run: LedgerRun, *, without: int = 0, **witness: Any) -> RunAccount:
    records = run.records()
    return _compared(records[: len(records) - without], **witness)


def _compared(records: list[Record], **witness: Any) -> RunAccount:
    histories = effective_histories({0: records})
    return account_of({0: records}, tuple(doubts_of(0, histories[0], records, **witness)))


def test_witnesses_that_agree_leave_the_proof(tmp_path: Path) -> None:
    run = _run(tmp_path)
    state = run.records()[-2]["state"]
    saved = [Checkpoint("checkpoint-3", 3, "s1", state)]
    assert _account(run, packs={(0, "p"), (2, "p")}, ended_run="run", checkpoints=saved).is_balanced


def test_a_pack_that_the_audit_tells_of_must_be_there(tmp_path: Path) -> None:
    account = _account(_run(tmp_path), packs={(0, "p"), (7, "q"), (9, "q")})
    assert account.num_violations == 0
    assert not account.is_provable
    assert account.doubts == (
        "rank 0: the audit tells of 3 packs of channel B that steps trained, the ledger lacks 2 of them, of steps 7, 9",
    )


def test_an_end_that_the_audit_tells_must_be_there(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert _account(run, ended_run="another").is_provable
    assert _account(run, without=1).is_provable  # killed
    (doubt,) = _account(run, ended_run="run", without=1).doubts
    assert "the audit tells that the run ended in order, the ledger ends before that" in doubt


def test_a_ledger_of_an_earlier_release_tells_no_end(tmp_path: Path) -> None:
    records = [
        {name: value for name, value in record.items() if name != "sequence"}
        for record in _run(tmp_path).records()
        if record["kind"] != Entry.END
    ]
    assert _compared(records, ended_run="run").is_balanced


def test_a_checkpoint_on_disk_must_be_told_of_and_hold_the_same(tmp_path: Path) -> None:
    run = _run(tmp_path)
    state = run.records()[-2]["state"]
    (doubt,) = _account(run, checkpoints=[Checkpoint("checkpoint-5", 5, "s2", state)]).doubts
    assert doubt == "rank 0: checkpoint-5 is of a save that the ledger does not tell of"
    other = dict(state) | {"position": 1}
    (doubt,) = _account(run, checkpoints=[Checkpoint("checkpoint-3", 3, "s1", other)]).doubts
    assert doubt == "rank 0: checkpoint-3 holds other samples in hand than the ledger tells"


def test_a_checkpoint_that_the_run_began_with_is_elsewheres(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path / "a", num_rows=20)
    first.train_drawn(2)
    run = LedgerRun(tmp_path / "b", num_rows=20, run_id="b", state=first.save("s1"))
    run.train_drawn(2)
    begun = Checkpoint("checkpoint-1", 1, "s1", {})
    assert _compared(run.records(), checkpoints=[begun]).is_balanced
