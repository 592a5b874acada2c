"""Scores checkpoints on held-out scenes with ms-swift's own engine, in a process of its own.

``python -m swift_stage2.demo.evaluation --rows ROWS.jsonl --out SCORES.json MODEL_DIR...``. All checkpoints of
one call see the same scenes, the same greedy decoding and the same scoring. Started by the demo and the benches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.demo.detection_score import Detections, DetectionScore, score_detections
from swift_stage2.whole_file import write_whole

MAX_NEW_TOKENS = 128
_BATCH_SIZE = 64


def evaluation_command(rows: Path, out: Path, checkpoints: Sequence[Path]) -> tuple[str, ...]:
    """The command line that writes one score per checkpoint to ``out``."""
    module = (sys.executable, "-m", "swift_stage2.demo.evaluation")
    return (*module, "--rows", str(rows), "--out", str(out), *map(str, checkpoints))


def read_scores(out: Path) -> tuple[DetectionScore, ...]:
    """The scores that such a command wrote, in the order of its checkpoints."""
    return tuple(DetectionScore(**score) for score in json.loads(out.read_text(encoding="utf-8")))


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
    """The objects of one answer, as channel B reads them: what is malformed counts as not said."""
    return [(item.label, item.box) for item in parse_rollout(text).objects]


def score_checkpoint(
    checkpoint: Path, requests: Sequence[dict[str, Any]], truth: Sequence[Detections]
) -> DetectionScore:
    """Greedy answers of one checkpoint against the truth, labels included, at IoU 0.5."""
    from swift_stage2.compat.torchvision_on_cpu import (
        declare_operators,  # here, because both take seconds to import
    )

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
    answers = [response.choices[0].message.content for response in responses]
    return score_detections([parse_answer(answer) for answer in answers], truth)


def main(argv: Sequence[str] | None = None) -> int:
    """Scores every checkpoint and writes all scores at once."""
    parser = argparse.ArgumentParser(prog="swift_stage2.demo.evaluation")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="MODEL_DIR")
    arguments = parser.parse_args(argv)
    requests, truth = read_ground_truth(arguments.rows)
    scores = []
    for checkpoint in arguments.checkpoints:
        score = score_checkpoint(checkpoint, requests, truth)
        print(
            f"{checkpoint}: f1={score.f1:.4f} precision={score.precision:.4f} recall={score.recall:.4f}",
            flush=True,
        )
        scores.append(asdict(score))
    write_whole(arguments.out, json.dumps(scores, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
