from __future__ import annotations

import pytest

from swift_stage2.errors import StaleSample
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh, require_fresh


def test_advances_by_one_from_where_it_starts() -> None:
    clock = VersionClock(current=41)
    assert clock.advance() == 42
    assert clock.current == 42
    with pytest.raises(ValueError, match="only grows"):
        clock.advance(42)


@pytest.mark.parametrize(
    ("version", "window", "fresh"),
    [(3, 0, True), (2, 0, False), (1, 2, True), (0, 2, False), (4, 0, True), (0, 3, True)],
)
def test_fresh_means_within_the_window_or_ahead(version: int, window: int, fresh: bool) -> None:
    assert is_fresh(version, current=3, window=window) is fresh


def test_a_sample_that_is_stale_is_named_before_it_is_trained() -> None:
    samples = [("a", 5), ("b", 3), ("c", 2), ("d", 9)]
    require_fresh(samples, current=4, window=2)
    require_fresh([], current=9, window=0)
    with pytest.raises(StaleSample, match="got sample=c version=2 current=5 version_window=2;"):
        require_fresh(samples, current=5, window=2)
