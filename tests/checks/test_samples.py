"""Measured lengths are those of the real template, for every row, whatever its prompt and the size of its image."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import config_of
from data.row_files import ANSWER, make_image, make_row, write_rows
from detection_task import make_task
from real_model import Rows, make_encoder, make_template, sample_of

from swift_stage2 import try_task
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.sample_source import RowOrigins
from swift_stage2.channel_b.task import TASKS, Task, register_task
from swift_stage2.checks.channel_b_parts import StepSizes, step_sizes
from swift_stage2.checks.samples import (
    RowLengths,
    check_sample,
    measure_lengths,
    task_faults,
    try_answers,
    usable_samples,
)
from swift_stage2.config import Stage2Config
from swift_stage2.errors import ConfigError, DatasetError, MatchingError, SampleError, TaskError
from swift_stage2.records import MatchQuality, Sample, SampleKey, Target


@pytest.fixture
def encoder() -> Encoder:
    return make_encoder(packing_length=100_000)


@pytest.fixture
def mixed_rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Several sizes, prompts and numbers of objects."""
    rows = []
    sizes = [(150, 100), (300, 200), (28, 28), (97, 411), (640, 480)]
    prompts = [
        "<image>Detect all objects.",
        "<image>Where are cats?\nList them.",
        "Look: <image> What is there?",
    ]
    for number in range(15):
        size = sizes[number % 5]
        image = make_image(tmp_path / f"{number}.png", size)
        count = 1 + number % 4 * (number + 1)
        boxes, labels = [[0, 1, size[0] // 2, size[1]]] * count, ["red circle"] * count
        answer = f"[{', '.join([ANSWER[1:-1]] * count)}]"
        prompt = prompts[number % 3]
        rows.append(make_row(image, answer=answer, labels=labels, boxes=boxes, prompt=prompt))
    return rows


def _config(packing_length: int, max_new_tokens: int) -> Stage2Config:
    packing = {"stage2_ab.channel_b.packing.packing_length": packing_length}
    return config_of(packing, {"rollout.decoding.max_new_tokens": max_new_tokens})


def test_a_pack_must_hold_a_prompt_and_its_answer_which_is_written_as_channel_a_writes_it(
    encoder: Encoder, rows: Rows
) -> None:
    sample = sample_of(rows[0])
    num_prompt = len(encoder.encode_prompt(sample).token_ids)
    needed = num_prompt + 100
    check_sample(_config(needed, 100), encoder, make_task(), sample, RowOrigins())
    with pytest.raises(ConfigError) as caught:
        check_sample(_config(needed - 1, 100), encoder, make_task(), sample, RowOrigins())
    assert f"packing_length={needed - 1} < prompt {num_prompt} + max_new_tokens 100" in str(caught.value)
    assert f"write packing_length: {needed} or more" in str(caught.value)
    two_turns = config_of(
        {"rollout.max_turns": 2, "rollout.decoding.max_new_tokens": 100},
        {"stage2_ab.channel_b.packing.packing_length": needed + 99},
    )
    with pytest.raises(
        ConfigError, match=rf"max_new_tokens 100 \* max_turns 2; write .*: {needed + 100} or more"
    ):
        check_sample(two_turns, encoder, make_task(), sample, RowOrigins())
    with pytest.raises(ConfigError, match=r"target\.dialect must be the format of channel A's answers"):
        check_sample(_config(needed, 100), encoder, make_task("object_map"), sample, RowOrigins())


def test_bad_rows_are_no_reason_not_to_start_unless_all_are(encoder: Encoder, rows: Rows) -> None:
    spoilt: list[dict[str, Any]] = [
        {**row, "images": ["/nowhere/a.png"]} if number % 2 else {**row, "objects": None}
        for number, row in enumerate(rows[:8])
    ]
    some = [rows[number] if number in (3, 6) else row for number, row in enumerate(spoilt)]
    samples, again = (usable_samples(some, 1, encoder, make_task(), 3, range(8)) for _ in range(2))
    assert {sample.key.index for sample in samples} == {3, 6}
    assert samples == again, "all ranks look at the same samples"
    first = r"got none among num_rows=8, the first \(a row of no local JSONL.*\) because: "
    with pytest.raises(DatasetError, match=first):
        usable_samples(spoilt, 1, encoder, make_task(), 3, range(8))


def _true_lengths(rows: Rows, encoder: Encoder) -> list[tuple[int, int]]:
    """(prompt, answer) of each row, as channel A encodes the whole of it."""
    template = make_template()
    found = []
    for row in rows:
        whole = len(template.encode(json.loads(json.dumps(row)))["input_ids"])
        prompt = len(encoder.encode_prompt(sample_of(row)).token_ids)
        found.append((prompt, whole - prompt))
    return found


def _measured(config: Stage2Config, rows: Rows, encoder: Encoder, *files: Path) -> RowLengths:
    """As three ranks measure their shares and join them."""
    origins = RowOrigins(files)
    return RowLengths.merged(
        [
            measure_lengths(config, rows, range(rank, len(rows), 3), encoder, make_task(), origins).to_note()
            for rank in range(3)
        ]
    )


def test_every_row_is_as_long_as_the_template_makes_it(encoder: Encoder, mixed_rows: Rows) -> None:
    expected = _true_lengths(mixed_rows, encoder)
    for number in range(len(expected)):
        lengths = measure_lengths(
            _config(4096, 512), mixed_rows, range(number + 1), encoder, make_task(), RowOrigins()
        )
        known = expected[: number + 1]
        assert lengths.longest_segment[0] == max(map(sum, known))
        assert lengths.longest_answer[0] == max(answer for _, answer in known)
        assert lengths.longest_prompt == max(prompt for prompt, _ in known)
        assert lengths.num_tokens == sum(map(sum, known))


def test_rows_that_the_task_refuses_are_counted_and_one_is_named(
    tmp_path: Path, encoder: Encoder, mixed_rows: Rows
) -> None:
    rows = [dict(row) for row in mixed_rows]
    for number in (3, 7):
        rows[number]["objects"] = {"ref": ["a"], "bbox": []}
    file, config = write_rows(tmp_path / "rows.jsonl", rows), _config(4096, 512)
    lengths = _measured(config, rows, encoder, file)
    assert (lengths.num_rows, lengths.num_unusable) == (13, 2)
    ((found, remedy),) = lengths.troubles(config)
    assert found.startswith("2 of 15 rows cannot be used by channel B")
    assert f"{file}:" in found
    assert remedy == "mend them"  # once: the row's own error has lost its remedy
    assert "; " not in found


def test_rows_that_never_fit_are_counted_and_the_longest_is_named(
    tmp_path: Path, encoder: Encoder, mixed_rows: Rows
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", mixed_rows)
    expected = _true_lengths(mixed_rows, encoder)
    totals, answers = [sum(each) for each in expected], [answer for _, answer in expected]
    packing, new = sorted(totals)[9], sorted(answers)[11]
    config = _config(packing, new)
    lengths = _measured(config, mixed_rows, encoder, file)
    assert (lengths.num_rows, lengths.num_long_segments) == (15, sum(total > packing for total in totals))
    assert lengths.num_long_answers == sum(answer > new for answer in answers)
    longest = totals.index(max(totals))
    assert lengths.longest_segment[1].startswith(f"{file}:{longest + 1}, image ")
    (segments, write_packing), (too_long, write_new) = lengths.troubles(config)
    assert f"{lengths.num_long_segments} of 15 rows can never be trained on channel B" in segments
    assert f"packing_length {packing}, the longest {max(totals)} tokens ({file}:{longest + 1}" in segments
    assert f"packing_length: {max(totals)} or more" in write_packing
    assert f"longer than max_new_tokens {new}" in too_long
    assert f"max_new_tokens: {max(answers)} or more" in write_new


def _lengths(num_rows: int, mean: int, prompt: int, answer: int) -> RowLengths:
    """Rows with the longest prompt and true answer as told."""
    longest = {"longest_prompt": prompt, "longest_segment": (prompt + answer, "")}
    return RowLengths(num_rows=num_rows, num_tokens=num_rows * mean, **longest)  # type: ignore[arg-type]


def _sizes(lengths: RowLengths, num_packs: int, **changes: Any) -> StepSizes:
    config = _config(changes.pop("packing_length", 4096), changes.pop("max_new_tokens", 1024))
    found = step_sizes(replace(config, swift={**config.swift, **changes}), lengths, num_packs)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("mean", "longest", "batch", "ratio", "advice"),
    [
        (256, 300, 1, "16 ", ""),
        (
            255,
            300,
            1,
            "16.1 ",
            "per_device_train_batch_size: 5, or stage2_ab.channel_b.packing.packing_length: 1274",
        ),
        (64, 100, 4, "16 ", ""),
        (64, 100, 3, "21.3 ", "packing_length: 1074"),
        (64, 900, 2, "32 ", "packing_length: 1874"),  # the longest prompt and an answer must fit
        (64, 2000, 1, "64 ", "per_device_train_batch_size: 16"),  # with so long a prompt no other pack helps
        (64, 4096, 1, "64 ", "per_device_train_batch_size: 16"),
        (5000, 4096, 1, "1 ", ""),
    ],
)
def test_the_sizes_of_steps_follow_from_the_rows(
    tmp_path: Path, mean: int, longest: int, batch: int, ratio: str, advice: str
) -> None:
    for num_packs in (1, 8):  # both channels have as many micro steps
        told = _sizes(_lengths(500, mean, longest - 50, 50), num_packs, per_device_train_batch_size=batch)
        assert f"as many rows as {ratio}" in told.told
        assert bool(told.remedy) is bool(advice)
        assert advice in told.remedy
        _, offers_pack, length = told.remedy.partition("packing.packing_length: ")
        if offers_pack:
            given = {"per_device_train_batch_size": batch, "packing_length": int(length)}
            assert not _sizes(_lengths(500, mean, longest - 50, 50), num_packs, **given).remedy


@pytest.mark.parametrize(
    ("packing_length", "ratio", "advice"),
    [(512, "8 ", ""), (128, "32 ", "write swift.packing_length: 1024"), (0, "", "")],
)
def test_rows_that_ms_swift_packs_are_counted_with_their_packs(
    packing_length: int, ratio: str, advice: str
) -> None:
    """64 tokens a row, 64 rows in a pack of channel B's."""
    config = _config(4096, 1024)
    packing = {"packing": True, "packing_length": packing_length, "per_device_train_batch_size": 1}
    found = step_sizes(replace(config, swift={**config.swift, **packing}), _lengths(500, 64, 50, 50), 2)
    if not packing_length:
        assert found is None, "the model's own maximum is not known here"
        return
    assert found is not None
    assert f"as many rows as {ratio}" in found.told
    assert found.remedy.startswith(advice)
    assert bool(found.remedy) is bool(advice)


# --- tasks of a user's ---------------------------------------------------------------------------------

QUALITY = MatchQuality(0, 1, 0, 0.0, 0, 0)


class _Broken(Task):
    """Trains the row's own answer, but for what ``spoil`` makes of an answer's text and of the target."""

    def __init__(self, spoil: Any) -> None:
        self.spoil = spoil

    def read_truth(self, row: Any) -> Any:
        return row["messages"][-1]["content"]

    def correct(self, rollout: Any, truth: Any, tokenise: Any) -> Any:
        token_ids, _ = tokenise(truth)
        return self.spoil(rollout, Target(truth, token_ids, (1.0,) * len(token_ids), QUALITY))

    def check_answer(self, text: str, truth: Any, normalise: Any = str) -> None:
        return


def _samples(task: Task, rows: Rows) -> list[Sample]:
    return [Sample(SampleKey(0, 0, 0), row, task.read_truth(row)) for row in rows[:2]]


def _choose(rollout: Any, target: Target) -> Target:
    raise SampleError("no") if rollout.text else MatchingError("no")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda rollout, target: (
                target if rollout.text.endswith("]") or not int(rollout.text or 0) else None
            ),
            "got ValueError: invalid literal for int",
        ),
        (lambda rollout, target: {"": target}[rollout.text], "got KeyError"),
        (lambda rollout, target: 1 // (not rollout.truncated) and target, "got ZeroDivisionError"),
        (lambda rollout, target: None, "correct must return a Target, got NoneType; mend the task"),
        (
            lambda rollout, target: replace(target, weights=(1.0,)),
            "a Target needs one weight per token, got num_weights=1 num_token_ids=",
        ),
    ],
)
def test_a_task_that_breaks_on_a_word_a_real_a_cut_or_any_answer_is_told_before_a_run(
    encoder: Encoder, rows: Rows, spoil: Any, told: str
) -> None:
    task = _Broken(spoil)
    with pytest.raises(TaskError, match=re.escape(told)) as caught, task_faults(task):
        try_answers(encoder, task, _samples(task, rows))
    assert str(caught.value).startswith("task _Broken")
    assert str(caught.value).endswith("; mend the task")
    if told.startswith("got "):
        assert f"({__file__}:" in str(caught.value)


