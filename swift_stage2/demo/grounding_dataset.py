"""Writes seeded scenes as data sets in ms-swift's grounding format: PNG files and one JSONL each.

Answers carry ms-swift's placeholders, which its template
fills with the boxes of the image as the model sees it. Called by the demo, the benches and tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_stage2.demo.demo_config import DemoJob
from swift_stage2.demo.scenes import IMAGE_SIZE, Box, SceneKind, Split, make_scene, scene_seed
from swift_stage2.errors import UserError

PROMPT = "<image>Detect all objects."
ROWS_FILE = "rows.jsonl"

_HELD_OUT_STREAM = 0
_MAX_TRAIN_SAMPLES = 2048


def write_dataset(
    directory: str | os.PathLike[str],
    kind: SceneKind,
    num_samples: int,
    split: Split,
    seed: int,
    *,
    image_size: tuple[int, int] = IMAGE_SIZE,
) -> Path:
    """Writes ``num_samples`` scenes and returns the path of the JSONL, absolute as its image paths are.

    ``directory`` is created by this call. ``seed`` is the stream of scenes within the split. ``image_size``: width and
    height of the PNG files in pixels.

    Raises:
        FileExistsError: the directory exists.
    """
    # ms-swift resolves relative image paths against the working directory, not against the JSONL.
    folder = Path(directory).resolve()
    folder.mkdir(parents=True)
    with open(folder / ROWS_FILE, "w", encoding="utf-8") as rows:
        for index in range(num_samples):
            scene = make_scene(kind, scene_seed(split, index, stream=seed), image_size=image_size)
            path = folder / f"{index:06d}.png"
            scene.image.save(path)
            rows.write(json.dumps(grounding_row(scene.objects, path)) + "\n")
    return folder / ROWS_FILE


def grounding_row(objects: Sequence[tuple[str, Box]], image_path: str | os.PathLike[str]) -> dict[str, Any]:
    """One row of the data set: a conversation, its image and the objects that fill its placeholders."""
    answer = ", ".join('{"bbox_2d": <bbox>, "label": "<ref-object>"}' for _ in objects)
    return {
        "messages": [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": f"[{answer}]"},
        ],
        "images": [os.fspath(image_path)],
        "objects": {"ref": [label for label, _ in objects], "bbox": [list(box) for _, box in objects]},
    }


def answer_text(objects: Sequence[tuple[str, Box]]) -> str:
    """The answer as the template renders it when no image is resized: the ``object_list`` dialect."""
    return "[" + ", ".join(f'{{"bbox_2d": {list(box)}, "label": "{label}"}}' for label, box in objects) + "]"


@dataclass(frozen=True, slots=True)
class SceneFiles:
    train: Path
    held_out: Path


def num_train_samples(job: DemoJob) -> int:
    """As many as channel A reads when it runs alone, so that no scene comes twice, up to a limit."""
    return min(_MAX_TRAIN_SAMPLES, job.num_steps * job.samples_per_step)


def write_scenes(
    directory: Path, kind: SceneKind, *, num_train: int, num_held_out: int, seed: int
) -> SceneFiles:
    """Writes ``directory/train`` and ``directory/held_out``, the latter alike for every seed, so that scores compare.

    Raises:
        UserError: the scenes need a package that is not installed, or cannot be written.
    """
    if kind is SceneKind.DIGITS and importlib.util.find_spec("sklearn") is None:
        raise UserError(
            "--kind digits needs scikit-learn, which is not installed", remedy="install swift-stage2[demo]"
        )
    try:
        return SceneFiles(
            train=write_dataset(directory / "train", kind, num_train, Split.TRAIN, seed),
            held_out=write_dataset(
                directory / "held_out", kind, num_held_out, Split.HELD_OUT, _HELD_OUT_STREAM
            ),
        )
    except OSError as error:
        raise UserError(f"scenes cannot be written to {directory}: {error}") from error
