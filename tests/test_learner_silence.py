"""What a learner tells when channel B does not run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from swift_stage2.learner import Learner
from swift_stage2.runtime.background import CurrentActivity
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.scheduling.watches import StarvationWatch


@pytest.mark.parametrize(("seconds", "is_told"), [(95.0, True), (5.0, False)])
def test_a_silence_of_channel_b_tells_what_its_pipeline_has_waited_for_long(
    seconds: float, is_told: bool
) -> None:
    """A server that hangs is no fault before its request's deadline."""
    told: list[str] = []
    standing = CurrentActivity(
        "channel B's pipeline asks servers for 12 rollouts", time.monotonic() - seconds
    )
    learner: Any = SimpleNamespace(
        starvation=StarvationWatch(200),
        fail_when_starved=False,
        channel_b=SimpleNamespace(pipeline=SimpleNamespace(current_activity=standing)),
        events=SimpleNamespace(record_warning=lambda message: told.append(message)),
    )
    for _ in range(8):
        Learner._watch_starvation(learner, StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS))
    assert len(told) == 1
    assert told[0].endswith("asks servers for 12 rollouts for 95 s") is is_told
