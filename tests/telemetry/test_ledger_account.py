"""Every rule of the ledger, broken once: the account must say so, name the samples, and say nothing else."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger_run import LedgerRun, again
from telemetry.test_match_log import rollout

from swift_stage2.records import MatchQuality, Sample, SampleKey, VersionSpan
from swift_stage2.telemetry.audit import AuditLog, Record
from swift_stage2.telemetry.ledger import Entry, Ledger, ReturnReason, UnusedReason
from swift_stage2.telemetry.ledger_account import RankAccount, account_of
from swift_stage2.telemetry.reading import read_audit, read_ledger

Spoil = Callable[[list[Record]], Any]


def _good_run(directory: Path) -> list[Record]:
    """Seven rows: two packs trained, one sample returned as stale and trained later, one given up, one in hand."""
    run = LedgerRun(directory)
    first = run.train_drawn(2)
    (late, bad) = run.draw(2)
    run.match([late])
    run.source.give_back([late], ReturnReason.STALE)
    run.source.settle_quarantined(bad, "bad_sample", "no box")
    run.save("s1")
    assert run.draw(1) == [again(late)]
    run.match([again(late)], version=2)
    run.pack([again(late)], "q")
    run.train([again(late)], "q", version=4)
    run.draw(1)
    run.save("s2")
    assert len(first) == 2
    return run.records()


def _account(records: list[Record]) -> RankAccount:
    (account,) = account_of({0: records}).ranks
    return account


def _rules(records: list[Record]) -> list[str]:
    return [violation.rule for violation in _account(records).violations]


def _at(records: list[Record], kind: str, number: int = 0) -> int:
    return [index for index, record in enumerate(records) if record["kind"] == kind][number]


def test_a_good_run_balances(tmp_path: Path) -> None:
    found = _account(_good_run(tmp_path))
    assert found.violations == ()
    assert (found.drawn, found.trained, found.quarantined) == (5, 3, {"bad_sample": 1})
    assert (found.in_hand, found.returned) == ({"drawn": 1}, {"stale": 1})
    assert (found.num_resumes, found.num_void, found.num_records_lost, found.taken_over) == (0, 0, 0, 0)


def _swap_row(records: list[Record]) -> None:
    records[_at(records, "trained")]["samples"][0][2] += 100


def _double(kind: str, number: int = 0) -> Spoil:
    def spoil(records: list[Record]) -> None:
        index = _at(records, kind, number)
        records.insert(index + 1, copy.deepcopy(records[index]))

    return spoil


def _without(kind: str, number: int = 0) -> Spoil:
    return lambda records: records.pop(_at(records, kind, number))


def _with(kind: str, number: int = 0, **fields: Any) -> Spoil:
    return lambda records: records[_at(records, kind, number)].update(fields)


def _drop_from_checkpoint(records: list[Record]) -> None:
    records[_at(records, "checkpoint")]["state"]["outstanding"].pop()


def _move_cursor(records: list[Record]) -> None:
    records[_at(records, "checkpoint")]["state"]["position"] += 1


def _train_the_quarantined(records: list[Record]) -> None:
    index = _at(records, "trained", 1)
    records[index]["samples"].append(records[_at(records, "quarantined")]["samples"][0])


def _new_before_returned(records: list[Record]) -> None:
    one, other = _at(records, "drawn", 2), _at(records, "drawn", 3)
    records[one : one + 1] = [records.pop(other), records[one]]


def _skip_a_position(records: list[Record]) -> None:
    records[_at(records, "drawn", 3)]["samples"][0][1] += 1


def _same_row_twice(records: list[Record]) -> None:
    row = records[_at(records, "drawn")]["samples"][0][2]
    records[_at(records, "drawn", 3)]["samples"][0][2] = row


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_double("trained"), "no sample is trained twice"),
        (_train_the_quarantined, "a sample that was quarantined is not trained after it"),
        (_without("drawn"), "a sample is drawn before it is sent"),
        (_without("trained"), "a checkpoint holds exactly the samples in hand"),
        (_without("quarantined"), "a checkpoint holds exactly the samples in hand"),
        (_without("returned"), "a checkpoint holds exactly the samples in hand"),
        (_without("packed"), "a sample is trained in the pack that it was packed into"),
        (_with("trained", pack_id="other"), "a sample is trained in the pack that it was packed into"),
        (_without("matched"), "a sample is packed once it was matched"),
        (_without("finished"), "a sample is matched once it was answered"),
        (_with("finished", end="lost"), "a sample is matched once it was answered"),
        (_without("sent"), "a sample is finished once it was sent"),
        (_double("drawn"), "a sample is redrawn once it had returned"),
        (_double("returned"), "a sample returns once it was drawn"),
        (_double("quarantined"), "a sample that was quarantined is not quarantined after it"),
        (_with("trained", 1, version=5), "nothing is trained that is older than the version window"),
        (_with("trained", 1, step=0), "steps that train only grow"),
        (_with("trained", step=1), "a checkpoint before a step is taken before that step trains"),
        (_drop_from_checkpoint, "a checkpoint holds exactly the samples in hand"),
        (_move_cursor, "a checkpoint's cursor stands behind the last new sample"),
        (_swap_row, "a sample keeps its row, and its attempt until it returns"),
        (_new_before_returned, "samples that returned are drawn before any new one"),
        (_skip_a_position, "every position of an epoch's shard is drawn once, in order"),
        (_same_row_twice, "no row is drawn at more positions of an epoch than it has"),
        (_without("start"), "a process's first record tells that it starts"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, spoil: Spoil, rule: str) -> None:
    records = _good_run(tmp_path)
    spoil(records)
    assert rule in _rules(records)
    assert not account_of({0: records}).is_balanced


def _resumed_run(directory: Path) -> list[Record]:
    """One sample whose rollout was aborted, resumed under the next version, and trained."""
    run = LedgerRun(directory)
    (key,) = keys = run.draw(1)
    run.ledger.sent(keys, server="http://s", seed=5, version=1)
    run.ledger.finished(keys, server="http://s", end="answered", seconds=0.25)
    spans = (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))
    run.ledger.cut(replace(rollout(0), sample=Sample(key, {}), token_ids=(7, 8, 9), spans=spans[:1]))
    run.ledger.sent(keys, server="http://t", seed=6, version=2)
    run.ledger.finished(keys, server="http://t", end="answered", seconds=0.25)
    whole = replace(rollout(0), sample=Sample(key, {}), spans=spans)
    run.ledger.matched(whole, MatchQuality(1, 1, 1, 0.5, 0, 0))
    run.pack(keys)
    run.train(keys)
    return run.records()


def test_a_resumed_rollout_has_one_end_and_keeps_its_spans(tmp_path: Path) -> None:
    records = _resumed_run(tmp_path)
    found = _account(records)
    assert found.violations == ()
    assert (found.drawn, found.trained, found.num_cut, found.returned) == (1, 1, 1, {})
    told = records[_at(records, "cut")]
    assert (told["num_tokens"], told["spans"]) == (3, [[1, 0, 3]])
    assert records[_at(records, "matched")]["spans"] == [[1, 0, 3], [2, 3, 5]]
    until_cut = records[: _at(records, "cut") + 1]
    assert _account(until_cut).in_hand == {"partial": 1}


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_without("cut"), "a sample is sent once it was drawn"),
        (_double("cut"), "a sample is cut once it was answered"),
        (_without("sent", 1), "a sample is finished once it was sent"),
        (_with("matched", version=2), "a rollout is as old as its oldest token"),
    ],
)
def test_a_broken_rule_of_resumed_rollouts_is_found(tmp_path: Path, spoil: Spoil, rule: str) -> None:
    records = _resumed_run(tmp_path)
    spoil(records)
    assert rule in _rules(records)


def _run_in_groups(directory: Path) -> list[Record]:
    """Three rows at three positions each: the first trained, the second compared in vain, of the third one dropped."""
    run = LedgerRun(directory, num_rows=3, num_generations=3)
    run.train_drawn(3)
    equal = run.draw(3)
    run.match(equal)
    run.source.settle_unused(equal, UnusedReason.NO_VARIANCE)
    late = run.draw(2)
    run.match(late)
    run.save("s1")
    run.pack(late[:1], "q")
    run.source.settle_unused(late[:1], UnusedReason.DROPPED)
    run.draw(1)
    return run.records()


def test_rows_that_stand_at_several_positions_balance(tmp_path: Path) -> None:
    records = _run_in_groups(tmp_path)
    found = _account(records)
    assert account_of({0: records}).is_balanced
    assert (found.drawn, found.trained, found.quarantined) == (9, 3, {})
    assert (found.unused, found.in_hand) == ({"dropped": 1, "no_variance": 3}, {"drawn": 1, "matched": 1})
    drawn = [sample for record in records if record["kind"] == "drawn" for sample in record["samples"]]
    assert [position for _, position, _, _ in drawn] == list(range(9))
    assert [drawn[n][2] == drawn[n + 1][2] for n in range(8)] == [True, True, False] * 2 + [True, True]


@pytest.mark.parametrize("num_generations", [1, 3])
def test_a_second_epoch_has_as_many_positions(tmp_path: Path, num_generations: int) -> None:
    run = LedgerRun(tmp_path, num_rows=2, num_generations=num_generations)
    for _ in range(2 * num_generations):
        run.train_drawn(2)
    records = run.records()
    assert account_of({0: records}).is_balanced
    for state in (record["state"] for record in records if record["kind"] == "start"):
        state["num_generations"] = num_generations + 1  # the second epoch begins too early for these
    assert "every position of an epoch's shard is drawn once, in order" in _rules(records)


def test_a_checkpoint_in_the_middle_of_a_group_opens_the_account(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path / "first", num_generations=3)
    first.train_drawn(1)
    first.draw(1)
    state = first.save("s1")
    second = LedgerRun(tmp_path / "second", num_generations=3, state=state)
    second.train_drawn(5)
    found = second.account()
    assert (found.violations, found.taken_over, found.drawn, found.trained) == ((), 1, 4, 5)


def _a_position_too_many(records: list[Record]) -> None:
    records[_at(records, "drawn", 1)]["samples"][0][2] = records[_at(records, "drawn")]["samples"][0][2]


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_double("unused"), "a sample that was unused is not unused after it"),
        (_without("unused"), "a checkpoint holds exactly the samples in hand"),
        (_without("matched", 3), "a sample is unused once it was matched"),
        (_without("drawn", 1), "a sample is drawn before it is unused"),
        (_a_position_too_many, "no row is drawn at more positions of an epoch than it has"),
        (
            lambda records: records[0]["state"].pop("num_generations"),
            "no row is drawn at more positions of an epoch",
        ),
    ],
)
def test_a_broken_rule_of_groups_is_found(tmp_path: Path, spoil: Spoil, rule: str) -> None:
    records = _run_in_groups(tmp_path)
    spoil(records)
    assert any(found.startswith(rule) for found in _rules(records)), _rules(records)


def test_a_violation_names_its_samples(tmp_path: Path) -> None:
    records = _good_run(tmp_path)
    trained = records[_at(records, "trained")]
    records.insert(_at(records, "trained") + 1, trained)
    (twice,) = [v for v in _account(records).violations if v.rule == "no sample is trained twice"]
    assert [list(sample) for sample in twice.samples] == trained["samples"]


def test_what_does_not_add_up_is_told_with_its_numbers(tmp_path: Path) -> None:
    records = _good_run(tmp_path)
    _double("trained")(records)
    assert any(
        "0 taken over + 5 drawn, 5 trained + 1 quarantined + 0 unused + 1 in hand" in r
        for r in _rules(records)
    )


def test_every_position_is_drawn_before_the_next_epoch(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path, num_rows=3)
    for _ in range(4):
        run.train_drawn(2)
    assert run.account().violations == ()
    records = run.records()
    for record in records:  # the second epoch begins one sample too early
        record["samples"] = [[1, 0, *s[2:]] if s[:2] == [0, 2] else s for s in record.get("samples", [])]
    assert "every position of an epoch's shard is drawn once, in order" in _rules(records)


# --- resumes -----------------------------------------------------------------------------------------


def test_what_did_not_survive_a_kill_is_void(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path, run_id="a")
    first.train_drawn(2)
    state = first.save("s1")
    first.train_drawn(2)
    first.draw(1)
    second = LedgerRun(tmp_path, run_id="b", state=state)
    second.train_drawn(3)
    found = second.account()
    assert found.violations == ()
    assert (found.drawn, found.trained, found.num_resumes, found.num_void) == (5, 5, 1, 2)


def test_a_resume_from_a_checkpoint_that_an_earlier_resume_had_left_behind(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path, run_id="a")
    early = first.save("s0")
    first.train_drawn(2)
    late = first.save("s1")
    LedgerRun(tmp_path, run_id="b", state=early).train_drawn(1)
    third = LedgerRun(tmp_path, run_id="c", state=late)
    found = third.account()
    assert found.violations == ()
    assert (found.trained, found.num_resumes, found.num_void) == (2, 1, 1)


def test_a_state_that_is_not_its_checkpoints_is_found(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path, run_id="a")
    first.draw(2)
    state = first.save("s1")
    LedgerRun(tmp_path, run_id="b", state=state.replace('"position": 2', '"position": 3'))
    assert _rules(first.records()) == ["a resumed process begins with the very state of its checkpoint"]


def test_a_checkpoint_from_elsewhere_opens_the_account(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path / "first", run_id="a")
    first.train_drawn(2)
    first.draw(2)
    second = LedgerRun(tmp_path / "second", run_id="b", state=first.save("s1"))
    second.train_drawn(3)
    found = second.account()
    assert found.violations == ()
    assert (found.taken_over, found.drawn, found.trained, found.num_resumes) == (2, 1, 3, 0)
    (joined,) = account_of({0: first.records() + second.records()}).ranks
    assert (joined.taken_over, joined.drawn, joined.trained, joined.num_resumes) == (0, 5, 5, 1)
    assert joined.violations == ()


def test_in_a_directory_used_again_only_the_new_run_counts(tmp_path: Path) -> None:
    LedgerRun(tmp_path, run_id="a").train_drawn(2)
    second = LedgerRun(tmp_path, run_id="b")
    second.draw(1)
    found = second.account()
    assert (found.drawn, found.trained, found.num_resumes, found.violations) == (1, 0, 0, ())


def test_ranks_that_resume_different_checkpoints_are_found(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, run_id="a") for rank in (0, 1)]
    states = [[run.save(name) for name in ("s1", "s2")] for run in ranks]
    for rank in (0, 1):
        LedgerRun(tmp_path, rank=rank, world_size=2, run_id="b", state=states[rank][rank])
    (mixed,) = account_of({rank: run.records() for rank, run in enumerate(ranks)}).violations
    assert mixed.rule == "all ranks resume the same checkpoints, rank 1 others than rank 0"


def test_a_rank_killed_before_it_began_anew_does_not_void_the_others(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, run_id="a") for rank in (0, 1)]
    states = [run.save("s1") for run in ranks]
    for run in ranks:
        run.train_drawn(1)
    LedgerRun(tmp_path, rank=1, world_size=2, run_id="b", state=states[1])
    account = account_of({rank: run.records() for rank, run in enumerate(ranks)})
    assert account.is_balanced
    assert [rank.trained for rank in account.ranks] == [1, 1]


def test_a_missing_ranks_ledger_is_named(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path, rank=1, world_size=3)
    (missing,) = account_of({1: run.records()}).violations
    assert missing.rule == "every rank has a ledger, rank 0, 2 of 3 has none"


def test_ranks_of_different_runs_have_nothing_to_balance(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, run_id=str(rank)) for rank in (0, 1)]
    (apart,) = account_of({rank: run.records() for rank, run in enumerate(ranks)}).violations
    assert apart.rule == "all ranks tell of a process that they began together"


# --- records that are not there ----------------------------------------------------------------------


def test_a_gap_makes_the_account_not_provable(tmp_path: Path) -> None:
    records = _good_run(tmp_path)
    records.insert(-1, {"kind": "gap", "records_lost": 3})
    account = account_of({0: records})
    assert account.num_violations == 0
    assert not account.is_provable
    assert not account.is_balanced
    assert account.ranks[0].num_records_lost == 3


def test_a_gap_in_what_is_void_does_no_harm(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path, run_id="a")
    state = first.save("s1")
    first.ledger._log.write("gap", records_lost=1)
    second = LedgerRun(tmp_path, run_id="b", state=state)
    assert account_of({0: second.records()}).is_balanced


def test_a_torn_last_line_is_dropped_and_one_in_the_middle_is_not(tmp_path: Path) -> None:
    records = _good_run(tmp_path)
    path = tmp_path / "ledger" / "rank0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    torn_at_the_end = account_of({0: read_ledger(path)})
    assert torn_at_the_end.is_balanced
    lines = whole.splitlines(keepends=True)
    lines[3] = lines[3][:-20] + b"\n"
    path.write_bytes(b"".join(lines))
    assert len(read_ledger(path)) == len(records)
    assert not account_of({0: read_ledger(path)}).is_provable


@pytest.mark.parametrize("damage", [b"x", b"\0\0", b"[]", b"7"])
def test_lines_that_no_kill_explains_are_lost_also_at_the_end(tmp_path: Path, damage: bytes) -> None:
    records = _good_run(tmp_path)
    path = tmp_path / "ledger" / "rank0.jsonl"
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if b'"gap"' not in line]
    path.write_bytes(b"".join([*lines[:-2], *(damage + line[1:] for line in lines[-2:])]))
    account = account_of({0: read_ledger(path)})
    assert (account.ranks[0].num_records_lost, account.is_provable) == (2, False)
    path.write_bytes(b"".join(damage + line[1:] for line in lines))
    assert account_of({0: read_ledger(path)}).ranks[0].num_records_lost == len(records)


def test_a_full_disk_raises_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(AuditLog(Path("/dev/full")))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ledger.write(Entry.DRAWN, [])
        ledger.flush_to_disk()
        ledger.close()
    assert len(caplog.records) == 1


def test_the_end_is_the_last_record_whatever_is_told_while_it_closes(tmp_path: Path) -> None:
    class Log(AuditLog):
        def close(self, **last: str) -> None:
            ledger.write(Entry.DRAWN, [SampleKey(0, 0, 0, 0)])  # of another thread, just before
            super().close(**last)

    ledger = Ledger(Log(tmp_path / "rank0.jsonl"))
    ledger.write(Entry.START, run_id="r", step=0, world_size=1, version_window=1, save_id=None, state={})
    ledger.close()
    kinds = [record["kind"] for record in read_audit(tmp_path / "rank0.jsonl")]
    assert kinds == ["start", "drawn", "end"]
