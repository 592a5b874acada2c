"""The gallery: what is drawn into a picture, what became of its sample, and files that are no picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_files import RunFiles

from swift_stage2.report.content import Gallery
from swift_stage2.report.quality import RankMatch, gallery_of, matches_of
from swift_stage2.report.run_data import read_run


def matches(tmp_path: Path, *each: dict[str, Any]) -> list[RankMatch]:
    run = RunFiles(tmp_path)
    run.start()
    for number, values in enumerate(each):
        run.match(**{"sample": [0, number, number, 0], **values})
    run.end()
    return matches_of(read_run([tmp_path]).ranks)


def gallery(tmp_path: Path, *each: dict[str, Any]) -> Gallery:
    return gallery_of(matches(tmp_path, *each))


def test_the_newest_come_first_and_no_more_than_fit(tmp_path: Path) -> None:
    found = gallery(tmp_path, *({"rollout": str(number)} for number in range(30)))
    assert [dict(shown.texts)["Rollout"] for shown in found.pictures] == [str(29 - n) for n in range(24)]
    assert found.told.startswith("24 of 30 matches, the newest first. Blue: true")


def test_an_image_without_a_path_is_a_line(tmp_path: Path) -> None:
    (shown,) = gallery(tmp_path, {"images": [None, None]}).pictures
    assert shown.trouble == "the image has no path"
    assert "first of 2 images" in shown.facts
