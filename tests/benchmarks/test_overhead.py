"""Benches of section 10's ratios: both arms alike, pairs counted as they should, budgets told by medians."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.crowds import AnswerKind, make_crowd
from benchmarks.overhead import ArmName, arm_command
from benchmarks.plan import BARE, PLAN, plan_table, slowest
from benchmarks.preprocess import bare_match
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import DemoJob, write_config


def test_both_arms_train_with_the_same_ms_swift_arguments(tmp_path: Path) -> None:
    job = DemoJob(directory=tmp_path, rows=tmp_path / "rows.jsonl", num_steps=9, b_ratio=0.0, num_ranks=2)
    write_config(job, (4001, 4002))
    plain, ours = arm_command(ArmName.PLAIN, job), arm_command(ArmName.OURS, job)
    arguments = load_config(job.config_path).swift_arguments()
    program = plain.index("benchmarks.swift_program")
    assert list(plain[program + 1 :]) == ["sft", *arguments]
    assert ours[program:] == ("swift_stage2", "train", str(job.config_path))
    assert plain[:program] == ours[:program]
    assert "--nproc-per-node=2" in plain


def test_a_plan_counts_as_its_slowest_rank_and_is_judged_by_both_budgets() -> None:
    ranks = [{PLAN: [0.001, 0.003], BARE: [0.001, 0.001]}, {PLAN: [0.0012, 0.001], BARE: [0.0005, 0.002]}]
    found = slowest(ranks)
    assert found == {PLAN: [0.0012, 0.003], BARE: [0.001, 0.002]}
    two, four = plan_table({2: found, 4: {PLAN: [0.5], BARE: [0.5]}}).rows
    assert (two[3], two[4]) == ("1.35 (1.27..1.43)", "2 ms: missed, ratio 1.3: missed")
    assert four[4] == "ratio 1.3: held"


def test_the_bare_match_is_the_best_assignment_of_the_best_candidates() -> None:
    crowd = make_crowd(5, AnswerKind.JITTERED, 3)
    predicted, true = ([box for _, box in side] for side in (crowd.answer, crowd.truth))

    def cost(one: tuple[int, ...], other: tuple[int, ...]) -> float:
        width = min(one[2], other[2]) - max(one[0], other[0])
        height = min(one[3], other[3]) - max(one[1], other[1])
        shared = max(width, 0) * max(height, 0)
        areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
        return 1 - shared / (areas - shared)

    orders = itertools.permutations(range(5))
    best = min(sum(cost(predicted[i], true[j]) for i, j in enumerate(order)) for order in orders)
    assert bare_match(predicted, true, top_k=5).sum() == pytest.approx(best)


@pytest.mark.slow
def test_two_real_ranks_plan_steps(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command.main(["plan", "--ranks", "2", "--repeats", "3", "--output", str(out)]) == 0
    assert (out / "plan.md").read_text().splitlines()[-1].startswith("| 2 ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_arms_side_by_side_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command.main(["overhead", "--steps=30", "--repeats=1", "--ranks=1", "--output", str(out)]) == 0
    share = next(
        line for line in (out / "overhead.md").read_text().splitlines() if "own hooks, share" in line
    )
    assert 0 < float(share.split("|")[2].strip().rstrip("%")) < 100
