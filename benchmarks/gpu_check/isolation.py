"""Stage *isolation*: the packing check of a run's start, on the device, with sound packs and leaking ones."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.stage import CheckFailed, Context
from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.dialects import OBJECT_LIST
from swift_stage2.channel_b.encoding import IGNORED_LABEL, Encoder
from swift_stage2.channel_b.sample_source import read_sample
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.checks.packing_isolation import check_isolation, isolation_batches
from swift_stage2.config import MatchingConfig
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset
from swift_stage2.demo.tiny_template import TINY_VL, tiny_template
from swift_stage2.errors import ConfigError
from swift_stage2.records import SampleKey

_NUM_SAMPLES = 4
_FLASH = "flash_attention_2"


def isolation(context: Context) -> None:
    """Raises ``CheckFailed`` where sound packs are refused or leaking ones pass."""
    from swift.model import get_model_processor

    weights = dict.fromkeys(TokenGroup, 1.0)
    task = DetectionTask(dialect=OBJECT_LIST, matching=MatchingConfig(), weights=weights)
    file = write_dataset(context.scratch / "isolation", SceneKind.SHAPES, _NUM_SAMPLES, Split.TRAIN, 0)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    samples = [read_sample(rows, task, SampleKey(0, index, index)) for index in range(_NUM_SAMPLES)]
    with_flash = not context.rehearsal and importlib.util.find_spec("flash_attn") is not None
    if not with_flash:
        context.note(_FLASH, "left out: no flash_attn, or a rehearsal")
    for implementation in ("sdpa", *([_FLASH] if with_flash else [])):
        model, processor = get_model_processor(
            str(STAGE1), model_type=TINY_VL, torch_dtype=getattr(torch, context.dtype),
            device_map=context.device, attn_impl=implementation,
        )  # fmt: skip
        model.train(False)
        encoder = Encoder(tiny_template(model, processor), packing_length=512)
        batches = isolation_batches(encoder, task, samples)
        try:
            check_isolation(batches, partial(_packed_loss, model, leaks=False))
        except ConfigError as error:
            raise CheckFailed(f"{implementation}: sound packs are refused: {error}") from error
        try:
            check_isolation(batches, partial(_packed_loss, model, leaks=True))
        except ConfigError as error:
            context.note(f"{implementation}_with_leak", str(error))
        else:
            raise CheckFailed(f"{implementation}: packs whose segments see each other pass the check")


def _packed_loss(model: Any, batch: dict[str, Any], *, leaks: bool) -> float:
    """Summed loss of one collated pack, in float32. ``leaks``: the attention takes the pack for one text."""
    if leaks:  # without text positions and borders
        batch = {
            name: value for name, value in batch.items() if not name.startswith(("cu_seq", "max_length"))
        }
        batch["position_ids"] = batch["position_ids"][1:]
    inputs = {
        name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()
    }
    labels = inputs.pop("labels")
    inputs.pop("loss_scale", None)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(
        logits, labels[0, 1:], ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return float(loss)
