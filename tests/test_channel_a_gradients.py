"""Channel A trains exactly as plain ms-swift does; a pack trains the sum of its segments."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_model import PACKING_LENGTH, Rows, make_encoder, make_task, make_template, sample_of, segment_of
from sft_run import build_trainer, channel_a_alone, our_trainer
from swift.trainers import Seq2SeqTrainer
from transformers import TrainerCallback

from swift_stage2 import Stage2Trainer
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.checks.preparation import EngineCanary
from swift_stage2.config import MissedOrder
from swift_stage2.records import Segment
from swift_stage2.runtime.run_directory import is_held
from swift_stage2.training.stage2_trainer import _rows_of

Gradients = dict[str, torch.Tensor]


@dataclass
class Recorded:
    """The gradients, losses and weights of one run."""

    gradients: list[Gradients] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: Gradients = field(default_factory=dict)


class _Recorder(TrainerCallback):  # type: ignore[misc]
    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorded.gradients.append(_gradients(kwargs["model"]))


def _gradients(model: Any) -> Gradients:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def _train(
    rows_file: Path,
    directory: Path,
    trainer_class: type,
    *,
    swift: dict[str, Any] | None = None,
    **given: Any,
) -> Recorded:
    trainer = build_trainer(
        rows_file,
        directory / "out",
        trainer=trainer_class,
        given=given,
        max_steps=3,
        gradient_accumulation_steps=3,
        freeze_vit=False,
        **(swift or {}),
    )
    recorded = Recorded()
    trainer.add_callback(_Recorder(recorded))
    trainer.train()
    recorded.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    recorded.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return recorded


def test_channel_a_is_bit_equal_to_plain_ms_swift(
    rows_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Gradients of every window, logged losses and final weights over three steps, one of them a short window."""
    directory = tmp_path_factory.mktemp("runs")
    for name in ("plain", "ours"):
        (directory / name).mkdir()
    plain = _train(rows_file, directory / "plain", Seq2SeqTrainer)
    ours = _train(rows_file, directory / "ours", Stage2Trainer, stage2=channel_a_alone())
    assert len(plain.gradients) == len(ours.gradients) == 3
    for expected, got in zip(plain.gradients, ours.gradients, strict=True):
        assert expected.keys() == got.keys()
        assert any("visual" in name for name in expected), "the vision tower must be trained too"
        assert all(bool(expected[name].any()) for name in expected if name.endswith("q_proj.weight"))
        for name, gradient in expected.items():
            assert torch.equal(gradient, got[name]), name
    assert plain.losses == ours.losses
    assert len(set(plain.losses)) == 3
    for name, weight in plain.weights.items():
        assert torch.equal(weight, ours.weights[name]), name


