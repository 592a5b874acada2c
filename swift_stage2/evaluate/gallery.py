"""The worst images as pictures for the page: truth, predictions, and who was matched at IoU 0.5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_stage2.detections.drawing import Drawing, gallery_image
from swift_stage2.detections.prediction import LabelledBoxes, Prediction
from swift_stage2.detections.prediction_files import TrueRow
from swift_stage2.detections.scores import DetectionScores
from swift_stage2.pages.content import Gallery, Picture


def worst_images(
    rows: Sequence[TrueRow],
    predictions: Sequence[Prediction | None],
    scores: DetectionScores,
    size: int,
) -> Gallery:
    """At most ``size`` images, those with the most objects missed or invented first. Opens their files."""
    matched = scores.matched()
    wrong = [
        len(row.truth.labels) + (len(prediction.objects.ref) if prediction else 0) - 2 * len(pairs)
        for row, prediction, pairs in zip(rows, predictions, matched, strict=True)
    ]
    pictures = []
    for number in sorted(range(len(wrong)), key=lambda number: -wrong[number])[:size]:
        row, prediction, pairs = rows[number], predictions[number], matched[number]
        objects = prediction.objects if prediction else LabelledBoxes()
        truth = tuple(zip(row.truth.labels, row.truth.boxes, strict=True))
        predicted = tuple(zip(objects.ref, objects.bbox, strict=True))
        image, trouble = "", "nothing was predicted"
        if prediction:
            drawing = Drawing(truth, predicted, pairs)
            image, trouble = gallery_image(drawing, row.image, (prediction.width, prediction.height))
        pictures.append(
            Picture(
                image=image,
                trouble=trouble,
                name=Path(row.image).name,
                facts=(
                    f"row {number} of the data",
                    f"{len(predicted)} predicted, {len(truth)} true",
                    f"{len(pairs)} matched, {len(truth) - len(pairs)} missed, {len(predicted) - len(pairs)} false",
                ),
                fate=f"ended by: {prediction.finish_reason or 'not told'}" if prediction else "no answer",
                texts=(
                    ("Answer", (prediction.answer if prediction else None) or _listed(predicted)),
                    ("Truth", _listed(truth)),
                ),
            )
        )
    return Gallery(pictures=tuple(pictures), num_matches=len(wrong))


def _listed(objects: Sequence[tuple[str, Sequence[float]]]) -> str:
    return "\n".join(f"{label}: {', '.join(f'{value:g}' for value in box)}" for label, box in objects)
