"""What ms-swift's arguments must say so that evaluations on the servers choose the best model."""

from __future__ import annotations

from typing import Any

import pytest

from swift_stage2.config.swift_arguments import best_metric, refuse_best_model, require_metric
from swift_stage2.errors import ConfigError

GOOD = {"metric_for_best_model": "eval_f1", "eval_strategy": "no", "save_strategy": "best"}


@pytest.mark.parametrize(
    ("named", "metric"),
    [
        ("eval_f1", "f1"),
        ("eval/f1", "f1"),
        ("f1", "f1"),
        ("eval/exact", "exact"),
        ("loss", None),
        ("eval_loss", None),
        ("rouge-l", None),
        (None, None),
    ],
)
def test_a_metric_of_evaluations_is_known_by_its_name(named: object, metric: str | None) -> None:
    assert best_metric({"metric_for_best_model": named}) == metric


@pytest.mark.parametrize(
    "swift",
    [
        GOOD,
        GOOD | {"eval_strategy": False, "load_best_model_at_end": False},
        GOOD | {"save_strategy": "steps", "early_stop_interval": 3},
        {"save_strategy": "no", "metric_for_best_model": "eval/f1"},
        {"metric_for_best_model": "loss", "load_best_model_at_end": True},
    ],
)
def test_what_goes_together_passes(swift: dict[str, Any]) -> None:
    refuse_best_model(swift, 200)


@pytest.mark.parametrize(
    ("more", "every_steps", "words"),
    [
        ({}, 0, "needs evaluations on the servers, got .*every_steps=0; write every_steps: 200"),
        ({"metric_for_best_model": "eval_ap"}, 9, "every rank knows .*; write one of eval_precision, "),
        ({"eval_strategy": "steps"}, 9, "got eval_strategy='steps'; write eval_strategy: 'no'"),
        ({"eval_strategy": None}, 9, "got eval_strategy=None; write eval_strategy: 'no'"),
        ({"load_best_model_at_end": True}, 9, "goes on with the last weights; write save_strategy: best"),
        ({"metric_for_best_model": "eval/truncated_ratio"}, 9, "lower; write greater_is_better: false"),
    ],
)
def test_what_would_choose_nothing_is_one_line(more: dict[str, Any], every_steps: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_best_model(GOOD | more, every_steps)


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_there_are() -> None:
    require_metric({"metric_for_best_model": "eval/exact"}, ("exact",))
    with pytest.raises(ConfigError, match=r"got eval/exakt; write one of eval/precision, .*, eval/exact$"):
        require_metric({"metric_for_best_model": "eval/exakt"}, ("exact",))
