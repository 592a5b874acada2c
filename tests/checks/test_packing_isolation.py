"""Segments of one pack do not see each other: on the real trainer, after a real training step has set it up, and on
the model itself in every dtype and under every attention implementation of this machine; and every known leak is seen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from real_model import make_encoder, make_task, read_rows, sample_of, summed_loss, tiny_model_with
from sft_run import our_trainer
from transformers import AttentionInterface, AttentionMaskInterface

from swift_stage2 import Stage2Trainer
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.checks.packing_isolation import (
    IsolationBatches,
    IsolationChange,
    check_isolation,
    collate_for_isolation,
    ground_truth_segments,
    isolation_batches,
    measure_isolation,
)
from swift_stage2.config import MissedOrder
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset
from swift_stage2.errors import ConfigError, DatasetError
from swift_stage2.records import Sample

IMAGE_SIZES = ((112, 112), (150, 100), (60, 200), (84, 84))
DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow))
Batch = dict[str, Any]
Spoil = Callable[[Batch], Batch]


def _check(encoder: Encoder, samples: list[Sample], packed_loss: Any) -> None:
    check_isolation(isolation_batches(encoder, make_task(), samples), packed_loss)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Samples whose images all differ in size."""
    directory = tmp_path_factory.mktemp("sizes")
    files = [
        write_dataset(directory / str(n), SceneKind.SHAPES, 2, Split.TRAIN, n, image_size=size)
        for n, size in enumerate(IMAGE_SIZES)
    ]
    return [
        sample_of(row, position) for position, row in enumerate(row for f in files for row in read_rows(f))
    ]


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def trainer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path
) -> Stage2Trainer:
    trainer = our_trainer(rows_file, tmp_path_factory.mktemp("run") / "out", attn_impl=request.param)
    trainer.train()
    assert trainer.model.config._attn_implementation == request.param
    return trainer


@pytest.fixture
def encoder(trainer: Stage2Trainer) -> Encoder:
    return make_encoder(trainer.template)


@pytest.mark.parametrize(
    "chosen",
    [
        (0, 2, 4, 6),
        (3, 3),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((0, 1), (6, 5, 4, 3, 2, 1, 0))),
    ],
)
def test_the_packed_loss_is_the_sum_of_the_single_losses(
    trainer: Stage2Trainer, encoder: Encoder, samples: list[Sample], chosen: tuple[int, ...]
) -> None:
    """The purpose of isolation, by another oracle than the check's."""
    segments = ground_truth_segments(encoder, make_task(), [samples[n] for n in chosen])
    assert len(segments) == len(chosen)
    singles = sum(trainer.packed_loss(encoder.collate([segment])) for segment in segments)
    assert trainer.packed_loss(encoder.collate(segments)) == pytest.approx(singles, rel=1e-5)
    change = measure_isolation(collate_for_isolation(encoder, segments), trainer.packed_loss)
    assert change == IsolationChange(seen=0.0, rounding=0.0)


def test_the_check_passes_where_missed_objects_have_no_order(
    trainer: Stage2Trainer, encoder: Encoder, samples: list[Sample]
) -> None:
    task = make_task(missed_order=MissedOrder.ANY)
    segments = ground_truth_segments(encoder, task, samples[:3])
    assert any("alternatives" in segment.encodings[0] for segment in segments)
    check_isolation(isolation_batches(encoder, task, samples[:3]), trainer.packed_loss)


def test_packed_loss_leaves_no_trace(trainer: Stage2Trainer, encoder: Encoder, samples: list[Sample]) -> None:
    segments = ground_truth_segments(encoder, make_task(), samples[:2])
    batch = encoder.collate(segments)
    keys = set(batch)
    trainer.model.train()
    random_state = torch.get_rng_state()
    first, second = trainer.packed_loss(batch), trainer.packed_loss(batch)
    assert first == second
    assert set(batch) == keys
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), random_state)


