from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded_files import LOG_PROBS, RecordedRank, edit

from swift_stage2.errors import UserError
from swift_stage2.records import SampleKey, VersionSpan
from swift_stage2.replay.recorded_run import read_run
from swift_stage2.telemetry.ledger import ledger_path, record_path

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
    assert (b"log_probs" in record_path(tmp_path, 0).read_bytes()) == (log_probs is not None)


@pytest.mark.parametrize("damaged", [[-0.1], [-0.1, "x"], [-0.1, None], "x"])
def test_a_column_that_is_not_whole_is_damage(tmp_path: Path, damaged: Any) -> None:
    RecordedRank(tmp_path, log_probs=LOG_PROBS).train("B")
    edit(
        record_path(tmp_path, 0),
        lambda line: line | {"log_probs": damaged} if line["kind"] == "completion" else line,
    )
    with pytest.raises(UserError, match="is damaged: a line of kind 'completion'"):
        read_run(tmp_path)


def test_a_killed_run_has_the_steps_that_every_rank_ended(tmp_path: Path) -> None:
    """Rank 0 has ended step 3 and both have planned step 4; lines are torn at the end."""
    ranks = [RecordedRank(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.train("AA")
    ranks[0].train("B")
    ranks[1].plan_b()
    for path in (record_path(tmp_path, 0), record_path(tmp_path, 1), ledger_path(tmp_path, 1)):
        with path.open("ab") as file:
            file.write(HALF)
    run = read_run(tmp_path)
    assert (run.last_step, run.unfinished_step, run.verdict(0, None).num_b_steps) == (1, None, 0)
    assert [len(steps) for steps in run.steps.values()] == [2, 2]
    hung = read_run(tmp_path, unfinished=True)
    assert (hung.last_step, hung.unfinished_step, hung.verdict(0, None).num_b_steps) == (1, 2, 0)
    assert all(steps[-1].losses is None and len(steps[-1].packs) == 2 for steps in hung.steps.values())


def test_a_step_that_not_every_rank_planned_is_not_taken(tmp_path: Path) -> None:
    ranks = [RecordedRank(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.train("A")
    ranks[0].plan_a()
    assert read_run(tmp_path, unfinished=True).unfinished_step is None


def test_of_a_resumed_run_the_last_process_counts(tmp_path: Path) -> None:
    first = RecordedRank(tmp_path, run_id="first", config={"swift": {"seed": 1}})
    first.train("AB")
    state = first.ledger.save("save")
    first.train("AA")
    resumed = RecordedRank(tmp_path, run_id="second", state=state, config={"swift": {"seed": 2}})
    resumed.train("A")
    run = read_run(tmp_path)
    assert (run.run_id, run.first_step, run.last_step, run.save_id) == ("second", 2, 2, "save")
    assert run.config["swift"]["seed"] == 2


def test_a_process_that_some_rank_never_began_is_passed_over(tmp_path: Path) -> None:
    for rank in (0, 1):
        RecordedRank(tmp_path, rank=rank, world_size=2, run_id="first").train("A")
    RecordedRank(tmp_path, rank=0, world_size=2, run_id="second")
    assert read_run(tmp_path).run_id == "first"


def test_without_channel_b_no_ledger_is_needed(tmp_path: Path) -> None:
    RecordedRank(tmp_path).train("AA")
    ledger_path(tmp_path, 0).unlink()
    assert read_run(tmp_path).last_step == 1


def test_no_record_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"record/rank0\.jsonl, got no such file; .*telemetry\.record: true"):
        read_run(tmp_path)


def test_a_missing_ranks_record_is_named(tmp_path: Path) -> None:
    RecordedRank(tmp_path, world_size=2).train("A")
    with pytest.raises(UserError, match=r"all 2 ranks, got none of rank 1; bring .*rank1\.jsonl"):
        read_run(tmp_path)


def test_a_run_that_ended_before_its_first_step_did_is_refused(tmp_path: Path) -> None:
    RecordedRank(tmp_path).plan_a()
    with pytest.raises(UserError, match="ended before its first step did"):
        read_run(tmp_path)


def test_a_torn_file_without_a_start_is_refused(tmp_path: Path) -> None:
    record_path(tmp_path, 0).parent.mkdir()
    record_path(tmp_path, 0).write_bytes(HALF)
    with pytest.raises(UserError, match="no process that began"):
        read_run(tmp_path)


def test_a_hole_is_not_taken_for_the_end(tmp_path: Path) -> None:
    RecordedRank(tmp_path).train("AAAA")
    edit(record_path(tmp_path, 0), lambda line: None if line.get("step") == 1 else line)
    with pytest.raises(UserError, match="a line of step 1 is lost, though rank 0 tells of later steps"):
        read_run(tmp_path)


@pytest.mark.parametrize(("channels", "number", "to"), [("AB", 1, "A"), ("AB", 0, "B")])
def test_a_changed_channel_is_found(tmp_path: Path, channels: str, number: int, to: str) -> None:
    RecordedRank(tmp_path).train(channels)

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"channel": to} if line["kind"] == "step" and line["step"] == number else line

    edit(record_path(tmp_path, 0), change)
    with pytest.raises(UserError, match=f"record and ledger of rank 0 disagree about step {number}"):
        read_run(tmp_path)


def test_ranks_that_trained_different_channels_are_refused(tmp_path: Path) -> None:
    RecordedRank(tmp_path, rank=0, world_size=2).train("AB")
    RecordedRank(tmp_path, rank=1, world_size=2).train("AA")
    with pytest.raises(UserError, match="got step 1: B on rank 0, A on rank 1"):
        read_run(tmp_path)


def test_a_lost_completion_is_named(tmp_path: Path) -> None:
    RecordedRank(tmp_path).train("B")
    edit(
        record_path(tmp_path, 0),
        lambda line: None if line["kind"] == "completion" and line["sample"][1] == 3 else line,
    )
    with pytest.raises(
        UserError, match=r"lacks what a server said to sample 0:3:\d+:0, which step 0 trained"
    ):
        read_run(tmp_path)


def test_a_pack_that_the_ledger_does_not_know_is_named(tmp_path: Path) -> None:
    RecordedRank(tmp_path).train("B")
    edit(ledger_path(tmp_path, 0), lambda line: None if line.get("kind") == "packed" else line)
    with pytest.raises(UserError, match="tells nothing of pack p1, which step 0 trained"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("start", "world_size"),
        ("completion", "sample"),
        ("step", "channel"),
        ("losses", "losses"),
        ("step", "kind"),
    ],
)
def test_a_line_without_what_its_kind_has_is_one_line(tmp_path: Path, kind: str, field: str) -> None:
    RecordedRank(tmp_path).train("AB")

    def damage(line: dict[str, Any]) -> dict[str, Any]:
        if line["kind"] == kind:
            line[field] = "stray"
        return line

    edit(record_path(tmp_path, 0), damage)
    with pytest.raises(UserError, match=r"rank0\.jsonl is damaged: a line of kind") as told:
        read_run(tmp_path)
    assert "\n" not in str(told.value)
