"""The fence of one rank beside its rounds, as the servers of a pending round become others."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_stage2.collectives import SingleRank
from swift_stage2.fence import InferFence
from swift_stage2.learner import Learner
from swift_stage2.learner.rounds import LearnerRounds
from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.runtime.watches import Standing
from swift_stage2.scheduling.round_schedule import RoundSchedule
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import StarvationWatch

OURS, STOCK = 0, 1
PROOF = ServerReport(proven=True, error=None, proof="checksums", num_bytes=0, seconds={}, stamps=True)


class ProvingSync:
    """Proves every target once it is heard."""

    def __init__(self) -> None:
        self.begun: list[tuple[tuple[int, ...], bool]] = []
        self.caught_up: list[tuple[int, ...]] = []
        self.num_hurried = 0

    def catch_up(self, targets: Any, *, version: int) -> None:
        assert version == self.outcome.version
        self.caught_up.append(tuple(targets))
        self.outcome = replace(
            self.outcome,
            reports=dict.fromkeys(targets, PROOF),
            news=tuple(targets),
            staged=True,
            is_catch_up=True,
        )

    def hurry(self) -> None:
        self.num_hurried += 1

    def begin(self, version: int, targets: Any, *, staged: bool, held: bool, step: int) -> None:
        self.begun.append((tuple(targets), staged))
        self.is_held = held
        self.outcome = RoundOutcome(
            version, reports=dict.fromkeys(targets, PROOF), news=tuple(targets), staged=staged
        )

    def hear(self) -> RoundOutcome:
        return self.outcome

    def distrust(self, servers: Any) -> None: ...


def ignore(*_: Any, **__: Any) -> None: ...


@pytest.fixture
def parts() -> Any:
    """One server of ours, which stages, and one stock server."""
    return SimpleNamespace(
        rounds=RoundSchedule(2, 4, backoff_steps=1, max_backoff_steps=8, staging=[OURS]),
        base_urls=("http://ours", "http://stock"),
        evaluation=None,
        longest_fill_s=None,
        clock=VersionClock(),
        fence=InferFence(start_closed=True),
        sync=ProvingSync(),
        probe=SimpleNamespace(pause=ignore, go_on=ignore, watch=ignore),
        client=SimpleNamespace(
            num_unsettled=0,
            suspects={},
            clear_suspicion=ignore,
            set_proven=ignore,
            stop_requests=ignore,
            expect=ignore,
        ),
    )


def test_an_evaluation_holds_back_a_fenced_round_and_only_the_install_of_a_staged_one(parts: Any) -> None:
    events: Any = SimpleNamespace(
        activity=lambda name: nullcontext(), record_round=ignore, record_warning=ignore
    )
    rounds = LearnerRounds(parts, SingleRank(), events)
    rounds.begin_if_due(0)
    parts.evaluation = SimpleNamespace(holds_round=lambda step: True)
    rounds.begin_if_due(4)
    assert (len(parts.sync.begun), parts.rounds.pending, parts.fence.is_open) == (1, False, True)
    rounds.take_in_suspects(4, [False, True], [False, False])
    rounds.begin_if_due(5)
    assert parts.sync.begun[1:] == [((OURS,), True)]
    assert parts.sync.is_held


def test_a_pending_round_that_is_left_with_servers_of_ours_holds_no_rollout_any_more(parts: Any) -> None:
    events: Any = SimpleNamespace(
        activity=lambda name: nullcontext(), record_round=ignore, record_warning=ignore
    )
    rounds = LearnerRounds(parts, SingleRank(), events)
    rounds.begin_if_due(0)
    assert parts.fence.is_open
    parts.fence.enter()  # somebody is busy
    rounds.begin_if_due(4)
    assert (parts.rounds.pending, parts.fence.is_open) == (True, False)
    rounds.take_in_suspects(4, [False, True], [False, False])
    rounds.begin_if_due(5)
    assert parts.sync.begun == [((OURS, STOCK), False), ((OURS,), True)]
    assert parts.fence.is_open, "the servers of a staged round are asked on"
    rounds.take_in(6, rounds.hear())
    assert (parts.fence.version, parts.clock.current) == (2, 2)


@pytest.mark.parametrize(("seconds", "is_told"), [(95.0, True), (5.0, False)])
def test_a_silence_of_channel_b_tells_what_its_pipeline_has_waited_for_long(
    seconds: float, is_told: bool
) -> None:
    """A server that hangs is no fault before its request's deadline."""
    told: list[str] = []
    standing = Standing("channel B's pipeline asks servers for 12 rollouts", time.monotonic() - seconds)
    learner: Any = SimpleNamespace(
        starvation=StarvationWatch(200),
        fail_when_starved=False,
        channel_b=SimpleNamespace(pipeline=SimpleNamespace(standing=standing)),
        events=SimpleNamespace(record_warning=lambda message: told.append(message)),
    )
    for _ in range(8):
        Learner._watch_starvation(learner, StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS))
    assert len(told) == 1
    assert told[0].endswith("asks servers for 12 rollouts for 95 s") is is_told
