from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry.run_facts import pack, round_outcome, step

from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.telemetry.audit import AuditLog, audit_path
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.live_state import AuditTail, RunProgress

RUN_B = StepPlan(Channel.B)
SKIPPED = StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS)


def _progress(run_dir: Path, num_ranks: int = 2) -> RunProgress:
    return RunProgress(run_dir, num_ranks, total_steps=10, b_enabled=True, queue_limit=8)


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
    assert state.last_round is not None
    assert (state.last_round.version, state.last_round.seconds, state.last_round.num_proven) == (1, 1.5, 1)
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
    names = ("step", "version", "version_lag", "queue_depth", "round_pending")
    log.write("step", channel="A", skip_reason=None, **{name: getattr(facts, name) for name in names})
    log.close()


def test_the_rate_counts_rollouts_of_the_last_ten_seconds_over_all_ranks(tmp_path: Path) -> None:
    _write_batches(audit_path(tmp_path, 0), [(80.0, 1000), (95.0, 20)], 100.0)
    _write_batches(audit_path(tmp_path, 1), [(99.0, 30)], 100.0)
    assert _progress(tmp_path).refresh().rollouts_per_s == (20 + 30) / 10


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
