"""Every sample has one attempt at a time, which comes out once, and keeps what it has when it is aborted."""

from __future__ import annotations

import pytest

from swift_stage2.channel_b.attempts import Attempt, Attempts
from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan

KEYS = [SampleKey(0, position, position) for position in range(4)]


def test_a_sample_has_one_attempt_at_a_time_and_comes_out_once() -> None:
    attempts = Attempts()
    attempts.begin(KEYS)
    with pytest.raises(AssertionError, match="one attempt at a time"):
        attempts.begin(KEYS[:1])
    attempts.sent(KEYS[:2], server="http://s", seed=1, version=3)
    attempts.sent(KEYS[:1], server="http://s", seed=2, version=4)  # bisected
    assert [attempts.open()[key].version for key in KEYS[:3]] == [4, 3, None]
    attempts.close([KEYS[0], *KEYS[2:]])
    assert list(attempts.open()) == KEYS[1:2]
    so_far = Rollout(Sample(KEYS[1], {}), "", (5,), (), False, 1, "http://s", (VersionSpan(3, 0, 1),))
    attempts.set_aside(KEYS[1], so_far)
    assert (attempts.of(KEYS[1]).so_far, attempts.of(KEYS[1]).num_cuts) == (so_far, 1)
    assert (attempts.of(KEYS[1]).oldest_version, attempts.of(KEYS[0])) == (3, Attempt())
    with pytest.raises(KeyError):
        attempts.close(KEYS[:1])
    with pytest.raises(KeyError):
        attempts.set_aside(KEYS[0], so_far)
