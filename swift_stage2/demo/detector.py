"""A tiny model as an object detector: makes supervised batches of scenes, and finds objects in images.

Works on many images at once and without a server, in exactly the conversation format of the ms-swift
template, which is read off the real template once. Called by stage 1 and to score any checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from swift_stage2.demo.detection_score import Detections, DetectionScore, score_detections
from swift_stage2.demo.grounding_dataset import answer_text, grounding_row
from swift_stage2.demo.scenes import MAX_OBJECTS, Box, Scene, SceneKind, Split, make_scene, scene_seed
from swift_stage2.demo.tiny_model import IMAGE_TOKEN_ID, PAD_TOKEN_ID
from swift_stage2.demo.tiny_template import load_tiny_model, tiny_template

IGNORED_LABEL = -100
# Scenes of stage 1 lie far from those of data sets, whose streams are small seeds.
STAGE1_STREAM = 1 << 20

_TOKENS_PER_OBJECT = 12
_ANSWER_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class ConversationFormat:
    """The token ids around an answer, as the ms-swift template lays them out for one 112 x 112 image."""

    prompt_ids: tuple[int, ...]
    closing_ids: tuple[int, ...]


class Detector:
    """Owns a model and its processor. Images are 112 x 112, the one size the conversation format is for."""

    def __init__(self, model: Any, processor: Any, conversation: ConversationFormat) -> None:
        self.model = model
        self.processor = processor
        self._conversation = conversation

    def batch(self, scenes: Sequence[Scene]) -> dict[str, torch.Tensor]:
        """Model inputs of (len(scenes), longest) token ids, right-padded; only answers are supervised."""
        prompt, closing = list(self._conversation.prompt_ids), list(self._conversation.closing_ids)
        tokenizer = self.processor.tokenizer
        answers = [tokenizer(answer_text(scene.objects))["input_ids"] + closing for scene in scenes]
        ends = [len(prompt) + len(answer) for answer in answers]
        ids = torch.full((len(scenes), max(ends)), PAD_TOKEN_ID)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, (answer, end) in enumerate(zip(answers, ends, strict=True)):
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        mask = (torch.arange(max(ends)) < torch.tensor(ends)[:, None]).long()
        return {**self._inputs(ids, mask, [scene.image for scene in scenes]), "labels": labels}

    def detect(self, images: Sequence[Image.Image]) -> list[Detections]:
        """The objects of each image by greedy decoding; an answer that is not valid JSON names none."""
        detections: list[Detections] = []
        for start in range(0, len(images), _ANSWER_BATCH_SIZE):
            answers = self._answer(images[start : start + _ANSWER_BATCH_SIZE])
            detections += [_read_answer(answer) for answer in answers]
        return detections

    @torch.no_grad()
    def _answer(self, images: Sequence[Image.Image]) -> list[str]:
        prompt = torch.tensor([self._conversation.prompt_ids] * len(images))
        was_training = self.model.training
        self.model.eval()
        output = self.model.generate(
            **self._inputs(prompt, torch.ones_like(prompt), images),
            max_new_tokens=(MAX_OBJECTS + 2) * _TOKENS_PER_OBJECT,
            do_sample=False,
        )
        self.model.train(was_training)
        answers = output[:, prompt.shape[1] :]
        texts: list[str] = self.processor.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts

    def _inputs(
        self, ids: torch.Tensor, mask: torch.Tensor, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        vision = self.processor.image_processor(images=list(images), return_tensors="pt", do_resize=False)
        types = (ids == IMAGE_TOKEN_ID).long()
        return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types, **vision}


def load_detector(directory: str | os.PathLike[str]) -> Detector:
    """A detector from a model directory, for instance ``demo/stage1`` or a checkpoint of stage 2."""
    model, processor = load_tiny_model(directory)
    return Detector(model, processor, _conversation_format(tiny_template(model, processor)))


def evaluate(detector: Detector, kind: SceneKind, num_scenes: int) -> DetectionScore:
    """Scores a detector, labels included and at IoU 0.5, on held-out scenes that are always the same."""
    seeds = [scene_seed(Split.HELD_OUT, index, stream=STAGE1_STREAM) for index in range(num_scenes)]
    scenes = [make_scene(kind, seed) for seed in seeds]
    return score_detections(detector.detect([scene.image for scene in scenes]), [s.objects for s in scenes])


def _conversation_format(template: Any) -> ConversationFormat:
    scene = make_scene(SceneKind.SHAPES, scene_seed(Split.TRAIN, 0, stream=STAGE1_STREAM))
    encoding = template.encode({**grounding_row(scene.objects, ""), "images": [scene.image]})
    ids = list(encoding["input_ids"])
    start = next(i for i, label in enumerate(encoding["labels"]) if label != IGNORED_LABEL)
    answer = template.tokenizer(answer_text(scene.objects))["input_ids"]
    if ids[start : start + len(answer)] != answer:
        rendered = template.tokenizer.decode(ids[start:])
        raise RuntimeError(f"the template must render answers as answer_text does, got rendered={rendered!r}")
    return ConversationFormat(tuple(ids[:start]), tuple(ids[start + len(answer) :]))


def _read_answer(text: str) -> list[tuple[str, Box]]:
    try:
        return [(str(item["label"]), _as_box(item["bbox_2d"])) for item in json.loads(text)]
    except (ValueError, KeyError, TypeError):
        return []


def _as_box(values: Sequence[Any]) -> Box:
    x1, y1, x2, y2 = (int(value) for value in values)
    return x1, y1, x2, y2
