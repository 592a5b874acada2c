"""What the pipeline's recorder counts, with the client's own records."""

from __future__ import annotations

from swift_stage2.channel_b.rollout_client import BatchOutcome, PostFailure
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.telemetry import AuditLog, Counters, PipelineRecorder, Trace
from swift_stage2.telemetry.ledger import Ledger
from swift_stage2.telemetry.run_record import RunRecord


def test_a_post_that_our_own_stop_cut_is_no_failed_rollout() -> None:
    counters = Counters()
    recorder = PipelineRecorder(
        counters, AuditLog(None), Ledger(AuditLog(None)), RunRecord(AuditLog(None)), Trace(False)
    )
    failures = tuple(PostFailure("http://127.0.0.1:9", end, 4, "") for end in (PostEnd.STOPPED, PostEnd.LOST))
    recorder.batch(BatchOutcome(failures=failures), seconds=0.1)
    assert counters.value("rollouts_failed") == 1
