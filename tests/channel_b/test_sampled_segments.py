"""Rollouts with advantages as segments and packs, and the loss that the real trainer makes of them.

The oracle of every loss is the bare model on one sequence alone, summed up token by token.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from detection_task import make_task
from real_model import Rows, make_encoder, objects_of, rollout_of, sample_of, tiny_model
from sft_run import our_trainer
from swift.trainers import Seq2SeqTrainer

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.encoding import ALTERNATIVE_TOKENS, Encoder
from swift_stage2.channel_b.preprocessing import make_segment
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.channel_b.task import Task
from swift_stage2.config import MissedOrder, Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.errors import SampleError
from swift_stage2.records import Rollout, Segment
from swift_stage2.training.losses import POLICY_SUMS
from swift_stage2.training.stage2_trainer import Stage2Trainer

Rollouts = list[Rollout]
TrainerBy = Callable[..., Any]
CAP = 1.5
MODEL_INPUTS = ("input_ids", "position_ids", "pixel_values", "image_grid_thw")
WEIGHTS = {TokenGroup.STRUCTURE: 0.0, TokenGroup.MISSED_LABEL: 2.0, TokenGroup.CLOSURE: 0.5}
GIVEN, ANY = (
    make_task(weights=WEIGHTS),
    make_task(weights=WEIGHTS, missed_order=MissedOrder.ANY, weighs_duplicates=True),
)
# Sampled alone, good and bad; with the corrected answer beside; that alone; a plain corrected answer.
ADVANTAGES = ((0.75,), (-1.25,), (0.5, 2.0), (-0.5, 0.25), (0.0, 3.0), None)


def configured(
    temperature: float = 1.0, proximal: str = "current", duplicate: float = 0.0, kl_weight: float = 0.0
) -> Stage2Config:
    grpo = {"proximal": proximal, "max_importance_weight": CAP, "kl_weight": kl_weight}
    channel_b = {"grpo": grpo, "target": {"weights": {"duplicate": duplicate}}}
    stage2_ab = {"schedule": {"b_ratio": 0}, "objective": "mixed", "channel_b": channel_b}
    return bind(Stage2Config, {"stage2_ab": stage2_ab, "rollout": {"decoding": {"temperature": temperature}}})


@pytest.fixture(scope="module")
def trainer(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """After a step that has set it up and changed nothing."""
    output = tmp_path_factory.mktemp("trained") / "out"
    found = our_trainer(rows_file, output, configured(), freeze_vit=False, learning_rate=0.0)
    found.train()
    return found


@pytest.fixture
def trainer_by(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> TrainerBy:
    """The trainer under another configuration, which has counted nothing yet."""

    def configure(**settings: Any) -> Any:
        monkeypatch.setattr(trainer, "stage2_config", configured(**settings))
        monkeypatch.setattr(trainer, "_policy_sums", None)
        return trainer

    return configure


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder(packing_length=2048)


@pytest.fixture(scope="module")
def rollouts(encoder: Encoder, rows: Rows) -> list[Rollout]:
    """One per entry of ``ADVANTAGES``, which lists one object twice and misses the others; every second is cut off."""
    found, drawn = [], random.Random(0)
    for number, advantages in enumerate(ADVANTAGES):
        sample = sample_of(rows[number], number)
        text = standard_template(DIALECTS["object_list"]).write([objects_of(encoder, sample)[0]] * 2)
        ids = encoder.tokenise(text)[0] + encoder.closing_token_ids[:1]
        ids = ids[: len(ids) - 5 * (number % 2)]
        log_probs = tuple(drawn.uniform(-4, 0) for _ in ids)
        rollout = rollout_of(sample, text, encoder.encode_prompt(sample).token_ids)
        found.append(replace(rollout, token_ids=ids, log_probs=log_probs, advantages=advantages))
    return found


def segments_of(rollouts: Iterable[Rollout], encoder: Encoder, task: Task = GIVEN) -> list[Segment]:
    return [make_segment(each, encoder.encode_prompt(each.sample), encoder, task)[0] for each in rollouts]


def alone(encoding: Mapping[str, Any], temperature: float, model: Any = None) -> list[float]:
    """The bare model's log-probability of every token of one sequence; of the first there is none."""
    ids = torch.tensor([encoding["input_ids"]])
    with torch.no_grad():
        logits = (model or tiny_model()[0])(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=encoding["pixel_values"],
            image_grid_thw=encoding["image_grid_thw"],
            mm_token_type_ids=encoding["mm_token_type_ids"].view(1, -1),
            use_cache=False,
        ).logits[0]
    rows = torch.log_softmax(logits[:-1].double() / temperature, -1)
    return [math.nan, *rows.gather(1, ids[0, 1:, None])[:, 0].tolist()]


