"""Whom a run trained: drops by chance are no finding, drops by size are, with their side and their remedy."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_run import LedgerRun, again

from swift_stage2.cli import main
from swift_stage2.records import SampleKey
from swift_stage2.report.samples import Comparison, Draw, Level, Trait, compare, draws_of, warnings
from swift_stage2.telemetry.ledger import Entry, ReturnReason

NUM_DRAWS = 200


def _draws(rng: random.Random, is_dropped: Callable[[int], bool], end: str = "stale") -> list[Draw]:
    sizes = [rng.choice((1, 2, 3, 5, 8, 13, 40)) for _ in range(NUM_DRAWS)]
    return [
        Draw(size, 100 * size, 10 * size + rng.randrange(9), end if is_dropped(size) else "trained")
        for size in sizes
    ]


def _find(comparisons: tuple[Comparison, ...], level: Level, trait: Trait) -> Comparison:
    (found,) = (found for found in comparisons if (found.level, found.trait) == (level, trait))
    return found


def test_drops_by_chance_are_seldom_a_finding() -> None:
    num_found = 0
    for seed in range(200):
        rng = random.Random(seed)
        draws = _draws(rng, lambda size, rng=rng: rng.random() < 0.2)  # type: ignore[misc]
        num_found += any(found.differs for found in compare(draws))
    assert num_found <= 20  # the limit holds 5 % for all tests together


@pytest.mark.parametrize(
    ("end", "level", "remedy"),
    [
        ("stale", Level.DRAWS, "raise prefetch.version_window"),
        ("timed_out", Level.DRAWS, "raise rollout.request_timeout_s"),
        ("quarantined", Level.SAMPLES, "see its reasons above"),
    ],
)
@pytest.mark.parametrize(("drops_crowded", "side"), [(True, "more objects"), (False, "fewer objects")])
def test_drops_by_size_are_told_with_side_and_remedy(
    end: str, level: Level, remedy: str, drops_crowded: bool, side: str
) -> None:
    rng = random.Random(7)
    draws = _draws(rng, lambda size: rng.random() < (0.6 if (size > 5) == drops_crowded else 0.1), end)
    comparisons = compare(draws)
    found = _find(comparisons, level, Trait.OBJECTS)
    assert found.differs
    assert found.main_end == end
    assert found.issued.size == found.trained.size + found.others.size == NUM_DRAWS
    (told,) = (text for text in warnings(comparisons) if " objects " in text)
    assert f"what is {level} has {side} than what is trained" in told
    assert remedy in told


@given(
    st.lists(st.integers(0, 6), min_size=8, max_size=30), st.lists(st.integers(0, 6), min_size=8, max_size=30)
)
def test_the_share_of_larger_ones_is_counted_over_all_pairs(mine: list[int], theirs: list[int]) -> None:
    draws = [Draw(size, None, None, "trained") for size in mine]
    draws += [Draw(size, None, None, "overflow") for size in theirs]
    found = _find(compare(draws), Level.DRAWS, Trait.OBJECTS)
    pairs = [(a < b) + (a == b) / 2 for a in mine for b in theirs]
    assert found.share_larger == pytest.approx(sum(pairs) / len(pairs))
    assert found.p_value is not None
    assert 0 <= found.p_value <= 1


def test_few_are_not_tested_and_unknown_ones_are_counted() -> None:
    draws = [Draw(1, None, 5, "trained") for _ in range(20)] + [Draw(90, None, None, "timed_out")] * 7
    comparisons = compare(draws)
    objects = _find(comparisons, Level.DRAWS, Trait.OBJECTS)
    assert (objects.p_value, objects.differs, objects.others.quartiles) == (None, False, (90, 90, 90))
    tokens = _find(comparisons, Level.DRAWS, Trait.ROLLOUT_TOKENS)
    assert (tokens.others.size, tokens.others.unknown) == (0, 7)
    assert _find(comparisons, Level.DRAWS, Trait.PIXELS).issued.quartiles is None


def _read(run: LedgerRun, keys: list[SampleKey], num_objects: int) -> None:
    run.ledger.write(Entry.READ, keys, num_objects=[num_objects] * len(keys), num_pixels=[None] * len(keys))


def test_draws_are_read_from_a_ledger_and_a_kill_is_nobodys_choice(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path)
    (late,) = run.draw(1)
    _read(run, [late], 30)
    run.source.give_back([late], ReturnReason.TIMED_OUT)
    keys = run.draw(1)
    assert keys == [again(late)]
    _read(run, keys, 30)
    run.match(keys)
    run.pack(keys)
    run.train(keys)
    state = run.save("s1")
    (bad, lost) = run.draw(2)
    run.source.settle_quarantined(bad, "bad_sample", "no box")
    _read(run, [lost], 2)
    resumed = LedgerRun(tmp_path, run_id="later", state=state)
    keys = resumed.draw(1)
    _read(resumed, keys, 4)
    assert draws_of(resumed.records()) == [
        Draw(30, None, None, "timed_out"),
        Draw(30, None, 4, "trained"),
        Draw(None, None, None, "quarantined"),
    ]


def test_the_report_warns_when_late_rollouts_are_those_of_crowded_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LedgerRun(tmp_path, num_rows=60)
    for number in range(30):
        keys = run.draw(1)
        _read(run, keys, 3 + number % 2)
        run.match(keys)
        run.pack(keys, str(number))
        run.train(keys, str(number))
    late = run.draw(12)
    _read(run, late, 50)
    run.source.give_back(late, ReturnReason.STALE)
    assert main(["report", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "what is dropped has more objects than what is trained: median 50 against 3.5" in text
    assert "raise prefetch.version_window" in text