def test_what_costs_one_sample_is_no_fault_and_faults_elsewhere_are_not_the_tasks(
    encoder: Encoder, rows: Rows
) -> None:
    for task in (_Broken(_choose), _Broken(lambda rollout, target: target), make_task()):
        try_answers(encoder, task, _samples(task, rows))
    with pytest.raises(ZeroDivisionError), task_faults(make_task()):
        _ = 1 // 0
    with pytest.raises(SampleError), task_faults(task):
        raise SampleError("no")


def test_a_task_is_tried_on_one_row_without_a_model(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = str(rows[0]["messages"][-1]["content"])
    target = try_task(_Broken(lambda rollout, target: target), rows[0], "two")
    assert (target.text, target.token_ids) == (answer, tuple(map(ord, answer)))
    quality = try_task(make_task(), rows[0], '[{"bbox_2d": [0, 0, 9, 9], "label": "x"}]').quality
    assert (quality.num_predictions, quality.num_ground_truth) == (1, len(rows[0]["objects"]["ref"]))
    monkeypatch.setattr("swift_stage2.channel_b.task.TASKS", dict(TASKS))
    register_task("captions")(_Broken)
    with pytest.raises(TaskError, match=r"^task captions: correct must return a Target"):
        try_task(_Broken(lambda rollout, target: None), rows[0], "two")
