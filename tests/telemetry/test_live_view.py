from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_facts import PLAN_A, PLAN_B, pack, round_outcome, skipped, step
from terminal import Terminal

from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.telemetry.activity import Activity
from swift_stage2.telemetry.audit import AuditLog, audit_path
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.live_state import LiveState, LiveTracker, RunProgress
from swift_stage2.telemetry.live_view import LiveView, plain_line, render
from swift_stage2.telemetry.metrics import Counters, encode
from swift_stage2.telemetry.reading import AuditTail

STATE = LiveState(
    step=120,
    total_steps=400,
    seconds_per_step=13.5,
    epoch=1.25,
    loss=0.4321,
    channel="B",
    num_b_run=20,
    num_b_skipped=4,
    skip_reason="not_enough_packs",
    version=30,
    version_lag=1,
    queue_depths=(5, 3),
    queue_limit=8,
    rollouts_per_s=12.34,
    last_round="v30 at step 118, 1.23 s, 1/2 proven",
    warnings=("server 1 is suspect",),
)


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_plain_line() -> None:
    assert plain_line(STATE) == (
        "step 120/400, epoch 1.25 | eta 1:03:00 (13.50 s/step) | channel B, loss 0.4321 | "
        "B 20 run, 4 skipped (last: not_enough_packs) | queue 3 of 8 (by rank 5/3) | version 30, lag 1 | "
        "rollouts 12.3/s | round v30 at step 118, 1.23 s, 1/2 proven"
    )


def test_a_slow_rate_does_not_read_as_none() -> None:
    assert "rollouts 0.042/s" in plain_line(replace(STATE, rollouts_per_s=0.0417))


def test_the_plain_line_of_a_run_that_knows_nothing_yet() -> None:
    assert plain_line(LiveState(total_steps=400)) == (
        "step 0/400 | eta - | channel A | B 0 run, 0 skipped | queue - | version 0 | rollouts - | round none yet"
    )


@pytest.mark.parametrize(
    ("answered", "f1", "text"),
    [
        (64, 0.4321, "v28, F1 0.432 (matched as rollouts are), 64 of 64 (complete)"),
        (0, None, "v28, 0 of 64 (complete)"),
    ],
)
def test_an_evaluation_is_shown_once_there_is_one(answered: int, f1: float | None, text: str) -> None:
    tracker = LiveTracker(1, 400, queue_limit=8)
    tracker.state = STATE
    counts = {"num_answered": answered, "num_wanted": 64}
    record = {"kind": "evaluation", "rank": 0, "version": 28, "end": "complete", "counts": counts}
    tracker.take(record | {"ratios": {} if f1 is None else {"f1": f1}})
    assert plain_line(tracker.state) == f"{plain_line(STATE)} | evaluation {text}"


def test_a_run_without_channel_b_says_nothing_about_it() -> None:
    assert plain_line(LiveState(step=1, total_steps=2, b_enabled=False)) == "step 1/2 | eta - | channel A"


def test_the_panel_shows_every_row_and_the_warnings() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(STATE))
    shown = console.export_text()
    for part in plain_line(STATE).split(" | "):
        name, _, text = part.partition(" ")
        assert name in shown
        assert text in shown
    assert "server 1 is suspect" in shown


def test_elsewhere_a_line_every_n_steps_and_the_last() -> None:
    stream = io.StringIO()
    view = LiveView(stream, plain_every_steps=10)
    for number in range(1, 26):
        view.update(replace(STATE, step=number, total_steps=25))
    view.close()
    view.close()
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "step 10/25",
        "step 20/25",
        "step 25/25",
    ]


def test_elsewhere_a_run_that_stops_early_shows_where() -> None:
    stream = io.StringIO()
    view = LiveView(stream, plain_every_steps=10)
    for number in range(1, 15):
        view.update(replace(STATE, step=number))
    view.close()
    assert stream.getvalue().splitlines()[-1].startswith("step 14/400")


def test_a_terminal_is_drawn_at_most_once_per_interval() -> None:
    terminal, seconds = Terminal(), Seconds()
    view = LiveView(terminal, interval_s=1.0, now_s=seconds)
    for number in range(1, 5):
        seconds.now = number * 0.4
        view.update(replace(STATE, step=number))
    drawn = [number for number in range(1, 5) if f"{number}/400" in terminal.getvalue()]
    assert drawn == [1, 4]
    assert any("4/400" in line for line in terminal.screen())
    view.close()


