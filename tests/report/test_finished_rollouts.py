"""Rollouts of logs that grow: each once, none missing, with the answer that is its own."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from followed_run import FollowedRun, killed_and_resumed
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_stage2.records import ReturnReason
from swift_stage2.report.rollouts_command import FinishedRollout, RunRollouts
from swift_stage2.telemetry.event_log import event_path

NUM_RANKS = 2
NO_END = "told no end: it was killed, or a full disk took no more"


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
    assert len({each.fields["rollout"] for each in found}) == len(found) == 18
    assert [each.matched.time for each in found] == sorted(each.matched.time for each in found)


PIECES = st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), st.integers(1, 900)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(pieces=PIECES)
def test_logs_that_grow_by_pieces_cut_anywhere_are_read_as_whole_ones_are(
    written: tuple[Path, list[str]], pieces: list[tuple[int, int]]
) -> None:
    whole_dir, _ = written
    found: list[FinishedRollout] = []
    with tempfile.TemporaryDirectory() as name:
        grown = Path(name)
        (grown / "events").mkdir()
        rollouts = RunRollouts(grown)
        for rank, num_bytes in itertools.chain(pieces, ((rank, 1 << 30) for rank in range(NUM_RANKS))):
            with (
                event_path(whole_dir, rank).open("rb") as source,
                event_path(grown, rank).open("ab") as target,
            ):
                source.seek(target.tell())
                target.write(source.read(num_bytes))
            found += rollouts.read()
        doubts = rollouts.doubts
    whole = read_whole(whole_dir)
    assert [of_rank(found, rank) for rank in range(NUM_RANKS)] == [
        of_rank(whole, rank) for rank in range(NUM_RANKS)
    ]
    assert doubts == []


def test_what_the_log_tells_of_a_rollout(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path, rank=1, world_size=2, run_id="a", similarity="closeness")
    (key,) = run.draw(1)
    run.ask([key])
    run.matched(key, 4, reward={"total": 0.5})
    (found,) = read_whole(tmp_path)
    assert found.fields | {"time": 0.0} == {
        "rollout": "a:1:0:0:0", "time": 0.0, "run_id": "a", "rank": 1, "version": 4, "epoch": 0, "position": 0,
        "row": key.index, "attempt": 0, "server": "http://s", "num_tokens": 4, "truncated": False, "pairs": 1,
        "false": 0, "missed": 0, "mean_iou": 0.5, "similarity": "closeness", "dropped": {}, "reward": {"total": 0.5},
        "text": None,
    }  # fmt: skip
    assert ", 0 missed, closeness 0.50, reward 0.50" in found.line


def test_rollouts_of_one_row_share_a_group_through_a_resume(tmp_path: Path) -> None:
    first = FollowedRun(tmp_path, rank=1, world_size=2, num_generations=3)
    keys = first.finish(2)
    first.pack(keys)
    first.train(keys)
    state = first.save("s1")
    later = FollowedRun(tmp_path, rank=1, world_size=2, num_generations=3, run_id="later", state=state)
    later.finish(3)
    found = read_whole(tmp_path)
    assert [each.group for each in found] == ["1:0:0"] * 3 + ["1:0:1"] * 2
    assert len({(each.key[2], each.group) for each in found}) == 2
    assert "  group 1:0:0  attempt 0  " in found[0].line


def test_a_redrawn_sample_is_another_rollout(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    (key,) = run.finish(1)
    run.source.give_back([key], ReturnReason.STALE)
    (again,) = run.finish(1)
    assert again == key._replace(attempt=1)
    assert [each.key[3] for each in read_whole(tmp_path)] == [0, 1]


def test_a_recording_holds_the_answers_of_rows_whose_match_is_not_kept(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    first, second = run.draw(2)
    run.record_text([first])
    run.match([first, second])
    assert [each.text for each in read_whole(tmp_path)] == [run.text(first), None]


def test_no_answer_of_another_process_is_taken(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path, run_id="a")
    state = json.dumps({"step": 0, "save_id": None, "source": run.source.state_dict()})
    keys = run.draw(1)
    run.write_text(keys)  # and is killed before that is matched
    resumed = FollowedRun(tmp_path, run_id="b", state=state)
    assert resumed.draw(1) == keys
    resumed.match(keys)
    found = [(each.start.run_id, each.text) for each in read_whole(tmp_path)]
    assert found == [("b", None)]


def doubts_of(run_dir: Path, *ends: bool) -> list[str]:
    """Of a run whose ranks told an end, or did not."""
    for rank, has_ended in enumerate(ends):
        run = FollowedRun(run_dir, rank=rank, world_size=2)
        run.finish(1)
        if has_ended:
            run.end()
    rollouts = RunRollouts(run_dir)
    assert list(rollouts.read())
    return list(rollouts.doubts)


@pytest.mark.parametrize("ends", [(True, False), (True,)])
def test_a_rank_without_an_end_or_a_log_is_named(tmp_path: Path, ends: tuple[bool, ...]) -> None:
    assert doubts_of(tmp_path, *ends) == [f"rank 1 {NO_END}"]


def test_the_end_of_an_earlier_process_is_not_the_last_ones(tmp_path: Path) -> None:
    assert doubts_of(tmp_path, True, True) == []
    FollowedRun(tmp_path, rank=0, world_size=2, run_id="later").end()
    assert doubts_of(tmp_path) == [f"rank 1 {NO_END}"]
