"""Conversations of several turns as segments: ms-swift's own scheduler makes them, its own template encodes them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import pytest
from detection_task import make_task
from real_model import Rows, make_encoder, make_template, sample_of
from scripted_turns import conversation, rollout_of
from swift.rollout import MultiTurnScheduler

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import Preprocessor, ScoredRollout, make_segment
from swift_stage2.channel_b.task import Task
from swift_stage2.checks.channel_b_parts import make_task as task_of
from swift_stage2.config import MissedOrder, Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.errors import ConfigError, PromptMismatch, SampleError
from swift_stage2.records import Rollout, Sample
from swift_stage2.telemetry.events import RecordedCompletion

AGAIN = "Look again at the image."
TIP = "But wait,"


class LooksAgain(MultiTurnScheduler):
    def step(self, request: Any, choice: Any, turn: int) -> dict[str, Any]:
        request.messages.append({"role": "user", "content": AGAIN})
        return {"infer_request": request}


class GoesOn(MultiTurnScheduler):
    """Puts words into the model's mouth, as ms-swift's MathTipsScheduler does."""

    def step(self, request: Any, choice: Any, turn: int) -> dict[str, Any]:
        tip = self.tokenizer.encode(TIP, add_special_tokens=False)
        ids = list(choice.token_ids)[:-1]  # without the end of turn
        request.messages[-1]["content"] = self.tokenizer.decode(ids) + TIP
        log_probs = self._extract_logprobs_from_choice(choice)[:-1]
        mask = [1] * len(ids) + [0] * len(tip)
        extended = {"response_token_ids": ids + tip, "response_loss_mask": mask}
        return {"infer_request": request, "rollout_logprobs": log_probs, **extended}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder(packing_length=2048)


@pytest.fixture(scope="module")
def sample(rows: Rows) -> Sample:
    return sample_of(rows[0])


def encoded_by_swift(output: Any, sample: Sample, last: str | None = None) -> dict[str, Any]:
    """As its GRPO trainer encodes the conversation; ``last`` is said in the last turn's place, and alone trained."""
    messages = copy.deepcopy(output.messages)
    turns = [message for message in messages if message["role"] == "assistant"]
    for message, ids, mask in zip(turns, output.response_token_ids, output.response_loss_mask, strict=True):
        scale = mask if last is None else [0] * len(mask)
        message["content"] = {"token_ids": list(ids), "loss_scale": scale}
    if last is not None:
        turns[-1]["content"] = last
    return dict(
        make_template().encode({"messages": messages, "images": sample.row["images"]}, return_length=True)
    )


CONVERSATIONS: list[tuple[type[MultiTurnScheduler], list[str]]] = [
    *((LooksAgain, texts) for texts in (["[]"], ["[]", "[1, 2]"], ["", "no", ""], ["a", AGAIN, AGAIN, "a"])),
    *((GoesOn, texts) for texts in (["[]"], ["[]", "[1, 2]"], ["a", TIP, TIP, ""])),
]


@pytest.mark.parametrize(("kind", "texts"), CONVERSATIONS)
def test_a_rollout_is_trained_as_swift_trains_it(
    kind: type[MultiTurnScheduler], texts: list[str], encoder: Encoder, sample: Sample
) -> None:
    output, found = conversation(kind, encoder, sample, texts)
    prompt = encoder.encode_prompt(sample)
    rollout = rollout_of(sample, found, (0.5,))
    segment, target = make_segment(rollout, prompt, encoder, make_task())
    (ours,), theirs = segment.encodings, encoded_by_swift(output, sample)
    assert ours["input_ids"] == theirs["input_ids"]
    assert ours["labels"] == theirs["labels"]
    trained = [place for place, label in enumerate(ours["labels"]) if label != -100]
    log_probs = list(chain.from_iterable(output.rollout_logprobs))
    assert [ours["behaviour"][place] for place in trained] == log_probs
    assert sum(map(math.isfinite, ours["behaviour"])) == len(trained) == segment.num_supervised_tokens
    assert [ours["loss_scale"][place] for place in trained] == [1.0] * len(trained)
    assert sum(ours["loss_scale"]) == len(trained)
    assert (
        target.text == make_segment(replace(rollout, advantages=None), prompt, encoder, make_task())[1].text
    )
    # A recording brings it back.
    told = RecordedCompletion.of(rollout, sample=sample.key, columns={"log_probs": found.log_probs})
    again = RecordedCompletion.model_validate_json(told.model_dump_json())
    assert (again.turns, again.columns["log_probs"]) == (found.turns, found.log_probs)


