from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_stage2.demo.scenes import SceneKind, Split, answer_text, make_scene, scene_seed, write_dataset


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", SceneKind)
def test_rows_are_the_scenes(tmp_path: Path, kind: SceneKind) -> None:
    rows = _rows(write_dataset(tmp_path / "data", kind, 5, Split.HELD_OUT, 3))
    assert len(rows) == 5
    for index, row in enumerate(rows):
        scene = make_scene(kind, scene_seed(Split.HELD_OUT, index, stream=3))
        assert list(zip(row["objects"]["ref"], map(tuple, row["objects"]["bbox"]), strict=True)) == [
            *scene.objects
        ]
        [path] = row["images"]
        assert os.path.isabs(path)
        with Image.open(path) as image:
            assert image.tobytes() == scene.image.tobytes()


def test_the_template_renders_the_object_list_dialect(tmp_path: Path, template: Any) -> None:
    [row] = _rows(write_dataset(tmp_path / "data", SceneKind.SHAPES, 1, Split.TRAIN, 0))
    objects = list(zip(row["objects"]["ref"], map(tuple, row["objects"]["bbox"]), strict=True))
    encoding = template.encode(row)
    answer = [token for token in encoding["labels"] if token != -100]
    assert template.tokenizer.decode(answer) == answer_text(objects) + "<|im_end|>\n"
    assert json.loads(answer_text(objects)) == [{"bbox_2d": [*box], "label": label} for label, box in objects]
