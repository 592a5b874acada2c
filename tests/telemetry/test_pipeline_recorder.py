"""What the pipeline's recorder counts, with the client's own records."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.records import BatchOutcome, PostFailure, RowOrigin, SampleKey
from swift_stage2.telemetry.activity import PipelineActivity
from swift_stage2.telemetry.audit import AuditLog, read_audit
from swift_stage2.telemetry.ledger import Ledger, RunRecord
from swift_stage2.telemetry.match_log import MatchLog
from swift_stage2.telemetry.metrics import Counters
from swift_stage2.telemetry.recorders import PipelineRecorder
from swift_stage2.telemetry.trace import Trace

PATIENCE_S = 10.0


def recorder(
    counters: Counters | None = None, *, trace: bool = False, audit: AuditLog | None = None
) -> PipelineRecorder:
    log = AuditLog(None)
    return PipelineRecorder(
        counters or Counters(), audit or log, Ledger(log), RunRecord(log), MatchLog(log, ()), Trace(trace)
    )


def test_a_post_that_our_own_stop_cut_is_no_failed_rollout() -> None:
    counters = Counters()
    failures = tuple(PostFailure("http://127.0.0.1:9", end, 4, "") for end in (PostEnd.STOPPED, PostEnd.LOST))
    recorder(counters).batch(BatchOutcome(failures=failures), seconds=0.1)
    assert counters.value("rollouts_failed") == 1


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
