"""Scores detections, and checkpoints on held-out scenes with ms-swift's own engine, in a process of its own.

``python -m swift_stage2.demo.scoring --rows ROWS.jsonl --out SCORES.json MODEL_DIR...``. All checkpoints of one call
see the same scenes, greedy decoding and scoring, which is that of ``swift-stage2 evaluate``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_stage2.channel_b.parsing import TrueObjects, parse_rollout
from swift_stage2.demo.scenes import Box
from swift_stage2.detections.objects import detection_data
from swift_stage2.detections.prediction import LabelledBoxes, Prediction
from swift_stage2.detections.scores import Counts, DetectionScores
from swift_stage2.whole_file import write_whole

Detections = Sequence[tuple[str, Box]]


@dataclass(frozen=True, slots=True)
class DetectionScore:
    """Micro-averaged over all objects of all images; a ratio of nothing to nothing is 0."""

    precision: float
    recall: float
    f1: float
    mean_iou: float  # over the pairs that count
    num_images: int
    ap: float = 0.0  # COCO's, all scores 1
    recall_few: float = 0.0  # of scenes with up to 3 objects
    recall_many: float = 0.0  # of scenes with more


def score_detections(predictions: Sequence[Detections], truth: Sequence[Detections]) -> DetectionScore:
    """Scores one list of (label, box) per image against another, as ``swift-stage2 evaluate`` does at IoU 0.5.

    Raises:
        ValueError: the two hold different numbers of images.
    """
    if len(predictions) != len(truth):
        raise ValueError(f"every image needs predictions, got {len(predictions)} of {len(truth)}")
    found = DetectionScores(
        detection_data(
            [TrueObjects(*_columns(objects)) for objects in truth],
            [
                Prediction(image="", width=1, height=1, objects=LabelledBoxes(*_columns(objects)))
                for objects in predictions
            ],
        )
    )
    points, counts = found.points(), found.counts("objects")
    few, many = (
        [each for name, each in counts.items() if (name in _FEW) is wanted] for wanted in (True, False)
    )
    names = ("precision", "recall", "f1", "mean_iou", "ap")
    return DetectionScore(
        num_images=len(truth),
        **{name: points.get(f"eval/{name}", 0.0) for name in names},
        recall_few=_recall(few),
        recall_many=_recall(many),
    )


def _columns(objects: Detections) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    return tuple(label for label, _ in objects), tuple(box for _, box in objects)


def _recall(parts: Sequence[Counts]) -> float:
    return sum(each.matched for each in parts) / max(1, sum(each.true for each in parts))


MAX_NEW_TOKENS = 128
_BATCH_SIZE = 64
_FEW = ("0", "1", "2-3")  # objects, of an image


def read_ground_truth(rows: Path) -> tuple[list[dict[str, Any]], list[Detections]]:
    """Requests without the answer, and the true objects, of a data set that ``write_dataset`` wrote."""
    requests: list[dict[str, Any]] = []
    truth: list[Detections] = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        objects = row["objects"]
        requests.append({"messages": row["messages"][:1], "images": row["images"]})
        truth.append([(ref, tuple(box)) for ref, box in zip(objects["ref"], objects["bbox"], strict=True)])
    return requests, truth


def parse_answer(text: str) -> Detections:
    """The objects of one answer, as channel B counts them: nothing of an answer that was not read whole."""
    boxes = [(item.label, item.box) for item in parse_rollout(text).counted]
    return [(label, (x1, y1, x2, y2)) for label, (x1, y1, x2, y2) in boxes]


def answers_of(checkpoint: Path, requests: Sequence[dict[str, Any]]) -> list[str]:
    """Greedy answers of one checkpoint."""
    # Here, because both take seconds to import.
    from swift_stage2.compat import declare_operators

    declare_operators()  # before ms-swift imports torchvision
    import torch
    from swift.infer_engine import InferRequest, RequestConfig, TransformersEngine

    from swift_stage2.demo.tiny_template import TINY_VL

    engine = TransformersEngine(
        str(checkpoint),
        model_type=TINY_VL,
        template_type=TINY_VL,
        torch_dtype=torch.float32,
        device_map="cpu",
        max_batch_size=_BATCH_SIZE,
    )
    responses = engine.infer(
        [InferRequest(**request) for request in requests],
        RequestConfig(max_tokens=MAX_NEW_TOKENS, temperature=0.0),
        use_tqdm=False,
    )
    return [response.choices[0].message.content for response in responses]


def score_checkpoint(
    checkpoint: Path, requests: Sequence[dict[str, Any]], truth: Sequence[Detections]
) -> DetectionScore:
    """Greedy answers of one checkpoint against the truth, labels included, at IoU 0.5."""
    return score_detections([parse_answer(each) for each in answers_of(checkpoint, requests)], truth)


def main(argv: Sequence[str] | None = None) -> int:
    """Scores every checkpoint and writes all scores at once."""
    parser = argparse.ArgumentParser(prog="swift_stage2.demo.scoring")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="MODEL_DIR")
    arguments = parser.parse_args(argv)
    requests, truth = read_ground_truth(arguments.rows)
    scores = []
    for checkpoint in arguments.checkpoints:
        score = score_checkpoint(checkpoint, requests, truth)
        numbers = f"f1={score.f1:.4f} precision={score.precision:.4f} recall={score.recall:.4f}"
        print(f"{checkpoint}: {numbers}", flush=True)
        scores.append(asdict(score))
    write_whole(arguments.out, json.dumps(scores, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
