"""Best checkpoint and early end by evaluations on the servers: ms-swift's real trainer, scripted evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import ended_evaluation
from sft_run import our_trainer

from swift_stage2.learner import Learner
from swift_stage2.records import EvaluationCounts
from swift_stage2.run import Stage2Run
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd, RunningEvaluation
from swift_stage2.telemetry.events import Evaluation

pytestmark = [pytest.mark.slow, pytest.mark.ci]


def evaluation(step: int, f1_percent: int, end: EvaluationEnd = EvaluationEnd.COMPLETE) -> Evaluation:
    """F1 is 2 · pairs / (predictions + truth)."""
    counts = EvaluationCounts(
        num_wanted=4, num_answered=4, num_predictions=100, num_ground_truth=100, num_pairs=f1_percent
    )
    return ended_evaluation(RunningEvaluation(step, step, step), step, end, counts)


Train = Callable[..., Any]


@pytest.fixture
def train(rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Gives a trainer that has trained; after step ``n`` there are the evaluations of ``ended`` below ``n + 1``."""

    def train(ended: Mapping[float, Evaluation], **arguments: Any) -> Any:
        settings = {"max_steps": 12, "metric_for_best_model": "eval_f1", "eval_strategy": "no"} | arguments
        trainer = our_trainer(rows_file, tmp_path, **settings)

        def so_far(run: Stage2Run) -> list[Evaluation]:
            return [ended[step] for step in sorted(ended) if step < trainer.state.global_step + 1]

        monkeypatch.setattr(Stage2Run, "evaluations", property(so_far))
        trainer.train()
        return trainer

    return train


def saved(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in output.glob("checkpoint-*"))


def test_the_best_model_is_saved_and_training_stops_where_it_gets_no_better(
    train: Train, tmp_path: Path
) -> None:
    ended = {step: evaluation(step, f1) for step, f1 in ((2, 20), (3, 50), (5, 40), (6, 50), (8, 90))}
    trainer = train(ended, save_strategy="best", save_only_model="true", early_stop_interval=2)
    assert trainer.state.global_step == 6, "two in a row were no better"
    assert trainer.state.best_metric == pytest.approx(0.5)
    assert saved(tmp_path) == [2, 3]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    lines = [json.loads(line) for line in (tmp_path / "logging.jsonl").read_text().splitlines()]
    assert [line["eval_f1"] for line in lines if "eval_f1" in line] == [0.2, 0.5, 0.4, 0.5]


def test_where_every_step_is_saved_ms_swift_counts_saves_and_no_checkpoint_is_called_the_best(
    train: Train, tmp_path: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1, "save_only_model": "true"}
    trainer = train({1: evaluation(1, 50), 2: evaluation(2, 40)}, early_stop_interval=2, **saves)
    assert trainer.state.global_step == 3
    assert saved(tmp_path) == [1, 2, 3]
    assert (trainer.state.best_metric, trainer.state.best_model_checkpoint) == (0.5, None)


@pytest.mark.parametrize(
    ("f1", "strategy", "best"),
    [
        (60, "best", "4"),
        (40, "best", "2"),
        (60, "steps", None),
        pytest.param(60, "epoch", None, marks=pytest.mark.slow),
    ],
)
def test_the_final_evaluation_comes_once_behind_the_last_save_and_chooses_too(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, f1: int, strategy: str, best: str | None
) -> None:
    ended, seen = {2: evaluation(2, 50)}, []

    def evaluate_final(learner: Learner, step: int) -> None:
        seen.append((step, saved(tmp_path)))
        ended[4] = evaluation(4, f1)

    monkeypatch.setattr(Learner, "evaluate_final", evaluate_final)
    trainer = train(ended, max_steps=4, save_strategy=strategy, save_only_model="true")
    assert seen == [(4, [2, 4] if strategy == "best" else [4])]
    assert trainer.state.best_model_checkpoint == (best and str(tmp_path / f"checkpoint-{best}"))
    assert trainer.state.best_metric == pytest.approx(max(50, f1) / 100)


def test_final_weights_that_are_the_best_are_saved_where_an_early_end_has_not(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: dict[float, Evaluation] = {1: evaluation(1, 50), 2: evaluation(2, 40)}
    monkeypatch.setattr(
        Learner, "evaluate_final", lambda learner, step: ended.update({step + 0.5: evaluation(3, 60)})
    )
    given = {"save_strategy": "best", "save_only_model": "true", "early_stop_interval": 1}
    trainer = train(ended, **given)
    assert (trainer.state.global_step, saved(tmp_path)) == (2, [1, 2])
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_a_run_that_was_stopped_evaluates_nothing_more(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Learner, "evaluate_final", lambda learner, step: seen.append(step))
    begin_step = Learner.begin_step
    monkeypatch.setattr(
        Learner, "begin_step", lambda learner, *of: replace(begin_step(learner, *of), stop=True)
    )
    trainer = train({}, max_steps=4)
    assert (trainer.state.global_step, seen) == (1, [])


def test_what_a_stop_saves_to_resume_outlives_a_limit_of_one_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_step = Learner.begin_step
    monkeypatch.setattr(
        Learner,
        "begin_step",
        lambda learner, step, *of: replace(begin_step(learner, step, *of), stop=step == 3),
    )
    ended = {2: evaluation(2, 50)}
    train(ended, save_strategy="best", save_total_limit=1)
    assert saved(tmp_path) == [2, 4]
    assert (tmp_path / "last-checkpoint").resolve() == tmp_path / "checkpoint-4"


def test_every_evaluation_is_logged_beside_its_steps_loss(train: Train) -> None:
    ended = {2: evaluation(2, 50), 3: evaluation(3, 20), 3.5: evaluation(3, 60)}
    trainer = train(ended, max_steps=3)
    logged = [
        (name, line["step"])
        for line in trainer.state.log_history
        for name in ("loss", "eval_f1")
        if name in line
    ]
    assert sorted(logged) == [
        ("eval_f1", 2),
        ("eval_f1", 3),
        ("eval_f1", 3),
        ("loss", 1),
        ("loss", 2),
        ("loss", 3),
    ]
    assert trainer.state.best_metric == pytest.approx(0.6)


def test_an_evaluation_that_was_cut_chooses_nothing(train: Train) -> None:
    cut = evaluation(1, 90, EvaluationEnd.ROUND_DUE)
    trainer = train({1: cut}, max_steps=3, early_stop_interval=1)
    assert (trainer.state.global_step, trainer.state.best_metric) == (3, None)
    assert any("eval_f1" in entry for entry in trainer.state.log_history)
