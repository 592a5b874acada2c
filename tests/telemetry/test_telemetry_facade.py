from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import ended_evaluation
from event_files import EventFiles
from run_facts import PLAN_A, PLAN_B, match, pack, quality, round_outcome, skipped, started, step, told

from swift_stage2.records import BatchOutcome, EvaluationCounts
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd, RunningEvaluation
from swift_stage2.scheduling.step_plan import SkipReason
from swift_stage2.telemetry.events import (
    End,
    Evaluation,
    Losses,
    Metrics,
    Step,
    Warned,
)
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.timing import Activity

TAGS = {
    "async": """policy_wants_b step_kind_b b_step_skipped_due_to_queue b_ratio_realized b_debt queue_depth queue_limit
        ver_current ver_lag drop_stale_total drop_oldest_total quarantined_total rollout_fail_total
        prefetch_success_total prefetch_last_progress_s_ago sync_pending sync_in_transfer sync_failed_total
        caught_up_total infer_inflight rollout_unconfirmed_total
        rollout_kept_total tokens_kept_total
        b_steps_skipped_total skipped/not_enough_packs_total skipped/truncation_guard_total
        skipped/servers_suspect_total skipped/pipeline_failed_total""",
    "packing": "fill_ratio segments tokens",
    "match": "precision recall f1 mean_iou gated",
    "parse": """objects truncated_ratio dropped/not_an_object dropped/unexpected_key dropped/missing_box
        dropped/wrong_arity dropped/invalid_box dropped/missing_label dropped/outside_list""",
    "time": """rollout prepare pack plan learner_busy learner_waiting learner_syncing learner_filling
        learner_switching learner_evaluating learner_saving
        learner_starting learner_other learner_wall""",
}


class Ranks:
    """As many ranks as threads, with an all-reduce between them."""

    def __init__(self, run_dir: Path, world_size: int = 2, **options: object) -> None:
        self.telemetry = [
            started(run_dir, rank, world_size, tensorboard=True, total_steps=100, **options)
            for rank in range(world_size)
        ]

    def merge(self, at: int) -> list[dict[str, float]]:
        """What each rank gets from one collective, in which all meet."""
        meeting, texts = threading.Barrier(len(self.telemetry)), [""] * len(self.telemetry)

        def work(rank: int) -> dict[str, float]:
            def gather(text: str) -> Sequence[str]:
                texts[rank] = text
                meeting.wait(20)
                return texts

            return self.telemetry[rank].merge_and_write(at, gather, epoch=0.5)

        with ThreadPoolExecutor() as threads:
            return list(threads.map(work, range(len(self.telemetry))))

    def step(self, *args: object, **fields: object) -> None:
        for telemetry in self.telemetry:
            telemetry.record_step(step(*args, **fields))  # type: ignore[arg-type]

    def close(self) -> None:
        for telemetry in self.telemetry:
            telemetry.close()


def produce(telemetry: Telemetry, num_packs: int = 1) -> None:
    """The pipeline's reports while it makes packs of two segments."""
    for _ in range(num_packs):
        telemetry.pipeline.batch(BatchOutcome(num_posts=1, seconds=0.5))
        match(telemetry, seconds=0.01)
        match(telemetry, quality(num_truncated=1, dropped={"invalid_box": 2}), seconds=0.01)
        telemetry.pipeline.pack(pack(), 0.001)


