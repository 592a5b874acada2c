"""Benches of a learner's loop: what the bound is, what idle is, what counts as the same work, how GRPO is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.learner_job import (
    COMPLETIONS_PER_STEP,
    Arm,
    ArmRecords,
    grpo_arguments,
    write_arm_config,
)
from benchmarks.overlap import Mode, OverlapRun, Repetition, run_of
from benchmarks.peer import LearnerLoop, LoopArm, share_of_bound
from benchmarks.stand_in_server import (
    NUM_ANSWERS,
)
from swift_stage2.config import Objective, Proof, load_config
from swift_stage2.demo.demo_config import GRADIENT_ACCUMULATION_STEPS
from swift_stage2.errors import ChildFailed
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Step

SECOND = 1_000_000_000


def _repetition(asynchronous: float, inline: float, waited: float, num_b_run: int = 5) -> Repetition:
    return Repetition(
        asynchronous=OverlapRun(seconds=asynchronous, waited=0.0, num_b_wanted=5, num_b_run=num_b_run),
        inline=OverlapRun(seconds=inline, waited=waited, num_b_wanted=5, num_b_run=5),
        a_only=OverlapRun(seconds=8.0, waited=0.0, num_b_wanted=0, num_b_run=0),
    )


@pytest.mark.parametrize(("waited", "bound"), [(4.0, 10 / 6), (8.0, 10 / 8), (5.0, 2.0)])
def test_the_bound_is_inline_over_the_longer_of_learner_and_pipeline(waited: float, bound: float) -> None:
    each = _repetition(asynchronous=6.25, inline=10.0, waited=waited)
    assert each.learner == 10.0 - waited
    assert each.bound == pytest.approx(bound)
    assert each.fraction == pytest.approx(1.6 / bound)


def _records(channels: str, waits: dict[int, float] | None = None) -> ArmRecords:
    steps = [
        Step(
            step=step, channel=Channel(channel), wants_b=step % 4 == 3, skip_reason=None, version=1, version_lag=None,
            queue_depth=0, infer_in_flight=0, version_pending=False, plan_seconds=(waits or {}).get(step, 0.1),
            num_supervised_tokens=0, packs={}, activity_ns={},
        )
        for step, channel in enumerate(channels)
    ]  # fmt: skip
    clock = {"end_ns": [(step + 1) * 500_000_000 for step in range(len(channels))]}
    return ArmRecords(clock, RankEvents(0, [steps]))


def test_a_run_counts_from_the_end_of_its_warm_up() -> None:
    run = run_of(Mode.INLINE, _records("AAABAAABAAAB", {3: 9.0, 7: 1.5, 11: 0.5}), num_warmup=4)
    assert (run.seconds, run.waited, run.num_b_wanted, run.num_b_run) == (4.0, 2.0, 2, 2)


def test_an_inline_run_that_skipped_a_step_is_no_measurement_but_an_asynchronous_one_is() -> None:
    skipping = _records("AAABAAABAAAA")
    with pytest.raises(ChildFailed, match="it ran 1 of 2"):
        run_of(Mode.INLINE, skipping, num_warmup=4)
    assert run_of(Mode.ASYNC, skipping, num_warmup=4).num_b_run == 1


def _clock(num_steps: int, *, wall: float, main: float, queued: float) -> dict[str, list[int]]:
    """Every step alike, after a long start."""

    def sums(start: float, per_step: float) -> list[int]:
        return [int((start + step * per_step) * SECOND) for step in range(num_steps)]

    return {"end_ns": sums(90, wall), "main_ns": sums(40, main), "queued_ns": sums(7, queued)}


def _loop(*, wall: float = 2.0, in_rollout: float = 0.0) -> LearnerLoop:
    return LearnerLoop.of(
        _clock(10, wall=wall, main=1.0, queued=0.5),
        4,
        in_rollout=in_rollout,
        in_push=0.6,
        num_wanted=4,
        num_rollout_steps=3,
        num_completions=60,
        num_tokens=6000,
    )


def test_idle_is_what_is_neither_on_a_core_nor_ready_for_one() -> None:
    loop = _loop()
    assert (loop.num_steps, loop.seconds, loop.on_core, loop.queued) == (6, 12.0, 6.0, 3.0)
    assert loop.idle_share == pytest.approx(0.25)


def test_a_learners_bound_is_its_inline_step_without_its_waits() -> None:
    loops = {arm: _loop() for arm in LoopArm} | {LoopArm.PEER_INLINE: _loop(wall=2.5, in_rollout=6.0)}
    assert loops[LoopArm.PEER_INLINE].step_s_without_rollouts == pytest.approx(1.5)
    assert share_of_bound(loops, LoopArm.PEER) == pytest.approx(0.75)
    # Half a second of either step was spent without a core.
    assert share_of_bound(loops, LoopArm.PEER, less_queued=True) == pytest.approx(1.0 / 1.5)


def test_both_learners_ask_their_server_alike_for_whole_groups(tmp_path: Path) -> None:
    arm = Arm(
        name="arm",
        directory=tmp_path,
        rows=tmp_path,
        num_steps=9,
        ports=(4001, 4002),
        b_ratio=1.0,
        prefetch={"sync_every_steps": 999},
    )
    words = grpo_arguments(arm, asynchronous=True)
    assert words["async_generate"]
    ports = words["vllm_server_host"], words["vllm_server_port"], words["vllm_server_group_port"]
    assert ports == (["127.0.0.1"], [4001], [4002])
    assert words["per_device_train_batch_size"] * GRADIENT_ACCUMULATION_STEPS == COMPLETIONS_PER_STEP
    config = load_config(write_arm_config(replace(arm, objective=Objective.GRPO)))
    rollout = config.rollout
    assert rollout.num_generations == words["num_generations"] == NUM_ANSWERS
    assert (rollout.decoding.temperature, rollout.decoding.top_p) == (words["temperature"], 1.0)
    assert config.launch.servers == ()
    assert config.stage2_ab.channel_b.prefetch.sync_every_steps == 999
    assert rollout.sync.proof is Proof.CHECKSUM
    assert load_config(write_arm_config(arm)).rollout.num_generations == 1