# --- the model itself ------------------------------------------------------------------------------


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _rows_of_the_stock_trainer(batch: Batch) -> Batch:
    return {**batch, "position_ids": batch["position_ids"][1:]}


def _with_a_cache(batch: Batch) -> Batch:
    return {**batch, "use_cache": True}


def _with_a_mask_of_ones(batch: Batch) -> Batch:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def _with_a_mask_over_all(batch: Batch) -> Batch:
    num_tokens = batch["input_ids"].numel()
    return {
        **batch,
        "attention_mask": torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()[None, None],
    }


def _with_one_length(batch: Batch) -> Batch:
    return _with_lengths(batch, batch["cu_seq_lens_q"][[0, -1]])


def _with_shifted_lengths(batch: Batch) -> Batch:
    """Every segment takes the last token of the one before it for its own."""
    lengths = batch["cu_seq_lens_q"].clone()
    lengths[1:-1] -= 1
    return _with_lengths(batch, lengths)


def _without_the_last_border(batch: Batch) -> Batch:
    lengths = batch["cu_seq_lens_q"]
    return _with_lengths(batch, torch.cat([lengths[:-2], lengths[-1:]]))


def _with_lengths(batch: Batch, lengths: torch.Tensor) -> Batch:
    return {**batch, "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}


@cache
def _model(attn_impl: str, dtype: torch.dtype) -> Any:
    """The trained tiny model; ``by_lengths`` keeps segments apart as flash attention does."""
    if attn_impl == "by_lengths":
        AttentionInterface.register("by_lengths", _attend_by_lengths)
        AttentionMaskInterface.register("by_lengths", lambda *args, **kwargs: None)
    model = (
        copy.deepcopy(tiny_model_with("eager" if attn_impl == "by_lengths" else attn_impl)).to(dtype).eval()
    )
    if attn_impl == "by_lengths":
        model.model.language_model.set_attn_implementation("by_lengths")
    return model


def _attend_by_lengths(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attention over ``cu_seq_lens_q``, which is all that tells segments apart; states (1, heads, T, width)."""
    borders = given["cu_seq_lens_q"].tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(states[:, :, start:end] for states in (query, key, value)), is_causal=True, scale=scaling
        )
        for start, end in pairwise(borders)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _loss_of(model: Any, spoil: Spoil = _as_it_is) -> Callable[[Batch], float]:
    def packed_loss(batch: Batch) -> float:
        inputs = spoil({"use_cache": False, **batch})
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        return summed_loss(model, inputs)

    return packed_loss


@pytest.fixture(scope="module")
def batches(samples: list[Sample]) -> IsolationBatches:
    return isolation_batches(make_encoder(), make_task(), samples[:3])


def _in_every_dtype(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases that begin with an attention. 16 bits take long on a CPU: of bfloat16 two are fast, float16 is long."""
    found, slow = [], {torch.bfloat16: pytest.mark.slow, torch.float16: (pytest.mark.slow)}
    for case, dtype in product(cases, (torch.float32, torch.bfloat16, torch.float16)):
        is_fast = dtype is torch.float32 or (
            dtype is torch.bfloat16 and case in [("sdpa",), ("sdpa", _with_a_cache)]
        )
        name = "-".join(getattr(part, "__name__", str(part)) for part in (*case, dtype))
        found.append(pytest.param(*case, dtype, id=name, marks=() if is_fast else slow[dtype]))
    return found


@pytest.mark.parametrize(("attn_impl", "dtype"), _in_every_dtype(("sdpa",), ("eager",), ("by_lengths",)))
def test_isolated_segments_do_not_change_by_a_single_bit(
    batches: IsolationBatches, attn_impl: str, dtype: torch.dtype
) -> None:
    change = measure_isolation(batches, _loss_of(_model(attn_impl, dtype)))
    assert change == IsolationChange(seen=0.0, rounding=0.0)


@pytest.mark.parametrize(
    ("attn_impl", "leak", "dtype"),
    _in_every_dtype(
        *(
            (attn_impl, leak)
            for attn_impl in ("sdpa", "eager")
            for leak in (_rows_of_the_stock_trainer, _with_a_cache, _with_a_mask_of_ones)
        ),
        ("sdpa", _with_a_mask_over_all),
        ("by_lengths", _with_one_length),
        ("by_lengths", _with_shifted_lengths),
        ("by_lengths", _without_the_last_border),
    ),
)
def test_every_known_leak_is_refused_in_every_dtype(
    batches: IsolationBatches, attn_impl: str, leak: Spoil, dtype: torch.dtype
) -> None:
    with pytest.raises(ConfigError, match="packed segments must not see each other"):
        check_isolation(batches, _loss_of(_model(attn_impl, dtype), leak))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images_that_see_each_other_are_refused(batches: IsolationBatches, dtype: torch.dtype) -> None:
    """The tower's features of one image change with another's: text tokens alone would not show it."""

    def mixing(batch: Batch) -> Batch:
        pixels = batch["pixel_values"]
        return {**batch, "pixel_values": pixels + pixels[:4].mean() / 8}

    with pytest.raises(ConfigError, match="packed segments must not see each other"):
        check_isolation(batches, _loss_of(_model("sdpa", dtype), mixing))


# --- the check itself ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_encoder() -> Encoder:
    return make_encoder()


@pytest.mark.parametrize("bad", range(1, 13))
def test_a_loss_that_is_not_a_number_proves_nothing(
    plain_encoder: Encoder, samples: list[Sample], bad: int
) -> None:
    numbers = count()
    with pytest.raises(ConfigError, match=r"changes by nan|by nan with what stands behind"):
        _check(plain_encoder, samples[:3], lambda batch: math.nan if next(numbers) == bad else 7.0)


def test_a_kernel_that_is_chosen_at_its_first_run_is_no_leak(
    plain_encoder: Encoder, samples: list[Sample]
) -> None:
    numbers = count()
    _check(plain_encoder, samples[:3], lambda batch: 7.0 if next(numbers) else 7.001)


def test_rounding_that_depends_on_the_other_tokens_is_no_leak(
    plain_encoder: Encoder, samples: list[Sample]
) -> None:
    """As experts have it: what is added up depends on everything in the pack, before and behind alike."""

    def rounded(batch: Batch) -> float:
        return 100.0 + 1e-3 * (hash(tuple(batch["input_ids"][0].tolist())) % 1000)

    batches = isolation_batches(plain_encoder, make_task(), samples[:3])
    change = measure_isolation(batches, rounded)
    assert change.seen > 0
    check_isolation(batches, rounded)


def test_only_content_changes_never_a_length_an_image_or_what_is_supervised(
    batches: IsolationBatches,
) -> None:
    for group in (*batches.before, batches.behind):
        own, *others = [make() for make in group]
        supervised = own["labels"] != -100
        assert supervised.any()
        for other in others:
            assert other.keys() == own.keys()
            for name in own.keys() - {"input_ids", "pixel_values"}:
                assert torch.equal(torch.as_tensor(own[name]), torch.as_tensor(other[name])), name
            differs = own["input_ids"] != other["input_ids"]
            assert differs.any()
            assert not (differs & supervised).any()
            assert torch.equal(own["pixel_values"], other["pixel_values"]) == (group is batches.behind)


def test_a_bad_sample_is_left_out_of_the_check(plain_encoder: Encoder, samples: list[Sample]) -> None:
    bad = replace(samples[0], row={**samples[0].row, "images": ["/nowhere/a.png"]})
    good = isolation_batches(plain_encoder, make_task(), [bad, samples[1]])
    assert {len(make()["cu_seq_lens_q"]) for make in good.behind} == {3}, "one sample is packed with itself"
    with pytest.raises(DatasetError, match="got none among the first num_samples=1"):
        isolation_batches(plain_encoder, make_task(), [bad])
