"""A run that wanted channel B and trained none of it says so and why, from its first step on."""

from __future__ import annotations

from pathlib import Path

import pytest
from telemetry.run_facts import PLAN_A, PLAN_B, skipped, step

from swift_stage2.launch.run_view import describe_end
from swift_stage2.report.report import report_of
from swift_stage2.report.run_data import read_run
from swift_stage2.scheduling.step_plan import SkipReason, StepPlan
from swift_stage2.telemetry import Telemetry
from swift_stage2.weights.sync_round import RoundOutcome, ServerReport

_NO_ROUTE = "http://a:1: the weight group did not form"


def outcome(error: str | None) -> RoundOutcome:
    report = ServerReport(proven=error is None, error=error, proof="", num_bytes=0, seconds={})
    return RoundOutcome("r", 1, {0: report})


@pytest.mark.parametrize(
    ("plans", "errors", "words"),
    [
        ([PLAN_A, PLAN_A], [], ""),
        ([skipped(), PLAN_B], [None], ""),
        ([PLAN_B], [_NO_ROUTE], ""),  # with what an earlier round has proven
        (
            [skipped()],
            [None],
            "channel B ran at none of the 1 steps that wanted it: packs were not ready in time",
        ),
        (
            [skipped(SkipReason.SERVERS_SUSPECT), PLAN_A],
            [_NO_ROUTE, _NO_ROUTE, "x"],
            "channel B ran at none of the 1 steps that wanted it: none of 3 sync rounds proved a server, mostly: "
            f"{_NO_ROUTE}",
        ),
        ([PLAN_A], [_NO_ROUTE], f"none of 1 sync rounds proved a server, mostly: {_NO_ROUTE}"),
    ],
)
def test_the_run_its_launch_and_its_report_say_it_with_the_cause(
    tmp_path: Path, plans: list[StepPlan], errors: list[str | None], words: str
) -> None:
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False, queue_limit=8)
    telemetry.record_start(0)
    for error in errors:
        telemetry.record_round(0, outcome(error))
    for number, plan in enumerate(plans):
        telemetry.record_step(step(number, plan))
    assert telemetry.unused_b == words
    telemetry.close()
    told = describe_end(tmp_path, 0, 0.0)
    assert told.endswith(f"; warning: {words}" if words else f"run directory {tmp_path}")
    (verdict,) = [part for part in report_of(read_run([tmp_path])).sections if part.key == "verdict"]
    shown = " ".join(str(part) for part in verdict.parts)
    if words:
        assert f"{words[0].upper()}{words[1:]}." in shown
    else:
        assert "ran at none" not in shown
