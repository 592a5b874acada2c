"""Rollouts of ledgers that grow: each once, none missing, with the answer that is its own."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from followed_run import FollowedRun, killed_and_resumed
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_stage2.errors import UserError
from swift_stage2.records import SampleKey
from swift_stage2.report.finished_rollouts import FinishedRollout, RunRollouts
from swift_stage2.telemetry import reading
from swift_stage2.telemetry.ledger import ReturnReason, ledger_path, matches_path

NUM_RANKS = 2


def read_whole(run_dir: Path) -> list[FinishedRollout]:
    return list(RunRollouts(run_dir).read())


def of_rank(rollouts: Iterable[FinishedRollout], rank: int) -> list[FinishedRollout]:
    return [each for each in rollouts if each.rank == rank]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Once, for all that only read it."""
    run_dir = tmp_path_factory.mktemp("run")
    return run_dir, killed_and_resumed(run_dir, NUM_RANKS)


def test_a_killed_and_resumed_runs_rollouts_are_told_once_each_with_their_own_answers(
    written: tuple[Path, list[str]],
) -> None:
    run_dir, told = written
    found = read_whole(run_dir)
    assert [each.text for rank in range(NUM_RANKS) for each in of_rank(found, rank)] == told
    assert len({each.rollout for each in found}) == len(found) == 18
    assert [each.time for each in found] == sorted(each.time for each in found)


