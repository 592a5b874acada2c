"""``--coordinates``, and a part of ``--live``: in which numbers a running server's model writes its boxes.

Rows of the data set are asked greedily, and the numbers of the answers are read in each way that people's models and
data have been seen to write them. A true box scores its best IoU with an answer of its label. The numbers that the
template expects stand unless another way is clearly better, and a verdict is given only if the answers fit their own
images clearly better than other images.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.matching import iou_matrix
from swift_stage2.channel_b.parsing import read_ground_truth
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.channel_b.rollouts.routes import RouteNow
from swift_stage2.checks.checks import CheckResult, failed, left_out, ok
from swift_stage2.checks.rollouts import OTHER_PROMPT, infer, size_difference
from swift_stage2.config import Stage2Config
from swift_stage2.data.picture import UNREADABLE, look_at
from swift_stage2.errors import SampleError
from swift_stage2.records import Box, Sample, SampleKey, image_paths

if TYPE_CHECKING:
    from swift_stage2.checks.doctor import CheckRun
    from swift_stage2.checks.preparation import LearnerPreparation

Objects = tuple[tuple[str, Box], ...]
Size = tuple[float, float]
Array = NDArray[np.float64]

_NUM_IMAGES = 32
_MOST_LOOKED_AT = 128
_SEED = 1
_FEWEST_IMAGES = 10
_MARGIN = 0.1  # mean IoU by which another reading, and answers to their own images, must be better
_TIE = 0.02  # mean IoU within which two readings fit alike
_NUM_SWAPS = 8
_LARGEST = 1e9
_NUMBER = r'\s{0,9}"?(-?\d{1,9}(?:\.\d{0,18})?(?:e-?\d{1,2})?)"?\s{0,9}'
_FOUR = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}(?:,|\),\s?\(){_NUMBER},{_NUMBER}[\])]", re.IGNORECASE)
_TOKEN = re.compile(r"<\|coord_(\d{1,9})\|>")
_ELEMENT = re.compile(r"\{[^{}]*\}")


class Reading(StrEnum):
    """The meaning of a box's four numbers; of the last two also in the numbers that are expected there."""

    EXPECTED = "the numbers that the template expects"
    STORED = "pixels of the stored image"
    RESIZED = "pixels of the image as the learner resizes it"
    THOUSANDTHS = "thousandths of the image (0..1000)"
    FRACTIONS = "fractions of the image (0..1)"
    Y_FIRST = "y1, x1, y2, x2"
    CORNER_SIZE = "x, y, width, height"


_REMEDIES = {
    Reading.STORED: "make sure that the rows hold x1, y1, x2, y2 in pixels of the stored image; if they do, ",
    Reading.THOUSANDTHS: "write swift.norm_bbox: norm1000, or ",
    Reading.RESIZED: "write swift.norm_bbox: none, or ",
}


@dataclass(frozen=True, slots=True)
class AnsweredImage:
    """One image: what the model wrote, number by number, and its truth in pixels; sizes are width, height."""

    answers: Objects
    truth: Objects
    stored: Size
    expected: Size
    """Of the space in which the template writes boxes."""
    resized: Size
    """Of the image as the learner's model sees it."""

    def answered_shares(self, reading: Reading) -> Array:
        """The answered boxes in shares of the image."""
        numbers = _numbers(self.answers)
        if reading is Reading.Y_FIRST:
            numbers = numbers[:, [1, 0, 3, 2]]
        if reading is Reading.CORNER_SIZE:
            numbers = np.concatenate([numbers[:, :2], numbers[:, :2] + numbers[:, 2:]], axis=1)
        sides = {Reading.STORED: self.stored, Reading.RESIZED: self.resized}
        sides |= {Reading.THOUSANDTHS: (1e3, 1e3), Reading.FRACTIONS: (1.0, 1.0)}
        boxes: Array = np.clip(numbers / (sides.get(reading, self.expected) * 2), -_LARGEST, _LARGEST)
        return boxes


