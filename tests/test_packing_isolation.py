"""Segments of one pack do not see each other: on the real trainer, after a real training step has set it up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_model import make_encoder, make_task, read_rows, sample_of
from sft_run import build_trainer

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.records import Sample
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.errors import ConfigError, DatasetError
from swift_stage2.packing_isolation import (
    check_isolation,
    collate_for_isolation,
    ground_truth_segments,
    isolation_batches,
    isolation_error,
)
from swift_stage2.trainer import CONFIG_VARIABLE, Stage2Trainer

IMAGE_SIZES = ((112, 112), (150, 100), (60, 200), (84, 84))


def _check(encoder: Encoder, samples: list[Sample], packed_loss: Any, **settings: Any) -> None:
    check_isolation(isolation_batches(encoder, make_task(), samples), packed_loss, **settings)


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
) -> Iterator[Stage2Trainer]:
    directory = tmp_path_factory.mktemp("run")
    config = directory / "config.yaml"
    config.write_text("stage2_ab: {schedule: {b_ratio: 0}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONFIG_VARIABLE, str(config))
        trainer = build_trainer(
            rows_file,
            directory / "out",
            trainer_class="swift_stage2.trainer.Stage2Trainer",
            attn_impl=request.param,
        )
        trainer.train()
        assert trainer.model.config._attn_implementation == request.param
        yield trainer


@pytest.fixture
def encoder(trainer: Stage2Trainer) -> Encoder:
    return make_encoder(trainer.template)


@pytest.mark.parametrize("chosen", [(0, 1), (0, 2, 4, 6), (6, 5, 4, 3, 2, 1, 0), (3, 3)])
def test_the_packed_loss_is_the_sum_of_the_single_losses(
    trainer: Stage2Trainer, encoder: Encoder, samples: list[Sample], chosen: tuple[int, ...]
) -> None:
    segments = ground_truth_segments(encoder, make_task(), [samples[n] for n in chosen])
    assert len(segments) == len(chosen)
    assert isolation_error(collate_for_isolation(encoder, segments), trainer.packed_loss) < 1e-5


def test_the_check_passes_on_a_trainer_that_has_begun(
    trainer: Stage2Trainer, encoder: Encoder, samples: list[Sample]
) -> None:
    _check(encoder, samples[:3], trainer.packed_loss)


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


def test_without_the_row_of_text_positions_the_check_refuses(
    trainer: Stage2Trainer, encoder: Encoder, samples: list[Sample]
) -> None:
    def leaking(batch: dict[str, Any]) -> float:
        return trainer.packed_loss({**batch, "position_ids": batch["position_ids"][1:]})

    with pytest.raises(ConfigError, match=r"packed segments must not see each other.*set swift\.attn_impl"):
        _check(encoder, samples[:3], leaking)


def test_with_a_cache_the_check_refuses(
    trainer: Stage2Trainer, encoder: Encoder, samples: list[Sample]
) -> None:
    def caching(batch: dict[str, Any]) -> float:
        return trainer.packed_loss({**batch, "use_cache": True})

    with pytest.raises(ConfigError, match="packed segments must not see each other"):
        _check(encoder, samples[:3], caching)


# --- the check itself ------------------------------------------------------------------------------


def _token_count(batch: dict[str, Any]) -> float:
    """A loss of isolated segments: it adds up."""
    return float(batch["input_ids"].numel())


@pytest.fixture(scope="module")
def plain_encoder() -> Encoder:
    return make_encoder()


def test_a_loss_that_is_not_a_number_proves_nothing(plain_encoder: Encoder, samples: list[Sample]) -> None:
    with pytest.raises(ConfigError, match=r"differs .* by nan"):
        _check(plain_encoder, samples[:3], lambda batch: math.nan)


def test_the_limit_is_wider_in_half_precision(plain_encoder: Encoder, samples: list[Sample]) -> None:
    def off_by_two_per_mille(batch: dict[str, Any]) -> float:
        packed = len(batch["cu_seq_lens_q"]) > 2
        return _token_count(batch) * (1.002 if packed else 1)

    _check(plain_encoder, samples[:3], off_by_two_per_mille, half_precision=True)
    with pytest.raises(ConfigError, match=r"by 2\.0e-03 \(limit 5e-04\)"):
        _check(plain_encoder, samples[:3], off_by_two_per_mille)


def test_a_bad_sample_is_left_out_of_the_check(plain_encoder: Encoder, samples: list[Sample]) -> None:
    bad = replace(samples[0], row={**samples[0].row, "images": ["/nowhere/a.png"]})
    packed: list[int] = []

    def remember(batch: dict[str, Any]) -> float:
        packed.append(len(batch["cu_seq_lens_q"]) - 1)
        return _token_count(batch)

    _check(plain_encoder, [bad, samples[1]], remember)
    assert packed[-1] == 2, "one sample is packed with itself"
    with pytest.raises(DatasetError, match="got none among the first num_samples=1"):
        _check(plain_encoder, [bad], remember)
