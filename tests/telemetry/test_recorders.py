from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from telemetry.run_facts import PLAN_A, PLAN_B, quality, skipped, started, step

from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.records import (
    BatchOutcome,
    MatchQuality,
    ObjectMatch,
    PostFailure,
    Rollout,
    RoundOutcome,
    RowOrigin,
    Sample,
    SampleKey,
    Segment,
    ServerReport,
    Target,
    VersionSpan,
)
from swift_stage2.report.command import report_of
from swift_stage2.report.run_data import read_run
from swift_stage2.scheduling.step_plan import SkipReason, StepPlan
from swift_stage2.telemetry import recorders
from swift_stage2.telemetry.event_log import EventLog, read_events
from swift_stage2.telemetry.events import FailedPosts, Match
from swift_stage2.telemetry.metrics import Counters
from swift_stage2.telemetry.recorders import PipelineRecorder, rows_to_keep
from swift_stage2.telemetry.timing import PipelineActivity, Trace

PATIENCE_S = 60.0


def recorder(
    counters: Counters | None = None, log: EventLog | None = None, kept_rows: Container[int] = ()
) -> PipelineRecorder:
    return PipelineRecorder(
        counters or Counters(["f1", "total"]), log or EventLog(None), Trace(False), kept_rows=kept_rows
    )


def rollout(index: int = 0, images: Any = ("a.png",)) -> Rollout:
    sample = Sample(SampleKey(1, 2, index, 1), {"images": list(images)})
    spans = (VersionSpan(7, 0, 2), VersionSpan(6, 2, 3))
    return Rollout(sample, "said", (1,), (2,), True, 3, "http://127.0.0.1:1", spans)


_SEGMENT = Segment(SampleKey(0, 0, 0), 1, (), 8, 4, quality(), 1)
_FAILURES = tuple(PostFailure("http://s", end, 4, "") for end in (PostEnd.STOPPED, PostEnd.LOST))


@pytest.mark.parametrize(
    ("name", "number", "tell"),
    [
        (
            "rollouts_failed",
            1,
            lambda told: told.batch(BatchOutcome(failures=_FAILURES)),
        ),  # one by our own stop
        ("targets_left_out", 1, lambda told: told.segment(_SEGMENT, 0.0)),
        ("rollouts_unconfirmed", 3, lambda told: told.count("rollouts_unconfirmed", 3)),
    ],
)
def test_losses_are_counted(name: str, number: int, tell: Callable[[PipelineRecorder], None]) -> None:
    counters = Counters()
    tell(recorder(counters))
    assert counters.snapshot()[name] == number


def test_rollouts_that_new_weights_came_under_are_counted_with_what_they_kept() -> None:
    counters = Counters()
    spans = (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3), VersionSpan(6, 3, 4))
    over = replace(rollout(), token_ids=(1, 2, 3, 4), spans=spans)
    alone = replace(rollout(), token_ids=(1, 2, 3), spans=(VersionSpan(4, 0, 3),))
    recorder(counters).batch(BatchOutcome(rollouts=(over, alone)))
    numbers = counters.snapshot()
    assert (numbers["rollouts_kept"], numbers["tokens_kept"]) == (1, 3)


