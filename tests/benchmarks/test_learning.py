from __future__ import annotations

from pathlib import Path

from benchmarks.learning import LearningArm, Treatment, learning_table, plan_jobs
from swift_stage2.config import Objective
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.scoring import DetectionScore


def _score(f1: float) -> DetectionScore:
    return DetectionScore(precision=f1, recall=f1, f1=f1, mean_iou=0.5, num_images=128)


def _arm(b_ratio: float, seed: int, f1: float) -> LearningArm:
    wanted = int(100 * b_ratio)
    return LearningArm(
        b_ratio=b_ratio,
        treatment=Treatment.GIVEN if b_ratio else Treatment.PLAIN,
        seed=seed,
        num_steps=100,
        num_b_wanted=wanted,
        num_b_run=wanted,
        train_seconds=60.0,
        core_seconds=120.0,
        score=_score(f1),
    )


def test_arms_differ_in_nothing_but_the_share_of_b(tmp_path: Path) -> None:
    treatments = [Treatment(name) for name in ("noise", "given", "any", "grpo")]
    planned = list(plan_jobs(tmp_path, 2, 2, (0.0, 0.3), SceneKind.SHAPES, treatments))
    arms = [(0.0, "a"), (0.0, "noise"), (0.3, "given"), (0.3, "any"), (0.3, "grpo")]
    assert [(job.seed, job.b_ratio, treatment) for treatment, job in planned] == [
        (seed, *arm) for seed in (0, 1) for arm in arms
    ]
    jobs = [job for treatment, job in planned if treatment is not Treatment.NOISE]
    assert [job.missed_order for job in jobs[:4]] == ["given", "given", "any", "given"]
    assert [job.objective for job in jobs[:4]] == [*[Objective.CORRECTED_TARGET] * 3, Objective.GRPO]
    for of_seed in (jobs[:4], jobs[4:]):
        assert of_seed[0].rows.is_file()
        assert len({(job.rows, job.num_steps, job.model, str(job.swift)) for job in of_seed}) == 1
    assert jobs[0].model == STAGE1
    assert jobs[0].rows.read_text() != jobs[4].rows.read_text()
    assert len({job.directory for job in jobs}) == 8


def test_every_seed_is_scored_on_the_same_scenes(tmp_path: Path) -> None:
    list(plan_jobs(tmp_path, 1, 2, (0.0,), SceneKind.SHAPES))
    first, second = (tmp_path / f"seed{seed}" / "held_out" for seed in (0, 1))
    for image in first.glob("*.png"):
        assert image.read_bytes() == (second / image.name).read_bytes()


def _text(arms: list[LearningArm]) -> str:
    return learning_table(_score(0.2), arms).markdown()


def test_one_seed_is_shown_as_it_is() -> None:
    text = _text([_arm(0.0, 0, 0.5), _arm(0.3, 0, 0.625)])
    assert "0.200" in text
    assert "0.625" in text
    assert "30 of 30" in text
    assert "+0.125 |" in text
    assert "(0" not in text, "no range of one"


def test_several_seeds_are_shown_with_their_range() -> None:
    assert "0.500 (0.250..0.750)" in _text([_arm(0.3, 0, 0.25), _arm(0.3, 1, 0.75)])


def test_gains_are_taken_seed_by_seed() -> None:
    arms = [_arm(0.0, 0, 0.25), _arm(0.3, 0, 0.5), _arm(0.0, 1, 0.5), _arm(0.3, 1, 0.625)]
    assert "| +0.188 (+0.125..+0.250) |" in _text(arms)