def by_hand(
    segments: Iterable[Segment], temperature: float, model: Any = None
) -> tuple[float, dict[str, float]]:
    """The loss of ``proximal: current`` and its sums."""
    loss, sums = 0.0, Counter(dict.fromkeys(POLICY_SUMS, 0.0))
    for encoding in (encoding for segment in segments for encoding in segment.encodings):
        plain, own = alone(encoding, 1.0, model), alone(encoding, temperature, model)
        for place, label in enumerate(encoding["labels"]):
            if label == -100:
                continue
            advantage = encoding["advantages"][place] if "advantages" in encoding else 1.0
            if "behaviour" not in encoding:
                loss -= encoding["loss_scale"][place] * advantage * plain[place]
                continue
            gap = own[place] - encoding["behaviour"][place]
            loss -= advantage * min(math.exp(gap), CAP) * own[place]
            seen = (1, 0, math.exp(gap) > CAP, abs(gap), -own[place], 0)
            sums.update(dict(zip(POLICY_SUMS, seen, strict=True)))
    return loss, sums


# --- segments --------------------------------------------------------------------------------------


def test_a_sampled_answer_trains_exactly_its_tokens(encoder: Encoder, rollouts: Rollouts) -> None:
    """Neither is an end of turn put behind one that was cut off, nor a line break behind the model's own."""
    for rollout, segment in zip(rollouts[:2], segments_of(rollouts[:2], encoder), strict=True):
        (encoding,), num_prompt = segment.encodings, len(rollout.prompt_token_ids)
        assert tuple(encoding["input_ids"]) == rollout.prompt_token_ids + rollout.token_ids
        assert tuple(encoding["labels"]) == (-100,) * num_prompt + rollout.token_ids
        assert encoding["loss_scale"] == [0.0] * num_prompt + [1.0] * len(rollout.token_ids)
        assert set(encoding["advantages"][num_prompt:]) == set(rollout.advantages or ())
        assert tuple(encoding["behaviour"][num_prompt:]) == rollout.log_probs
        assert all(math.isnan(value) for value in encoding["behaviour"][:num_prompt])
        assert segment.num_supervised_tokens == len(rollout.token_ids)
    assert rollouts[0].token_ids[-1] == encoder.closing_token_ids[0] != rollouts[1].token_ids[-1]


@pytest.mark.parametrize("task", [GIVEN, ANY], ids=["given", "any"])
def test_the_corrected_answer_beside_is_what_is_trained_without_advantages(
    encoder: Encoder, rollouts: Rollouts, task: Task
) -> None:
    """To the end of its turn, in every field but the advantages."""
    for rollout in rollouts[2:5]:
        assert rollout.advantages is not None
        sampled, both, without = segments_of(
            [replace(rollout, advantages=each) for each in ((0.5,), rollout.advantages, None)], encoder, task
        )
        num_sampled = int(rollout.advantages[0] != 0)
        assert [*map(len, (sampled.encodings, both.encodings))] == [1, num_sampled + 1]
        (expected,), beside = without.encodings, dict(both.encodings[-1])
        advantages = beside.pop("advantages")[len(rollout.prompt_token_ids) :]
        assert set(advantages) == {rollout.advantages[1]}
        assert tuple(beside["labels"][-2:]) == encoder.closing_token_ids
        assert beside.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(beside[name]), torch.as_tensor(value)), name
        assert {*ALTERNATIVE_TOKENS} & expected.keys() == (set() if task is GIVEN else {*ALTERNATIVE_TOKENS})
        assert both.num_tokens == num_sampled * sampled.num_tokens + without.num_tokens


