"""All of a run is read, less what a resume made void and what a kill tore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_files import A_S, B_S, BUSY_S, ROUND_S, RunFiles, balanced_ledger

from swift_stage2.report.quality import matches_of
from swift_stage2.report.run_data import read_run
from swift_stage2.report.verdict import speed_of, trained_steps
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Metrics, Round


def first(run_dir: Path) -> RankEvents:
    (events,) = read_run([run_dir]).ranks
    return events


def test_the_length_of_every_step_is_that_of_its_training(tmp_path: Path) -> None:
    RunFiles(tmp_path).start().train(41).end()
    rank = first(tmp_path)
    steps = trained_steps(rank)
    assert [step.step for step in steps] == list(range(40))  # the end of the last is not known
    for step in steps:
        beside = step.step % 6 in (4, 5)
        quiet_s = A_S if step.channel == "A" else B_S
        assert step.seconds == pytest.approx(quiet_s + (BUSY_S if beside else 0))
        assert step.is_quiet == (not beside and (step.step + 1) % 4 != 0)
    assert speed_of(rank).rounds_s == pytest.approx(11 * ROUND_S)
    assert rank.has_ended


def test_what_a_resume_made_void_is_left_out_also_elsewhere(tmp_path: Path) -> None:
    run = RunFiles(tmp_path / "a").start().train(8)
    state = run.save()
    run.train(7)
    run.match([0, 1, 1, 0], label="lost")
    places = ["a", "b"]
    for place in places:
        resumed = RunFiles(tmp_path / place)
        resumed.now = run.now + 50
        resumed.start(state=state)
        resumed.match([0, 2, 1, 0], label="kept")
        resumed.train(4).end()
    for dirs in ([tmp_path / "a"], [tmp_path / place for place in places]):
        found = read_run(dirs)
        (rank,) = found.ranks
        assert sorted(rank.steps) == list(range(12))
        assert rank.steps[8].activity_ns["other"]  # of the second process
        assert [each.step for each in rank.of(Round)] == [0, 4, 8]
        assert [each.step for each in rank.of(Metrics)] == [10, None]  # the first process's 10 is void
        ((_, match),) = matches_of(found.ranks)
        assert match.truth[0][0] == "kept"
        # The step that the kill cut off has no length; nor has the one before the resume.
        assert [step.step for step in trained_steps(rank)] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
        assert account_of(found.logs, found.doubts).is_balanced


def test_a_draw_that_was_repeated_counts_once(tmp_path: Path) -> None:
    run = RunFiles(tmp_path).start()
    run.match([0, 1, 1, 0])
    run.match([0, 1, 1, 0], label="asked again")
    run.end()
    ((_, match),) = matches_of([first(tmp_path)])
    assert match.truth[0][0] == "asked again"


@pytest.mark.parametrize(("save_id", "step", "is_told"), [("s1", 6, True), ("s2", 6, False), ("s0", 0, True)])
def test_a_checkpoint_on_disk_must_be_told_of_unless_the_run_began_with_it(
    tmp_path: Path, save_id: str, step: int, is_told: bool
) -> None:
    run = balanced_ledger(tmp_path)
    run.save("s1")
    run.end()
    checkpoint = tmp_path / "checkpoint-6"
    checkpoint.mkdir()
    (checkpoint / "stage2_rank0.json").write_text(json.dumps({"step": step, "state": {"save_id": save_id}}))
    (checkpoint / "stage2_rank1.json").write_text("{")
    found = read_run([tmp_path])
    told = "rank 0: checkpoint-6 is of a save that the log does not tell of"
    assert found.doubts == (() if is_told else (told,))
    assert account_of(found.logs, found.doubts).is_balanced is is_told
