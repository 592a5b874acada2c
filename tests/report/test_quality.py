"""Rollouts by the length of their answers: whether long ones are trained as often as short ones."""

from __future__ import annotations

from pathlib import Path

from builders import matched_of
from ledger_run import LedgerRun

from swift_stage2.records import MatchQuality, Rollout, Sample, VersionSpan
from swift_stage2.report.quality import _by_length
from swift_stage2.telemetry.event_log import ranks_of


def test_quarters_of_rollouts_by_length_say_what_was_trained(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path, num_rows=8)
    keys = run.draw(8)
    run.ask(keys)
    for length, key in enumerate(keys, start=1):
        spans = (VersionSpan(1, 0, length),)
        rollout = Rollout(Sample(key, {}), "a", (7,) * length, (5,), False, 5, "http://s", spans)
        run.log.write(matched_of(rollout, MatchQuality(1, 1, 1, 0.5, 0, 0)))
    run.pack(keys[:3])
    run.train(keys[:3])
    ranks = tuple(ranks_of({0: run.events()}).values())
    assert _by_length(ranks).rows == (
        ("1 to 2", "2", "2", "100%"),
        ("3 to 4", "2", "1", "50%"),
        ("5 to 6", "2", "0", "0%"),
        ("7 to 8", "2", "0", "0%"),
    )
    assert _by_length(()).rows == ()
