"""All of a run is read, less what a resume made void and what a kill tore."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import A_S, B_S, BUSY_S, ROUND_S, RunFiles, balanced_ledger

from swift_stage2.pages.content import MOST_POINTS, thinned
from swift_stage2.report.matches import matches_of
from swift_stage2.report.run_data import read_run
from swift_stage2.report.speed import trained_steps, works_of
from swift_stage2.telemetry.reading import RankRecords


def first(run_dir: Path) -> RankRecords:
    (records,) = read_run([run_dir]).ranks
    return records


def test_the_length_of_every_step_is_that_of_its_training(tmp_path: Path) -> None:
    RunFiles(tmp_path).start().train(41).end()
    records = first(tmp_path)
    steps = trained_steps(records)
    assert [step.step for step in steps] == list(range(40))  # the end of the last is not known
    for step in steps:
        beside = step.step % 6 in (4, 5)
        quiet_s = A_S if step.channel == "A" else B_S
        assert step.seconds == pytest.approx(quiet_s + (BUSY_S if beside else 0))
        assert step.is_quiet == (not beside and (step.step + 1) % 4 != 0)
    (work,) = works_of(read_run([tmp_path]))
    assert work.syncing_s == pytest.approx(11 * ROUND_S)
    assert records.has_ended


def test_what_a_resume_made_void_is_left_out(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    run.start().train(15)
    run.match([0, 1, 1, 0], label="lost")
    run.now += 50
    run.start(step=8)
    run.match([0, 2, 1, 0], label="kept")
    run.train(4).end()
    records = first(tmp_path)
    assert sorted(records.steps) == list(range(12))
    assert records.steps[8]["activity_ns"]["other"]  # of the second process
    assert [record["step"] for record in records.rounds] == [0, 4, 8]
    assert [record["step"] for record in records.metrics] == [10, None]  # the first process's 10 is void
    ((match,), odd) = matches_of(records.matches)
    assert (match.truth[0].label, odd) == ("kept", 0)
    # The step that the kill cut off has no length; nor has the one before the resume.
    assert [step.step for step in trained_steps(records)] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]


def test_a_run_that_is_still_running_or_was_killed_is_read(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    run.start().train(7)
    path = tmp_path / "audit" / "rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    records = first(tmp_path)
    assert sorted(records.steps) == list(range(6))
    assert not records.has_ended


def test_several_directories_of_one_run_are_joined(tmp_path: Path) -> None:
    RunFiles(tmp_path / "a").start().train(10).end()
    later = RunFiles(tmp_path / "b")
    later.now += 1000
    later.start(step=6).train(6).end()
    records = read_run([tmp_path / "a", tmp_path / "b"]).ranks[0]
    assert sorted(records.steps) == list(range(12))


def test_the_configuration_is_that_of_the_start_or_unknown(tmp_path: Path) -> None:
    RunFiles(tmp_path / "new").start().train(1).end()
    RunFiles(tmp_path / "old", config=None).start().train(1).end()
    path = ("stage2_ab", "channel_b", "prefetch", "version_window")
    assert read_run([tmp_path / "new"]).setting(*path) == 2
    assert read_run([tmp_path / "new"]).setting("rollout", "absent", "too") is None
    assert read_run([tmp_path / "old"]).setting(*path) is None


def test_a_ledger_alone_is_a_run(tmp_path: Path) -> None:
    balanced_ledger(tmp_path)
    run = read_run([tmp_path])
    assert (run.ranks, list(run.ledgers)) == ((), [0])


def test_matches_of_another_form_are_counted(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    run.start()
    run.match([0, 1, 1, 0])
    run.match([0, 1, 1, 0], label="asked again")
    run.match([0, 1, 2, 0], pairs=[[0, 5, 0.9]])
    run.match([0, 1, 3, 0], truth=[(1, 2, 3)])
    run.match([0, 1, 4, 0], space=[0, 10])
    run.match([0, 1, 5, 0], space=None)
    run.match([0, 1, 6], pairs=[])
    run.match([0, 1, 7, 0], truth=[("nan", 0, 1, 1)])
    run.end()
    found, odd = matches_of(first(tmp_path).matches)
    assert [match.truth[0].label for match in found] == ["asked again"]
    assert odd == 6


def test_long_series_are_thinned_without_losing_their_sum_or_end() -> None:
    points = [(float(n), float(n % 7)) for n in range(10 * MOST_POINTS)]
    few = thinned(points)
    assert len(few) == MOST_POINTS
    assert sum(y for _, y in few) * 10 == pytest.approx(sum(y for _, y in points))
    assert max(y for _, y in thinned(points, max)) == 6
    assert thinned(points[:3]) == points[:3]
    assert thinned([]) == []
