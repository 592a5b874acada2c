"""Other answers to the same scenes, for channel A alone: in random order with noise, or corrected once by a model.

``python -m benchmarks.altered_rows ROWS.jsonl OUT.jsonl MODEL_DIR`` is the second: the model answers every scene,
greedily, and the rows list their objects as channel B's targets would: those that it found in its order, then the
others. It is what channel B trains, made before training.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swift_stage2.channel_b.matching import match_objects
from swift_stage2.channel_b.targets import order_ground_truth
from swift_stage2.config import MatchingConfig
from swift_stage2.demo.scenes import IMAGE_SIZE, Box
from swift_stage2.demo.scoring import Detections, answers_of, parse_answer, read_ground_truth
from swift_stage2.whole_file import write_whole

_NOISE = 0.03  # standard deviation of an edge, as a share of the box's side
_COPIES = 2  # of every scene, each with an order and noise of its own


def noisy_rows(rows: Path, seed: int) -> str:
    """Each scene twice, its objects in random order and their edges moved a little."""
    numbers = random.Random(seed)

    def disturbed(row: dict[str, Any]) -> dict[str, Any]:
        objects = list(zip(row["objects"]["ref"], map(tuple, row["objects"]["bbox"]), strict=True))
        numbers.shuffle(objects)
        return _with_objects(row, [(label, _moved(box, numbers)) for label, box in objects])

    copies = [disturbed(row) for row in _read(rows) for _ in range(_COPIES)]
    numbers.shuffle(copies)
    return _text(copies)


def corrected_rows(rows: Path, answers: Sequence[str]) -> str:
    """Each scene with its objects in the order in which its answer found them, then the others."""
    return _text(
        [_corrected(row, parse_answer(text)) for row, text in zip(_read(rows), answers, strict=True)]
    )


def _corrected(row: dict[str, Any], predicted: Detections) -> dict[str, Any]:
    truth = list(zip(row["objects"]["ref"], map(tuple, row["objects"]["bbox"]), strict=True))
    matching = MatchingConfig()
    match = match_objects(
        [box for _, box in predicted],
        [box for _, box in truth],
        iou_threshold=matching.iou_threshold,
        top_k=matching.top_k,
        unmatched_prediction_cost=matching.unmatched_prediction_cost,
        unmatched_ground_truth_cost=matching.unmatched_ground_truth_cost,
    )
    return _with_objects(row, [truth[number] for number in order_ground_truth(match.pairs, len(truth))])


def _with_objects(row: dict[str, Any], objects: Sequence[tuple[str, Box]]) -> dict[str, Any]:
    refs, boxes = [label for label, _ in objects], [list(box) for _, box in objects]
    return {**row, "objects": {"ref": refs, "bbox": boxes}}


def _moved(box: Box, numbers: random.Random) -> Box:
    """Inside the picture, and never without a width or height."""
    x1, y1, x2, y2 = box
    moved = [
        edge + round(numbers.gauss(0, _NOISE * side))
        for edge, side in zip(box, (x2 - x1, y2 - y1) * 2, strict=True)
    ]
    width, height = IMAGE_SIZE
    left, top = min(max(0, moved[0]), width - 2), min(max(0, moved[1]), height - 2)
    return left, top, min(max(left + 1, moved[2]), width - 1), min(max(top + 1, moved[3]), height - 1)


def _read(rows: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, rows.read_text(encoding="utf-8").splitlines())


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(argv: Sequence[str]) -> int:
    rows, out, model = map(Path, argv)
    requests, _ = read_ground_truth(rows)
    write_whole(out, corrected_rows(rows, answers_of(model, requests)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
