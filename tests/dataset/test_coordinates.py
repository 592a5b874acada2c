"""Every convention is named from noisy answers; healthy answers and those of a model that finds nothing never are."""

from __future__ import annotations

import dataclasses
import math

import pytest
from answered_images import (
    LIMITS,
    Numbers,
    PixelLimits,
    Write,
    corner_size,
    draw,
    resized,
    share,
    stored,
    y_first,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift_stage2.dataset.conventions import (
    Convention,
    Layout,
    Side,
    Unit,
    read_numbers,
)
from swift_stage2.dataset.coordinates import CoordinateJudgement, CoordinateVerdict, fit_coordinates

SEEDS = range(2)
LONG = pytest.mark.slow


def scaled(write: Write, scale: float, shift: float = 0.0) -> Write:
    def changed(box: Numbers, size: tuple[int, int]) -> Numbers:
        x1, y1, x2, y2 = (scale * each + shift for each in write(box, size))
        return x1, y1, x2, y2

    return changed


def judge(seed: int, **drawn: object) -> CoordinateVerdict:
    return fit_coordinates(draw(seed, **drawn))  # type: ignore[arg-type]


# --- answers in other numbers ------------------------------------------------------------------------

PIXELS, THOUSANDTHS = resized(), share(1000)
ANSWERS = [
    (stored, False, Convention(unit=Unit.STORED)),
    (stored, True, Convention(unit=Unit.STORED)),
    (THOUSANDTHS, False, Convention(unit=Unit.THOUSANDTHS)),
    (PIXELS, True, Convention(unit=Unit.RESIZED)),
    (share(1, digits=4), False, Convention(unit=Unit.FRACTIONS)),
    (share(1, digits=4), True, Convention(unit=Unit.FRACTIONS)),
    (y_first(PIXELS), False, Convention(layout=Layout.Y_FIRST)),
    (y_first(THOUSANDTHS), True, Convention(layout=Layout.Y_FIRST)),
    (y_first(THOUSANDTHS), False, Convention(layout=Layout.Y_FIRST, unit=Unit.THOUSANDTHS)),
    (corner_size(PIXELS), False, Convention(layout=Layout.CORNER_SIZE)),
    (corner_size(stored), True, Convention(layout=Layout.CORNER_SIZE, unit=Unit.STORED)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("answers", "thousandths", "convention"), ANSWERS)
def test_answers_in_other_numbers_are_named(
    answers: Write, thousandths: bool, convention: Convention, seed: int
) -> None:
    verdict = judge(seed, answers=answers, thousandths=thousandths)
    assert verdict.judgement is CoordinateJudgement.NAMED
    assert verdict.best.convention == convention
    assert verdict.best.share > 0.8 > verdict.expected.share
    assert verdict.best.residual_px < 12


# --- data in other numbers ---------------------------------------------------------------------------

DATA = [
    (THOUSANDTHS, False, Convention(Side.DATA, unit=Unit.THOUSANDTHS)),
    (THOUSANDTHS, True, Convention(Side.DATA)),
    (share(1, digits=4), False, Convention(Side.DATA, unit=Unit.FRACTIONS)),
    (PIXELS, True, Convention(Side.DATA, unit=Unit.RESIZED)),
    (corner_size(stored), False, Convention(Side.DATA, Layout.CORNER_SIZE, Unit.STORED)),
    (y_first(stored), True, Convention(Side.DATA, Layout.Y_FIRST, Unit.STORED)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("data", "thousandths", "convention"), DATA)
def test_rows_in_other_numbers_are_named(
    data: Write, thousandths: bool, convention: Convention, seed: int
) -> None:
    answers = THOUSANDTHS if thousandths else PIXELS
    verdict = judge(seed, answers=answers, data=data, thousandths=thousandths)
    assert verdict.judgement is CoordinateJudgement.NAMED
    assert verdict.best.convention == convention


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("side", [500, 1600])
def test_equal_numbers_on_both_sides_are_laid_to_the_side_that_cannot_be_right(side: int, seed: int) -> None:
    """On images of 1600 pixels no box would lie beyond 1000; on those of 500 boxes would lie outside."""
    sides = (side, side + 1)
    rows = judge(seed, answers=THOUSANDTHS, data=THOUSANDTHS, thousandths=True, sides=sides)
    model = judge(seed, answers=stored, data=stored, thousandths=True, sides=sides)
    assert (rows.best.convention, model.best.convention) == (
        Convention(Side.DATA),
        Convention(unit=Unit.STORED),
    )


def test_what_nothing_tells_apart_is_listed() -> None:
    """The template's pixels are those of the image resized a little, so rows and answers may both be in them."""
    limits = PixelLimits(28, LIMITS.min_pixels, 900 * 900)
    verdict = judge(0, answers=resized(limits), data=resized(limits), limits=limits, sides=(1000, 1100))
    assert Convention(Side.DATA) in (verdict.best.convention, *verdict.rivals)
    assert Convention(unit=Unit.STORED) in (verdict.best.convention, *verdict.rivals)


# --- no false alarm, and no verdict from nothing -----------------------------------------------------


SIDES = [(300, 2400), (60, 300), (640, 641), (1000, 1100)]


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 200), marks=LONG)])
def test_healthy_pairs_are_healthy(seeds: range) -> None:
    """Precise models and sloppy ones, all sizes of images, one size, and images that are not resized."""
    judgements = [
        judge(
            seed,
            answers=THOUSANDTHS if seed % 2 else PIXELS,
            thousandths=bool(seed % 2),
            noise=(0.02, 0.05, 0.1, 0.2, 0.3)[seed % 5],
            sides=SIDES[seed // 10 % 4],
        ).judgement
        for seed in seeds
    ]
    assert judgements == [CoordinateJudgement.HEALTHY] * len(seeds)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 100), marks=LONG)])