def test_logs_and_prints_stay_above_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, seconds = Terminal(), Seconds()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("a.logger.of.another.package")
    logger.addHandler(handler)
    view = LiveView(terminal, interval_s=0.0, now_s=seconds)
    try:
        for number in range(1, 4):
            view.update(replace(STATE, step=number))
            logger.warning("logged after step %d", number)
            print(f"printed after step {number}", file=sys.stderr)
        lines = terminal.screen()
        said = [line for line in lines if "after step" in line]
        assert said == [f"{how} after step {number}" for number in (1, 2, 3) for how in ("logged", "printed")]
        top = next(index for index, line in enumerate(lines) if line.startswith("╭"))
        assert lines.index(said[-1]) < top, "the panel comes last"
        assert sum(line.startswith("╭") for line in lines) == 1, "no panel was left behind"
    finally:
        view.close()
        logger.removeHandler(handler)
    assert handler.stream is terminal, "the stream is given back"
    assert sys.stderr is terminal


def test_closing_shows_the_last_state() -> None:
    terminal, seconds = Terminal(), Seconds()
    view = LiveView(terminal, interval_s=100.0, now_s=seconds)
    view.update(replace(STATE, step=1))
    view.update(replace(STATE, step=399))
    view.close()
    assert any("399/400" in line for line in terminal.screen())


def test_rank_0_shows_what_it_writes_and_learns_of_the_others(tmp_path: Path) -> None:
    stream = io.StringIO()
    live = LiveView(stream, plain_every_steps=1)
    telemetry = Telemetry(
        tmp_path, 0, 2, tensorboard=False, audit=False, queue_limit=8, total_steps=100, live=live
    )
    others = Counters()
    others.set("queue_depth", 2)

    def sum_across_ranks(mine: Sequence[float]) -> list[float]:
        numbers = others.snapshot() | {"rollouts_received": 20}
        theirs = encode(numbers, dict.fromkeys(Activity, 0), rank=1, world_size=2)
        return [one + other for one, other in zip(mine, theirs, strict=True)]

    telemetry.record_start(0)
    telemetry.record_step(step(0, PLAN_A))
    telemetry.record_step(step(1, skipped(), queue_depth=4))
    telemetry.merge_and_write(1, sum_across_ranks, epoch=0.5)
    telemetry.record_step(step(2, PLAN_B, version=3, packs=(pack(version=1),), queue_depth=4))
    telemetry.record_loss(2, float("nan"))
    telemetry.record_round(2, round_outcome(4, True, False))
    telemetry.close()
    shown = stream.getvalue().splitlines()[-1]
    for part in (
        "step 3/100, epoch 0.50",
        "channel AAB",
        "B 1 run, 1 skipped (not_enough_packs)",
        "queue 2 of 8 (by rank 4/2)",
        "version 3, lag 2",
        "/s | round none yet",
    ):
        assert part in shown


def test_the_tracker_follows_a_run() -> None:
    tracker = LiveTracker(2, 100, queue_limit=8)

    def take(kind: str, rank: int = 0, **values: object) -> None:
        tracker.take({"kind": kind, "rank": rank, **values})

    def take_step(number: int, time: float, **values: object) -> None:
        same = {"channel": "A", "skip_reason": None, "version": 3, "version_lag": None, "queue_depth": 4}
        take("step", step=number, time=time, round_pending=False, **same | values)

    take_step(0, 0.0)
    assert tracker.state.eta_s is None
    take_step(1, 2.0, skip_reason="not_enough_packs")
    tracker.take_others((4, None), 100, 2.0)
    assert (tracker.state.queue_depths, tracker.state.rollouts_per_s) == ((4, None), None)
    take_step(2, 4.0, channel="B", version_lag=2)
    tracker.take_others((4, 2), 10, 4.0)
    take("metrics", epoch=0.5)
    take("metrics", epoch=None)
    take("loss", loss="nan")
    take("loss", rank=1, loss=1.0)
    take("loss", loss=0.25)
    take("round", step=2, version=4, seconds=1.0, servers={"0": {"proven": True}, "1": {"proven": False}})
    counts = {"num_answered": 63, "num_wanted": 64}
    take("evaluation", version=4, end="complete", counts=counts, ratios={"f1": 0.5})
    for number in range(5):
        take("warning", message=f"w{number}")
        take("warning", rank=1, message=f"w{number}")
    state = tracker.state
    assert state.eta_s == 97 * 2.0
    assert (state.channel, state.num_b_run, state.num_b_skipped) == ("AAB", 1, 1)
    assert (state.skip_reason, state.version, state.version_lag) == ("not_enough_packs", 3, 2)
    assert (state.queue_depth_min, state.queue_depths, state.queue_limit) == (2, (4, 2), 8)
    assert state.rollouts_per_s == 5.0
    assert (state.epoch, state.loss) == (0.5, 0.25)
    assert state.last_round == "v4 at step 2, 1.00 s, 1/2 proven"
    assert state.last_evaluation == "v4, F1 0.500 (matched as rollouts are), 63 of 64 (complete)"
    assert state.warnings == ("w2", "w3", "w4")
    take("catch_up", step=3, version=4, seconds=0.5, servers={"1": {"proven": True}})
    assert tracker.state.last_round == "v4 at step 3, 0.50 s, 1/1 caught up"
    ratios = {"precision": 0.5, "truncated_ratio": 0.0, "exact": 0.25, "error": 12.0}
    take("evaluation", version=5, end="complete", counts=counts, ratios=ratios)
    assert tracker.state.last_evaluation == "v5, exact 0.25, error 12, 63 of 64 (complete)", "a task's own"
    take("server_added", step=3, server=2, base_url="http://late:8000")
    take("server_added", rank=1, step=3, server=2, base_url="http://late:8000")
    assert tracker.state.added_servers == ("http://late:8000 at step 3",)


