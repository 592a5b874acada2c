"""The demo's tiny model, its template and what channel B makes of its samples, for tests that need the real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from detection_task import make_task as make_task

import swift_stage2.demo
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.parsing import read_ground_truth
from swift_stage2.channel_b.preprocessing import make_segment
from swift_stage2.channel_b.task import Task
from swift_stage2.demo.tiny_template import TINY_VL, load_tiny_model, tiny_template
from swift_stage2.records import Rollout, Sample, SampleKey, Segment, VersionSpan

Rows = list[dict[str, Any]]
IntegerBox = tuple[int, int, int, int]

STAGE1 = Path(swift_stage2.demo.__file__).parent / "stage1"
PACKING_LENGTH = 256


@cache
def tiny_model() -> tuple[Any, Any]:
    """Model (float32, sdpa) and processor; no test may change the weights."""
    return load_tiny_model(STAGE1)


@cache
def tiny_model_with(attn_impl: str) -> Any:
    """The same model under another attention implementation."""
    import torch
    from swift.model import get_model_processor

    model, _ = get_model_processor(
        str(STAGE1), model_type=TINY_VL, torch_dtype=torch.float32, device_map="cpu", attn_impl=attn_impl
    )
    return model


def make_template(**options: Any) -> Any:
    """A template of its own, bound to the model; ``options`` are ms-swift's, ``norm_bbox`` for one."""
    model, processor = tiny_model()
    if not options:
        return tiny_template(model, processor)
    from swift.template import get_template

    template = get_template(processor, template_type=TINY_VL, **options)
    template.model = model
    template.set_mode("train")
    return template


def make_encoder(template: Any = None, *, packing_length: int = PACKING_LENGTH) -> Encoder:
    return Encoder(make_template() if template is None else template, packing_length=packing_length)


def read_rows(file: Path) -> Rows:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def sample_of(row: Mapping[str, Any], position: int = 0) -> Sample:
    return Sample(SampleKey(epoch=0, position=position, index=position), row, read_ground_truth(row))


def objects_of(encoder: Encoder, sample: Sample) -> tuple[tuple[str, IntegerBox], ...]:
    """Its true objects in the template's space."""
    return tuple(make_task().to_space(sample.truth, encoder.encode_prompt(sample).convert))


def boxes_of(encoder: Encoder, sample: Sample) -> tuple[IntegerBox, ...]:
    return tuple(box for _, box in objects_of(encoder, sample))


def answer_and_objects(encoder: Encoder, sample: Sample) -> tuple[str, tuple[tuple[str, IntegerBox], ...]]:
    """Channel A's answer, and the objects that it must spell out."""
    objects = objects_of(encoder, sample)
    return encoder.answer_of(sample), tuple((encoder.normalise(label), box) for label, box in objects)


def rollout_of(
    sample: Sample, text: str, prompt_token_ids: Sequence[int], *, version: int = 0, seconds: float = 0.0
) -> Rollout:
    """The answer of a server, as if sampled under one version."""
    return Rollout(
        sample=sample,
        text=text,
        token_ids=(),
        prompt_token_ids=tuple(prompt_token_ids),
        truncated=False,
        seed=1,
        server="http://127.0.0.1:1",
        spans=(VersionSpan(version, 0, 0),),
        seconds=seconds,
    )


def segment_of(encoder: Encoder, task: Task, sample: Sample, text: str = "", version: int = 0) -> Segment:
    """The whole way from an answer to a segment."""
    prompt = encoder.encode_prompt(sample)
    rollout = rollout_of(sample, text, prompt.token_ids, version=version)
    return make_segment(rollout, prompt, encoder, task)[0]


def summed_loss(model: Any, batch: Mapping[str, Any]) -> float:
    """Cross-entropy of what a collated batch supervises, in nats, by the model itself without ms-swift's trainer."""
    import torch

    inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_scale", "length")}
    (positions,) = torch.nonzero(batch["labels"][0, 1:] != -100, as_tuple=True)
    with torch.no_grad():
        logits = model(**inputs, logits_to_keep=positions).logits[0].float()
    targets = batch["labels"][0, positions + 1]
    return float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
