"""Measured lengths are those of the real template, for every row, whatever its prompt and the size of its image."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from builders import config_of
from detection_task import make_task
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from real_model import make_encoder, make_template, sample_of

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.sample_source import RowOrigins
from swift_stage2.checks.channel_b_parts import step_sizes
from swift_stage2.checks.samples import Excess, RowLengths, measure_lengths
from swift_stage2.config import Stage2Config
from swift_stage2.config.rules import Inequality

OBJECT = '{"bbox_2d": <bbox>, "label": "<ref-object>"}'


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
        path = tmp_path / f"{number}.png"
        Image.new("RGB", size).save(path)
        count = 1 + number % 4 * (number + 1)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": prompts[number % 3]},
                    {"role": "assistant", "content": f"[{', '.join([OBJECT] * count)}]"},
                ],
                "images": [str(path)],
                "objects": {"ref": ["red circle"] * count, "bbox": [[0, 1, size[0] // 2, size[1]]] * count},
            }
        )
    return rows


def _config(packing_length: int, max_new_tokens: int) -> Stage2Config:
    packing = {"stage2_ab.channel_b.packing.packing_length": packing_length}
    return config_of(packing, {"rollout.decoding.max_new_tokens": max_new_tokens})


def _true_lengths(rows: list[dict[str, Any]], encoder: Encoder) -> list[tuple[int, int]]:
    """(prompt, answer) of each row, as channel A encodes the whole of it."""
    template = make_template()
    found = []
    for row in rows:
        whole = len(template.encode(json.loads(json.dumps(row)))["input_ids"])
        prompt = len(encoder.encode_prompt(sample_of(row)).token_ids)
        found.append((prompt, whole - prompt))
    return found


def test_every_row_is_as_long_as_the_template_makes_it(
    tmp_path: Path, encoder: Encoder, mixed_rows: list[dict[str, Any]]
) -> None:
    expected = _true_lengths(mixed_rows, encoder)
    for number, (prompt, answer) in enumerate(expected):
        lengths = measure_lengths(
            _config(4096, 512), mixed_rows, range(number + 1), encoder, make_task(), RowOrigins()
        )
        assert lengths.segments.longest == max(sum(each) for each in expected[: number + 1])
        assert lengths.answers.longest == max(each[1] for each in expected[: number + 1])
        assert lengths.shortest_prompt == min(each[0] for each in expected[: number + 1])
        assert prompt + answer <= lengths.segments.longest


def test_rows_that_the_task_refuses_are_counted_and_one_is_named(
    tmp_path: Path, encoder: Encoder, mixed_rows: list[dict[str, Any]]
) -> None:
    rows = [dict(row) for row in mixed_rows]
    for number in (3, 7):
        rows[number]["objects"] = {"ref": ["a"], "bbox": []}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    config, origins = _config(4096, 512), RowOrigins([file])
    shares = [
        measure_lengths(config, rows, range(rank, 15, 2), encoder, make_task(), origins).to_note()
        for rank in range(2)
    ]
    lengths = reduce(RowLengths.merged, map(RowLengths.from_note, shares))
    assert (lengths.num_rows, lengths.num_unusable) == (13, 2)
    ((found, remedy),) = lengths.troubles
    assert found.startswith("2 of 15 rows cannot be used by channel B")
    assert f"{file}:" in found
    assert remedy == "mend them"  # once: the row's own error has lost its remedy
    assert "; " not in found


def test_rows_that_never_fit_are_counted_and_the_longest_is_named(
    tmp_path: Path, encoder: Encoder, mixed_rows: list[dict[str, Any]]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in mixed_rows) + "\n")
    expected = _true_lengths(mixed_rows, encoder)
    totals, answers = [sum(each) for each in expected], [answer for _, answer in expected]
    packing, new = sorted(totals)[9], sorted(answers)[11]
    config = _config(packing, new)
    origins = RowOrigins([file])
    lengths = measure_lengths(config, mixed_rows, range(15), encoder, make_task(), origins)
    assert (lengths.num_rows, lengths.segments.num_rows) == (15, sum(total > packing for total in totals))
    assert lengths.answers.num_rows == sum(answer > new for answer in answers)
    longest = totals.index(max(totals))
    assert lengths.segments.place.startswith(f"{file}:{longest + 1}, image ")
    (segments, write_packing), (too_long, write_new) = lengths.troubles
    assert f"{lengths.segments.num_rows} of 15 rows can never be trained on channel B" in segments
    assert f"packing_length {packing}, the longest {max(totals)} tokens ({file}:{longest + 1}" in segments
    assert f"packing_length: {max(totals)} or more" in write_packing
    assert f"longer than max_new_tokens {new}" in too_long
    assert f"max_new_tokens: {max(answers)} or more" in write_new
    # Ranks measure their shares and join them.
    parts = [
        RowLengths.from_note(
            measure_lengths(config, mixed_rows, range(rank, 15, 3), encoder, make_task(), origins).to_note()
        )
        for rank in range(3)
    ]
    assert parts[0].merged(parts[1]).merged(parts[2]) == lengths


def test_a_row_that_cannot_be_read_is_not_measured(
    tmp_path: Path, encoder: Encoder, mixed_rows: list[dict[str, Any]]
) -> None:
    rows = [{**mixed_rows[0], "images": ["/nowhere.png"]}, {**mixed_rows[1], "objects": None}, mixed_rows[2]]
    rows += [{**mixed_rows[0], "messages": messages} for messages in ([], None, [7], [{}])]
    lengths = measure_lengths(_config(4096, 512), rows, range(7), encoder, make_task(), RowOrigins())
    assert (lengths.num_rows, lengths.num_unusable) == (1, 6)


def _lengths(num_rows: int, mean: int, prompt: int, answer: int) -> RowLengths:
    """Rows with the longest prompt and true answer as told."""
    segments, answers = Excess(4096, 0, prompt + answer, ""), Excess(1024, 0, answer, "")
    return RowLengths(num_rows, segments, answers, 0, "", prompt, prompt, num_rows * mean)


def _sizes(lengths: RowLengths, num_packs: int, **changes: Any) -> Inequality:
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
        (64, 2000, 1, "64 ", "packing_length: 2974"),  # the longest prompt and an answer must fit
        (64, 4096, 1, "64 ", "per_device_train_batch_size: 16"),
        (5000, 4096, 1, "1 ", ""),
    ],
)
def test_the_sizes_of_steps_follow_from_the_rows(
    tmp_path: Path, mean: int, longest: int, batch: int, ratio: str, advice: str
) -> None:
    for num_packs in (1, 8):  # both channels have as many micro steps
        told = _sizes(_lengths(500, mean, longest - 50, 50), num_packs, per_device_train_batch_size=batch)
        assert f"as many rows as {ratio}" in told.numbers
        assert told.holds is (not advice)
        assert not advice or advice in told.remedy


@given(
    mean=st.integers(1, 300), answer=st.integers(1, 100), prompt=st.integers(1, 500), batch=st.integers(1, 8)
)
def test_the_length_that_is_advised_is_one_that_a_run_takes(
    mean: int, answer: int, prompt: int, batch: int
) -> None:
    lengths = _lengths(50, mean, prompt, answer)
    told = _sizes(lengths, 4, per_device_train_batch_size=batch)
    if told.holds:
        return
    found = re.search(r"packing_length: (\d+)$", told.remedy)
    assert found is not None
    assert prompt + 1024 <= int(found[1]) <= 4096