def test_rollouts_of_all_ranks_are_told_by_time(tmp_path: Path) -> None:
    runs = [FollowedRun(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for rank in (1, 0, 0, 1):
        runs[rank].finish(1)
    assert [each.rank for each in read_whole(tmp_path)] == [1, 0, 0, 1]


PIECES = st.lists(st.tuples(st.integers(0, 2 * NUM_RANKS - 1), st.integers(1, 900)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(pieces=PIECES, chunk=st.sampled_from([1, 64, 1 << 20]))
def test_files_that_grow_by_pieces_cut_anywhere_are_read_as_whole_ones_are(
    written: tuple[Path, list[str]], pieces: list[tuple[int, int]], chunk: int
) -> None:
    whole_dir, _ = written
    paths = [path(Path(), rank) for rank in range(NUM_RANKS) for path in (ledger_path, matches_path)]
    found: list[FinishedRollout] = []
    with tempfile.TemporaryDirectory() as name, mock.patch.object(reading, "_CHUNK_BYTES", chunk):
        grown = Path(name)
        for path in paths:
            (grown / path).parent.mkdir(exist_ok=True)
        rollouts = RunRollouts(grown)
        for number, num_bytes in itertools.chain(pieces, ((each, 1 << 30) for each in range(len(paths)))):
            path = paths[number]
            with (whole_dir / path).open("rb") as source, (grown / path).open("ab") as target:
                source.seek(target.tell())
                target.write(source.read(num_bytes))
            found += rollouts.read()
        doubts = rollouts.doubts
    whole = read_whole(whole_dir)
    for rank in range(NUM_RANKS):
        pairs = zip(of_rank(found, rank), of_rank(whole, rank), strict=True)
        for one, other in pairs:
            # A match that came behind its ledger record is not waited for
            assert one.text in (
                None,
                other.text,
            )
            assert replace(one, text=None) == replace(other, text=None)
    assert doubts == []


def test_what_the_ledger_tells_of_a_rollout(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path, rank=1, world_size=2, run_id="a")
    (key,) = run.draw(1)
    run.match([key], version=4)
    (found,) = read_whole(tmp_path)
    assert replace(found, time=0.0) == FinishedRollout(
        rollout="a:1:0:0:0", time=0.0, run_id="a", rank=1, version=4,
        epoch=0, position=0, row=key.index, group=None, attempt=0, server="http://s", num_tokens=4, truncated=False,
        pairs=1, false=0, missed=0, mean_iou=0.5, likeness="IoU", reward={}, dropped={}, text=None,
    )  # fmt: skip


def test_rollouts_of_one_row_share_a_group_through_a_resume(tmp_path: Path) -> None:
    first = FollowedRun(tmp_path, rank=1, world_size=2, num_generations=3)
    first.train_finished(first.finish(2))
    state = first.save("s1")
    later = FollowedRun(tmp_path, rank=1, world_size=2, num_generations=3, run_id="later", state=state)
    later.finish(3)
    found = read_whole(tmp_path)
    assert [each.group for each in found] == ["1:0:0"] * 3 + ["1:0:1"] * 2
    assert len({(each.row, each.group) for each in found}) == 2


def test_a_redrawn_sample_is_another_rollout(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    (key,) = run.finish(1)
    run.source.give_back([key], ReturnReason.STALE)
    (again,) = run.finish(1)
    assert again == replace(key, attempt=1)
    assert [each.attempt for each in read_whole(tmp_path)] == [0, 1]


def test_the_recording_holds_the_answers_of_rows_whose_match_is_not_kept(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    first, second = run.draw(2)
    run.record_text([first])
    run.match([first, second])
    assert [each.text for each in read_whole(tmp_path)] == [run.text(first), None]


def test_no_answer_of_an_evaluation_or_of_another_process_is_taken(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path, run_id="a")
    keys = run.draw(2)
    run.write_text(keys, "evaluation")
    run.match(keys[:1])
    run.write_text(keys[1:])  # and is killed before the ledger hears of it
    resumed = FollowedRun(tmp_path, run_id="b", state=json.dumps(_at_the_beginning(run)))
    assert resumed.draw(2) == keys
    resumed.match(keys)
    assert [(each.run_id, each.text) for each in read_whole(tmp_path)] == [
        ("a", None),
        ("b", None),
        ("b", None),
    ]


def _at_the_beginning(run: FollowedRun) -> dict[str, object]:
    (start,) = [record for record in run.records() if record["kind"] == "start"]
    return {"step": 0, "save_id": None, "source": start["state"]}


def finished_run(run_dir: Path, ends: Iterable[bool]) -> None:
    ranks = list(ends)
    for rank, has_ended in enumerate(ranks):
        run = FollowedRun(run_dir, rank=rank, world_size=len(ranks))
        run.finish(1)
        if has_ended:
            run.ledger.close()


def doubts_of(run_dir: Path) -> list[str]:
    rollouts = RunRollouts(run_dir)
    assert list(rollouts.read())
    return list(rollouts.doubts)


def test_a_rank_without_an_end_is_named(tmp_path: Path) -> None:
    finished_run(tmp_path, [True, False])
    assert doubts_of(tmp_path) == ["rank 1 told no end: it was killed, or a full disk took no more"]


def test_a_rank_without_a_ledger_is_named(tmp_path: Path) -> None:
    finished_run(tmp_path, [True, True])
    ledger_path(tmp_path, 1).unlink()
    assert doubts_of(tmp_path) == ["rank 1 told no end: it was killed, or a full disk took no more"]


def test_the_end_of_an_earlier_process_is_not_the_last_ones(tmp_path: Path) -> None:
    finished_run(tmp_path, [True, True])
    FollowedRun(tmp_path, rank=0, world_size=2, run_id="later").ledger.close()
    told = "told no end: it was killed, or a full disk took no more"
    assert doubts_of(tmp_path) == [f"rank 1 {told}"]
    for rank in range(2):
        FollowedRun(tmp_path, rank=rank, world_size=2, run_id="latest")
    assert doubts_of(tmp_path) == [f"rank 0 {told}", f"rank 1 {told}"]


@pytest.mark.parametrize("damage", ["removed", "overwritten"])
def test_a_record_that_is_missing_or_damaged_is_told(tmp_path: Path, damage: str) -> None:
    finished_run(tmp_path, [True])
    path = ledger_path(tmp_path, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    (number,) = [number for number, line in enumerate(lines) if b'"kind":"finished"' in line]
    lines[number] = b"" if damage == "removed" else b"\0" * (len(lines[number]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    assert doubts_of(tmp_path) == ["rank 0: 1 records of its ledger are missing or damaged"]


def test_a_ledger_of_no_rank_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path, [True])
    shutil.copy(ledger_path(tmp_path, 0), tmp_path / "ledger" / "rank0-copy.jsonl")
    with pytest.raises(
        UserError, match=r"a ledger is rank<number>\.jsonl and can be read, got path=.*rank0-copy"
    ):
        read_whole(tmp_path)


def test_a_ledger_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path, [True])
    ledger_path(tmp_path, 0).unlink()
    ledger_path(tmp_path, 0).mkdir()
    with pytest.raises(UserError, match="make it readable"):
        read_whole(tmp_path)


def test_reading_holds_a_chunk_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first lines of a long run come at once."""
    run = FollowedRun(tmp_path, num_rows=200)
    keys: list[SampleKey] = run.finish(200)
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 256)
    tail = reading.AuditTail(run.path)
    first = next(record for record in tail.stream() if record["kind"] == "matched")
    assert first["samples"] == [keys[0].entry]
    assert tail._offset < run.path.stat().st_size / 2