def test_a_warning_goes_with_its_cause_and_all_go_where_the_run_is_resumed() -> None:
    tracker = LiveTracker(1, 100, queue_limit=8)

    def take(kind: str, **values: object) -> tuple[str, ...]:
        tracker.take(
            {"kind": kind, "rank": 0, "time": 0.0, "version": 1, "step": 0, "seconds": 0.0, **values}
        )
        return tracker.state.warnings

    def proven(kind: str, **servers: bool) -> tuple[str, ...]:
        return take(kind, servers={each[-1]: {"proven": is_proven} for each, is_proven in servers.items()})

    take("warning", message="both are suspect", until=["server0", "server1"])
    take("warning", message="B starves", until=["channel_b"])
    assert take("warning", message="slow disk") == ("both are suspect", "B starves", "slow disk")
    assert proven("round", server0=True, server1=False) == ("both are suspect", "B starves", "slow disk")
    assert proven("catch_up", server1=True) == ("B starves", "slow disk")
    plan = {"skip_reason": None, "version_lag": 0, "round_pending": False, "queue_depth": 1}
    assert take("step", channel="A", **plan) == ("B starves", "slow disk")
    assert take("step", channel="B", **plan) == ("slow disk",)
    assert take("start", step=9) == ()
    take("warning", message="both are suspect", until=["server0", "server1"])
    assert proven("round", server0=True) == ("both are suspect",)  # told again, it waits for both again


RUN_B = StepPlan(Channel.B)
SKIPPED = StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS)


def _progress(run_dir: Path, num_ranks: int = 2) -> RunProgress:
    return RunProgress(run_dir, num_ranks, total_steps=10, queue_limit=8)


def test_the_state_is_what_the_ranks_wrote(tmp_path: Path) -> None:
    ranks = [
        Telemetry(tmp_path, rank, 2, tensorboard=False, queue_limit=8, total_steps=10) for rank in (0, 1)
    ]
    progress = _progress(tmp_path)
    for rank, telemetry in enumerate(ranks):
        telemetry.record_round(0, round_outcome(1, True, seconds=1.5))
        telemetry.record_step(step(0, queue_depth=3 + rank))
        telemetry.record_step(step(1, RUN_B, version=2, packs=(pack(version=1),), queue_depth=4 - rank))
        telemetry.record_step(step(2, SKIPPED, version=2, queue_depth=2))
        telemetry.record_warning("slow")
    state = progress.refresh()
    assert (state.step, state.total_steps, state.channel) == (3, 10, "ABA")
    assert (state.num_b_run, state.num_b_skipped, state.skip_reason) == (1, 1, "not_enough_packs")
    assert (state.version, state.version_lag, state.queue_depths) == (2, 1, (2, 2))
    assert state.last_round == "v1 at step 0, 1.50 s, 1/1 proven"
    assert state.warnings == ("slow",)
    assert state.loss is None
    for rank, telemetry in enumerate(ranks):
        telemetry.record_loss(3, 0.25 + rank)
    assert progress.refresh().loss == 0.25
    for telemetry in ranks:
        telemetry.close()


