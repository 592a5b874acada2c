from __future__ import annotations

import json
import logging
import math
import os
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from swift_stage2.telemetry.audit import AuditLog, audit_path, read_audit


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
