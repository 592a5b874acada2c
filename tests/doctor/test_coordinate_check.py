"""``--coordinates`` against the real server: another ``max_pixels`` than the learner's, wrong rows, no fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answered_images import LIMITS, corner_size, draw, resized, share, stored, y_first
from doctor_run import Report
from live_server import RunningServer
from PIL import Image

from swift_stage2.config import load_config
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.doctor.coordinates import AnsweredRows, check_coordinates, check_limits
from swift_stage2.doctor.examination import Verdict

Configure = Callable[..., Path]
Doctor = Callable[..., Report]

TRAINED_SIDE = 112
LIMIT = TRAINED_SIDE**2
"""Pixels that the tiny model was trained on. It finds objects in images of that size only."""


@pytest.fixture(scope="session")
def large_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty-two scenes, enlarged to twice the size that the tiny model was trained on."""
    directory = tmp_path_factory.mktemp("data") / "large"
    file = write_dataset(
        directory, SceneKind.SHAPES, 32, Split.HELD_OUT, 1, image_size=(TRAINED_SIDE, TRAINED_SIDE)
    )
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        (path,) = row["images"]
        with Image.open(path) as image:
            enlarged = image.resize((2 * TRAINED_SIDE, 2 * TRAINED_SIDE), Image.Resampling.NEAREST)
        enlarged.save(path)
        row["objects"]["bbox"] = [[2 * number for number in box] for box in row["objects"]["bbox"]]
    return write_rows(file, rows)


def write_rows(file: Path, rows: list[dict[str, object]]) -> Path:
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
    assert report.row("pixel limits")["found"].startswith("both sides see all 32 images in the same size")
    row = report.row("coordinates")
    assert row["verdict"] == "ok"
    assert "healthy: answers are pixels of the image as the learner resizes it" in row["found"]
    assert "dry sync round" not in [row["check"] for row in report.findings]


@pytest.mark.parametrize("option", ["--coordinates", pytest.param("--live", marks=pytest.mark.slow)])
def test_a_server_with_another_limit_is_named_with_the_line_to_change(
    shrinking_server: RunningServer, configure: Configure, doctor: Doctor, large_rows: Path, option: str
) -> None:
    report = doctor(configure(shrinking_server.base_url, swift__dataset=[str(large_rows)]), option)
    assert report.status == 1
    limits, coordinates = report.row("pixel limits"), report.row("coordinates")
    assert (
        "32 of 32 images differ in size, one of 224x224 is 224x224 on the learner, 112x112 on the server"
        in (limits["found"])
    )
    assert coordinates["verdict"] == "failed"
    assert coordinates["found"].startswith("answers are pixels of the image as the server resizes it")
    for row in (limits, coordinates):
        assert row["fix"].startswith(f"write swift.max_pixels: {LIMIT}")


def test_rows_in_thousandths_are_named(
    shrinking_server: RunningServer, configure: Configure, doctor: Doctor, large_rows: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in large_rows.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        boxes = row["objects"]["bbox"]
        row["objects"]["bbox"] = [[round(1000 * number / 224) for number in box] for box in boxes]
    file = write_rows(tmp_path / "thousandths.jsonl", rows)
    config = configure(shrinking_server.base_url, swift__dataset=[str(file)], swift__max_pixels=LIMIT)
    report = doctor(config, "--coordinates")
    assert report.status == 1
    row = report.row("coordinates")
    assert row["verdict"] == "failed"
    assert row["found"].startswith("boxes of the data set are thousandths of the image")
    assert row["fix"] == (
        "write objects.bbox in pixels of the stored image: x times width / 1000, y times height / 1000"
    )


@pytest.mark.slow
def test_a_model_that_finds_nothing_leaves_it_open(
    server: RunningServer, configure: Configure, doctor: Doctor, large_rows: Path
) -> None:
    report = doctor(configure(server.base_url, swift__dataset=[str(large_rows)]), "--coordinates")
    assert report.status == 0, report.text
    assert report.verdict("pixel limits") == "ok"
    row = report.row("coordinates")
    assert row["verdict"] == "not checked"
    assert row["found"].startswith("cannot tell: ")


# --- the line to change ------------------------------------------------------------------------------

QUARTER = 256 * 28 * 28
CHECKPOINT = "start from a checkpoint that was trained with this template, whose boxes are "


@pytest.mark.parametrize(
    ("drawn", "swift", "fix"),
    [
        ({"answers": share(1000)}, {}, "write swift.norm_bbox: norm1000"),
        ({"answers": resized(), "thousandths": True}, {}, "write swift.norm_bbox: none"),
        (
            {"answers": stored},
            {},
            f"{CHECKPOINT}pixels of the image as the learner resizes it",
        ),
        ({"answers": y_first(share(1000)), "thousandths": True}, {}, f"{CHECKPOINT}thousandths of the image"),
        (
            {"answers": resized(), "data": corner_size(stored)},
            {},
            "write objects.bbox in pixels of the stored image: x, y, width, height as x1, y1, x2, y2",
        ),
        (
            {"answers": resized(), "data": share(1, digits=4)},
            {},
            "write objects.bbox_type: norm1 in every row, or multiply its boxes by the image's width and height",
        ),
    ],
)
def test_every_fault_has_its_line(
    configure: Configure, drawn: dict[str, Any], swift: dict[str, Any], fix: str
) -> None:
    config = load_config(
        configure("http://127.0.0.1:1", **{f"swift__{name}": value for name, value in swift.items()})
    )
    rows = AnsweredRows(tuple(draw(0, **drawn)), drawn.get("thousandths", False))
    outcome = check_coordinates(rows, config, 0)
    assert (outcome.verdict, outcome.fix) == (Verdict.FAILED, fix)


def test_limits_that_are_written_differently_are_told_where_a_server_reports_no_sizes(
    configure: Configure,
) -> None:
    args = {"template": "stage2_tiny_vl", "max-pixels": QUARTER}
    changes: dict[str, Any] = {
        "swift__max_pixels": LIMITS.max_pixels,
        "launch__servers": [{"engine": "transformers", "args": args}],
    }
    config = load_config(configure("http://127.0.0.1:1", **changes))
    rows = AnsweredRows(tuple(draw(0, answers=resized())), is_thousandths=False)
    outcome = check_limits(rows, config, 0)
    assert outcome.verdict is Verdict.FAILED
    assert outcome.fix == f"write launch.servers[0].args.max-pixels: {LIMITS.max_pixels}, as swift.max_pixels"
    alone = load_config(configure("http://127.0.0.1:1"))
    assert check_limits(rows, alone, 0).verdict is Verdict.NOT_CHECKED
