"""The nearest word is named; a message that lists every choice names the nearest few instead."""

from __future__ import annotations

import pytest

from swift_stage2.errors import closest, without_list

TYPES = "['qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'llama3']"


def test_an_ending_alone_is_not_near() -> None:
    assert closest("learning_rat", ("learning_rate", "max_steps")) == "learning_rate"
    assert closest("eval_steps", ("max_steps",)) is None


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            f"model_type: 'qwen2_5_v' not in {TYPES}",
            "model_type: 'qwen2_5_v' is none of the 4 that there are (did you mean 'qwen2_5_vl' or 'qwen2_vl'?)",
        ),
        (f"template_type: 'x' not in {TYPES}", "template_type: 'x' is none of the 4 that there are"),
        ("a file is not in the folder", "a file is not in the folder"),
    ],
)
def test_the_nearest_few_stand_in_a_lists_place(message: str, told: str) -> None:
    assert without_list(message) == told
