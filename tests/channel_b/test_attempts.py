"""A rollout attempt goes one way, and every sample has one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.attempts import Attempt, Attempts, AttemptState
from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan

KEYS = [SampleKey(0, position, position) for position in range(4)]
ENDS = (AttemptState.DONE, AttemptState.ENDED)


@given(path=st.lists(st.sampled_from(AttemptState), max_size=6))
def test_an_attempt_is_done_only_after_a_post_and_never_goes_on_after_its_end(
    path: list[AttemptState],
) -> None:
    attempt, been = Attempt(), [AttemptState.PENDING]
    for state in path:
        allowed = (
            been[-1] not in ENDS
            and state is not AttemptState.PENDING
            and (state is not AttemptState.DONE or been[-1] is AttemptState.IN_FLIGHT)
            and (state is not AttemptState.PARTIAL or been[-1] is AttemptState.IN_FLIGHT)
        )
        if not allowed:
            with pytest.raises(ValueError, match="goes on in its order"):
                attempt.go_on_to(state)
            return
        attempt = attempt.go_on_to(state)
        been.append(state)


def test_a_sample_has_one_attempt_at_a_time_and_comes_out_once() -> None:
    attempts = Attempts()
    attempts.begin(KEYS)
    with pytest.raises(ValueError, match="one attempt at a time"):
        attempts.begin(KEYS[:1])
    attempts.sent(KEYS[:2], server="http://s", seed=1, version=3)
    attempts.sent(KEYS[:1], server="http://s", seed=2, version=4)  # bisected
    assert [attempts.open()[key].version for key in KEYS[:3]] == [4, 3, None]
    attempts.close(KEYS[:1], AttemptState.DONE)
    with pytest.raises(ValueError, match="done after pending"):
        attempts.close(KEYS[2:3], AttemptState.DONE)
    attempts.close(KEYS[3:], AttemptState.ENDED)
    assert list(attempts.open()) == KEYS[1:2]
    with pytest.raises(KeyError):
        attempts.close(KEYS[:1], AttemptState.ENDED)


def test_an_attempt_is_cut_while_a_post_is_out_and_waits_for_the_next() -> None:
    attempts = Attempts()
    attempts.begin(KEYS[:1])
    key = KEYS[0]
    with pytest.raises(ValueError, match="partial after pending"):
        attempts.set_aside(key, rollout(key, 5))
    attempts.sent([key], server="http://s", seed=1, version=3)
    attempts.set_aside(key, rollout(key, 5))
    with pytest.raises(ValueError, match="partial after partial"):
        attempts.set_aside(key, rollout(key, 5))  # it came out twice
    attempts.set_aside(key, None)  # no server was there
    assert (attempts.of(key).so_far, attempts.of(key).num_cuts) == (rollout(key, 5), 1)
    with pytest.raises(ValueError, match="done after partial"):
        attempts.close([key], AttemptState.DONE)
    attempts.begin([KEYS[1]])
    assert attempts.of(KEYS[1]) == Attempt()


def rollout(key: SampleKey, *token_ids: int) -> Rollout:
    spans = (VersionSpan(3, 0, len(token_ids)),)
    return Rollout(Sample(key, {}), "", token_ids, (), False, 1, "http://s", spans)