@pytest.mark.parametrize("room", [0, -1])
def test_a_corrected_answer_that_does_not_fit_into_a_pack_beside_its_rollout_is_left_out(
    encoder: Encoder, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    together, alone = segments_of([rollouts[2], replace(rollouts[2], advantages=(0.5,))], encoder)
    monkeypatch.setattr(encoder, "packing_length", together.num_tokens + room)
    (found,) = segments_of([rollouts[2]], encoder)
    expected = together if room == 0 else replace(alone, num_left_out=1)
    assert replace(found, encodings=()) == replace(expected, encodings=())
    assert [each["input_ids"] for each in found.encodings] == [
        each["input_ids"] for each in expected.encodings
    ]
    monkeypatch.setattr(encoder, "packing_length", alone.num_tokens - 1)
    with pytest.raises(SampleError, match="must fit a pack"):
        segments_of([rollouts[2]], encoder)


# --- the loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [0.0, 0.5])
@pytest.mark.parametrize("task", [GIVEN, ANY], ids=["given", "any"])
def test_the_corrected_answer_beside_adds_its_loss_times_its_weight(
    trainer_by: TrainerBy, encoder: Encoder, rollouts: Rollouts, task: Task, duplicate: float
) -> None:
    trainer = trainer_by(duplicate=duplicate)

    def loss(advantages: tuple[float, ...] | None) -> float:
        segments = segments_of([replace(rollouts[2], advantages=advantages)], encoder, task)
        return float(trainer.packed_loss(encoder.collate(segments)))

    target = loss(None)
    assert loss((0.0, 2.5)) == pytest.approx(2.5 * target, rel=1e-5)
    assert loss((-0.5, 2.5)) == pytest.approx(loss((-0.5,)) + 2.5 * target, rel=1e-5)
    assert abs(loss((-0.5,))) > 1


@pytest.mark.parametrize("temperature", [1.0, 1.4])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_packs_loss_is_the_sum_over_its_sequences(
    trainer_by: TrainerBy,
    encoder: Encoder,
    rollouts: Rollouts,
    temperature: float,
    is_cut: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where logits, and all beside them, are cut to the supervised places."""
    trainer = trainer_by(temperature=temperature, duplicate=0.5)
    monkeypatch.setattr(trainer.args, "use_logits_to_keep", is_cut)
    for task in (GIVEN, ANY):
        segments = segments_of(rollouts, encoder, task)
        packed = trainer.packed_loss(encoder.collate(segments))
        singles = [trainer.packed_loss(encoder.collate([segment])) for segment in segments]
        assert packed == pytest.approx(math.fsum(singles), rel=1e-5)
        assert len({round(single, 3) for single in singles}) == len(singles)
        if task is GIVEN:
            assert packed == pytest.approx(by_hand(segments, temperature)[0], rel=1e-5)


@pytest.mark.parametrize("proximal", ["current", "behaviour"])
@pytest.mark.parametrize("temperature", [1.0, 1.4])
def test_at_first_use_a_packs_gradient_is_that_of_reinforce(
    trainer_by: TrainerBy, encoder: Encoder, rollouts: Rollouts, temperature: float, proximal: str
) -> None:
    """The log-probabilities that came with the rollouts are the model's own in the same pack."""
    values = (1.5, -1.0, 0.5)
    asked = [replace(each, advantages=(value,)) for each, value in zip(rollouts, values, strict=False)]
    batch, (model, _) = encoder.collate(segments_of(asked, encoder)), tiny_model()
    inputs = {name: batch[name] for name in MODEL_INPUTS}
    (places,) = torch.nonzero(batch["labels"][0] != -100, as_tuple=True)
    logits = model(**inputs, use_cache=False).logits[0, places - 1].float()
    own = torch.log_softmax(logits / temperature, -1).gather(1, batch["labels"][0, places, None])[:, 0]
    advantages = torch.cat(
        [torch.full((len(each.token_ids),), value) for each, value in zip(asked, values, strict=True)]
    )
    loss, named = -(advantages * own).mean(), dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, tuple(named.values()), allow_unused=True)
    expected = dict(zip(named, gradients, strict=True))
    given = own.tolist()
    first = [replace(each, log_probs=tuple(given.pop(0) for _ in each.token_ids)) for each in asked]
    trainer = trainer_by(temperature=temperature, proximal=proximal)
    trainer.model.zero_grad(set_to_none=True)
    pack = encoder.collate(segments_of(first, encoder))
    trainer.training_step(trainer.model, pack, torch.tensor(len(places)))
    num_tokens, clipped, capped, gap, *_ = trainer._policy_sums.tolist()
    assert (num_tokens, clipped, capped) == (len(places), 0, 0)
    assert gap < 1e-5 * num_tokens
    trained = {name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None}
    assert any("visual" in name for name in trained)
    for name, gradient in trained.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4 * scale)


