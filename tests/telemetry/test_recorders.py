from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from telemetry.run_facts import PLAN_A, PLAN_B, pack, quality, skipped, step
from telemetry.test_match_log import rollout

from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.records import (
    BatchOutcome,
    PostFailure,
    RoundOutcome,
    RowOrigin,
    SampleKey,
    Segment,
    ServerReport,
    VersionSpan,
)
from swift_stage2.report.report import report_of
from swift_stage2.report.run_data import read_run
from swift_stage2.scheduling.step_plan import SkipReason, StepPlan
from swift_stage2.telemetry.activity import PipelineActivity
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.ledger import Ledger, MatchLog
from swift_stage2.telemetry.metrics import Counters
from swift_stage2.telemetry.reading import read_audit
from swift_stage2.telemetry.recorders import PipelineRecorder
from swift_stage2.telemetry.trace import Trace

PATIENCE_S = 60.0


def recorder(
    counters: Counters | None = None, *, trace: bool = False, audit: AuditLog | None = None
) -> PipelineRecorder:
    log = AuditLog(None)
    return PipelineRecorder(
        counters or Counters(), audit or log, Ledger(log), log, MatchLog(log, ()), Trace(trace)
    )


def test_a_post_that_our_own_stop_cut_is_no_failed_rollout() -> None:
    counters = Counters()
    failures = tuple(PostFailure("http://127.0.0.1:9", end, 4, "") for end in (PostEnd.STOPPED, PostEnd.LOST))
    recorder(counters).batch(BatchOutcome(failures=failures))
    assert counters.snapshot()["rollouts_failed"] == 1


def test_what_groups_lose_is_counted() -> None:
    counters = Counters()
    pipeline = recorder(counters)
    pipeline.stale_in_group(3)
    for num_left_out in (0, 1):
        pipeline.segment(Segment(SampleKey(0, 0, 0), 1, (), 8, 4, quality(), num_left_out), 0.0)
    numbers = counters.snapshot()
    assert (numbers["rollouts_dropped_stale"], numbers["targets_left_out"]) == (3, 1)


def test_tokens_of_aborted_rollouts_are_counted_as_kept_or_thrown_away(tmp_path: Path) -> None:
    path, counters = tmp_path / "rank0.jsonl", Counters()
    pipeline = recorder(counters, audit=AuditLog(path))
    part = replace(rollout(0), token_ids=(1, 2, 3), spans=(VersionSpan(4, 0, 3),))
    whole = replace(
        part, token_ids=(1, 2, 3, 4), spans=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 3), VersionSpan(6, 3, 4))
    )
    pipeline.batch(BatchOutcome(partial=(part,), aborted=(part, part), rollouts=(whole, part)))
    pipeline.partial_dropped(part)
    pipeline.tell_batches()
    numbers = counters.snapshot()
    assert (numbers["rollouts_resumed"], numbers["rollouts_aborted"]) == (1, 2)
    assert (numbers["tokens_kept"], numbers["tokens_aborted"], numbers["tokens_partial_dropped"]) == (3, 6, 3)
    (line,) = (each for each in map(json.loads, path.read_text().splitlines()) if each["kind"] == "batch")
    assert line["partial"] == [{"sample": part.sample.key.entry, "spans": [[4, 0, 3]]}]


def test_the_audit_has_one_record_of_what_came_until_a_pack_or_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    pipeline = recorder(audit=AuditLog(path))
    answered = BatchOutcome(rollouts=(rollout(0),), num_posts=1, seconds=0.5)
    for _ in range(3):
        pipeline.batch(answered)
    assert not path.exists() or path.read_text() == ""
    pipeline.pack(pack(), 0.1)
    pipeline.batch(answered)
    pipeline.batch(BatchOutcome(failures=(PostFailure("http://s", PostEnd.LOST, 1, "gone"),), num_posts=1))
    pipeline.tell_batches()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first, second = (line for line in lines if line["kind"] == "batch")
    assert (first["num_rollouts"], first["num_posts"], first["seconds"], first["failures"]) == (3, 3, 1.5, [])
    assert (second["num_rollouts"], second["num_posts"], len(second["failures"])) == (1, 2, 1)


def test_a_pipeline_that_comes_back_to_its_wait_is_asking_if_a_post_is_out() -> None:
    pipeline = recorder()
    pipeline.enter(PipelineActivity.TICKET)
    with pipeline.post():
        pipeline.enter(PipelineActivity.PREPARING)
        pipeline.enter(PipelineActivity.TICKET)
        assert pipeline.clock.current is PipelineActivity.ASKING
    assert pipeline.clock.current is PipelineActivity.TICKET


def test_rollouts_that_no_round_confirmed_are_counted() -> None:
    counters = Counters()
    pipeline = recorder(counters)
    pipeline.unconfirmed(0)
    pipeline.unconfirmed(3)
    assert counters.snapshot()["rollouts_unconfirmed"] == 3


