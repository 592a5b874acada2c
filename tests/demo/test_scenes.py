from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_stage2.demo.scenes import (
    IMAGE_SIZE,
    MAX_OBJECTS,
    Box,
    Scene,
    SceneKind,
    Split,
    digit_scans,
    make_scene,
    scene_seed,
)

kinds = st.sampled_from(SceneKind)
seeds = st.builds(scene_seed, st.sampled_from(Split), st.integers(0, 10_000), stream=st.integers(0, 50))


def _inked(scene: Scene) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Where a scene differs from its background, whose colour the corner pixels outvote."""
    pixels = np.asarray(scene.image)
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    inked: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (pixels != colours[counts.argmax()]).any(-1)
    return inked


@settings(max_examples=40, deadline=None)
@given(kinds, seeds)
def test_a_scene_is_a_pure_function_of_its_seed(kind: SceneKind, seed: int) -> None:
    first, second = make_scene(kind, seed), make_scene(kind, seed)
    assert first.objects == second.objects
    assert first.image.tobytes() == second.image.tobytes()


def test_seeds_mean_the_same_on_every_machine() -> None:
    # Written down once: a change here would silently change every data set and the stage-1 scores.
    assert make_scene(SceneKind.SHAPES, scene_seed(Split.TRAIN, 7)).objects == GOLDEN_SHAPES
    assert make_scene(SceneKind.DIGITS, scene_seed(Split.HELD_OUT, 7)).objects == GOLDEN_DIGITS


@settings(max_examples=60, deadline=None)
@given(kinds, seeds, st.sampled_from([IMAGE_SIZE, (150, 100), (45, 45)]))
def test_boxes_lie_inside_and_apart(kind: SceneKind, seed: int, size: tuple[int, int]) -> None:
    scene = make_scene(kind, seed, image_size=size)
    assert scene.image.size == size
    assert 1 <= len(scene.objects) <= MAX_OBJECTS
    owners = np.zeros((size[1], size[0]), dtype=int)
    for _, (x1, y1, x2, y2) in scene.objects:
        assert 0 <= x1 < x2 <= size[0]
        assert 0 <= y1 < y2 <= size[1]
        owners[y1:y2, x1:x2] += 1
    assert owners.max() == 1


@settings(max_examples=60, deadline=None)
@given(kinds, seeds)
def test_all_ink_is_in_boxes_and_boxes_are_tight(kind: SceneKind, seed: int) -> None:
    scene = make_scene(kind, seed)
    inked = _inked(scene)
    for _, box in scene.objects:
        assert _slack(inked, box) <= (1 if kind is SceneKind.SHAPES else 4)
        inked[box[1] : box[3], box[0] : box[2]] = False
    assert not inked.any()


def _slack(inked: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], box: Box) -> int:
    """Pixels by which a box exceeds its ink on its loosest side."""
    rows, columns = np.nonzero(inked[box[1] : box[3], box[0] : box[2]])
    width, height = box[2] - box[0], box[3] - box[1]
    return int(max(rows.min(), columns.min(), height - 1 - rows.max(), width - 1 - columns.max()))


def test_splits_share_neither_seeds_nor_scans() -> None:
    seeds = {
        split: {scene_seed(split, index, stream=stream) for index in range(50) for stream in (0, 1, 1 << 20)}
        for split in Split
    }
    assert all(len(of_split) == 150 for of_split in seeds.values())
    assert not seeds[Split.TRAIN] & seeds[Split.HELD_OUT]
    train, held_out = ({(s.size, s.tobytes()) for s in digit_scans(held_out=h)} for h in (False, True))
    assert not train & held_out
    assert len(digit_scans(held_out=False)) + len(digit_scans(held_out=True)) == 1797
    assert len(digit_scans(held_out=True)) > 200


GOLDEN_SHAPES = (("yellow circle", (74, 9, 109, 44)), ("blue circle", (38, 54, 67, 94)))
GOLDEN_DIGITS = (("digit", (17, 72, 44, 108)),)
