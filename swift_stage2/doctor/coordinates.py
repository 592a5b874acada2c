"""``--coordinates``, and a part of ``--live``: in which numbers a running server's model writes its boxes.

Rows of the data set are asked greedily; their boxes are taken as they stand in the row, before any conversion, and the
answers number by number. ``dataset.coordinates`` judges; this file asks, compares pixel limits, and writes the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.parsing import read_ground_truth
from swift_stage2.channel_b.rollout_client.connection import ServerConnection
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.config import ServerEngine, Stage2Config
from swift_stage2.dataset.conventions import (
    AnsweredImage,
    Layout,
    Side,
    Unit,
    read_numbers,
)
from swift_stage2.dataset.coordinates import (
    CoordinateJudgement,
    Fit,
    fit_coordinates,
)
from swift_stage2.dataset.picture import UNREADABLE, look_at
from swift_stage2.doctor.examination import Checked, Examination, Outcome, failed, left_out, ok
from swift_stage2.doctor.rollouts import infer
from swift_stage2.errors import SampleError
from swift_stage2.records import Sample, SampleKey, image_paths

if TYPE_CHECKING:
    from swift_stage2.doctor.preparation import LearnerPreparation

_NUM_IMAGES = 32
_MOST_LOOKED_AT = 128
_SEED = 1


@dataclass(frozen=True, slots=True)
class AnsweredRows:
    """Rows with one image each, as one server answered them."""

    images: tuple[AnsweredImage, ...]
    is_thousandths: bool

    @property
    def expected(self) -> str:
        """In words: the numbers that the template writes."""
        pixels = "pixels of the image as the learner resizes it"
        return "thousandths of the image" if self.is_thousandths else pixels


@dataclass(frozen=True, slots=True)
class Questions:
    """Rows that every server is asked, with what is known of them before."""

    encoder: Encoder
    samples: tuple[Sample, ...]
    unanswered: AnsweredRows


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
    is_thousandths = template.norm_bbox == "norm1000"
    return Questions(encoder, tuple(samples), AnsweredRows(tuple(images), is_thousandths))


def _unanswered(sample: Sample, encoder: Encoder) -> AnsweredImage:
    """Its truth is in pixels, if the row is right about it. Raises ValueError unless it has one image."""
    (path,) = image_paths(sample.row)
    picture, prompt = look_at(path or ""), encoder.encode_prompt(sample)
    stored = (picture.width, picture.height)
    is_share = sample.row["objects"].get("bbox_type") == "norm1"
    x, y = stored if is_share else (1, 1)
    boxes = ((x * x1, y * y1, x * x2, y * y2) for x1, y1, x2, y2 in sample.truth.boxes)
    return AnsweredImage(
        answers=(),
        truth=tuple(zip(sample.truth.labels, boxes, strict=True)),
        stored=stored,
        expected=prompt.space or stored,
        resized=prompt.images_size[0],
    )


def examine_answers(
    exam: Examination,
    config: Stage2Config,
    index: int,
    connection: ServerConnection,
    questions: Callable[[], Questions],
    needs: Sequence[Checked[Any]],
) -> None:
    """The rows of one server."""
    answered = exam.check("answered rows", lambda: ask_rows(connection, questions, config), needs=needs)
    exam.check("pixel limits", lambda: check_limits(answered.result, config, index), needs=[answered])
    exam.check("coordinates", lambda: check_coordinates(answered.result, config, index), needs=[answered])


def ask_rows(
    connection: ServerConnection, questions: Callable[[], Questions], config: Stage2Config
) -> Outcome[AnsweredRows]:
    """Greedy answers, in POSTs of the run's size."""
    if config.stage2_ab.task != "detection":
        return left_out("only task detection says where its boxes stand")
    dialect = DIALECTS.get(config.stage2_ab.dialect or "", OBJECT_LIST)
    decoding, size = replace(config.rollout.decoding, temperature=0.0), config.rollout.max_inflight_per_server
    asked, images = questions(), list[AnsweredImage]()
    for start in range(0, len(asked.samples), size):
        samples = asked.samples[start : start + size]
        result = infer(connection, asked.encoder, samples, decoding, config.rollout.request_timeout_s)
        if result.end is not PostEnd.ANSWERED:
            return failed(
                f"{len(samples)} row(s) at once: {result.reason or result.end}",
                "read the server's log; if it was late, write a longer rollout.request_timeout_s",
            )
        for image, reply in zip(asked.unanswered.images[start:], result.completions, strict=False):
            served = reply.images_size[0] if len(reply.images_size) == 1 else None
            images.append(replace(image, answers=read_numbers(reply.text, dialect.label_key), served=served))
    num_boxes = sum(len(image.answers) for image in images)
    return ok(
        f"{len(images)} row(s) of one image each, answered greedily: {num_boxes} boxes of four numbers",
        replace(asked.unanswered, images=tuple(images)),
    )


