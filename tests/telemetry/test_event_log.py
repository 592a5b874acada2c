"""The log on disk: whole lines, a beginning of what happened, and nothing after the first that could not be written."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import threading
from pathlib import Path

import pytest
from ledger_run import LedgerRun
from small_disk import SmallDisk

from swift_stage2.errors import StorageFull, UserError
from swift_stage2.records import PostFailure
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import EventLog, EventTail, event_path, read_events, read_logs
from swift_stage2.telemetry.events import AnyEvent, Damaged, End, FailedPosts, Metrics, Start, Warned


def metrics(number: float) -> Metrics:
    return Metrics(step=1, numbers={"x": number}, activity_ns={})


def messages(path: Path) -> list[str]:
    return [event.message for event in read_events(path) if isinstance(event, Warned)]


def test_what_is_written_is_read_back_by_the_same_types(tmp_path: Path) -> None:
    failure = PostFailure("http://s", "lost", 2, "a\nb\u2028")
    failures = FailedPosts(failures=(failure,))
    path = event_path(tmp_path, 3)
    log = EventLog(path)
    for event in (failures, metrics(-math.inf)):
        assert log.write(event) > 0
    log.close(End())
    assert path == tmp_path / "events" / "rank3.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept, told, end = read_events(path)
    assert kept == failures
    assert isinstance(told, Metrics)
    assert told.numbers == {"x": -math.inf}
    assert isinstance(end, End)


def test_every_line_is_strict_json_whatever_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = EventLog(path)
    log.write(metrics(math.nan))
    log.write(Start(run_id="r", step=0, world_size=1, config={"path": tmp_path, "of": {1: object()}}))
    log.write(Warned(message="half a pair: \ud800"))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["numbers"] == {"x": "NaN"}
    assert lines[1]["config"]["path"] == str(tmp_path)
    assert messages(path) == ["half a pair: ?"]
    assert not any(isinstance(event, Damaged) for event in read_events(path))


@pytest.mark.parametrize("kept", [1, 7, 20, -1])
def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_process(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.jsonl"
    log = EventLog(path)
    log.write(Warned(message="whole"))
    whole = path.stat().st_size
    log.write(Warned(message="torn"))
    os.truncate(path, whole + kept if kept > 0 else path.stat().st_size + kept)
    assert messages(path) == ["whole"]
    EventLog(path).write(Warned(message="next"))
    assert messages(path) == ["whole", "next"]
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        *(
            (line, ["damaged"])
            for line in (b"x", b"\0\0", b"[]", b'{"kind":"losses"}', b'{"kind":"losses","step":0,')
        ),
        (b'{"kind":"taken","time":1}', []),  # another program's
        (b'{"kind":"end","time":2,"more":3}', ["end"]),
    ],
)
def test_a_whole_line_is_an_event_or_damage_unless_it_is_of_another_kind(
    tmp_path: Path, line: bytes, kinds: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n")
    assert [event.kind for event in read_events(path)] == kinds


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    log, begin = EventLog(tmp_path / "a.jsonl"), threading.Barrier(3)

    def work(name: str) -> None:
        begin.wait(10)
        for number in range(200):
            log.write(Warned(message=f"{name * 500} {number}"))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    told = messages(tmp_path / "a.jsonl")
    for name in "abc":
        numbers = [int(message.split()[1]) for message in told if message[0] == name]
        assert numbers == list(range(200))


def test_nothing_is_written_without_a_path_or_after_the_end(tmp_path: Path) -> None:
    assert EventLog(None).write(Warned(message="")) == 0

    class LateTeller(EventLog):
        def close(self, last: AnyEvent | None = None) -> None:
            self.write(Warned(message="of another thread, just before"))
            super().close(last)
            self.write(Warned(message="and after"))

    log = LateTeller(tmp_path / "a.jsonl")
    log.close(End())
    log.close(End())
    assert [event.kind for event in read_events(tmp_path / "a.jsonl")] == ["warning", "end"]


def test_a_reader_of_a_growing_log_gets_every_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = EventTail(path)
    assert list(tail.read()) == []
    log = EventLog(tmp_path / "b.jsonl")
    for number in range(3):
        log.write(metrics(number))
    content = (tmp_path / "b.jsonl").read_bytes()
    found: list[AnyEvent] = []
    for place in range(0, len(content), 11):
        with path.open("ab") as file:
            file.write(content[place : place + 11])
        found += tail.read()
    assert found == read_events(tmp_path / "b.jsonl")


def test_a_directory_without_logs_is_refused_and_told_where_they_are(tmp_path: Path) -> None:
    EventLog(event_path(tmp_path / "v0-DATE", 0)).write(End())
    with pytest.raises(UserError, match=r"name .*v0-DATE"):
        read_logs([tmp_path])


# --- a disk that takes no more -----------------------------------------------------------------------


def test_the_first_event_that_cannot_be_written_ends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a shorter one would fit and where there is room again: what is on disk is a beginning."""
    path, room, write = tmp_path / "a.jsonl", [100], os.write
    log = EventLog(path)

    def until_full(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", until_full)
        log.write(Warned(message="kept"))
        assert log.failure == ""
        assert log.write(Warned(message="x" * 100)) == 0
        assert log.failure == f"{path}: No space left on device"
    assert log.write(End()) == 0
    with pytest.raises(StorageFull, match=r"must be written, got .*a\.jsonl: No space left .*--resume"):
        log.flush_to_disk()
    log.close(End())
    assert [event.kind for event in read_events(path)] == ["warning"]


def test_an_account_on_a_full_disk_is_proven_up_to_where_it_was_full_and_goes_on_from_its_checkpoint(
    small_disk: SmallDisk,
) -> None:
    run = LedgerRun(small_disk.path, num_rows=300)
    run.train_drawn(2)
    state = run.save("s1")
    small_disk.fill()
    while not run.log.failure:
        run.train_drawn(2)
    run.end()
    told = account_of({0: run.events()})
    assert told.is_balanced
    assert not told.ranks[0].has_ended
    small_disk.make_room()
    resumed = LedgerRun(small_disk.path, num_rows=300, run_id="second", state=state)
    resumed.train_drawn(2)
    resumed.end()
    account = account_of({0: resumed.events()})
    assert account.is_balanced
    assert (account.ranks[0].trained, account.ranks[0].has_ended) == (4, True)


@pytest.mark.parametrize("where", ["full", "no directory"])
def test_a_log_that_cannot_even_begin_says_so(tmp_path: Path, where: str) -> None:
    (tmp_path / "events").write_text("a file where the directory should be")
    log = EventLog(Path("/dev/full") if where == "full" else event_path(tmp_path, 0))
    log.write(End())
    assert str(log._path) in log.failure
    log.close()