def test_boxes_from_anywhere_tell_nothing(seeds: range) -> None:
    judgements = [
        judge(
            seed,
            answers=THOUSANDTHS if seed % 2 else PIXELS,
            thousandths=bool(seed % 2),
            finds=False,
            sides=SIDES[seed // 2 % 4],
        ).judgement
        for seed in seeds
    ]
    assert judgements == [CoordinateJudgement.CANNOT_TELL] * len(seeds)


@pytest.mark.parametrize("seed", range(5))
def test_a_poor_model_that_leans_to_the_middle_is_no_alarm(seed: int) -> None:
    write = scaled(THOUSANDTHS, 0.7, 150)
    verdict = judge(seed, answers=write, thousandths=True, noise=0.4)
    assert verdict.judgement is not CoordinateJudgement.NAMED


@pytest.mark.parametrize("seed", range(5))
def test_one_answer_to_every_image_tells_nothing(seed: int) -> None:
    images = draw(seed, answers=THOUSANDTHS, thousandths=True)
    alike = [dataclasses.replace(image, answers=images[0].answers) for image in images]
    assert fit_coordinates(alike).judgement is CoordinateJudgement.CANNOT_TELL


def test_too_few_images_or_boxes_tell_nothing() -> None:
    images = draw(0, answers=THOUSANDTHS)
    for few in ([], images[:8]):
        verdict = fit_coordinates(few)
        assert verdict.judgement is CoordinateJudgement.CANNOT_TELL
        assert f"only {len(few)} images" in verdict.reason or len(few) == 8
    assert "overlap" in judge(0, answers=lambda box, size: (5000.0, 5000.0, 5001.0, 5001.0)).reason


@settings(max_examples=30)
@given(
    st.lists(
        st.lists(st.tuples(*[st.floats(-1e9, 1e9)] * 4), min_size=0, max_size=4), min_size=12, max_size=12
    )
)
@example([[(0.0, 0.0, 0.0, 0.0)]] * 12)
@example([[(9.0, 9.0, 1.0, 1.0)]] * 12)
def test_any_numbers_are_answers(boxes: list[list[Numbers]]) -> None:
    images = draw(0, answers=PIXELS, num_images=12)
    answered = [
        dataclasses.replace(image, answers=tuple(("car", box) for box in given))
        for image, given in zip(images, boxes, strict=True)
    ]
    verdict = fit_coordinates(answered)
    assert verdict.judgement is CoordinateJudgement.CANNOT_TELL
    assert not math.isnan(verdict.best.median_iou)


# --- parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "a"}]', [("a", (1, 2, 3, 4))]),
        ('{"label": "a b", "bbox_2d": [0.1, .5, 0.25, 1.0]} {', []),
        ('{"label": "\\u00e9", "bbox_2d": [0.1, 0.5, 1e-1, 1.0]}', [("é", (0.1, 0.5, 0.1, 1))]),
        ("<box>(9,8),(7,6)</box>", [("", (9, 8, 7, 6))]),
        (
            '{"bbox_2d": [<|coord_5|>, <|coord_6|>, <|coord_7|>, <|coord_8|>], "label": "a"}',
            [("a", (5, 6, 7, 8))],
        ),
        ('[{"bbox_2d": [1, 2, 3], "label": "a"}, {"bbox_2d": [4, 3, 2, -1]}]', [("", (4, 3, 2, -1))]),
        ("nothing", []),
    ],
)
def test_numbers_are_read_as_they_are_written(text: str, found: list[tuple[str, Numbers]]) -> None:
    assert list(read_numbers(text)) == found
