"""The worst images as pictures for the page: truth, predictions, and who was matched at IoU 0.5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_stage2.detections.prediction import LabelledBoxes, Prediction
from swift_stage2.detections.prediction_files import TrueRow
from swift_stage2.detections.scores import DetectionScores
from swift_stage2.pages.pictures import Gallery, Picture, Thumbnails, drawn_boxes, filters_of
from swift_stage2.records import find_image


def worst_images(
    rows: Sequence[TrueRow],
    predictions: Sequence[Prediction | None],
    scores: DetectionScores,
    size: int,
) -> Gallery:
    """At most ``size`` images, those with the most objects missed or invented first. Opens their files."""
    all_missed, all_false = scores.unmatched()
    wrong = [len(missed) + len(false) for missed, false in zip(all_missed, all_false, strict=True)]
    pictures, thumbnails = [], Thumbnails()
    for number in sorted(range(len(wrong)), key=lambda number: -wrong[number])[:size]:
        row, prediction = rows[number], predictions[number]
        missed, false = all_missed[number], all_false[number]
        objects = prediction.objects if prediction else LabelledBoxes()
        truth = list(zip(row.truth.labels, row.truth.boxes, strict=True))
        predicted = list(zip(objects.ref, objects.bbox, strict=True))
        image, trouble = (
            thumbnails.add(find_image(row.image)) if prediction else (None, "nothing was predicted")
        )
        pictures.append(
            Picture(
                image=image,
                trouble=trouble,
                name=Path(row.image).name,
                facts=(
                    f"row {number} of the data",
                    f"{len(predicted)} predicted, {len(truth)} true",
                    f"{len(predicted) - len(false)} matched, {len(missed)} missed, {len(false)} false",
                ),
                fate=f"ended by: {prediction.finish_reason or 'not told'}" if prediction else "no answer",
                space=(prediction.width, prediction.height) if prediction else _extent(row.truth.boxes),
                boxes=(
                    *drawn_boxes(truth, missed, "missed", "truth"),
                    *drawn_boxes(predicted, false, "false", "matched"),
                ),
                outcomes=filters_of(len(truth), missed, false),
                rollout=(prediction.answer if prediction else None) or _listed(predicted),
                target=_listed(truth),
            )
        )
    return Gallery(
        pictures=tuple(pictures),
        thumbnails=thumbnails.uris,
        num_matches=len(wrong),
        backward="Worse",
        forward="Better",
    )


def _extent(boxes: Sequence[Sequence[float]]) -> tuple[int, int]:
    """A frame around boxes of an image whose size nobody has told."""
    return max([1, *(round(box[2]) for box in boxes)]), max([1, *(round(box[3]) for box in boxes)])


def _listed(objects: Sequence[tuple[str, Sequence[float]]]) -> str:
    return "\n".join(f"{label}: {', '.join(f'{value:g}' for value in box)}" for label, box in objects)