def test_requests_that_failed_are_told_with_their_cause(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    pipeline = recorder(log=EventLog(path))
    pipeline.batch(BatchOutcome(rollouts=(rollout(),), num_posts=1, seconds=0.5))
    assert not path.exists()
    failures = (PostFailure("http://s", PostEnd.LOST, 1, "gone"),)
    pipeline.batch(BatchOutcome(failures=failures, num_posts=1))
    (found,) = read_events(path)
    assert isinstance(found, FailedPosts)
    assert found.failures == failures


@pytest.mark.parametrize(
    ("before", "beside", "inside", "after"),
    [
        ("TICKET", ("PREPARING", "TICKET"), "ASKING", "TICKET"),  # it comes back to its wait
        ("TICKET", ("IDLE",), "IDLE", "IDLE"),  # a lane may end its call when the pipeline has gone on
        ("EVALUATING", (), "EVALUATING", "EVALUATING"),  # whose POSTs belong to it
    ],
)
def test_a_pipeline_that_waits_is_asking_if_a_post_is_out(
    before: str, beside: tuple[str, ...], inside: str, after: str
) -> None:
    pipeline = recorder()
    pipeline.enter(PipelineActivity[before])
    with pipeline.post():
        for activity in beside:
            pipeline.enter(PipelineActivity[activity])
        assert pipeline.clock.current is PipelineActivity[inside]
    assert pipeline.clock.current is PipelineActivity[after]


def test_the_pipeline_is_asking_while_at_least_one_post_is_out() -> None:
    pipeline = recorder()
    pipeline.enter(PipelineActivity.TICKET)
    with pipeline.post():
        with pipeline.post():
            pass
        assert pipeline.clock.current is PipelineActivity.ASKING, "the first is still out"
    assert pipeline.clock.current is PipelineActivity.TICKET


def test_the_log_of_samples_that_are_given_up_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    pipeline, origin = recorder(), RowOrigin("/data/rows.jsonl", 13, ("/data/a.png",))
    for _ in range(50):
        pipeline.quarantined(SampleKey(0, 4, 7), "bad_sample", "a box must lie inside its image", origin)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 20
    assert messages[0] == (
        "a sample is given up (bad_sample): /data/rows.jsonl:13, image /data/a.png: a box must lie inside its image"
    )
    assert messages[-1].endswith("; the event log holds those to come")


QUALITY = MatchQuality(1, 2, 1, 0.75, 0, 1, {"invalid_box": 2}, reward={"f1": 2 / 3, "total": 1.0})
MATCH = ObjectMatch(
    predicted=(("cat", (1, 2, 3, 4)),),
    truth=(("cat", (1, 2, 3, 5)), ("dog", (6, 7, 8, 9))),
    pairs=((0, 0, 2 / 3),),
)


def target(match: ObjectMatch | None = MATCH) -> Target:
    return Target("wanted", (1,), (1.0,), QUALITY, match)


def kept(path: Path) -> list[Match]:
    return [event for event in read_events(path) if isinstance(event, Match)]


def test_a_match_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = ["a.png", {"path": "b.png", "bytes": b""}, {"bytes": b"x"}]
    path = tmp_path / "rank1.jsonl"
    recorder(log=EventLog(path), kept_rows={5}).matched(rollout(5, images), target(), (640, 480))
    (found,) = kept(path)
    assert found == Match(
        time=found.time,
        sample=(1, 2, 5, 1),
        version=6,
        images=(str(tmp_path / "a.png"), str(tmp_path / "b.png"), None),
        space=(640, 480),
        truth=(("cat", (1, 2, 3, 5)), ("dog", (6, 7, 8, 9))),
        predicted=(("cat", (1, 2, 3, 4)),),
        pairs=((0, 0, 0.6667),),
        rollout="said",
        target="wanted",
        truncated=True,
        dropped={"invalid_box": 2},
        reward={"f1": 0.6667, "total": 1.0},
    )


def test_only_the_chosen_rows_are_kept_what_has_no_boxes_is_left_out_and_the_rest_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "MOST_MATCH_BYTES", 2000)
    pipeline = recorder(log=EventLog(tmp_path / "a.jsonl"), kept_rows={5})
    pipeline.matched(rollout(4), target(), (1, 1))
    pipeline.matched(rollout(5), target(match=None), (1, 1))
    pipeline.matched(rollout(5), target(), None)
    assert kept(tmp_path / "a.jsonl") == []
    for _ in range(100):
        pipeline.matched(rollout(5), target(), (1, 1))
    found = kept(tmp_path / "a.jsonl")
    assert {match.sample[2] for match in found} == {5}
    assert 2000 < sum(len(match.model_dump_json()) for match in found) < 3000


def test_all_ranks_keep_the_same_rows() -> None:
    rows = rows_to_keep(1000, 64, seed=7)
    assert rows == rows_to_keep(1000, 64, seed=7) != rows_to_keep(1000, 64, seed=8)
    assert len(rows) == 64
    assert rows <= set(range(1000))
    assert rows_to_keep(10, 64, seed=7) == set(range(10))
    assert rows_to_keep(10, 0, seed=7) == set()


_NO_ROUTE = "http://a:1: the weight group did not form"


def outcome(error: str | None) -> RoundOutcome:
    report = ServerReport(proven=error is None, error=error, proof="", num_bytes=0, seconds={})
    return RoundOutcome(1, {0: report})


@pytest.mark.parametrize(
    ("plans", "errors", "words"),
    [
        ([PLAN_A, PLAN_A], [], ""),
        ([skipped(), PLAN_B], [None], ""),
        ([PLAN_B], [_NO_ROUTE], ""),  # with what an earlier round has proven
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
    telemetry = started(tmp_path)
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