def test_every_tag_of_the_design_is_written_and_no_other(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for telemetry in ranks.telemetry:
        produce(telemetry)
    ranks.step(0, PLAN_B, packs=(pack(version=0),))
    ranks.merge(at=1)
    ranks.close()
    expected = {f"stage2_ab/{group}/{name}" for group, names in TAGS.items() for name in names.split()}
    assert EventFiles(tmp_path / "runs").tags == expected


def test_an_evaluation_is_in_every_log_and_in_no_counter(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    counts = EvaluationCounts(num_wanted=4, num_answered=3, num_pairs=2, num_predictions=4, sum_iou=1.0)
    record = ended_evaluation(RunningEvaluation(10, 12, 5), 14, EvaluationEnd.ROUND_DUE, counts)
    for telemetry in ranks.telemetry:
        before = telemetry.counters.snapshot()
        telemetry.record_evaluation(record)
        assert telemetry.counters.snapshot() == before
    ranks.close()
    for rank in (0, 1):
        (evaluation,) = told(tmp_path, Evaluation, rank)
        assert (evaluation.step, evaluation.due_step, evaluation.begun_step) == (14, 10, 12)
        assert (evaluation.end, evaluation.version, evaluation.counts) == ("round_due", 5, counts)
        assert evaluation.ratios == {"precision": 0.5, "f1": 1.0, "mean_iou": 0.5, "truncated_ratio": 0.0}
    events = EventFiles(tmp_path / "runs")
    assert events.series("stage2_ab/eval/precision") == [(12, 0.5)]
    assert events.series("stage2_ab/eval/num_samples") == [(12, 3)]
    assert events.series("stage2_ab/eval/version") == [(12, 5)]
    assert "stage2_ab/eval/recall" not in events.tags, "there was no ground truth"


def test_scores_and_what_an_evaluation_lacks_stand_where_it_began(tmp_path: Path) -> None:
    telemetry, run = started(tmp_path, tensorboard=True), RunningEvaluation(10, 12, 5)
    telemetry.record_scores(run, {"ap": 0.25}, "no room")
    for num_answered in (1, 0):
        counts = EvaluationCounts(num_wanted=4, num_answered=num_answered)
        telemetry.record_evaluation(ended_evaluation(run, 14, EvaluationEnd.ROUND_DUE, counts))
    telemetry.close()
    assert EventFiles(tmp_path / "runs").series("stage2_ab/eval/ap") == [(12, 0.25)]
    fault, no_answer = (each.message for each in told(tmp_path, Warned))
    assert fault == "the evaluation that began at step 12 is not whole: no room"
    assert "began at step 12 has no answer to 4 samples (round_due); " in no_answer


def test_a_round_that_proves_nothing_says_why_once_per_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(tmp_path)
    for version, proven in enumerate((False, False, True, False)):
        for telemetry in ranks.telemetry:
            telemetry.record_round(version, round_outcome(version, proven, True))
    ranks.close()
    warnings = [record.getMessage() for record in caplog.records if "did not prove" in record.getMessage()]
    assert warnings == [
        f"the round of version {version} did not prove a server: refused" for version in (0, 3)
    ]


def test_every_step_has_its_plan_and_logging_steps_the_rest(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    plans = [PLAN_A, PLAN_B, PLAN_A, skipped(), PLAN_A, skipped(SkipReason.TRUNCATION_GUARD)]
    for number, plan in enumerate(plans):
        ranks.step(number, plan)
        if number in (2, 5):
            ranks.merge(at=number)
    ranks.close()
    events = EventFiles(tmp_path / "runs")
    wanted = events.series("stage2_ab/async/policy_wants_b")
    assert wanted == list(enumerate([0, 1, 0, 1, 0, 1]))
    assert events.series("stage2_ab/async/step_kind_b") == list(enumerate([0, 1, 0, 0, 0, 0]))
    assert events.series("stage2_ab/async/b_step_skipped_due_to_queue") == list(enumerate([0, 0, 0, 1, 0, 0]))
    assert events.series("stage2_ab/async/b_steps_skipped_total") == [(2, 0), (5, 2)]
    assert events.series("stage2_ab/async/skipped/truncation_guard_total") == [(2, 0), (5, 1)]
    assert events.series("stage2_ab/async/b_debt") == [(2, 0), (5, 2)]
    ratios = dict(events.series("stage2_ab/async/b_ratio_realized"))
    assert ratios == pytest.approx({2: 1 / 3, 5: 1 / 6})


def test_ranks_read_the_same_merged_numbers(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for telemetry, depth, lag in zip(ranks.telemetry, (5, 3), (1, 2), strict=True):
        produce(telemetry, num_packs=2)
        telemetry.pipeline.dropped(pack(), "dropped_stale")
        plan_facts = step(
            0, PLAN_B, version=2, packs=(pack(version=2 - lag),), queue_depth=depth, in_flight=4
        )
        telemetry.record_step(plan_facts)
        telemetry.record_round(0, round_outcome(2, False, False))
    first, second = ranks.merge(at=1)
    ranks.close()
    assert first == second
    expected = {
        "async/queue_depth": 3,
        "async/queue_limit": 8,
        "async/ver_lag": 2,
        "async/ver_current": 2,
        "async/infer_inflight": 8,
        "async/drop_stale_total": 2,
        "async/sync_failed_total": 1,
        "async/prefetch_success_total": 4,
        "packing/segments": 8,
        "packing/tokens": 120,
        "packing/fill_ratio": 0.75,
        "match/precision": 0.75,
        "match/recall": 0.5,
        "match/f1": 0.6,
        "match/mean_iou": 0.75,
        "match/gated": 16,
        "parse/objects": 32,
        "parse/dropped/invalid_box": 8,
        "parse/truncated_ratio": 0.5,
        "time/rollout": 2.0,
    }
    assert {tag: first[f"stage2_ab/{tag}"] for tag in expected} == pytest.approx(expected)


def test_a_reward_is_the_mean_over_the_window_s_rollouts_of_all_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, reward_terms=("own", "total"))
    for telemetry, rewards in zip(ranks.telemetry, ((1.0, 0.5), (-1.5,)), strict=True):
        for value in rewards:
            found = quality(reward={"own": value, "total": 2 * value})
            match(telemetry, found)
    first = ranks.merge(at=1)[0]
    assert (first["stage2_ab/reward/own"], first["stage2_ab/reward/total"]) == (0.0, 0.0)
    match(ranks.telemetry[1], quality(reward={"own": -0.25, "total": 1.0}))
    second = ranks.merge(at=2)[0]
    assert (second["stage2_ab/reward/own"], second["stage2_ab/reward/total"]) == (-0.25, 1.0)
    assert "stage2_ab/reward/own" not in ranks.merge(at=3)[0], "nothing was matched since"
    ranks.close()


def test_activities_add_up_to_wall_time_in_tags_and_audit(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for number in range(3):
        for telemetry in ranks.telemetry:
            with telemetry.activity("waiting"), telemetry.activity("syncing"):
                telemetry.record_step(step(number))
            telemetry.clock.switch("busy")
    merged = ranks.merge(at=3)[0]
    ranks.close()
    spent = [merged[f"stage2_ab/time/learner_{activity}"] for activity in Activity]
    assert merged["stage2_ab/time/learner_wall"] == pytest.approx(sum(spent), rel=1e-12)
    for rank in range(2):
        metrics = told(tmp_path, Metrics, rank)
        assert len(metrics) == 2, "one logging step and the end"
        in_steps = sum(sum(each.activity_ns.values()) for each in told(tmp_path, Step, rank))
        assert 0 < in_steps <= sum(metrics[-1].activity_ns.values())


def test_a_resumed_run_continues_its_counters(tmp_path: Path) -> None:
    first = Ranks(tmp_path / "first", world_size=1)
    first.step(0, PLAN_B)
    first.step(1, skipped())
    match(first.telemetry[0], quality(pairs=4, predictions=4, truths=4))
    first.merge(at=2)
    match(first.telemetry[0], quality(pairs=0, predictions=4, truths=4))
    state = json.loads(json.dumps(first.telemetry[0].state_dict()))
    first.close()

    second = Ranks(tmp_path / "second", world_size=1)
    second.telemetry[0].load_state_dict(state)
    second.step(2, PLAN_A)
    merged = second.merge(at=3)[0]
    second.close()
    assert merged["stage2_ab/async/b_ratio_realized"] == pytest.approx(1 / 3)
    assert merged["stage2_ab/async/b_debt"] == 1
    assert merged["stage2_ab/parse/objects"] == 8
    assert merged["stage2_ab/match/precision"] == 0.0, (
        "the window began at the last logging step before the save"
    )
    wall_s = sum(state["activity_ns"].values()) / 1e9
    assert merged["stage2_ab/time/learner_wall"] > wall_s


def test_the_time_of_earlier_processes_is_in_no_step_of_this_one(tmp_path: Path) -> None:
    telemetry = started(tmp_path)
    an_hour_ns = 3600 * 10**9
    telemetry.load_state_dict({"counters": {}, "activity_ns": {"busy": an_hour_ns}, "window_start": {}})
    telemetry.record_step(step(0))
    telemetry.close()
    (first,), (last,) = told(tmp_path, Step), told(tmp_path, Metrics)
    assert sum(first.activity_ns.values()) < an_hour_ns
    assert last.activity_ns["busy"] == an_hour_ns


def test_a_process_that_ends_before_its_start_tells_neither_numbers_nor_an_end(tmp_path: Path) -> None:
    """They would count for the process before it."""
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False)
    telemetry.record_warning("no server")
    telemetry.close()
    assert told(tmp_path, Warned)
    assert not told(tmp_path, Metrics) + told(tmp_path, End)


@pytest.mark.parametrize(("rank", "events", "files"), [(1, True, ["events"]), (0, False, [])])
def test_other_ranks_write_no_curves_and_what_is_switched_off_no_file(
    tmp_path: Path, rank: int, events: bool, files: list[str]
) -> None:
    telemetry = started(tmp_path, rank, 2, tensorboard=bool(rank), events=events)
    telemetry.record_step(step(0))
    telemetry.merge_and_write(1, lambda text: [text])
    telemetry.close()
    telemetry.close()
    assert [path.name for path in tmp_path.iterdir()] == files


@pytest.mark.parametrize("records", [True, False])
def test_losses_are_kept_to_the_last_bit_when_asked_for(tmp_path: Path, records: bool) -> None:
    telemetry = started(tmp_path, records=records)
    losses = ((0.1).hex(), float("inf").hex(), (-0.0).hex())
    telemetry.record_losses(0, losses)
    telemetry.close()
    telemetry.record_losses(1, losses)  # after the end: dropped
    assert [each.losses for each in told(tmp_path, Losses)] == ([losses] if records else [])


def test_a_full_disk_is_told_by_the_log_and_raises_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Event log, event file and trace all stand on one full disk."""
    for path in ("events/rank0.jsonl", "trace/rank0.partial"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).symlink_to("/dev/full")
    (tmp_path / "runs").touch()  # no folder for the event file
    telemetry = started(tmp_path, tensorboard=True, trace=True, total_steps=3)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            telemetry.record_step(step(number))
            telemetry.merge_and_write(number, lambda text: [text])
        telemetry.close()
    assert telemetry.counters.snapshot()["steps"] == 3
    assert "No space left on device" in telemetry.log.failure
    assert "the event log lacks its end" in caplog.text
