"""Two kills of a real two-rank run, and what the bench makes of a kill that went wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import kills
from benchmarks.faults.kills import Kill, newest_whole_checkpoint

pytestmark = pytest.mark.timeout(1700)
_DEADLINE_S = 1600

SOUND = Kill(
    number=0,
    victim="rank 1",
    resumed_from="checkpoint-5",
    num_steps=3,
    seconds_to_end=1.5,
    num_void=2,
    broken_rules=(),
    records_lost=0,
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process of its own, because the bench adopts orphans and takes signals."""
    out = tmp_path_factory.mktemp("bench") / "kills"
    command = [sys.executable, "-m", "swift_stage2", "bench", "kills", "--points", "2", "--output", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "drawn =" in (out / "kills.md").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads((out / "kills.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_account_in_balance(facts: dict[str, Any]) -> None:
    assert len(facts["kills"]) == 2
    for kill in facts["kills"]:
        assert kill["seconds_to_end"] is not None
        assert (kill["broken_rules"], kill["records_lost"]) == ([], 0)
    assert facts["left_at_the_end"] == 0
    assert [rank["violations"] for rank in facts["account"]["ranks"]] == [[], []]
    assert all(rank["trained"] > 0 for rank in facts["account"]["ranks"])


@pytest.mark.parametrize(
    "wrong",
    [{"seconds_to_end": None}, {"broken_rules": ("a sample is trained once",)}, {"records_lost": 1}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_hang_a_broken_rule_and_a_lost_record_are_told_and_counted(wrong: dict[str, Any]) -> None:
    bad = dataclasses.replace(SOUND, **wrong)
    assert kills.is_bad(bad)
    assert not kills.is_bad(SOUND)
    assert kills.line_of(bad) != kills.line_of(SOUND)


def test_only_a_checkpoint_that_was_written_to_its_end_is_resumed(tmp_path: Path) -> None:
    assert newest_whole_checkpoint(tmp_path) is None
    for step, is_whole in ((5, True), (10, True), (15, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if is_whole:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
