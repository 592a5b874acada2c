from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_files import LOG_PROBS, RecordedRank, edit

from swift_stage2.errors import UserError
from swift_stage2.records import SampleKey, VersionSpan
from swift_stage2.replay.recorded_run import read_run
from swift_stage2.telemetry.event_log import event_path

HALF = b'{"kind":"losses","time":17952'


def test_steps_hold_plan_packs_completions_and_losses(tmp_path: Path) -> None:
    RecordedRank(tmp_path).train("ABA")
    run = read_run(tmp_path)
    assert (run.first_step, run.last_step, run.verdict(0, None).num_b_steps, run.world_size) == (0, 2, 1, 1)
    first, second, third = run.steps[0]
    assert [str(step.channel) for step in run.steps[0]] == ["A", "B", "A"]
    assert first.packs == third.packs == ()
    assert [pack.pack_id for pack in second.packs] == ["p1", "p2"]
    assert [pack.num_tokens for pack in second.packs] == [30, 30]
    assert second.losses == ((1.1).hex(), (1.2).hex())
    key = second.packs[1].completions[0].sample.key
    assert key == SampleKey(0, 2, key.index, 0)
    assert second.packs[1].completions[0].text == "[2]"
    assert second.packs[1].completions[0].token_ids == (5, 2)
    assert second.packs[1].completions[0].spans == (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))


@pytest.mark.parametrize("log_probs", [None, LOG_PROBS])
def test_columns_come_back_to_the_last_bit_and_are_absent_where_none_was_needed(
    tmp_path: Path, log_probs: tuple[float, ...] | None
) -> None:
    RecordedRank(tmp_path, log_probs=log_probs).train("B")
    (step,) = read_run(tmp_path).steps[0]
    assert {each.log_probs for pack in step.packs for each in pack.completions} == {log_probs}
    assert (b"log_probs" in event_path(tmp_path, 0).read_bytes()) == (log_probs is not None)


def test_a_killed_run_has_the_steps_that_every_rank_ended(tmp_path: Path) -> None:
    """Rank 0 has ended step 3 and both have planned step 4; lines are torn at the end."""
    ranks = [RecordedRank(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.train("AA")
    ranks[0].train("B")
    ranks[1].plan_b()
    for rank in (0, 1):
        with event_path(tmp_path, rank).open("ab") as file:
            file.write(HALF)
    run = read_run(tmp_path)
    assert (run.last_step, run.verdict(0, None).num_b_steps) == (1, 0)
    assert [len(steps) for steps in run.steps.values()] == [2, 2]


def test_of_a_resumed_run_the_last_process_counts(tmp_path: Path) -> None:
    first = RecordedRank(tmp_path, run_id="first", config={"swift": {"seed": 1}})
    first.train("AB")
    state = first.run.save("save")
    first.train("AA")
    resumed = RecordedRank(tmp_path, run_id="second", state=state, config={"swift": {"seed": 2}})
    resumed.train("A")
    run = read_run(tmp_path)
    assert (run.run_id, run.first_step, run.last_step) == ("second", 2, 2)
    assert run.config["swift"]["seed"] == 2


def test_a_process_that_some_rank_never_began_is_passed_over(tmp_path: Path) -> None:
    for rank in (0, 1):
        RecordedRank(tmp_path, rank=rank, world_size=2, run_id="first").train("A")
    RecordedRank(tmp_path, rank=0, world_size=2, run_id="second")
    assert read_run(tmp_path).run_id == "first"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), r"holds events/rank\*\.jsonl, got .*telemetry\.audit: true"),
        (lambda path: path.write_bytes(HALF), "a process that every rank began, got none"),
        (
            lambda path: edit(path, lambda line: None if line["kind"] == "losses" else line),
            "a step that was recorded and ended, got none .*telemetry.record: true",
        ),
        (
            lambda path: edit(path, lambda line: {"kind": "step"} if line["kind"] == "step" else line),
            "the log of rank 0 in .* is damaged",
        ),
    ],
)
def test_what_cannot_be_replayed_is_one_clear_line(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    RecordedRank(tmp_path).train("AB")
    spoil(event_path(tmp_path, 0))
    with pytest.raises(UserError, match=words):
        read_run(tmp_path)


def test_a_missing_ranks_log_is_named(tmp_path: Path) -> None:
    RecordedRank(tmp_path, world_size=2).train("A")
    with pytest.raises(UserError, match="all 2 ranks, got none of rank 1"):
        read_run(tmp_path)
