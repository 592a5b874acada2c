"""Columns: what an answer must bring, who asks for it, and that nothing changes where nobody does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from builders import config_of
from detection_task import make_task
from hypothesis import example, given
from hypothesis import strategies as st

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.task import TASKS, correct_by, needed_columns
from swift_stage2.columns import LOG_PROBS, asked_by, given_by
from swift_stage2.config import Stage2Config
from swift_stage2.errors import ConfigError, ProtocolError, SampleError
from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.servers import infer_wire

DECODING = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}
FLOAT32_MAX = float(np.finfo(np.float32).max)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(max_value=0.0, allow_nan=False)


def reply(num_tokens: int, log_probs: Any) -> Any:
    choice = {"message": {"content": "x"}, "token_ids": list(range(num_tokens)), "logprobs": log_probs}
    return [{"response": {"choices": [choice], "prompt_token_ids": [1]}}]


def entries(values: list[float]) -> dict[str, Any]:
    return {"content": [{"logprob": value, "token": "x", "bytes": [120]} for value in values]}


@given(num_tokens=st.integers(0, 4), values=st.lists(NUMBERS, max_size=4), asked=st.booleans())
@example(num_tokens=1, values=[5e-324], asked=False)
@example(num_tokens=2, values=[-0.0, 0.0], asked=True)
@example(num_tokens=1, values=[-1e308], asked=True)  # no number in a batch
def test_an_answer_has_one_finite_value_up_to_0_for_every_token_or_is_refused(
    num_tokens: int, values: list[float], asked: bool
) -> None:
    names = (LOG_PROBS.name,) if asked else ()
    is_sound = len(values) == num_tokens and all(-FLOAT32_MAX <= value <= 0 for value in values)
    if not is_sound:
        with pytest.raises(ProtocolError, match=r"logprob|log_probs"):
            infer_wire.parse_infer_reply(reply(num_tokens, entries(values)), 1, names)
        return
    (completion,) = infer_wire.parse_infer_reply(reply(num_tokens, entries(values)), 1, names)
    assert completion.log_probs == tuple(values)


def test_what_was_asked_for_must_come_and_what_was_not_need_not() -> None:
    assert infer_wire.parse_infer_reply(reply(2, None), 1)[0].log_probs is None
    with pytest.raises(ProtocolError, match="log_probs must have one value per token, got num_values=0"):
        infer_wire.parse_infer_reply(reply(2, None), 1, ("log_probs",))
    # Of an answer that was aborted before its first token, servers say null.
    assert infer_wire.parse_infer_reply(reply(0, None), 1, ("log_probs",))[0].log_probs == ()


def test_a_request_asks_for_columns_in_ms_swifts_words_and_without_any_is_as_it_was() -> None:
    plain = infer_wire.request_config(**DECODING, seed=3)
    assert json.dumps(plain) == (
        '{"max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "seed": 3, '
        '"return_details": true}'
    )
    asking = infer_wire.request_config(**DECODING, seed=3, columns=[LOG_PROBS])
    assert asking == plain | {"logprobs": True}
    assert (asked_by(plain), asked_by(asking)) == (frozenset(), {"log_probs"})


def rollout(log_probs: tuple[float, ...] | None = None) -> Rollout:
    sample = Sample(SampleKey(0, 1, 2), {})
    spans = (VersionSpan(4, 0, 2),)
    return Rollout(sample, "ab", (7, 8), (1,), False, 3, "http://s", spans, log_probs)


def test_columns_are_recorded_where_an_answer_brings_them() -> None:
    assert given_by(rollout()) == {}
    assert given_by(rollout((-0.5, 0.0))) == {"log_probs": (-0.5, 0.0)}


def configured(task: str, **telemetry: Any) -> Stage2Config:
    plugins = {"model": "m", "external_plugins": ["tasks.py"]}
    return config_of(
        {"stage2_ab.schedule.b_ratio": 0, "stage2_ab.task": task, "swift": plugins, "telemetry": telemetry}
    )


def test_a_task_or_telemetry_needs_columns_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weighing(DetectionTask):
        columns = ("log_probs",)

    monkeypatch.setitem(TASKS, "weighing", Weighing)
    assert needed_columns(configured("weighing")) == (LOG_PROBS,)
    assert needed_columns(configured("weighing", record=True, log_probs=True)) == (LOG_PROBS,)
    assert needed_columns(configured("detection")) == ()
    assert needed_columns(configured("detection", record=True, log_probs=True)) == (LOG_PROBS,)
    Weighing.columns = ("advantages",)
    with pytest.raises(ConfigError, match=r"Weighing.columns must be log_probs, got columns='advantages'"):
        needed_columns(configured("weighing"))


def test_a_rollout_that_lacks_a_column_costs_its_sample() -> None:
    task: Any = make_task()
    task.columns = ("log_probs",)
    with pytest.raises(SampleError, match="needs a rollout's log_probs, got one without"):
        correct_by(task, rollout(), (), lambda text: ((), ()))
