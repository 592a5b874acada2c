"""Draws seeded scenes of coloured shapes or handwritten digits, and writes them as data sets in ms-swift's format.

A scene is a pure function of (kind, seed, image size). Held-out scenes have seeds that no training scene
has, and their digits are scans that no training scene shows. Ground truth stands in random order, so that
the order in which a model names the objects is the model's own. Answers carry ms-swift's placeholders, which its
template fills with the boxes of the image as the model sees it. Called by the demo, stage 1, benches and tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from swift_stage2.demo.demo_config import GRADIENT_ACCUMULATION_STEPS, PER_DEVICE_BATCH_SIZE, DemoJob
from swift_stage2.errors import UserError

Box = tuple[int, int, int, int]
Colour = tuple[int, int, int]

IMAGE_SIZE = (112, 112)
COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 200, 30),
}
SHAPES = ("square", "circle", "triangle")
DIGIT_LABEL = "digit"
MAX_OBJECTS = 4

_PAPER: Colour = (245, 245, 245)
_MIN_SIDE, _MAX_SIDE = 18, 44  # pixels
_PLACEMENT_ATTEMPTS = 20
_STREAM_LENGTH = 1 << 24
_HELD_OUT = 1 << 48
_HELD_OUT_SCANS = 8  # every eighth scan


class SceneKind(StrEnum):
    SHAPES = "shapes"
    DIGITS = "digits"


class Split(StrEnum):
    """Which of the disjoint halves of all scenes a scene belongs to."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Scene:
    """An image and its objects as (label, box).

    Boxes are whole pixels x1, y1, x2, y2, of which x2 and y2 are exclusive.
    """

    image: Image.Image
    objects: tuple[tuple[str, Box], ...]


def scene_seed(split: Split, index: int, *, stream: int = 0) -> int:
    """The seed of scene ``index`` of a split; different streams of one split never share a scene."""
    return (_HELD_OUT if split is Split.HELD_OUT else 0) + stream * _STREAM_LENGTH + index


def make_scene(kind: SceneKind, seed: int, *, image_size: tuple[int, int] = IMAGE_SIZE) -> Scene:
    """Draws one scene of one to four objects that do not touch. ``seed`` is a value of ``scene_seed``.

    ``image_size``: width and height in pixels, at least 45 each, so that the largest object fits.
    """
    # A string seed is hashed with SHA-512: the same on every platform, and kinds do not share streams.
    rng = random.Random(f"{kind}:{seed}")
    if kind is SceneKind.SHAPES:
        image, objects = _draw_shapes(rng, image_size)
    else:
        image, objects = _draw_digits(rng, image_size, digit_scans(held_out=seed >= _HELD_OUT))
    rng.shuffle(objects)
    return Scene(image, tuple(objects))


@lru_cache(maxsize=2)
def digit_scans(*, held_out: bool) -> tuple[Image.Image, ...]:
    """scikit-learn's handwritten digits (8x8 greyscale) cut down to their ink, one split of them."""
    from sklearn.datasets import load_digits  # takes a second, and shapes do without

    scans = load_digits().images
    chosen = (scan for index, scan in enumerate(scans) if (index % _HELD_OUT_SCANS == 0) is held_out)
    images = [Image.fromarray(np.clip(scan * 16, 0, 255).astype(np.uint8)) for scan in chosen]
    return tuple(
        image.crop(image.point(lambda value: 255 if value >= 64 else 0).getbbox()) for image in images
    )


def _draw_shapes(rng: random.Random, size: tuple[int, int]) -> tuple[Image.Image, list[tuple[str, Box]]]:
    image = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(image)
    sides = [(_side(rng), _side(rng)) for _ in range(rng.randint(1, MAX_OBJECTS))]
    objects: list[tuple[str, Box]] = []
    for _, box in _place(rng, sides, size):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        _draw_shape(draw, shape, box, COLOURS[colour])
        objects.append((f"{colour} {shape}", box))
    return image, objects


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, box: Box, colour: Colour) -> None:
    x1, y1, x2, y2 = box[0], box[1], box[2] - 1, box[3] - 1  # Pillow paints the last row and column too
    if shape == "square":
        draw.rectangle((x1, y1, x2, y2), fill=colour)
    elif shape == "circle":
        draw.ellipse((x1, y1, x2, y2), fill=colour)
    else:
        draw.polygon([((x1 + x2) // 2, y1), (x1, y2), (x2, y2)], fill=colour)


def _draw_digits(
    rng: random.Random, size: tuple[int, int], scans: tuple[Image.Image, ...]
) -> tuple[Image.Image, list[tuple[str, Box]]]:
    image = Image.new("RGB", size, _random_colour(rng, 190, 255))
    inks = [
        _enlarge(rng.choice(scans), rng.randint(24, _MAX_SIDE)) for _ in range(rng.randint(1, MAX_OBJECTS))
    ]
    objects: list[tuple[str, Box]] = []
    for index, box in _place(rng, [ink.size for ink in inks], size):
        image.paste(_random_colour(rng, 0, 90), box, mask=inks[index])
        objects.append((DIGIT_LABEL, box))
    return image, objects


def _enlarge(ink: Image.Image, height: int) -> Image.Image:
    width = min(max(round(height * ink.width / ink.height), _MIN_SIDE // 2), _MAX_SIDE)
    return ink.resize((width, height), Image.Resampling.BILINEAR)


def _place(
    rng: random.Random, sides: Sequence[tuple[int, int]], size: tuple[int, int]
) -> Iterator[tuple[int, Box]]:
    """Yields the index and box of every (width, height) that finds a free place; the first always does."""
    taken: list[Box] = []
    for index, (width, height) in enumerate(sides):
        for _ in range(_PLACEMENT_ATTEMPTS):
            x, y = rng.randint(0, size[0] - width), rng.randint(0, size[1] - height)
            box = (x, y, x + width, y + height)
            if all(_apart(box, other) for other in taken):
                taken.append(box)
                yield index, box
                break


def _apart(first: Box, second: Box) -> bool:
    return first[2] < second[0] or second[2] < first[0] or first[3] < second[1] or second[3] < first[1]


def _side(rng: random.Random) -> int:
    return rng.randint(_MIN_SIDE, _MAX_SIDE)


def _random_colour(rng: random.Random, darkest: int, brightest: int) -> Colour:
    return rng.randint(darkest, brightest), rng.randint(darkest, brightest), rng.randint(darkest, brightest)


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
    samples_per_step = PER_DEVICE_BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS * job.num_ranks
    return min(_MAX_TRAIN_SAMPLES, job.num_steps * samples_per_step)


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
