"""Matches kept whole: whose, how, and how many bytes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_stage2.records import MatchQuality, ObjectMatch, Rollout, Sample, SampleKey, Target, VersionSpan
from swift_stage2.telemetry import ledger
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.ledger import MatchLog, matches_path, rows_to_keep
from swift_stage2.telemetry.reading import read_audit

QUALITY = MatchQuality(1, 2, 1, 0.75, 0, 1, {"invalid_box": 2}, reward={"f1": 2 / 3, "total": 1.0})
MATCH = ObjectMatch(
    predicted=(("cat", (1, 2, 3, 4)),),
    truth=(("cat", (1, 2, 3, 5)), ("dog", (6, 7, 8, 9))),
    pairs=((0, 0, 2 / 3),),
)


def rollout(index: int, images: Any = ("a.png",)) -> Rollout:
    sample = Sample(SampleKey(1, 2, index, 1), {"images": list(images)})
    spans = (VersionSpan(7, 0, 2), VersionSpan(6, 2, 3))
    return Rollout(sample, "said", (1,), (2,), True, 3, "http://127.0.0.1:1", spans)


def target(match: ObjectMatch | None = MATCH) -> Target:
    return Target("wanted", (1,), (1.0,), QUALITY, match)


def log_in(tmp_path: Path, rows: Any) -> MatchLog:
    return MatchLog(AuditLog(matches_path(tmp_path, 1), 1), rows)


def records(tmp_path: Path) -> list[dict[str, Any]]:
    path = matches_path(tmp_path, 1)
    return read_audit(path) if path.exists() else []


def test_a_match_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = log_in(tmp_path, {5})
    log.write(
        "training",
        rollout(5, ["a.png", {"path": "b.png", "bytes": b""}, {"bytes": b"x"}]),
        target(),
        (640, 480),
    )
    (record,) = records(tmp_path)
    record.pop("time")
    assert record == {
        "kind": "match",
        "rank": 1,
        "sequence": 0,
        "purpose": "training",
        "sample": [1, 2, 5, 1],
        "version": 6,
        "spans": [[7, 0, 2], [6, 2, 3]],
        "images": [str(tmp_path / "a.png"), str(tmp_path / "b.png"), None],
        "space": [640, 480],
        "truth": [{"label": "cat", "box": [1, 2, 3, 5]}, {"label": "dog", "box": [6, 7, 8, 9]}],
        "predicted": [{"label": "cat", "box": [1, 2, 3, 4]}],
        "pairs": [[0, 0, 0.6667]],
        "rollout": "said",
        "target": "wanted",
        "truncated": True,
        "dropped": {"invalid_box": 2},
        "reward": {"f1": 0.6667, "total": 1.0},
    }


def test_only_the_chosen_rows_are_kept(tmp_path: Path) -> None:
    log = log_in(tmp_path, {5})
    for index in (4, 5, 6, 5):
        log.write("training", rollout(index), target(), (1, 1))
    assert [record["sample"][2] for record in records(tmp_path)] == [5, 5]


def test_of_an_evaluation_the_first_rows_are_kept_unless_none_is(tmp_path: Path) -> None:
    log_in(tmp_path, ()).write("evaluation", rollout(0), target(), (1, 1))
    assert records(tmp_path) == []
    log = log_in(tmp_path, {5})
    log.write("evaluation", rollout(0), target(), (1, 1))
    log.write("evaluation", rollout(10_000), target(), (1, 1))
    assert [(record["purpose"], record["sample"][2]) for record in records(tmp_path)] == [("evaluation", 0)]


def test_what_has_no_boxes_or_no_image_is_left_out(tmp_path: Path) -> None:
    log = log_in(tmp_path, {5})
    log.write("training", rollout(5), target(match=None), (1, 1))
    log.write("training", rollout(5), target(), None)
    assert records(tmp_path) == []


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_BYTES", 2000)
    log = log_in(tmp_path, {5})
    for _ in range(100):
        log.write("training", rollout(5), target(), (1, 1))
    assert 2000 < matches_path(tmp_path, 1).stat().st_size < 3000


def test_all_ranks_keep_the_same_rows() -> None:
    rows = rows_to_keep(1000, 64, seed=7)
    assert rows == rows_to_keep(1000, 64, seed=7) != rows_to_keep(1000, 64, seed=8)
    assert len(rows) == 64
    assert rows <= set(range(1000))
    assert rows_to_keep(10, 64, seed=7) == set(range(10))
    assert rows_to_keep(10, 0, seed=7) == set()