def test_turns_whose_budget_was_used_up_are_counted() -> None:
    counters = Counters()
    pipeline = recorder(counters)
    for num_begun in (4, 3, 0):
        pipeline.run_ahead(num_wanted=4, num_begun=num_begun)
    assert counters.snapshot()["run_ahead_exhausted"] == 2


def test_the_pipeline_is_asking_while_at_least_one_post_is_out() -> None:
    pipeline = recorder()
    current = lambda: pipeline.clock.current  # noqa: E731
    pipeline.enter(PipelineActivity.TICKET)
    first_ends, first_is_out = threading.Event(), threading.Event()

    def other_lane() -> None:
        with pipeline.post():
            first_is_out.set()
            first_ends.wait(PATIENCE_S)

    lane = threading.Thread(target=other_lane)
    lane.start()
    assert first_is_out.wait(PATIENCE_S)
    assert current() is PipelineActivity.ASKING
    with pipeline.post():
        first_ends.set()
        lane.join(PATIENCE_S)
        assert current() is PipelineActivity.ASKING, "the second is still out"
    assert current() is PipelineActivity.TICKET


def test_posts_of_an_evaluation_belong_to_it() -> None:
    pipeline = recorder()
    pipeline.enter(PipelineActivity.EVALUATING)
    with pipeline.post():
        assert pipeline.clock.current is PipelineActivity.EVALUATING
    assert pipeline.clock.current is PipelineActivity.EVALUATING


def test_a_post_that_outlives_its_batch_changes_nothing() -> None:
    """A lane may still end its call when the pipeline's thread has gone on."""
    pipeline = recorder()
    pipeline.enter(PipelineActivity.TICKET)
    with pipeline.post():
        pipeline.enter(PipelineActivity.IDLE)
    assert pipeline.clock.current is PipelineActivity.IDLE


def test_a_sample_given_up_is_told_by_file_line_image_and_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = AuditLog(tmp_path / "rank0.jsonl")
    pipeline = recorder(audit=audit)
    origin = RowOrigin("/data/rows.jsonl", 13, ("/data/a.png",))
    for _ in range(50):
        pipeline.quarantined(SampleKey(0, 4, 7), "bad_sample", "a box must lie inside its image", origin)
    audit.close()
    records = read_audit(tmp_path / "rank0.jsonl")
    assert len(records) == 50
    assert {name: records[0][name] for name in ("file", "line", "images", "message")} == {
        "file": "/data/rows.jsonl",
        "line": 13,
        "images": ["/data/a.png"],
        "message": "a box must lie inside its image",
    }
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 20, "the log is not flooded"
    assert told[0] == (
        "a sample is given up (bad_sample): /data/rows.jsonl:13, image /data/a.png: a box must lie inside its image"
    )
    assert told[-1].endswith("; the audit holds those to come")


_NO_ROUTE = "http://a:1: the weight group did not form"


def outcome(error: str | None) -> RoundOutcome:
    report = ServerReport(proven=error is None, error=error, proof="", num_bytes=0, seconds={})
    return RoundOutcome("r", 1, {0: report})


@pytest.mark.parametrize(
    ("plans", "errors", "words"),
    [
        ([PLAN_A, PLAN_A], [], ""),
        ([skipped(), PLAN_B], [None], ""),
        (
            [PLAN_B, *[skipped(SkipReason.SERVERS_SUSPECT)] * 2],
            [None],
            "channel B ran at 1 of the 3 steps that wanted it: no proven server was left (2)",
        ),
        ([PLAN_B], [_NO_ROUTE], ""),  # with what an earlier round has proven
        (
            [skipped()],
            [None],
            "channel B ran at none of the 1 steps that wanted it: packs were not ready in time (1)",
        ),
        (
            [skipped(), skipped(SkipReason.SERVERS_SUSPECT)],
            [None],
            "channel B ran at none of the 2 steps that wanted it: no proven server was left (1), packs were not ready "
            "in time (1)",
        ),
        (
            [skipped(SkipReason.SERVERS_SUSPECT), PLAN_A],
            [_NO_ROUTE, _NO_ROUTE, "x"],
            "channel B ran at none of the 1 steps that wanted it: none of 3 sync rounds proved a server, mostly: "
            f"{_NO_ROUTE}",
        ),
        ([PLAN_A], [_NO_ROUTE], f"none of 1 sync rounds proved a server, mostly: {_NO_ROUTE}"),
    ],
)
def test_the_run_and_its_report_say_it_with_the_cause(
    tmp_path: Path, plans: list[StepPlan], errors: list[str | None], words: str
) -> None:
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False, queue_limit=8)
    telemetry.record_start(0)
    for error in errors:
        telemetry.record_round(0, outcome(error))
    for number, plan in enumerate(plans):
        telemetry.record_step(step(number, plan))
    assert telemetry.unused_b == words
    telemetry.close()
    (verdict,) = [part for part in report_of(read_run([tmp_path])).sections if part.key == "verdict"]
    shown = " ".join(str(part) for part in verdict.parts)
    if words:
        assert f"{words[0].upper()}{words[1:]}." in shown
    else:
        assert "that wanted it" not in shown
