"""In which numbers boxes are written: every reading is named from noisy answers, healthy ones never are, and a server
with another ``max_pixels`` than the learner's is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from answered_images import Numbers, Write, corner_size, draw, resized, share, stored, y_first
from doctor_run import Report
from hypothesis import example, given, settings
from hypothesis import strategies as st
from live_server import RunningServer
from PIL import Image

from swift_stage2.checks.checks import Verdict
from swift_stage2.checks.coordinates import Reading, check_coordinates, judge, read_numbers
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset

Configure = Callable[..., Path]
Doctor = Callable[..., Report]
PIXELS, THOUSANDTHS = resized, share(1000)
SIDES = [(300, 2400), (60, 300), (640, 641), (1000, 1100)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("answers", "thousandths", "reading"),
    [
        (stored, False, Reading.STORED),
        (stored, True, Reading.STORED),
        (THOUSANDTHS, False, Reading.THOUSANDTHS),
        (PIXELS, True, Reading.RESIZED),
        (share(1, digits=4), False, Reading.FRACTIONS),
        (share(1, digits=4), True, Reading.FRACTIONS),
        (y_first(PIXELS), False, Reading.Y_FIRST),
        (y_first(THOUSANDTHS), True, Reading.Y_FIRST),
        (corner_size(PIXELS), False, Reading.CORNER_SIZE),
        (corner_size(THOUSANDTHS), True, Reading.CORNER_SIZE),
    ],
)
def test_answers_in_other_numbers_are_named(
    answers: Write, thousandths: bool, reading: Reading, seed: int
) -> None:
    images = draw(seed, answers=answers, thousandths=thousandths)
    verdict = judge(images)
    assert verdict.reading is reading
    assert verdict.mean_iou > 0.6 > verdict.expected_iou
    outcome = check_coordinates(images)
    assert outcome.verdict is Verdict.FAILED
    assert reading in outcome.found
    assert outcome.fix


def _drawn(seed: int, **drawn: object) -> Reading | None:
    is_thousandths = bool(seed % 2)
    answers = THOUSANDTHS if is_thousandths else PIXELS
    sides = SIDES[seed // 2 % 4]
    return judge(draw(seed, answers=answers, thousandths=is_thousandths, sides=sides, **drawn)).reading  # type: ignore[arg-type]


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 60), marks=pytest.mark.slow)])
def test_neither_sloppy_models_nor_boxes_from_anywhere_are_an_alarm(seeds: range) -> None:
    noises = (0.02, 0.05, 0.1, 0.2, 0.3)
    assert {_drawn(seed, noise=noises[seed % 5]) for seed in seeds} == {Reading.EXPECTED}
    assert {_drawn(seed, finds=False) for seed in seeds} == {None}


def test_too_few_images_and_one_answer_to_all_tell_nothing() -> None:
    images = draw(0, answers=THOUSANDTHS, thousandths=True)
    for few in ([], images[:8]):
        assert "images have answered boxes and true ones" in judge(few).reason
    alike = [dataclasses.replace(image, answers=images[0].answers) for image in images]
    assert judge(alike).reading is None


@settings(max_examples=30)
@given(st.lists(st.lists(st.tuples(*[st.floats(-1e9, 1e9)] * 4), max_size=4), min_size=12, max_size=12))
@example([[(0.0, 0.0, 0.0, 0.0)]] * 12)
@example([[(9.0, 9.0, 1.0, 1.0)]] * 12)
def test_any_numbers_are_answers(boxes: list[list[Numbers]]) -> None:
    images = draw(0, answers=PIXELS, num_images=12)
    answered = [
        dataclasses.replace(image, answers=tuple(("car", box) for box in given))
        for image, given in zip(images, boxes, strict=True)
    ]
    assert judge(answered).reading is None


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


# --- on the real server --------------------------------------------------------------------------------

TRAINED_SIDE = 112
LIMIT = TRAINED_SIDE**2
"""Pixels that the tiny model was trained on. It finds objects in images of that size only."""


@pytest.fixture(scope="session")
def large_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty-two scenes, enlarged to twice the size that the tiny model was trained on."""
    directory = tmp_path_factory.mktemp("data") / "large"
    size = (TRAINED_SIDE, TRAINED_SIDE)
    file = write_dataset(directory, SceneKind.SHAPES, 32, Split.HELD_OUT, 1, image_size=size)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        (path,) = row["images"]
        with Image.open(path) as image:
            enlarged = image.resize((2 * TRAINED_SIDE, 2 * TRAINED_SIDE), Image.Resampling.NEAREST)
        enlarged.save(path)
        row["objects"]["bbox"] = [[2 * number for number in box] for box in row["objects"]["bbox"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def shrinking_server(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """The real server, as ``--max-pixels`` starts it."""
    monkeypatch.setattr(server.engine.generator.template, "max_pixels", LIMIT)
    return server


def test_both_sides_alike_are_healthy(
    shrinking_server: RunningServer, configure: Configure, doctor: Doctor, large_rows: Path
) -> None:
    config = configure(shrinking_server.base_url, swift__dataset=[str(large_rows)], swift__max_pixels=LIMIT)
    report = doctor(config, "--coordinates")
    assert report.status == 0, report.text
    assert (report.verdict("answered rows"), report.verdict("coordinates")) == ("ok", "ok")
    assert "dry sync round" not in [row["check"] for row in report.findings]


@pytest.mark.parametrize("option", ["--coordinates", pytest.param("--live", marks=pytest.mark.slow)])
def test_a_server_with_another_limit_is_named_with_the_line_to_change(
    shrinking_server: RunningServer, configure: Configure, doctor: Doctor, large_rows: Path, option: str
) -> None:
    report = doctor(configure(shrinking_server.base_url, swift__dataset=[str(large_rows)]), option)
    row = report.row("answered rows")
    assert row["verdict"] == "failed"
    assert row["found"] == "images are 112x112 on the server, 224x224 on the learner"
    assert report.row("coordinates")["found"] == "since answered rows failed"