@pytest.mark.parametrize("kind", [LooksAgain, GoesOn])
@pytest.mark.parametrize("advantages", [None, (0.5, 2.0)])
def test_the_last_turn_is_corrected_behind_all_before_it(
    kind: type[MultiTurnScheduler], advantages: tuple[float, ...] | None, encoder: Encoder, sample: Sample
) -> None:
    task = make_task(missed_order=MissedOrder.ANY)
    truth = encoder.answer_of(sample)
    output, found = conversation(kind, encoder, sample, [truth, "[]"])
    prompt = encoder.encode_prompt(sample)
    segment, target = make_segment(rollout_of(sample, found, advantages), prompt, encoder, task)
    assert (target.quality.num_predictions, target.text) == (0, truth), "of the last turn alone"
    ours, first = segment.encodings[-1], len(prompt.token_ids) + found.turns[-1][0]
    assert ours["input_ids"][:first] == [*prompt.token_ids, *found.token_ids][:first]
    if kind is LooksAgain:  # what a model goes on with is no message of its own
        theirs = encoded_by_swift(output, sample, truth)
        assert ours["input_ids"] == theirs["input_ids"]
        assert ours["labels"][first:] == theirs["labels"][first:]
    assert set(ours["labels"][:first]) == {-100}
    assert set(ours["loss_scale"][:first]) == {0.0}
    alone, _ = make_segment(
        replace(rollout_of(sample, found, None), turns=(), token_ids=(), text="[]"), prompt, encoder, task
    )
    moved = found.turns[-1][0]
    assert alone.encodings[0]["alternatives"]
    assert ours["alternatives"] == [
        (place + moved, token) for place, token in alone.encodings[0]["alternatives"]
    ]
    if advantages:
        assert set(ours["advantages"][first:]) == {2.0}


class Consistent(DetectionTask):
    """A reward of the whole conversation: how many of its answers are the last one."""

    reward_terms: ClassVar = {"same": 1.0}

    def reward(self, rollout: Rollout, truth: Any, target: Any) -> dict[str, float]:
        return {"same": float(rollout.earlier_texts.count(rollout.text))}


def test_a_reward_sees_every_turn(encoder: Encoder, sample: Sample) -> None:
    """Also that of the corrected answer, which is said in the last turn's place."""
    truth = encoder.answer_of(sample)
    _, found = conversation(LooksAgain, encoder, sample, ["[]", truth, "[]"])
    task = Consistent.from_config(bind(Stage2Config, {"stage2_ab": {"schedule": {"b_ratio": 0}}}))
    preprocessor = Preprocessor(encoder, task)
    (scored,) = preprocessor.score([rollout_of(sample, found, None)], in_group=True, with_target=True)
    assert isinstance(scored, ScoredRollout), scored
    assert (scored.target.text, scored.target.quality.reward["same"]) == (truth, 1.0)
    assert scored.target_reward == 1.0, "truth, once before it"


def test_a_picture_or_another_prompt_costs_the_sample(encoder: Encoder, sample: Sample) -> None:
    _, found = conversation(LooksAgain, encoder, sample, ["[]", "[]"])
    prompt, rollout = encoder.encode_prompt(sample), rollout_of(sample, found, None)
    other = replace(rollout, prompt_token_ids=(*found.prompt_token_ids, 1))
    with pytest.raises(PromptMismatch):
        make_segment(other, prompt, encoder, make_task())
    (picture,) = {label for label in prompt.token_ids if label in encoder._media_tokens}
    said = list(rollout.token_ids)
    said[rollout.turns[0][1] + 1] = picture
    with pytest.raises(SampleError, match="no token that stands for an image"):
        make_segment(replace(rollout, token_ids=tuple(said)), prompt, encoder, make_task())


@pytest.mark.parametrize(
    ("objective", "target_in_group", "may"),
    [
        ("grpo", False, True),
        ("grpo", True, False),
        ("mixed", False, False),
        ("corrected_target", False, False),
    ],
)
def test_only_a_task_that_corrects_last_turns_trains_them(
    objective: str, target_in_group: bool, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "stage2_ab": {
            "schedule": {"b_ratio": 0.5},
            "objective": objective,
            "channel_b": {"grpo": {"target_in_group": target_in_group}},
        },
        "rollout": {"servers": [{"base_url": "http://127.0.0.1:9"}], "max_turns": 2},
    }
    if objective != "corrected_target":
        settings["rollout"] |= {"num_generations": 4, "decoding": {"temperature": 1.0}}
    config = bind(Stage2Config, settings)
    if may:
        task_of(config)
    else:
        with pytest.raises(
            ConfigError, match=rf"got rollout.max_turns=2 objective='{objective}' task=detection"
        ):
            task_of(config)
    monkeypatch.setattr(DetectionTask, "corrects_last_turn", True)
    assert isinstance(task_of(config), Task)
