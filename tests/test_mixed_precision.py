"""Mixed precision keeps float32 weights and computes in 16 bits: what is compared must know. On a real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from real_model import make_encoder, read_rows, sample_of
from sft_run import build_trainer, channel_a_alone

from swift_stage2 import Stage2Trainer
from swift_stage2.assembly import RunInputs, start_run
from swift_stage2.config import Stage2Config
from swift_stage2.weights.proof import HALF_PRECISION_TIE_NATS

pytestmark = [pytest.mark.slow, pytest.mark.ci]


@pytest.mark.parametrize("bf16", [True, False])
def test_near_ties_and_the_wide_limit_follow_the_dtype_that_is_computed_in(
    bf16: bool, tmp_path: Path, rows_file: Path
) -> None:
    taken: list[RunInputs] = []

    def remember(config: Stage2Config, given: RunInputs) -> Any:
        taken.append(given)
        return start_run(config, given)

    trainer = build_trainer(
        rows_file,
        tmp_path / "out",
        trainer=Stage2Trainer,
        given={"stage2": channel_a_alone(), "start_run": remember},
        fp16=False,
        bf16=bf16,
    )
    trainer.train()
    (given,) = taken
    module = given.module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}

    canary = given.make_canary(make_encoder(trainer.template), sample_of(read_rows(rows_file)[0], 0))
    likeliest, second = trainer.template.tokenizer.encode("cat dog")[:2]
    computed: set[torch.dtype] = set()

    def nearly_tie(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        computed.add(output.dtype)
        logits = torch.zeros_like(output)
        logits[..., likeliest], logits[..., second] = 20.0, 20.0 - HALF_PRECISION_TIE_NATS / 2
        return logits

    watch = module.lm_head.register_forward_hook(nearly_tie)
    answer = canary.answer()
    watch.remove()
    assert computed == {torch.bfloat16 if bf16 else torch.float32}
    assert answer.agrees([second]) == bf16, "what follows a near tie cannot be compared"
    assert not answer.agrees([likeliest]), "it ends too early"
