"""The worst images as pictures for the page: truth, predictions, and who was matched at IoU 0.5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swift_stage2.detections.prediction import Prediction
from swift_stage2.detections.scores import DetectionScores
from swift_stage2.evaluate.predictions import TrueRow
from swift_stage2.pages.pictures import Filter, Gallery, Picture, Thumbnails
from swift_stage2.records import find_image

_Boxes = Sequence[Sequence[float]]


def worst_images(
    rows: Sequence[TrueRow],
    predictions: Sequence[Prediction | None],
    scores: DetectionScores,
    size: int,
) -> Gallery:
    """At most ``size`` images, those with the most objects missed or invented first. Opens their files."""
    data, pairs = scores.data, scores.pairs[0]
    matched_true = set(scores.overlaps.true[pairs].tolist())
    matched_predicted = set(scores.overlaps.predicted[pairs].tolist())
    wrong = [np.bincount(side.images, minlength=data.num_images) for side in (data.truth, data.predicted)]
    num_matched = np.bincount(scores.overlaps.images[pairs], minlength=data.num_images)
    order = np.argsort(2 * num_matched - wrong[0] - wrong[1], kind="stable")[:size].tolist()
    begins = [
        np.searchsorted(side.images, np.arange(data.num_images)).tolist()
        for side in (data.truth, data.predicted)
    ]
    pictures, thumbnails = [], Thumbnails()
    for number in order:
        row, prediction = rows[number], predictions[number]
        missed = [begins[0][number] + place not in matched_true for place in range(len(row.truth))]
        objects = prediction.objects if prediction else None
        labels, boxes = (objects.ref, objects.bbox) if objects else ((), ())
        false = [begins[1][number] + place not in matched_predicted for place in range(len(boxes))]
        image, trouble = (
            thumbnails.add(find_image(row.image)) if prediction else (None, "nothing was predicted")
        )
        holds = {
            Filter.MISSED: any(missed),
            Filter.FALSE: any(false),
            Filter.NOTHING_FOUND: missed and all(missed),
        }
        outcomes = [str(name) for name, held in holds.items() if held] or [str(Filter.ALL_MATCHED)]
        pictures.append(
            Picture(
                image=image,
                trouble=trouble,
                name=Path(row.image).name,
                facts=(
                    f"row {number} of the data",
                    f"{len(boxes)} predicted, {len(row.truth)} true",
                    f"{len(boxes) - sum(false)} matched, {sum(missed)} missed, {sum(false)} false",
                ),
                fate=f"ended by: {prediction.finish_reason or 'not told'}" if prediction else "no answer",
                space=(prediction.width, prediction.height) if prediction else _extent(row.truth.boxes),
                boxes=(
                    *_drawn(row.truth.labels, row.truth.boxes, missed, "missed", "truth"),
                    *_drawn(labels, boxes, false, "false", "matched"),
                ),
                outcomes=tuple(outcomes),
                rollout=(prediction.answer if prediction else None) or _listed(labels, boxes),
                target=_listed(row.truth.labels, row.truth.boxes),
            )
        )
    return Gallery(
        pictures=tuple(pictures),
        thumbnails=thumbnails.uris,
        num_matches=data.num_images,
        backward="Worse",
        forward="Better",
    )


def _drawn(
    labels: Sequence[str], boxes: _Boxes, alone: Sequence[bool], without_partner: str, with_partner: str
) -> list[tuple[str | float, ...]]:
    return [
        (without_partner if is_alone else with_partner, *box, label)
        for label, box, is_alone in zip(labels, boxes, alone, strict=True)
    ]


def _extent(boxes: _Boxes) -> tuple[int, int]:
    """A frame around boxes of an image whose size nobody has told."""
    return (
        max([1, *(round(box[2]) for box in boxes)]),
        max([1, *(round(box[3]) for box in boxes)]),
    )


def _listed(labels: Sequence[str], boxes: _Boxes) -> str:
    return "\n".join(
        f"{label}: {', '.join(f'{value:g}' for value in box)}"
        for label, box in zip(labels, boxes, strict=True)
    )
