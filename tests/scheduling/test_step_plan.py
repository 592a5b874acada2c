from __future__ import annotations

import pytest

from swift_stage2.scheduling.step_plan import Channel, SkipReason, plan_step


@pytest.mark.parametrize(
    ("wants_b", "reserved", "channel", "reason", "wanted"),
    [
        (True, True, "B", None, True),
        (True, False, "A", SkipReason.NOT_ENOUGH_PACKS, True),
        (False, True, "A", None, False),
        (False, False, "A", None, False),
    ],
)
def test_policy_wants_and_gate_allows(
    wants_b: bool, reserved: bool, channel: str, reason: SkipReason | None, wanted: bool
) -> None:
    plan = plan_step(wants_b=wants_b, reserved_everywhere=reserved)
    assert plan.channel == channel
    assert plan.skip_reason == reason
    assert plan.wanted_b is wanted


def test_a_named_cause_is_told_only_when_b_is_skipped() -> None:
    cause = SkipReason.TRUNCATION_GUARD
    assert plan_step(wants_b=True, reserved_everywhere=False, skip_reason=cause).skip_reason is cause
    assert plan_step(wants_b=True, reserved_everywhere=True, skip_reason=cause).skip_reason is None
    assert plan_step(wants_b=False, reserved_everywhere=False, skip_reason=cause).skip_reason is None


def test_reasons_and_channels_read_as_plain_words() -> None:
    assert f"{SkipReason.NOT_ENOUGH_PACKS} {Channel.B}" == "not_enough_packs B"
