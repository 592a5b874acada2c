"""A resumed run trains on from its checkpoint's weights: ms-swift's real trainer, ours, and the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sft_run import our_trainer

from swift_stage2.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.ci]

NUM_STEPS, STOPPED_AFTER = 4, 2


def train(rows_file: Path, output: Path, resume: Path | None = None, **arguments: Any) -> Any:
    settings = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 1, **arguments}
    trainer = our_trainer(rows_file, output, **settings)
    trainer.train(str(resume) if resume else None)
    return trainer


@pytest.mark.parametrize("arguments", [{}, {"tuner_type": "lora"}], ids=["whole", "adapters"])
def test_a_resumed_run_ends_with_the_weights_and_losses_of_one_that_was_never_stopped(
    rows_file: Path, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    never_stopped = train(rows_file, tmp_path / "first", **arguments)
    checkpoint = tmp_path / "first" / f"checkpoint-{STOPPED_AFTER}"
    resumed = train(rows_file, tmp_path / "second", checkpoint, **arguments)
    losses = [
        [(line["step"], line["loss"]) for line in each.state.log_history if "loss" in line]
        for each in (never_stopped, resumed)
    ]
    assert len(losses[0]) == NUM_STEPS
    assert losses[0] == losses[1]
    weights = resumed.model.state_dict()
    for name, weight in never_stopped.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_a_checkpoint_that_lacks_a_weight_is_not_taken(rows_file: Path, tmp_path: Path) -> None:
    train(rows_file, tmp_path / "first", max_steps=1)
    file = tmp_path / "first" / "checkpoint-1" / "model.safetensors"
    weights = load_file(file)
    del weights[next(name for name in weights if name.endswith("q_proj.weight"))]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"without model\..*q_proj\.weight \(1 in all\)"):
        train(rows_file, tmp_path / "second", file.parent)
