"""The preprocess bench: what is compared with what, crowds of the right kind, and the real stages in a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.crowds import IMAGE_SIDE, AnswerKind, make_crowd
from benchmarks.estimates import fit_exponent
from benchmarks.preprocess import match_table, notes, pack_table, stage_table, template_table
from benchmarks.preprocess_stages import bare_match, in_turns
from swift_stage2.channel_b.matching import match_objects


@pytest.mark.parametrize("kind", AnswerKind)
def test_a_crowd_has_the_wanted_number_of_boxes_in_order_and_in_the_image(kind: AnswerKind) -> None:
    crowd = make_crowd(200, kind, seed=3)
    assert crowd == make_crowd(200, kind, seed=3) != make_crowd(200, kind, seed=4)
    for objects in (crowd.truth, crowd.answer):
        assert len(objects) == 200
        assert all(
            0 <= x1 <= x2 <= IMAGE_SIDE and 0 <= y1 <= y2 <= IMAGE_SIDE for _, (x1, y1, x2, y2) in objects
        )


def test_answers_are_as_right_as_their_kind_says() -> None:
    pairs = {}
    for kind in AnswerKind:
        crowd = make_crowd(50, kind, seed=0)
        match = match_objects(
            [box for _, box in crowd.answer],
            [box for _, box in crowd.truth],
            iou_threshold=0.3,
            top_k=10,
            unmatched_prediction_cost=1.0,
            unmatched_ground_truth_cost=1.0,
        )
        pairs[kind] = len(match.pairs)
    assert pairs[AnswerKind.JITTERED] > 35 > pairs[AnswerKind.REPEATED] >= 10 > pairs[AnswerKind.RANDOM]


def test_the_bare_match_is_the_best_assignment_of_the_best_candidates() -> None:
    predicted = [(0, 0, 10, 10), (100, 100, 120, 120), (50, 50, 60, 60)]
    true = [predicted[2], predicted[0], (200, 200, 210, 210)]
    assert bare_match(predicted, true, top_k=3).tolist() == [0.0, 1.0, 0.0]
    assert bare_match(predicted, true, top_k=2).tolist() == [0.0, 2.0, 0.0]  # its truth is no candidate


def test_pairs_take_turns_and_the_first_does_not_count() -> None:
    calls: list[str] = []

    def timed(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    ours, bare = in_turns(3, lambda: timed("ours"), lambda: timed("bare"))
    assert calls == ["bare", "ours", "ours", "bare", "bare", "ours", "ours", "bare"]
    assert (ours, bare) == ([3.0, 6.0, 7.0], [4.0, 5.0, 8.0])


def test_the_exponent_is_that_of_a_power_law_and_needs_two_sizes() -> None:
    assert fit_exponent([1, 10, 100], [3.0, 30.0, 300.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="two different sizes"):
        fit_exponent([5, 5], [1.0, 2.0])


def test_rates_are_the_reciprocal_of_the_median_second() -> None:
    seconds = {str(count): {"parse": [count / 1000, count / 1000, 9.0]} for count in (20, 100, 500)}
    (row,) = stage_table(seconds).rows
    assert row == ("parse", "50", "10", "2.0", "1.00", "1.00")


def test_a_packs_cost_is_told_by_its_samples_with_its_exponent() -> None:
    packs = {str(size): {"pack": [size * 1e-3, size * 1e-3, 9.0]} for size in (16, 1, 4)}
    (row,) = pack_table(packs).rows
    assert row == ("pack", "1.00", "4.00", "16.00", "1.00")


def test_budgets_are_told_by_the_median_of_the_pairs() -> None:
    pairs = {"20": {"ours": [1.0, 1.2, 1.1], "bare": [1.0, 1.0, 1.0]}, "5": {"ours": [1.2], "bare": [1.0]}}
    assert [(row[0], row[-1]) for row in template_table(pairs).rows] == [("5", "missed"), ("20", "held")]
    matches = {"random": {"ours": [3.0], "bare": [2.0]}, "jittered": {"ours": [3.1], "bare": [2.0]}}
    assert [row[-1] for row in match_table(matches, 500).rows] == ["held", "missed"]
    assert "budget at least 240: missed" in notes({"20": {"parse+match+target": [1 / 200]}})[0]
    assert notes({"5": {"parse+match+target": [1.0]}}) == []


@pytest.mark.slow
def test_the_real_stages_are_measured_on_the_same_work(tmp_path: Path) -> None:
    """The measured process itself refuses pairs whose tokens differ."""
    out = tmp_path / "out"
    argv = [
        *["--objects", "2", "20", "--samples", "1", "3", "--crowd", "30", "--repeats", "2", "--output"],
        str(out),
    ]
    assert command.main(["preprocess", *argv]) == 0
    found = json.loads((out / "preprocess.json").read_text())
    for count in ("2", "20"):
        stages = found["stages"][count]
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in stages.values())
        assert set(stages) >= {"parse", "match", "target", "parse+match+target", "encode", "pack"}
    for size in ("1", "3"):
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found["packs"][size].values())
    assert set(found["matches"]) == set(AnswerKind)
    assert "samples/s, budget at least 240" in (out / "preprocess.md").read_text()
