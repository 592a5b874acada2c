"""Evaluations of a real job: two ranks, a real server, rounds and production meanwhile; told by audits and ledgers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from telemetry.event_files import EventFiles
from torchrun_job import LearnerRun, Server, run_learner, write_config

from swift_stage2.cli import main
from swift_stage2.data.recorded import evaluation_file, evaluations_directory, read_recorded
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS = 39  # the evaluation that falls due at 36 meets the end
EVERY_STEPS = 12
NUM_SAMPLES = 15  # an odd number: rank 0 has one more than rank 1
MAX_DELAY = 40
SYNC_EVERY = 2  # a round falls due at the step after the one in which an evaluation begins


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, server: Server) -> LearnerRun:
    directory = tmp_path_factory.mktemp("runs") / "evaluated"
    validation = write_dataset(
        tmp_path_factory.mktemp("validation") / "shapes", SceneKind.SHAPES, 30, Split.HELD_OUT, 5
    )
    config = write_config(
        directory,
        rows_file,
        server,
        b_ratio=0.2,
        swift={"max_steps": NUM_STEPS, "val_dataset": [str(validation)]},
        evaluation={
            "every_steps": EVERY_STEPS,
            "num_samples": NUM_SAMPLES,
            "max_round_delay_steps": MAX_DELAY,
        },
        prefetch={
            "queue_limit": 6,
            "version_window": 3,
            "sync_every_steps": SYNC_EVERY,
            "prefetch_target_packs": 6,
        },
    )
    # An evaluation that a round has come beside ends before the next step, however busy the machine is.
    run = run_learner(config, directory, ranks=2, inject="*:4:await_packs,*:1:await_rounds")
    assert run.status == 0, run.output[-3000:]
    return run


def test_all_ranks_have_the_same_evaluations(run: LearnerRun) -> None:
    first, second = ([{**record, "time": 0} for record in run.audit(rank, "evaluation")] for rank in (0, 1))
    assert first == second
    *during, final = first
    assert all(record["due_step"] % EVERY_STEPS == 0 for record in during)
    assert all(
        0 < record["due_step"] <= record["begun_step"] < record["step"] < NUM_STEPS for record in during
    )
    assert (final["due_step"], final["begun_step"], final["end"]) == (NUM_STEPS, NUM_STEPS, "complete")
    assert len({record["due_step"] for record in first}) == len(first) >= 2
    complete = [record for record in first if record["end"] == "complete"]
    assert complete, Counter(record["end"] for record in first)
    for record in complete:
        counts = record["counts"]
        assert (counts["num_wanted"], counts["num_answered"], counts["num_failed"]) == (
            NUM_SAMPLES,
            NUM_SAMPLES,
            0,
        )
        assert record["ratios"]["f1"] > 0.2, "the stage-1 model finds shapes"


def test_every_evaluation_has_one_version_of_its_own(run: LearnerRun) -> None:
    evaluations = run.audit(0, "evaluation")
    versions = [record["version"] for record in evaluations]
    assert versions == sorted(set(versions))
    steps = {step["step"]: step["version"] for step in run.audit(0, "step")}
    # It begins behind a round that is heard in the same step; the next step is the first that trains at its version.
    assert [steps[record["begun_step"] + 1] for record in evaluations[:-1]] == versions[:-1]


def test_the_last_evaluation_is_of_the_weights_behind_the_last_step(run: LearnerRun) -> None:
    last_round, final = run.audit(0, "round")[-1], run.audit(0, "evaluation")[-1]
    assert (last_round["step"], last_round["committed"]) == (NUM_STEPS, True)
    assert final["version"] == last_round["version"] > run.audit(0, "step")[-1]["version"]
    assert final["counts"]["num_answered"] == NUM_SAMPLES


def test_no_round_comes_while_an_evaluation_asks(run: LearnerRun) -> None:
    rounds = {record["step"] for record in run.audit(0, "round")}
    meanwhile = [
        set(range(record["begun_step"] + 1, record["step"])) for record in run.audit(0, "evaluation")
    ]
    assert any(meanwhile)
    assert not any(steps & rounds for steps in meanwhile)


def test_channel_b_still_runs_and_its_ledger_knows_of_no_evaluation(run: LearnerRun) -> None:
    wanted = [record for record in run.audit(0, "step") if record["wants_b"]]
    ran = [record for record in wanted if record["channel"] == "B"]
    assert ran, [record["skip_reason"] for record in wanted]
    assert main(["report", str(run.directory)]) == 0
    sent = [each for rank in (0, 1) for each in run.audit(rank, "sent")]
    assert {sample[0] for record in sent for sample in record["samples"]} <= set(range(100))
    for rank in (0, 1):
        received = run.audit(rank, "metrics")[-1]["numbers"]["rollouts_received"]
        assert received == sum(
            len(each["samples"]) for each in run.audit(rank, "finished") if each["end"] == "answered"
        )


def test_every_evaluation_leaves_the_rows_that_it_counts(run: LearnerRun) -> None:
    evaluations = run.audit(0, "evaluation")
    told = {record["due_step"]: record["counts"] for record in evaluations}
    found = {}
    for each in evaluations:
        path = evaluation_file(evaluations_directory(run.directory), each["due_step"], each["version"])
        if rows := list(read_recorded(path)):
            found[each["due_step"]] = rows
    assert found.keys() == {step for step, counts in told.items() if counts["num_answered"]}
    for step, rows in found.items():
        assert len(rows) == len({row.row for row in rows}) == told[step]["num_answered"]
        assert sum(len(row.objects.ref) for row in rows) == told[step]["num_predictions"]
        assert sum(len(row.truth.ref) for row in rows if row.truth) == told[step]["num_ground_truth"]
    begun = {record["due_step"]: record["begun_step"] for record in evaluations}
    scored = EventFiles(run.directory / "runs").series("stage2_ab/eval/ap")
    assert len(EventFiles(run.directory / "runs").series("stage2_ab/eval/ece")) == len(scored) > 0
    assert [step for step, _ in scored] == sorted(begun[due] for due in found)
