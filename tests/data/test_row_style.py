"""Prompts, dialects and the split: the choices of whoever imports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run_command
from drawn_sources import Importer, annotation, draw, write_coco

from swift_stage2.data.survey import survey
from swift_stage2.errors import UserError

PATIENCE_S = 120
CATEGORIES = [{"id": number, "name": name} for number, name in enumerate(("cat", "dog", "bird", "cow"))]


def some_images(folder: Path, count: int) -> Path:
    """Image ``n`` shows the first n classes, the last one first, from the lower right to the upper left."""
    images = []
    for number in range(count):
        draw(folder / "images" / f"{number:02d}.png")
        images.append({"id": number, "file_name": f"{number:02d}.png", "width": 64, "height": 48})
    objects = [
        annotation(10 * number + each, number, category_id=each, bbox=[9 * each, 9 * each, 8, 8])
        for number in range(count)
        for each in reversed(range(min(number, 4)))
    ]
    return write_coco(folder, objects, images, CATEGORIES)


def test_labels_in_a_prompt_are_all_classes(tmp_path: Path, run_import: Importer) -> None:
    found = run_import("coco", some_images(tmp_path, 2), "--prompt", "Which of {labels}?")
    asked = {row["messages"][0]["content"] for row in found.rows}
    assert asked == {"<image>Which of cat, dog, bird, cow?"}


def test_dialects_and_the_place_of_the_image(tmp_path: Path, run_import: Importer) -> None:
    source = some_images(tmp_path, 3)
    found = run_import("coco", source, "--dialect", "object_map", "--prompt", "Look at <image> and list.")
    assert [row["messages"][1]["content"] for row in found.rows] == [
        "{}",
        '{"object_1": {"desc": "<ref-object>", "bbox_2d": <bbox>}}',
        '{"object_1": {"desc": "<ref-object>", "bbox_2d": <bbox>}, '
        '"object_2": {"desc": "<ref-object>", "bbox_2d": <bbox>}}',
    ]
    assert found.rows[0]["messages"][0]["content"] == "Look at <image> and list."


def test_the_split_is_by_image_and_an_image_stays_on_its_side(tmp_path: Path, run_import: Importer) -> None:
    def sides(count: int, seed: str) -> tuple[set[str], set[str]]:
        train = run_import("coco", some_images(tmp_path, count), "--split", "0.3", "--seed", seed)
        val = train.path.with_name("train.val.jsonl")
        assert survey([val]).num_faults == 0
        held_out = [json.loads(line)["images"][0] for line in val.read_text().splitlines()]
        return set(train.names), {Path(name).name for name in held_out}

    train, val = sides(60, "0")
    assert (len(train | val), train & val) == (60, set())
    assert 8 <= len(val) <= 28  # 18 expected, with a deviation of 3.5
    more_train, more_val = sides(70, "0")
    assert (train < more_train, val < more_val) == (True, True)
    assert sides(60, "1") != (train, val)
    assert sides(60, "0") == (train, val)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prompt", "Where is {label}?"], r"knows \{labels\}, got \{label\}"),
        (["--prompt", "<bbox>"], "neither"),
        (["--prompt", "<image><image>"], "once"),
        (["--prompt", "Find {Labels}."], r"knows \{labels\}, got \{Labels\}"),
        (["--split", "0.0001"], "images on both sides"),
        (["--images", "nowhere"], "--images must be a folder"),
        (["--images", "n" * 300], "--images must be a folder"),
        (["--output", "n" * 300], "--output must be a file that can be written"),
    ],
)
def test_choices_that_cannot_be_are_refused_and_nothing_is_left(
    tmp_path: Path, run_import: Importer, options: list[str], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        run_import("coco", some_images(tmp_path, 3), *options)
    assert list(tmp_path.rglob("*.jsonl*")) == []


def test_the_command_as_its_users_call_it(tmp_path: Path) -> None:
    """From another directory's point of view, with a relative folder of images."""
    some_images(tmp_path, 3)
    words = "import coco coco.json --images images --output new/train.jsonl"
    done = run_command(*words.split(), cwd=tmp_path, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == [
        "new/train.jsonl: 3 rows with 3 objects",
        "check it with: swift-stage2 data check new/train.jsonl",
    ]
    again = run_command(*words.split(), cwd=tmp_path, timeout=PATIENCE_S)
    assert again.returncode == 2
    assert again.stderr.startswith("swift-stage2 import: error: --output must be a new file")
    assert again.stderr.count("\n") == 1
