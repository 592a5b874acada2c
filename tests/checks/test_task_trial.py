"""Tasks that break on an answer are told before a run, with their name and the line of their file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from detection_task import make_task
from real_model import make_encoder

from swift_stage2 import try_task
from swift_stage2.channel_b.task import TASKS, Task, register_task
from swift_stage2.checks.task_trial import task_faults, try_answers
from swift_stage2.errors import ConfigError, MatchingError, SampleError, TaskError
from swift_stage2.records import MatchQuality, Sample, SampleKey, Target

QUALITY = MatchQuality(0, 1, 0, 0.0, 0, 0)
LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


class _Echo(Task):
    """Trains the row's own answer; each test's task breaks it in one place."""

    def read_truth(self, row: Any) -> Any:
        return row["messages"][-1]["content"]

    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        token_ids, _ = tokenise(truth)
        return Target(truth, token_ids, (1.0,) * len(token_ids), QUALITY)

    def check_answer(self, text: str, truth: Any, normalise: Any = str) -> None:
        return


class _Strict(_Echo):
    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        if rollout.text and not rollout.text.endswith("]"):
            int(rollout.text)  # breaks on a word, and on half an answer
        return super().correct(rollout, truth, tokenise)


class _OfRealAnswers(_Echo):
    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        if rollout.text.endswith("]"):
            rollout.text["bbox"]  # breaks on a real answer
        return super().correct(rollout, truth, tokenise)


class _OfCutAnswers(_Echo):
    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        return super().correct(rollout, 1 // (not rollout.truncated) and truth, tokenise)  # breaks on a cut


class _Forgetful(_Echo):
    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        super().correct(rollout, truth, tokenise)


class _Short(_Echo):
    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        return replace(super().correct(rollout, truth, tokenise), weights=(1.0,))


class _TwoArguments(_Echo):
    def correct(self, rollout: Any, truth: Any) -> Any:  # type: ignore[override]
        return None


class _Unlisted(_Echo):
    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        raise ConfigError("no answer will do; give up")  # breaks always


class _Choosy(_Echo):
    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        raise SampleError("no") if rollout.text else MatchingError("no")


def _samples(task: Task, rows: list[dict[str, Any]]) -> list[Sample]:
    return [Sample(SampleKey(0, 0, 0), row, task.read_truth(row)) for row in rows[:2]]


def _line(comment: str) -> int:
    return next(number for number, line in enumerate(LINES, start=1) if f"# {comment}" in line)


@pytest.mark.parametrize(
    ("task", "told", "line"),
    [
        (_Strict, "ValueError: invalid literal", _line("breaks on a word, and on half an answer")),
        (_OfRealAnswers, "TypeError: string indices must be integers", _line("breaks on a real answer")),
        (_OfCutAnswers, "ZeroDivisionError", _line("breaks on a cut")),
        (_TwoArguments, "TypeError: _TwoArguments.correct() takes 3", _line("type: ignore[override]")),
        (_Unlisted, "ConfigError: no answer will do", _line("breaks always")),
    ],
)
def test_a_task_that_breaks_on_an_answer_is_told_with_its_line(
    task: type[Task], told: str, line: int, rows: list[dict[str, Any]]
) -> None:
    with pytest.raises(TaskError) as caught:
        try_answers(make_encoder(), task(), _samples(task(), rows))
    message = str(caught.value)
    assert message.startswith(f"task {task.__name__} must work on every row and answer")
    assert told in message
    assert message.endswith(f" ({__file__}:{line}); mend the task")


def test_what_costs_one_sample_is_no_fault(rows: list[dict[str, Any]]) -> None:
    for task in (_Choosy(), _Echo(), make_task()):
        try_answers(make_encoder(), task, _samples(task, rows))


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (_Forgetful, "correct must return a Target, got NoneType; mend the task"),
        (_Short, "a Target needs one weight per token, got num_weights=1 num_token_ids="),
    ],
)
def test_a_target_of_another_form_is_told_with_the_tasks_name(
    task: type[Task], told: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_stage2.channel_b.task.TASKS", dict(TASKS))
    register_task("captions")(task)
    for work in (
        lambda: try_answers(make_encoder(), task(), _samples(task(), rows)),
        lambda: try_task(task(), rows[0], "two"),
    ):
        with pytest.raises(TaskError) as caught:
            work()
        assert str(caught.value).startswith(f"task captions: {told}")


def test_faults_elsewhere_are_not_the_tasks() -> None:
    with pytest.raises(ZeroDivisionError), task_faults(make_task()):
        _ = 1 // 0
    with pytest.raises(SampleError), task_faults(_Echo()):
        raise SampleError("no")
    with pytest.raises(TaskError, match="got KeyError: 'messages' "), task_faults(_Echo()):
        _Echo().read_truth({})


def test_a_task_is_tried_on_one_row_without_a_model(rows: list[dict[str, Any]]) -> None:
    answer = str(rows[0]["messages"][-1]["content"])
    target = try_task(_Echo(), rows[0], "two")
    assert (target.text, target.token_ids) == (answer, tuple(map(ord, answer)))
    said = '[{"bbox_2d": [0, 0, 9, 9], "label": "x"}]'
    quality = try_task(make_task(), rows[0], said).quality
    assert (quality.num_predictions, quality.num_ground_truth) == (1, len(rows[0]["objects"]["ref"]))