def held_trainer(rows_file: Path, output: Path, temperature: float, weight: float) -> Any:
    """Its adapter, which begins as nothing, has weights, and is held by the model under it."""
    config = configured(temperature, kl_weight=weight)
    trainer = our_trainer(rows_file, output, config, tuner_type="lora", lora_dropout=0, learning_rate=0.0)
    trainer.train()
    generator = torch.Generator().manual_seed(0)
    for each in adapter_of(trainer).values():
        each.data = torch.randn(each.shape, generator=generator) * 0.02
    return trainer


def adapter_of(trainer: Any) -> dict[str, torch.nn.Parameter]:
    found = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert found
    return found


@pytest.mark.parametrize("temperature", [1.0, pytest.param(1.4, marks=pytest.mark.slow)])
def test_the_reference_is_the_model_without_its_adapter(
    encoder: Encoder, rows_file: Path, rollouts: Rollouts, tmp_path: Path, temperature: float
) -> None:
    """Every sampled token, and no other, is drawn to it; asking it leaves adapter and accuracy alone."""
    weight, segments = 0.3, segments_of(rollouts, encoder)
    trainer = held_trainer(rows_file, tmp_path / "out", temperature, weight)
    trained = adapter_of(trainer)
    expected, divergence = by_hand(segments, temperature, trainer.model)[0], 0.0
    for encoding in (each for segment in segments for each in segment.encodings if "behaviour" in each):
        own, base = alone(encoding, temperature, trainer.model), alone(encoding, temperature)
        for place, label in enumerate(encoding["labels"]):
            if label != -100:
                ratio = math.exp(base[place] - own[place])
                divergence += ratio - math.log(ratio) - 1
                expected -= weight * (ratio - 1) * own[place]
    batch = encoder.collate(segments)
    found = trainer.packed_loss(batch)
    assert found == pytest.approx(expected, rel=1e-4)
    assert abs(found - by_hand(segments, temperature, trainer.model)[0]) > 1e-2 * abs(found)
    assert trainer._policy_sums.tolist()[-1] == pytest.approx(divergence, rel=1e-4)
    trainer.model.train()
    trainer.custom_metrics["train"].clear()
    trainer.training_step(trainer.model, batch, torch.tensor(1.0))
    assert all(each.requires_grad and each.grad is not None for each in trained.values())
    num_supervised = sum(segment.num_supervised_tokens for segment in segments)
    assert trainer.custom_metrics["train"]["token_acc"].count == num_supervised


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_gradient_checkpointing_computes_again_has_the_adapter_on(
    encoder: Encoder,
    rows_file: Path,
    rollouts: Rollouts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use_reentrant: bool,
) -> None:
    """The reference's forward pass, which has it off, comes before: loss and gradients stay as they are without."""
    from peft.tuners.lora import LoraLayer  # at the top it came before the operators that it needs

    trainer = held_trainer(rows_file, tmp_path / "out", 1.0, 0.3)
    trained, batch = adapter_of(trainer), encoder.collate(segments_of(rollouts, encoder))
    adapted = [module for module in trainer.model.modules() if isinstance(module, LoraLayer)]
    calls: list[tuple[int, bool]] = []
    for number, module in enumerate(adapted):
        module.register_forward_pre_hook(
            lambda it, _, number=number: calls.append((number, it.disable_adapters))
        )

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[int, list[bool]]]:
        calls.clear()
        trainer.model.train()
        trainer.model.zero_grad(set_to_none=True)
        loss = trainer.training_step(trainer.model, dict(batch), torch.tensor(1.0))
        gradients = {name: each.grad.clone() for name, each in trained.items() if each.grad is not None}
        return loss, gradients, {n: [off for m, off in calls if m == n] for n in range(len(adapted))}

    loss, gradients, plain = step()
    assert gradients.keys() == trained.keys()
    # ms-swift has one use_reentrant for the whole process.
    own = getattr(torch.utils.checkpoint, "_old_checkpoint", torch.utils.checkpoint.checkpoint)
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", own)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    trainer.model.enable_input_require_grads()
    found, again, recomputed = step()
    assert all(each == [True, False] for each in plain.values()), "the reference, then what is trained"
    assert all(each == [True, False, False] for each in recomputed.values())
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    assert again.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))


