"""Stage *isolation*: what a run checks of its packs at its start, on the device, and that a leak does not pass it."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.stage import Context
from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.dialects import OBJECT_LIST
from swift_stage2.channel_b.encoding import IGNORED_LABEL, Encoder
from swift_stage2.channel_b.ground_truth import read_ground_truth
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.demo.tiny_template import TINY_VL, tiny_template
from swift_stage2.errors import CheckFailed, ConfigError
from swift_stage2.preflight.packing_isolation import check_isolation, isolation_batches
from swift_stage2.records import Sample, SampleKey

_NUM_SAMPLES = 4
_FLASH = "flash_attention_2"


def run(context: Context) -> None:
    """Raises ``CheckFailed`` where sound packs are refused or leaking ones pass."""
    from swift.model import get_model_processor

    samples = _samples(context)
    with_flash = not context.rehearsal and importlib.util.find_spec("flash_attn") is not None
    if not with_flash:
        context.figures.note(_FLASH, "left out: no flash_attn, or a rehearsal")
    for implementation in ("sdpa", *([_FLASH] if with_flash else [])):
        model, processor = get_model_processor(
            str(STAGE1), model_type=TINY_VL, torch_dtype=getattr(torch, context.dtype),
            device_map=context.device, attn_impl=implementation,
        )  # fmt: skip
        model.train(False)
        encoder = Encoder(tiny_template(model, processor), packing_length=512)
        sound = partial(packed_loss, model)
        if told := _refusal(encoder, samples, sound):
            raise CheckFailed(f"{implementation}: sound packs are refused: {told}")
        leaking = lambda batch, sound=sound: sound(_with_leak(batch))  # noqa: E731
        told = _refusal(encoder, samples, leaking)
        if not told:
            raise CheckFailed(f"{implementation}: packs whose segments see each other pass the check")
        context.figures.note(f"{implementation}_with_leak", told)


def _refusal(encoder: Encoder, samples: list[Sample], loss: Any) -> str:
    """Returns the packing check's objection to these packs, or nothing."""
    task = DetectionTask(
        dialect=OBJECT_LIST, weights=dict.fromkeys(TokenGroup, 1.0), iou_threshold=0.3, top_k=10,
        unmatched_prediction_cost=1.0, unmatched_ground_truth_cost=1.0, same_label=False,
    )  # fmt: skip
    try:
        check_isolation(isolation_batches(encoder, task, samples), loss)
    except ConfigError as error:
        return str(error)
    return ""


def packed_loss(model: Any, batch: dict[str, Any]) -> float:
    """Summed loss of one collated pack, in float32."""
    inputs = {
        name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()
    }
    labels = inputs.pop("labels")
    inputs.pop("loss_scale", None)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    return float(
        torch.nn.functional.cross_entropy(
            logits[0, :-1].float(), labels[0, 1:], ignore_index=IGNORED_LABEL, reduction="sum"
        )
    )


def _with_leak(batch: dict[str, Any]) -> dict[str, Any]:
    """Without text positions and borders the attention takes the pack for one text."""
    kept = {name: value for name, value in batch.items() if not name.startswith(("cu_seq", "max_length"))}
    return {**kept, "position_ids": batch["position_ids"][1:]}


def _samples(context: Context) -> list[Sample]:
    rows = write_dataset(context.scratch / "isolation", SceneKind.SHAPES, _NUM_SAMPLES, Split.TRAIN, 0)
    samples = []
    for index, line in enumerate(rows.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        samples.append(Sample(SampleKey(epoch=0, position=index, index=index), row, read_ground_truth(row)))
    return samples
