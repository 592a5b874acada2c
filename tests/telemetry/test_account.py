"""Every rule of the account, broken once: the account must say so, name the samples, and say nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import matched_of
from ledger_run import LedgerRun, again

from swift_stage2.records import MatchQuality, ReturnReason, Rollout, Sample, UnusedReason, VersionSpan
from swift_stage2.telemetry.account import RankAccount, account_of
from swift_stage2.telemetry.events import AnyEvent

Spoil = Callable[[list[AnyEvent]], Any]


def _good_run(directory: Path) -> list[AnyEvent]:
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
    return run.events()


def _run_over_versions(directory: Path) -> list[AnyEvent]:
    """One sample under whose rollout new weights came, and that was trained."""
    run = LedgerRun(directory)
    (key,) = keys = run.draw(1)
    run.ask(keys)
    spans = (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))
    rollout = Rollout(Sample(key, {}), "said", (7, 8, 9), (2,), True, 3, "http://s", spans)
    run.log.write(matched_of(rollout, MatchQuality(1, 1, 1, 0.5, 0, 0)))
    run.pack(keys)
    run.train(keys)
    return run.events()


def _run_in_groups(directory: Path) -> list[AnyEvent]:
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
    return run.events()


def _account(records: list[AnyEvent]) -> RankAccount:
    (account,) = account_of({0: records}).ranks
    return account


def _rules(records: list[AnyEvent]) -> list[str]:
    return [violation.rule for violation in _account(records).violations]


def _at(records: list[AnyEvent], kind: str, number: int = 0) -> int:
    return [index for index, record in enumerate(records) if record.kind == kind][number]


def test_a_good_run_balances(tmp_path: Path) -> None:
    found = _account(_good_run(tmp_path))
    assert found.violations == ()
    assert (found.drawn, found.trained, found.quarantined) == (5, 3, {"bad_sample": 1})
    assert (found.in_hand, found.returned) == ({"drawn": 1}, {"stale": 1})
    assert (found.num_resumes, found.num_void, found.num_damaged, found.taken_over) == (0, 0, 0, 0)


def _double(kind: str, number: int = 0) -> Spoil:
    def spoil(records: list[AnyEvent]) -> None:
        index = _at(records, kind, number)
        records.insert(index + 1, records[index])

    return spoil


def _without(kind: str, number: int = 0) -> Spoil:
    return lambda records: records.pop(_at(records, kind, number))


def _with(kind: str, number: int = 0, **fields: Any) -> Spoil:
    """``fields`` of one event become others."""

    def spoil(records: list[AnyEvent]) -> None:
        index = _at(records, kind, number)
        records[index] = records[index].model_copy(update=fields)

    return spoil


def _with_state(kind: str, **changes: Any) -> Spoil:
    """``changes`` gives fields of the first state of that kind from what they were."""

    def spoil(records: list[AnyEvent]) -> None:
        state = records[_at(records, kind)].state  # type: ignore[union-attr]
        fields = {name: change(getattr(state, name)) for name, change in changes.items()}
        _with(kind, state=state.model_copy(update=fields))(records)  # type: ignore[union-attr]

    return spoil


def _with_key(
    kind: str, number: int, change: Callable[[list[AnyEvent], tuple[int, ...]], tuple[int, ...]]
) -> Spoil:
    """The first sample of one event becomes another."""

    def spoil(records: list[AnyEvent]) -> None:
        first, *rest = records[_at(records, kind, number)].samples  # type: ignore[union-attr]
        _with(kind, number, samples=(change(records, first), *rest))(records)

    return spoil


def _first_row(records: list[AnyEvent], key: tuple[int, ...]) -> tuple[int, ...]:
    """The key at the row that was drawn first."""
    return (*key[:2], records[_at(records, "drawn")].samples[0][2], key[3])  # type: ignore[union-attr]


def _train_the_quarantined(records: list[AnyEvent]) -> None:
    quarantined = records[_at(records, "quarantined")].samples  # type: ignore[union-attr]
    trained = records[_at(records, "trained", 1)].samples  # type: ignore[union-attr]
    _with("trained", 1, samples=(*trained, *quarantined))(records)


def _new_before_returned(records: list[AnyEvent]) -> None:
    one, other = _at(records, "drawn", 2), _at(records, "drawn", 3)
    records[one : one + 1] = [records.pop(other), records[one]]


IN_HAND = "a checkpoint holds exactly the samples in hand"
PACKED = "a sample is trained in the pack that it was packed into"
ANSWERED = "a sample is matched once it was answered"
IN_ORDER = "every position of an epoch's shard is drawn once, in order"
POSITIONS = "no row is drawn at more positions of an epoch than it has"


@pytest.mark.parametrize(
    ("run", "spoil", "rule"),
    [
        (_good_run, _double("trained"), "no sample is trained twice"),
        (_good_run, _train_the_quarantined, "a sample that was quarantined is not trained after it"),
        (_good_run, _without("drawn"), "a sample is drawn before it is sent"),
        *((_good_run, _without(kind), IN_HAND) for kind in ("trained", "quarantined", "returned")),
        (_good_run, _without("packed"), PACKED),
        (_good_run, _with("trained", pack_id="other"), PACKED),
        (_good_run, _without("matched"), "a sample is packed once it was matched"),
        (_good_run, _without("finished"), ANSWERED),
        (_good_run, _with("finished", end="lost"), ANSWERED),
        (_good_run, _without("sent"), "a sample is finished once it was sent"),
        (_good_run, _double("drawn"), "a sample is redrawn once it had returned"),
        (_good_run, _double("returned"), "a sample returns once it was drawn"),
        (_good_run, _double("quarantined"), "a sample that was quarantined is not quarantined after it"),
        (
            _good_run,
            _with("trained", 1, version=5),
            "nothing is trained that is older than the version window",
        ),
        (_good_run, _with("trained", 1, step=0), "steps that train only grow"),
        (_good_run, _with("trained", step=1), "a checkpoint before a step is taken before that step trains"),
        (_good_run, _with_state("checkpoint", outstanding=lambda keys: keys[:-1]), IN_HAND),
        (
            _good_run,
            _with_state("checkpoint", position=lambda at: at + 1),
            "a checkpoint's cursor stands behind the last new sample",
        ),
        (
            _good_run,
            _with_key("trained", 0, lambda _, key: (*key[:2], key[2] + 100, key[3])),
            "a sample keeps its row, and its attempt until it returns",
        ),
        (_good_run, _new_before_returned, "samples that returned are drawn before any new one"),
        (_good_run, _with_key("drawn", 3, lambda _, key: (key[0], key[1] + 1, *key[2:])), IN_ORDER),
        (_good_run, _with_key("drawn", 3, lambda _, key: (1, 0, *key[2:])), IN_ORDER),
        (_good_run, _with_key("drawn", 3, _first_row), POSITIONS),
        (_good_run, _without("start"), "a process's first record tells that it starts"),
        (_run_over_versions, _with("matched", version=2), "a rollout is as old as its oldest token"),
        (_run_in_groups, _double("unused"), "a sample that was unused is not unused after it"),
        (_run_in_groups, _without("unused"), IN_HAND),
        (_run_in_groups, _without("matched", 3), "a sample is unused once it was matched"),
        (_run_in_groups, _without("drawn", 1), "a sample is drawn before it is unused"),
        (_run_in_groups, _with_key("drawn", 1, _first_row), POSITIONS),
        (_run_in_groups, _with_state("start", num_generations=lambda _: 1), POSITIONS),
    ],
)
def test_a_broken_rule_is_found(
    tmp_path: Path, run: Callable[[Path], list[AnyEvent]], spoil: Spoil, rule: str
) -> None:
    records = run(tmp_path)
    spoil(records)
    assert rule in _rules(records)
    assert not account_of({0: records}).is_balanced


def test_rows_that_stand_at_several_positions_balance(tmp_path: Path) -> None:
    records = _run_in_groups(tmp_path)
    found = _account(records)
    assert account_of({0: records}).is_balanced
    assert (found.drawn, found.trained, found.quarantined) == (9, 3, {})
    assert (found.unused, found.in_hand) == ({"dropped": 1, "no_variance": 3}, {"drawn": 1, "matched": 1})
    drawn = [key for record in records if record.kind == "drawn" for key in record.samples]  # type: ignore[union-attr]
    assert [position for _, position, _, _ in drawn] == list(range(9))
    assert [drawn[n][2] == drawn[n + 1][2] for n in range(8)] == [True, True, False] * 2 + [True, True]


@pytest.mark.parametrize("num_generations", [1, 3])
def test_a_second_epoch_has_as_many_positions(tmp_path: Path, num_generations: int) -> None:
    run = LedgerRun(tmp_path, num_rows=2, num_generations=num_generations)
    for _ in range(2 * num_generations):
        run.train_drawn(2)
    records = run.events()
    assert account_of({0: records}).is_balanced
    _with_state("start", num_generations=lambda _: num_generations + 1)(
        records
    )  # their second epoch begins too early
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


# --- resumes -----------------------------------------------------------------------------------------


def test_a_state_that_is_not_its_checkpoints_is_found(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path, run_id="a")
    first.draw(2)
    state = first.save("s1")
    LedgerRun(tmp_path, run_id="b", state=state.replace('"position": 2', '"position": 3'))
    assert _rules(first.events()) == ["a resumed process begins with the very state of its checkpoint"]


def test_a_checkpoint_from_elsewhere_opens_the_account(tmp_path: Path) -> None:
    first = LedgerRun(tmp_path / "first", run_id="a")
    first.train_drawn(2)
    first.draw(2)
    second = LedgerRun(tmp_path / "second", run_id="b", state=first.save("s1"))
    second.train_drawn(3)
    found = second.account()
    assert found.violations == ()
    assert (found.taken_over, found.drawn, found.trained, found.num_resumes) == (2, 1, 3, 0)
    (joined,) = account_of({0: first.events() + second.events()}).ranks
    assert (joined.taken_over, joined.drawn, joined.trained, joined.num_resumes) == (0, 5, 5, 1)
    assert joined.violations == ()


def test_ranks_that_resume_different_checkpoints_are_found(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, run_id="a") for rank in (0, 1)]
    states = [[run.save(name) for name in ("s1", "s2")] for run in ranks]
    for rank in (0, 1):
        LedgerRun(tmp_path, rank=rank, world_size=2, run_id="b", state=states[rank][rank])
    (mixed,) = account_of({rank: run.events() for rank, run in enumerate(ranks)}).violations
    assert mixed.rule == "all ranks resume the same checkpoints, rank 1 others than rank 0"


def test_a_rank_killed_before_it_began_anew_does_not_void_the_others(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, run_id="a") for rank in (0, 1)]
    states = [run.save("s1") for run in ranks]
    for run in ranks:
        run.train_drawn(1)
    LedgerRun(tmp_path, rank=1, world_size=2, run_id="b", state=states[1])
    account = account_of({rank: run.events() for rank, run in enumerate(ranks)})
    assert account.is_balanced
    assert [rank.trained for rank in account.ranks] == [1, 1]


def test_a_missing_ranks_log_is_named(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path, rank=1, world_size=3)
    (missing,) = account_of({1: run.events()}).violations
    assert missing.rule == "every rank has a log, rank 0, 2 of 3 has none"


def test_ranks_of_different_runs_have_nothing_to_balance(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, run_id=str(rank)) for rank in (0, 1)]
    (apart,) = account_of({rank: run.events() for rank, run in enumerate(ranks)}).violations
    assert apart.rule == "all ranks tell of a process that they began together"


# --- lines that are no events -----------------------------------------------------------------------


@pytest.mark.parametrize("is_void", [False, True])
def test_a_damaged_line_takes_the_proof_away_unless_a_resume_made_it_void(
    tmp_path: Path, is_void: bool
) -> None:
    first = LedgerRun(tmp_path, run_id="a")
    state = first.save("s1")
    with first.path.open("ab") as file:
        file.write(b"\0\0\n")
    if is_void:
        LedgerRun(tmp_path, run_id="b", state=state)
    account = account_of({0: first.events()})
    assert account.num_violations == 0
    assert (account.ranks[0].num_damaged, account.is_balanced) == (int(not is_void), is_void)
