"""The gallery: what a picture is filtered by, what became of its sample, and files that are no picture."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest
from ledger_run import LedgerRun
from PIL import Image
from run_files import RunFiles, balanced_ledger, picture, write_advantages

from swift_stage2.pages.pictures import MOST_SIDE, Gallery, UnreadableImage, thumbnail
from swift_stage2.report.gallery import Grouping, gallery_of
from swift_stage2.report.matches import LoggedMatch, matches_of
from swift_stage2.report.run_data import read_run
from swift_stage2.report.samples import compare, draws_of
from swift_stage2.telemetry.ledger import ReturnReason, UnusedReason


def matches(tmp_path: Path, *each: dict[str, Any]) -> list[LoggedMatch]:
    run = RunFiles(tmp_path)
    run.start()
    for number, values in enumerate(each):
        run.match(**{"sample": [0, number, number, 0], **values})
    run.end()
    found, odd = matches_of(read_run([tmp_path]).ranks[0].matches)
    assert odd == 0
    return found


def gallery(tmp_path: Path, *each: dict[str, Any], size: int = 200) -> Gallery:
    return gallery_of(matches(tmp_path, *each), {}, size)


@pytest.mark.parametrize(
    ("values", "filters"),
    [
        ({}, {"all matched"}),
        ({"pairs": []}, {"has missed", "has false", "nothing found"}),
        ({"predicted": [], "pairs": []}, {"has missed", "nothing found"}),
        ({"predicted": [[0, 0, 9, 9], [1, 1, 2, 2]]}, {"has false"}),
        ({"truth": [[0, 0, 9, 9], [1, 1, 2, 2]]}, {"has missed"}),
        ({"truth": [], "predicted": [], "pairs": []}, {"all matched"}),
        ({"dropped": {"invalid_box": 2}}, {"dropped objects"}),
        ({"dropped": {"invalid_box": 0}}, {"all matched"}),
    ],
)
def test_filters_hold_by_what_was_matched(tmp_path: Path, values: dict[str, Any], filters: set[str]) -> None:
    (shown,) = gallery(tmp_path, values).pictures
    assert set(shown.outcomes) == filters


def test_the_newest_come_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    found = gallery(tmp_path, *({"rollout": str(number)} for number in range(9)), size=3)
    assert [shown.rollout for shown in found.pictures] == ["8", "7", "6"]
    assert found.num_matches == 9
    assert gallery_of(matches(tmp_path), {}, 0).pictures == ()


def test_a_thumbnail_is_small_and_made_once(tmp_path: Path) -> None:
    path = picture(tmp_path / "big.png", (1200, 300))
    found = gallery(tmp_path, {"images": [path]}, {"images": [path, path]})
    (uri,) = found.thumbnails
    assert [shown.image for shown in found.pictures] == [0, 0]
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (MOST_SIDE, MOST_SIDE // 4)
    assert "first of 2 images" in found.pictures[0].facts


def test_a_reward_is_one_short_line(tmp_path: Path) -> None:
    with_one, without = gallery(tmp_path, {}, {"reward": {"f1": 2 / 3, "misses": -0.5, "total": 1}}).pictures
    assert "reward: f1 0.67, misses -0.50, total 1.00" in with_one.facts
    assert not any("reward" in fact for fact in without.facts)


def test_boxes_are_told_apart(tmp_path: Path) -> None:
    values = {"truth": [[0, 0, 9, 9], [1, 1, 2, 2]], "predicted": [[0, 0, 9, 8], [3, 3, 4, 4]]}
    (shown,) = gallery(tmp_path, values).pictures
    assert [box[0] for box in shown.boxes] == ["truth", "missed", "matched", "false"]
    assert shown.boxes[1][1:] == (1, 1, 2, 2, "car")


def test_points_are_told_apart_as_boxes_are(tmp_path: Path) -> None:
    values = {"truth": [[0, 0], [1, 1]], "predicted": [[0, 1], [3, 3]]}
    (shown,) = gallery(tmp_path, values).pictures
    assert [point[0] for point in shown.boxes] == ["truth", "missed", "matched", "false"]
    assert shown.boxes[1][1:] == (1, 1, "car")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "gif", "tiff", "ppm"])
def test_every_raster_format_is_read(tmp_path: Path, suffix: str) -> None:
    assert thumbnail(picture(tmp_path / f"image.{suffix}")).startswith("data:image/webp")


def test_what_is_no_picture_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("<script>alert(1)</script>")
    (tmp_path / "vector.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    whole = Path(picture(tmp_path / "whole.png"))
    (tmp_path / "torn.png").write_bytes(whole.read_bytes()[:80])
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for ever
    names = ["text.png", "vector.svg", "program.eps", "torn.png", "pipe.png", "absent.png"]
    for name in [*names, ".", "null\0byte", "x" * 9000]:
        with pytest.raises(UnreadableImage):
            thumbnail(str(tmp_path / name))
    found = gallery(tmp_path, {"images": [str(tmp_path / "absent.png")]}, {"images": [None]}, {"images": []})
    assert [shown.trouble for shown in found.pictures] == [
        "the image has no path",
        "the image has no path",
        "there is no such file here",
    ]
    assert found.thumbnails == ()


def test_an_image_with_too_many_pixels_is_never_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = picture(tmp_path / "image.png")
    for most in (112 * 112 - 1, 112 * 112 // 3):  # Pillow warns of the first and refuses the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(UnreadableImage, match="too many pixels"):
            thumbnail(path)


def test_what_became_of_a_sample_is_read_from_the_ledger(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path)
    (trained,) = run.train_drawn(1)
    late, bad, waiting, cut = run.draw(4)
    run.source.give_back([late], ReturnReason.STALE)
    run.source.give_back([cut], ReturnReason.STOPPED)
    run.source.settle_quarantined(bad, "too_slow", "three times")
    run.match([waiting])
    (once_more,) = run.draw(1)
    assert once_more.attempt == 1
    run.match([once_more])
    run.pack([once_more])
    run.train([once_more])
    told = {draw.key: draw.fate for draw in draws_of(run.records())}
    keys = {
        name: (key.epoch, key.position, key.index, key.attempt)
        for name, key in {
            "trained": trained,
            "late": late,
            "bad": bad,
            "cut": cut,
            "again": once_more,
            "waiting": waiting,
        }.items()
    }
    assert told == {
        keys["trained"]: "trained at step 0",
        keys["late"]: "not trained, asked again: stale",
        keys["bad"]: "given up: too_slow",
        keys["cut"]: "not trained, the run ended",
        keys["again"]: "trained at step 1",
    }
    found = gallery_of(
        matches(tmp_path, *({"sample": list(keys[name])} for name in ("trained", "waiting"))), {0: told}
    )
    assert [shown.fate for shown in found.pictures] == ["not trained", "trained at step 0"]


def test_a_picture_of_an_evaluation_was_never_trained(tmp_path: Path) -> None:
    (shown,) = gallery(tmp_path, {"purpose": "evaluation", "sample": [2**31 - 1, 2, 7, 0]}).pictures
    assert shown.fate == "evaluation, never trained"
    assert shown.facts[0] == "row 7 of the validation set, rank 0"


def said(match_number: int, position: int, total: float, **others: Any) -> dict[str, Any]:
    """A rollout that says its number, of one row of two positions each."""
    row = position // 2
    return {
        "sample": [0, position, row, 0],
        "rollout": str(match_number),
        "reward": {"total": total},
        **others,
    }


def test_rollouts_of_a_group_stand_together_with_the_best_first(tmp_path: Path) -> None:
    found = gallery_of(
        matches(
            tmp_path,
            said(0, 0, 1.0),
            said(1, 3, -0.5),
            said(2, 5, 0.25),
            said(3, 7, 0.0, purpose="evaluation"),
            said(4, 1, 2.0),
            said(5, 2, 1.5, reward={}),
        ),
        {},
        grouping=Grouping(2),
    )
    first, second, third = (
        "Group 1, epoch 0, rank 0, row 1: rewards -0.50, mean -0.50",
        "Group 0, epoch 0, rank 0, row 0: rewards 2.00, 1.00, mean 1.50",
        "Group 2, epoch 0, rank 0, row 2: rewards 0.25, mean 0.25",
    )
    assert [(shown.rollout, shown.group) for shown in found.pictures] == [
        ("1", first),
        ("5", first),
        ("4", second),
        ("0", second),
        ("3", None),
        ("2", third),
    ]
    assert found.texts == ("Rollout", "Corrected answer")


def test_ranks_and_epochs_have_groups_of_their_own(tmp_path: Path) -> None:
    run = RunFiles(tmp_path, rank=1)
    run.start()
    run.match([1, 0, 0, 0])
    run.end()
    of_rank_0 = matches(tmp_path, said(0, 0, 1.0), said(1, 1, 1.0))
    of_rank_1, _ = matches_of(read_run([tmp_path]).ranks[1].matches)
    found = gallery_of([*of_rank_0, *of_rank_1], {}, grouping=Grouping(2))
    assert [(shown.group or "").partition(":")[0] for shown in found.pictures] == [
        "Group 0, epoch 1, rank 1, row 0",
        *["Group 0, epoch 0, rank 0, row 0"] * 2,
    ]


def test_a_run_without_groups_has_none(tmp_path: Path) -> None:
    told = matches(tmp_path, *(said(number, number, 1.0) for number in range(4)))
    write_advantages(tmp_path, {(0, 0, 0, 0): (0.5,)})  # no run without groups writes any
    run = read_run([tmp_path])
    found = gallery_of(told, {}, grouping=Grouping(run.num_generations, run.advantages))
    assert found == gallery_of(told, {})
    assert [(shown.rollout, shown.group) for shown in found.pictures] == [
        (str(n), None) for n in (3, 2, 1, 0)
    ]
    assert not any("advantage" in fact for shown in found.pictures for fact in shown.facts)
    assert found.texts == ("Rollout", "Target")


def test_advantages_are_told_where_they_were_recorded(tmp_path: Path) -> None:
    balanced_ledger(tmp_path, num_generations=2)
    write_advantages(tmp_path, {(0, 0, 0, 0): (9.0,), (0, 1, 0, 0): (-0.7071,)})
    # The process that resumed has compared it again
    write_advantages(tmp_path, {(0, 0, 0, 0): (0.7071, 1.0)})
    told = matches(tmp_path, said(0, 0, 2.0), said(1, 1, 1.0), said(2, 2, 1.0))
    run = read_run([tmp_path])
    assert run.num_generations == 2
    found = gallery_of(told, {}, grouping=Grouping(run.num_generations, run.advantages))
    facts = {shown.rollout: [fact for fact in shown.facts if "advantage" in fact] for shown in found.pictures}
    assert facts == {
        "0": ["advantage 0.71, its corrected answer 1.00"],
        "1": ["advantage -0.71"],
        "2": [],
    }


def test_what_was_compared_and_not_trained_is_no_drop(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path, num_generations=2)
    keys = run.draw(2)
    run.match(keys)
    run.source.settle_unused(keys, UnusedReason.NO_VARIANCE)
    draws = draws_of(run.records())
    assert [draw.fate for draw in draws] == ["compared, and nothing trained of it: no_variance"] * 2
    assert {comparison.others.size + comparison.others.unknown for comparison in compare(draws)} == {0}