def _numbers(objects: Objects) -> Array:
    return np.array([box for _, box in objects], dtype=np.float64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class CoordinateVerdict:
    """How boxes are written, and the mean IoU by that; no ``reading`` but a ``reason`` if nothing tells."""

    reading: Reading | None
    mean_iou: float = 0.0
    expected_iou: float = 0.0
    reason: str = ""


def read_numbers(text: str, label_key: str = "label") -> Objects:
    """Every box of an answer as it is written: fractions, numbers in any order, in any brackets. No text raises."""
    text = _TOKEN.sub(r"\1", text)
    label = re.compile(
        rf'"{re.escape(label_key)}"\s*:\s*("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{{4}})*")'
    )
    found = []
    for element in _ELEMENT.findall(text) or [text]:
        named = label.search(element)
        for box in _FOUR.findall(element):
            x1, y1, x2, y2 = map(float, box)
            found.append((str(json.loads(named[1])).strip() if named else "", (x1, y1, x2, y2)))
    return tuple(found)


def judge(images: Sequence[AnsweredImage]) -> CoordinateVerdict:
    """The verdict on the answers of one model on one server. Answers may be any numbers."""
    images = [image for image in images if image.answers and image.truth]
    if len(images) < _FEWEST_IMAGES:
        reason = f"only {len(images)} images have answered boxes and true ones, {_FEWEST_IMAGES} must"
        return CoordinateVerdict(None, reason=reason)
    labels = {label.casefold() for image in images for label, _ in image.truth}

    def mean_iou(reading: Reading, swap: int = 0) -> float:
        """Of answers and the truth of as many images further on."""
        others = [*images[swap:], *images[:swap]]
        pairs = zip(others, images, strict=True)
        return float(np.mean([_score(answered, asked, reading, labels) for answered, asked in pairs]))

    means = {reading: mean_iou(reading) for reading in Reading}
    best = next(reading for reading, mean in means.items() if mean >= max(means.values()) - _TIE)
    if means[best] < means[Reading.EXPECTED] + _MARGIN:
        best = Reading.EXPECTED
    if means[best] < np.mean([mean_iou(best, swap) for swap in range(1, _NUM_SWAPS + 1)]) + _MARGIN:
        reason = "in no numbers do the answers fit their own images clearly better than other images"
        return CoordinateVerdict(None, reason=reason)
    return CoordinateVerdict(best, means[best], means[Reading.EXPECTED])


def _score(answered: AnsweredImage, asked: AnsweredImage, reading: Reading, known: set[str]) -> float:
    """Mean over the true boxes of the best IoU with an answer of their label, or of one that no truth has."""
    boxes = answered.answered_shares(reading)
    in_order: NDArray[np.bool_] = np.all(boxes[:, :2] < boxes[:, 2:], axis=1)
    boxes[~in_order] = 0.0
    corners = (_numbers(asked.truth) / (asked.stored * 2)).reshape(-1, 2, 2)
    truth = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)  # ms-swift puts them in order
    named = [label.casefold() for label, _ in answered.answers]
    same = np.array(
        [[name == label.casefold() or name not in known for label, _ in asked.truth] for name in named]
    )
    allowed = same & in_order[:, None]
    return float(np.where(allowed, iou_matrix(boxes, truth), 0.0).max(axis=0).mean())


@dataclass(frozen=True, slots=True)
class Questions:
    """Rows with one image each that every server is asked, with what is known of them before."""

    encoder: Encoder
    samples: tuple[Sample, ...]
    images: tuple[AnsweredImage, ...]


