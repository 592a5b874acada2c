"""Evaluations of a real job: two ranks, a real server, rounds and production meanwhile; told by audits and ledgers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torchrun_job import LearnerRun, Server, run_learner, write_config

from swift_stage2.cli import main
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.telemetry.reading import read_ledgers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 86  # the evaluation that falls due at 84 meets the end
EVERY_STEPS = 12
NUM_SAMPLES = 15  # an odd number: rank 0 has one more than rank 1
MAX_DELAY = 40  # so many that a busy machine, too, gets through an evaluation
SYNC_EVERY = 4


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
    )
    run = run_learner(config, directory, ranks=2)
    assert run.status == 0, run.output[-3000:]
    return run


def _posts(run: LearnerRun) -> list[dict[str, Any]]:
    return [record for rank in (0, 1) for record in run.audit(rank, "post")]


def test_all_ranks_have_the_same_evaluations(run: LearnerRun) -> None:
    first, second = (
        [{**record, "time": 0, "rank": 0, "sequence": 0} for record in run.audit(rank, "evaluation")]
        for rank in (0, 1)
    )
    assert first == second
    assert all(record["due_step"] % EVERY_STEPS == 0 for record in first)
    assert all(
        0 < record["due_step"] <= record["begun_step"] < record["step"] < NUM_STEPS for record in first
    )
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


def test_every_evaluation_has_one_version_and_asks_each_row_once(run: LearnerRun) -> None:
    evaluations = run.audit(0, "evaluation")
    posts = _posts(run)
    assert {post["purpose"] for post in posts} == {"evaluation"}
    for record in evaluations:
        mine = [post for post in posts if post["version"] == record["version"]]
        answered = sorted(row for post in mine for row in post["rows"] if post["end"] == "answered")
        if record["end"] == "complete":
            assert answered == list(range(NUM_SAMPLES))
    versions = [record["version"] for record in evaluations]
    assert versions == sorted(set(versions))
    assert {post["version"] for post in posts} <= set(versions)
    steps = {step["step"]: step["version"] for step in run.audit(0, "step")}
    # It begins behind a round that is heard in the same step; the next step is the first that trains at its version.
    assert [steps[record["begun_step"] + 1] for record in evaluations] == versions


def test_no_post_of_an_evaluation_comes_in_a_round(run: LearnerRun) -> None:
    posts = _posts(run)
    last_step_began = run.audit(0, "step")[-1]["time"]
    ends = {post["end"] for post in posts if post["time"] < last_step_began}
    assert ends == {"answered"}, "the server refuses who comes in a round"
    assert {post["end"] for post in posts} <= {"answered", "stopped"}, (
        "the end of the run cuts what is in flight"
    )


def test_no_round_is_delayed_for_longer_than_allowed(run: LearnerRun) -> None:
    """Beyond the delay it may only wait for what is in flight, which a step record tells."""
    pending = {record["step"] for record in run.audit(0, "step") if record["round_pending"]}
    for before, after in pairwise(record["step"] for record in run.audit(0, "round")):
        waited = set(range(before + SYNC_EVERY, after)) - pending
        assert len(waited) <= MAX_DELAY


def test_channel_b_still_runs_and_its_ledger_knows_of_no_evaluation(run: LearnerRun) -> None:
    wanted = [record for record in run.audit(0, "step") if record["wants_b"]]
    ran = [record for record in wanted if record["channel"] == "B"]
    assert len(ran) >= 0.5 * len(wanted), [record["skip_reason"] for record in wanted]
    assert main(["report", str(run.directory)]) == 0
    sent = [r for records in read_ledgers([run.directory]).values() for r in records if r["kind"] == "sent"]
    assert {sample[0] for record in sent for sample in record["samples"]} <= set(range(100))
    for rank in (0, 1):
        received = run.audit(rank, "metrics")[-1]["numbers"]["rollouts_received"]
        assert received == sum(record["num_rollouts"] for record in run.audit(rank, "batch"))


def test_tensorboard_shows_each_evaluation_where_it_began(run: LearnerRun) -> None:
    (file,) = (run.directory / "runs").glob("*.stage2")
    points = {
        (event.step, value.tag.removeprefix("stage2_ab/eval/")): value.tensor.float_val[0]
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag.startswith("stage2_ab/eval/")
    }
    for record in run.audit(0, "evaluation"):
        step = record["begun_step"]
        assert points[step, "version"] == record["version"]
        assert points[step, "num_samples"] == record["counts"]["num_answered"]
        for name, value in record["ratios"].items():
            assert points[step, name] == pytest.approx(value)