def _assert_close(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            got[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_rows_in_one_row_train_as_padded_ones_of_plain_ms_swift(rows_file: Path, tmp_path: Path) -> None:
    """``padding_free`` without flash attention, where ms-swift's own positions would let rows see each other."""
    for name in ("plain", "ours"):
        (tmp_path / name).mkdir()
    plain = _train(rows_file, tmp_path / "plain", Seq2SeqTrainer)
    free = {"padding_free": True}
    ours = _train(rows_file, tmp_path / "ours", Stage2Trainer, swift=free, stage2=channel_a_alone())
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    _assert_close(ours.gradients[0], plain.gradients[0])


def test_a_pack_of_ms_swifts_trains_the_sum_of_its_rows_and_rows_stay_single_for_channel_b(
    rows_file: Path, rows: Rows, tmp_path: Path
) -> None:
    """The flags of the template are ms-swift's again once the canary has asked it for one answer."""
    packing = {"packing": True, "packing_length": PACKING_LENGTH, "per_device_train_batch_size": 1}
    trainer = our_trainer(rows_file, tmp_path / "out", learning_rate=0.0, **packing)
    trainer.train()
    packs = trainer.train_dataset
    assert sum(len(packs[number]) for number in range(len(packs))) == len(rows) > len(packs)
    single = _rows_of(packs)
    assert len(single) == len(rows)
    assert [turn["role"] for turn in single[0]["messages"]] == [turn["role"] for turn in rows[0]["messages"]]
    pack = next(pack for pack in (packs[number] for number in range(len(packs))) if len(pack) > 1)
    collate = trainer.template.data_collator
    loss, packed = _step(trainer, collate([copy.deepcopy(pack)]), 7)
    alone = [_step(trainer, collate([[copy.deepcopy(row)]]), 7) for row in pack]
    assert loss == pytest.approx(sum(each for each, _ in alone), rel=1e-5)
    _assert_close(packed, {name: sum(found[name] for _, found in alone) for name in packed})

    encoder, sample = make_encoder(trainer.template), sample_of(rows[0])
    asked = EngineCanary(trainer.model, trainer.template, encoder, sample, half_precision=False).answer()
    assert (trainer.template.packing, trainer.template.padding_free) == (True, True)
    assert (
        asked.token_ids
        == EngineCanary(trainer.model, make_template(), encoder, sample, half_precision=False)
        .answer()
        .token_ids
    )


def test_a_pack_of_channel_b_goes_beside_what_ms_swift_measures_of_its_own(
    rows_file: Path, rows: Rows, tmp_path: Path
) -> None:
    """It cuts each micro-batch at the rows of its packs, for the accuracy of whole answers and the loss by channel."""
    losses = []
    for free in (False, True):
        measured = {"padding_free": free, "acc_strategy": "seq", "enable_channel_loss": free}
        trainer = our_trainer(rows_file, tmp_path / str(free), learning_rate=0.0, **measured)
        trainer.train()
        encoder = make_encoder(trainer.template)
        segments = [segment_of(encoder, make_task(), sample_of(row, n)) for n, row in enumerate(rows[:3])]
        losses.append(_step(trainer, encoder.collate(segments), 7)[0])
    assert losses[0] == losses[1]


def _fuse(model: Any, options: Any) -> None:
    """Liger's contract: a pass with labels gives a loss and no logits, and none cuts them. Its kernels need a GPU."""
    whole, model.fused = model.forward, []

    def forward(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
        found = whole(*args, labels=labels, **kwargs)
        if model.training and labels is not None:
            model.fused.append(float(found.loss))
            found.logits = None
        return found

    known = inspect.signature(whole)
    kept = [each for name, each in known.parameters.items() if name != "logits_to_keep"]
    forward.__signature__ = known.replace(parameters=kept)  # type: ignore[attr-defined]
    model.forward = forward


def test_ligers_fused_loss_trains_channel_a_alone(
    rows_file: Path, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift.trainers.arguments.is_liger_available", lambda: True)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", _fuse)
    found = []
    for use in (False, True):
        trainer = our_trainer(rows_file, tmp_path / str(use), learning_rate=0.0, use_liger_kernel=use)
        trainer.train()
        encoder, task = make_encoder(trainer.template), make_task(missed_order=MissedOrder.ANY)
        segments = [segment_of(encoder, task, sample_of(row, n)) for n, row in enumerate(rows[:3])]
        (channel_a,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((channel_a, *_step(trainer, encoder.collate(segments), 7)))
        assert len(getattr(trainer.model, "fused", ())) == use, "one step of channel A, none of B"
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5)
    _assert_close(found[1][2], found[0][2])


# --- a pack ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Stage2Trainer:
    output = tmp_path_factory.mktemp("pack") / "out"
    trainer: Stage2Trainer = our_trainer(rows_file, output, freeze_vit=False, learning_rate=0.0)
    trainer.add_callback(_Held())
    trainer.train()
    return trainer


class _Held(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_held = is_held(Path(args.output_dir))


def test_the_directory_is_held_while_it_is_trained_in(trainer: Stage2Trainer) -> None:
    """Whoever follows the run sees there that it goes on, also without ``train`` around it."""
    (told,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, _Held)]
    assert told.is_held
    assert not is_held(Path(trainer.args.output_dir))


@pytest.fixture(scope="module")
def segments(trainer: Stage2Trainer, rows: Rows) -> list[Segment]:
    return _segments(trainer, rows, MissedOrder.GIVEN)


def _segments(trainer: Stage2Trainer, rows: Rows, missed_order: MissedOrder) -> list[Segment]:
    """Three segments with four different weights per token, one of them zero."""
    weights = {TokenGroup.STRUCTURE: 0.0, TokenGroup.MISSED_LABEL: 2.0, TokenGroup.CLOSURE: 0.5}
    encoder = make_encoder(trainer.template)
    task = make_task(weights=weights, missed_order=missed_order)
    return [segment_of(encoder, task, sample_of(row, n)) for n, row in enumerate(rows[:3])]


def _step(trainer: Stage2Trainer, batch: dict[str, Any], num_items: int) -> tuple[float, Gradients]:
    """One micro_step as the loop runs it; the trainer takes entries out of the batch."""
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer.training_step(trainer.model, dict(batch), torch.tensor(num_items))
    return float(loss), _gradients(trainer.model)


@pytest.mark.parametrize("missed_order", [MissedOrder.GIVEN, MissedOrder.ANY])
def test_a_packs_gradient_is_the_sum_of_its_segments_gradients(
    trainer: Stage2Trainer, rows: Rows, missed_order: MissedOrder
) -> None:
    segments, encoder = _segments(trainer, rows, missed_order), make_encoder(trainer.template)
    num_items = sum(segment.num_supervised_tokens for segment in segments)
    pack_loss, packed = _step(trainer, encoder.collate(segments), num_items)
    singles = [_step(trainer, encoder.collate([segment]), num_items) for segment in segments]
    assert pack_loss == pytest.approx(sum(loss for loss, _ in singles), rel=1e-5)
    assert any("visual" in name for name in packed)
    _assert_close(packed, {name: sum(single[name] for _, single in singles) for name in packed})


def test_columns_change_no_loss_and_reach_it_beside_their_labels_in_their_own_dtype(
    trainer: Stage2Trainer, segments: list[Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where DeepSpeed's plugin casts what is prepared, and only the supervised places are kept."""
    batch = make_encoder(trainer.template).collate(segments)
    marked = batch["labels"] * -0.001  # a value tells its label
    seen: set[str] = set()  # by the model, which would take any name
    hook = trainer.model.register_forward_pre_hook(lambda *call: seen.update(call[-1]), with_kwargs=True)
    assert _step(trainer, {**batch, "log_probs": marked}, 9)[0] == _step(trainer, batch, 9)[0]
    hook.remove()
    assert "pixel_values" in seen
    assert "log_probs" not in seen
    casting = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    state = SimpleNamespace(deepspeed_plugin=casting)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "is_deepspeed_enabled", True)
        patch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
        prepared = trainer._prepare_inputs({**batch, "log_probs": marked})
    labels, column = prepared["labels"], prepared["log_probs"]
    assert (labels.shape, prepared["loss_scale"].dtype) == (column.shape, torch.bfloat16)
    assert labels.numel() < batch["labels"].numel()
    kept = labels != -100
    assert kept.any()
    assert torch.equal(column[kept], labels[kept] * -0.001)


def test_the_loss_is_the_weighted_cross_entropy_over_the_number_of_items(
    trainer: Stage2Trainer, segments: list[Segment]
) -> None:
    """Against each segment alone through the bare model, its tokens predicted one by one."""
    total = 0.0
    for segment in segments:
        ids = torch.tensor([segment.encodings[0]["input_ids"]])
        with torch.no_grad():
            logits = (
                copy.deepcopy(trainer.model)
                .eval()(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    pixel_values=segment.encodings[0]["pixel_values"],
                    image_grid_thw=segment.encodings[0]["image_grid_thw"],
                    mm_token_type_ids=segment.encodings[0]["mm_token_type_ids"].view(1, -1),
                    use_cache=False,
                )
                .logits[0]
            )
        log_probabilities = logits.double().log_softmax(dim=-1)
        for place, (token, weight) in enumerate(
            zip(segment.encodings[0]["input_ids"], segment.encodings[0]["loss_scale"], strict=True)
        ):
            if weight > 0:
                total -= weight * float(log_probabilities[place - 1, token])
    loss, _ = _step(trainer, make_encoder(trainer.template).collate(segments), 37)
    assert loss == pytest.approx(total / 37, rel=1e-4)


def test_a_pack_without_an_order_trains_the_summed_probability_of_what_may_come(
    trainer: Stage2Trainer, rows: Rows
) -> None:
    """Against a sum over the model's own logits of the whole pack, token by token."""
    encoder, task = make_encoder(trainer.template), make_task(missed_order=MissedOrder.ANY)
    batch = encoder.collate([segment_of(encoder, task, sample_of(row, n)) for n, row in enumerate(rows[:3])])
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "pixel_values", "image_grid_thw")}
    with torch.no_grad():
        trainer.model.eval()
        log_probs = torch.log_softmax(trainer.model(**inputs, use_cache=False).logits[0].double(), dim=-1)
        trainer.model.train()
    right: dict[int, list[int]] = {
        place: [label] for place, label in enumerate(batch["labels"][0].tolist()) if label != -100
    }
    for place, token in batch["alternatives"].tolist():
        right[place].append(token)
    assert max(map(len, right.values())) > 2
    losses = [-torch.logsumexp(log_probs[place - 1, tokens], dim=0) for place, tokens in right.items()]
    assert trainer.packed_loss(batch) == pytest.approx(float(sum(losses)), rel=1e-5)
    without = {name: value for name, value in batch.items() if name != "alternatives"}
    assert trainer.packed_loss(batch) < trainer.packed_loss(without)