def test_depths_are_shown_by_rank(tmp_path: Path) -> None:
    for rank, depth in ((0, 5), (1, 1)):
        telemetry = Telemetry(tmp_path, rank, 2, tensorboard=False, queue_limit=8)
        telemetry.record_step(step(0, queue_depth=depth))
        telemetry.close()
    progress = _progress(tmp_path)
    progress.refresh()
    telemetry = Telemetry(tmp_path, 0, 2, tensorboard=False, queue_limit=8)
    telemetry.record_step(step(1, queue_depth=4))
    telemetry.close()
    assert progress.refresh().queue_depths == (4, 1)
    assert progress.state.queue_depth_min == 1


def _write_batches(path: Path, times_and_counts: list[tuple[float, int]], step_time: float) -> None:
    moments = iter([*(time for time, _ in times_and_counts), step_time])
    log = AuditLog(path, now=lambda: next(moments))
    for _, count in times_and_counts:
        log.write("batch", num_rollouts=count)
    facts = step(0)
    names = ("step", "version", "version_lag", "queue_depth", "infer_in_flight", "round_pending", "packs")
    told = {name: getattr(facts, name) for name in names}
    log.write("step", channel="A", wants_b=False, skip_reason=None, activity_ns={}, **told)
    log.close()


def test_the_rate_of_fast_servers_is_that_of_the_last_ten_seconds_over_all_ranks(tmp_path: Path) -> None:
    seconds = [float(number) for number in range(50, 100)]
    _write_batches(audit_path(tmp_path, 0), [(second, 20) for second in seconds], 100.0)
    _write_batches(audit_path(tmp_path, 1), [(99.0, 30)], 100.0)
    assert _progress(tmp_path).refresh().rollouts_per_s == (10 * 20 + 30) / (100 - 89)


def test_the_rate_of_slow_servers_is_that_of_their_last_batches(tmp_path: Path) -> None:
    _write_batches(audit_path(tmp_path, 0), [(float(time), 2) for time in range(0, 1000, 50)], 990.0)
    rate = _progress(tmp_path, num_ranks=1).refresh().rollouts_per_s
    assert rate == 8 * 2 / (990 - 550)


def test_without_a_batch_there_is_no_rate(tmp_path: Path) -> None:
    _write_batches(audit_path(tmp_path, 0), [], 990.0)
    assert _progress(tmp_path, num_ranks=1).refresh().rollouts_per_s is None


def test_only_the_last_channels_are_shown(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False, queue_limit=8)
    for number in range(30):
        telemetry.record_step(step(number, RUN_B if number == 29 else StepPlan(Channel.A)))
    telemetry.close()
    assert _progress(tmp_path, num_ranks=1).refresh().channel == "A" * 19 + "B"


def test_a_run_without_audit_yet_is_at_its_start(tmp_path: Path) -> None:
    assert _progress(tmp_path).refresh().step == 0


@given(st.lists(st.integers(0, 9), max_size=20), st.data())
def test_every_record_is_read_once_wherever_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], data: st.DataObject
) -> None:
    text = b"".join(json.dumps({"kind": "k", "time": 0, "n": n}).encode() + b"\n" for n in numbers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    path = tmp_path_factory.mktemp("audit") / "rank0.jsonl"
    tail, read = AuditTail(path), []
    for end in (*cuts, len(text)):
        path.write_bytes(text[:end])
        read += [record["n"] for record in tail.read()]
    assert read == numbers


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('torn\n[1]\n{"kind": "k"}\n{"kind": "k", "time": 1}\n')
    assert AuditTail(path).read() == [{"kind": "k", "time": 1}]


@pytest.mark.parametrize("kind", ["start", "step", "batch", "round", "metrics", "loss", "warning", "read"])
def test_a_stray_line_is_told_once_and_the_rest_is_shown(tmp_path: Path, kind: str) -> None:
    stray = json.dumps({"kind": kind, "time": 1.0, "rank": "none"}) + "\n"
    path = audit_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(2 * stray)
    assert RunProgress.of_run(tmp_path) is None
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False, queue_limit=8)
    telemetry.record_step(step(4))
    telemetry.close()
    state = _progress(tmp_path, num_ranks=1).refresh()
    assert state.step == 5
    told = "the audit holds lines that are none of this release's; they are not shown"
    assert state.warnings == (() if kind == "read" else (told,))