# --- the trainer -----------------------------------------------------------------------------------


def test_a_step_of_packs_trains_their_loss_and_counts_what_it_trained(
    encoder: Encoder, rows_file: Path, rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packs in the place of channel A's first window; in the second step, channel A's, nothing is counted."""
    segments, own = segments_of(rollouts, encoder), Stage2Trainer.get_batch_samples

    def packs_first(trainer: Any, iterator: Any, num: int, device: Any) -> Any:
        batches, num_items = own(trainer, iterator, num, device)
        if trainer.state.global_step == 0:
            batches = [encoder.collate(segments[:2]), encoder.collate(segments[2:])]
            num_items = trainer._get_num_items_in_batch(batches, device)
        return batches, num_items

    monkeypatch.setattr(Stage2Trainer, "get_batch_samples", packs_first)
    steps = {"gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = our_trainer(rows_file, tmp_path / "out", configured(1.4), learning_rate=0.0, **steps)
    trainer.train()
    loss, sums = by_hand(segments, 1.4)
    num_items = sum(segment.num_supervised_tokens for segment in segments)
    first, second = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert first == pytest.approx(loss / num_items, rel=1e-4)
    assert second > 0
    counted = trainer.stage2.telemetry.counters.snapshot()
    assert {name: counted[name] for name in POLICY_SUMS} == pytest.approx(sums, rel=1e-4)
    assert 0 < sums["policy_capped"] < sums["policy_tokens"] < num_items


def test_channel_a_has_the_loss_of_plain_ms_swift(trainer_by: TrainerBy) -> None:
    trainer = trainer_by(temperature=1.4, duplicate=0.5)
    batch = next(iter(trainer.get_train_dataloader()))

    def made(trainer_class: type[Any]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        inputs = trainer._prepare_inputs(dict(batch))
        loss = trainer_class.compute_loss(trainer, trainer.model, inputs, num_items_in_batch=torch.tensor(9))
        trained = [each for each in trainer.model.parameters() if each.requires_grad]
        return loss, torch.autograd.grad(loss, trained)

    (ours, mine), (plain, theirs) = made(Stage2Trainer), made(Seq2SeqTrainer)
    assert torch.equal(ours, plain)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert trainer._policy_sums is None