def prepare_questions(prepared: LearnerPreparation, config: Stage2Config) -> Questions:
    """Rows from all over the training set, those that the template can take."""
    template, rows = prepared.template, prepared.row_sets[0]
    encoder = Encoder(template, packing_length=config.stage2_ab.channel_b.packing.packing_length)
    samples, images = [], []
    for number in Random(_SEED).sample(range(len(rows)), min(len(rows), _MOST_LOOKED_AT)):
        try:
            sample = Sample(SampleKey(0, 0, number), rows[number], read_ground_truth(rows[number]))
            image = _unanswered(sample, encoder)
        except (SampleError, *UNREADABLE):
            continue
        if image.truth:
            samples.append(sample)
            images.append(image)
        if len(samples) == _NUM_IMAGES:
            break
    return Questions(encoder, tuple(samples), tuple(images))


def _unanswered(sample: Sample, encoder: Encoder) -> AnsweredImage:
    """Raises ValueError unless it has one image."""
    (path,) = image_paths(sample.row)
    picture, prompt = look_at(path or ""), encoder.encode_prompt(sample)
    stored = (float(picture.width), float(picture.height))
    x, y = stored if sample.row["objects"].get("bbox_type") == "norm1" else (1, 1)
    boxes = ((x * x1, y * y1, x * x2, y * y2) for x1, y1, x2, y2 in sample.truth.boxes)
    truth = tuple(zip(sample.truth.labels, boxes, strict=True))
    return AnsweredImage((), truth, stored, prompt.space or stored, prompt.images_size[0])


def examine_answers(
    check_run: CheckRun,
    config: Stage2Config,
    route: RouteNow,
    questions: Callable[[], Questions],
    needs: Sequence[CheckResult[Any]],
) -> None:
    """The rows of one server."""
    answered = check_run.check("answered rows", lambda: ask_rows(route, questions, config), needs=needs)
    check_run.check("coordinates", lambda: check_coordinates(answered.result), needs=[answered])


def ask_rows(
    route: RouteNow, questions: Callable[[], Questions], config: Stage2Config
) -> CheckResult[list[AnsweredImage]]:
    """Greedy answers, in POSTs of the run's size."""
    if config.stage2_ab.task != "detection":
        return left_out("only task detection says where its boxes stand")
    dialect = DIALECTS.get(config.stage2_ab.dialect or "", OBJECT_LIST)
    decoding, size = replace(config.rollout.decoding, temperature=0.0), config.rollout.max_inflight_per_server
    asked, images = questions(), list[AnsweredImage]()
    for start in range(0, len(asked.samples), size):
        samples = asked.samples[start : start + size]
        result = infer(route, asked.encoder, samples, decoding, config.rollout.request_timeout_s)
        if result.end is not PostEnd.ANSWERED:
            return failed(
                f"{len(samples)} row(s) at once: {result.reason or result.end}",
                "read the server's log; if it was late, write a longer rollout.request_timeout_s",
            )
        for image, reply in zip(asked.images[start:], result.completions, strict=False):
            if difference := size_difference(
                reply.images_size, [(round(image.resized[0]), round(image.resized[1]))]
            ):
                return failed(difference, OTHER_PROMPT)
            images.append(replace(image, answers=read_numbers(reply.text, dialect.label_key)))
    num_boxes = sum(len(image.answers) for image in images)
    return ok(
        f"{len(images)} row(s) of one image each, answered greedily: {num_boxes} boxes of four numbers",
        images,
    )


def check_coordinates(images: Sequence[AnsweredImage]) -> CheckResult[None]:
    """The verdict on the answers, with what mends them."""
    verdict = judge(images)
    if verdict.reading is None:
        return left_out(f"cannot tell: {verdict.reason}")
    if verdict.reading is Reading.EXPECTED:
        return ok(f"healthy: answers are {verdict.reading}, mean IoU {verdict.mean_iou:.2f}")
    return failed(
        f"answers are {verdict.reading}: mean IoU {verdict.mean_iou:.2f}, against {verdict.expected_iou:.2f} as the "
        "template expects them",
        f"{_REMEDIES.get(verdict.reading, '')}start from a checkpoint that was trained with this template",
    )