def check_limits(answered: AnsweredRows, config: Stage2Config, index: int) -> Outcome[None]:
    """The sizes in which both sides saw the same images, and the limits that are written for them."""
    own, theirs = _written_limits(config, index)
    written = f"swift.max_pixels {own or 'not written'}"
    if is_started := index < len(config.launch.servers):
        written += f", max_pixels of launch.servers[{index}].args {theirs or 'not written'}"
    seen = [image for image in answered.images if image.served is not None]
    differing = [image for image in seen if image.served != image.resized]
    if differing:
        stored, resized, served = (
            f"{size[0]:g}x{size[1]:g}"
            for size in (differing[0].stored, differing[0].resized, differing[0].served)
            if size
        )
        found = f"one of {stored} is {resized} on the learner, {served} on the server; {written}"
        return failed(
            f"{len(differing)} of {len(seen)} images differ in size, {found}",
            _limit_remedy(answered, config, index),
        )
    if own != theirs and is_started:
        return failed(f"the limits differ: {written}", _limit_remedy(answered, config, index))
    if not seen:
        return left_out(f"the server does not say in which size it sees an image; {written}")
    return ok(f"both sides see all {len(seen)} images in the same size; {written}")


def _written_limits(config: Stage2Config, index: int) -> tuple[int | None, int | None]:
    started = config.launch.servers
    args = started[index].args if index < len(started) else {}
    return config.swift.get("max_pixels"), args.get("max_pixels", args.get("max-pixels"))


def _limit_remedy(answered: AnsweredRows, config: Stage2Config, index: int) -> str:
    """The line that gives both sides one limit."""
    own, theirs = _written_limits(config, index)
    served = [image.served for image in answered.images if image.served is not None]
    if own is None:
        other = theirs or max(map(math.prod, served), default=0)
        return f"write swift.max_pixels: {other:.0f}, or take the limit from the server (--max-pixels, MAX_PIXELS)"
    if index < len(config.launch.servers):
        is_ours = config.launch.servers[index].engine is ServerEngine.TRANSFORMERS
        name = f"launch.servers[{index}].args.{'max-pixels' if is_ours else 'max_pixels'}"
        return f"write {name}: {own}, as swift.max_pixels"
    return f"restart the server with swift.max_pixels: --max-pixels {own} (swift rollout: --max_pixels {own})"


def check_coordinates(answered: AnsweredRows, config: Stage2Config, index: int) -> Outcome[None]:
    """The verdict on the answers, with the line that mends them."""
    verdict = fit_coordinates(answered.images)
    best = verdict.best
    if verdict.judgement is CoordinateJudgement.CANNOT_TELL:
        return left_out(f"cannot tell: {verdict.reason}")
    if verdict.judgement is CoordinateJudgement.HEALTHY:
        expected = f"healthy: answers are {answered.expected}, as the template expects"
        return ok(f"{expected}; {_figures(best)}")
    whose = "answers" if best.convention.side is Side.ANSWERS else "boxes of the data set"
    rivals = " or ".join(f"{each.side} in {each}" for each in verdict.rivals[:2])
    return failed(
        f"{whose} are {best.convention}: {_figures(best)}; as the template expects ({answered.expected}): "
        f"{_figures(verdict.expected)}{'; fits as well: ' if rivals else ''}{rivals}",
        _remedy(best, answered, config, index),
    )


def _figures(fit: Fit) -> str:
    if not fit.num_pairs:
        return "no answer overlaps with its object"
    return (
        f"{fit.num_pairs} pairs, {fit.share:.0%} of the boxes above IoU 0.5, median IoU {fit.median_iou:.2f}, "
        f"edges off by {fit.residual_px:.1f} pixels"
    )


def _remedy(fit: Fit, answered: AnsweredRows, config: Stage2Config, index: int) -> str:
    unit, layout = fit.convention.unit, fit.convention.layout
    if fit.convention.side is Side.DATA:
        return _data_remedy(unit, layout, answered.is_thousandths)
    if layout is Layout.CORNERS and unit is Unit.THOUSANDTHS:
        return "write swift.norm_bbox: norm1000"
    if layout is Layout.CORNERS and answered.is_thousandths and unit in (Unit.RESIZED, Unit.SERVED):
        return "write swift.norm_bbox: none"
    if layout is Layout.CORNERS and unit is Unit.SERVED:
        return _limit_remedy(answered, config, index)
    return f"start from a checkpoint that was trained with this template, whose boxes are {answered.expected}"


def _data_remedy(unit: Unit, layout: Layout, is_thousandths: bool) -> str:
    if layout is Layout.CORNERS and unit is Unit.FRACTIONS:
        return "write objects.bbox_type: norm1 in every row, or multiply its boxes by the image's width and height"
    order = "" if layout is Layout.CORNERS else f"{layout} as x1, y1, x2, y2"
    sides = {
        Unit.STORED: "",
        Unit.FRACTIONS: "x times the image's width, y times its height",
        Unit.THOUSANDTHS: "x times width / 1000, y times height / 1000",
    }
    resized = "every number times the stored image's side / the resized image's"
    scale = sides.get(Unit.THOUSANDTHS if is_thousandths and unit is Unit.EXPECTED else unit, resized)
    return f"write objects.bbox in pixels of the stored image: {', '.join(filter(None, (order, scale)))}"
