"""ms-swift plugin: rows are packed without flash attention, with the positions that keep them apart.

So ``swift sft`` computes on a CPU what ours does, and packs in the rank's own process, as ours does. Its own check
asks for flash attention; its packing workers import ms-swift anew.
"""

from __future__ import annotations

from typing import Any

from swift_stage2.checks.swift_parsing import LearnerArguments
from swift_stage2.compat import pack_here
from swift_stage2.training.losses import set_text_positions

from swift.arguments import SftArguments  # isort: skip
from swift.dataset import packing  # isort: skip
from swift.trainers import Seq2SeqTrainer  # isort: skip

_compute_loss = Seq2SeqTrainer.compute_loss


def _of_rows_apart(trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    set_text_positions(inputs)
    return _compute_loss(trainer, model, inputs, *args, **kwargs)


SftArguments._check_padding_free = LearnerArguments._check_padding_free
Seq2SeqTrainer.compute_loss = _of_rows_apart
packing._spawn_workers = pack_here
