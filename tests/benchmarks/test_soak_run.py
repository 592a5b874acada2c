"""A short soak for real: torchrun ranks, our server on the transformers engine, two faults."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.telemetry.audit import audit_path
from swift_stage2.telemetry.reading import read_audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]
_DEADLINE_S = 1200
_STEPS = 96
_SEED = 40  # 500 for two requests, then SIGSTOP of a rank for 3.6 s


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process of its own, because the bench adopts orphans and takes signals."""
    out = tmp_path_factory.mktemp("bench") / "soak"
    bench = [sys.executable, "-m", "swift_stage2", "bench", "soak"]
    options = ["--steps", str(_STEPS), "--seed", str(_SEED), "--output", str(out)]
    ended = subprocess.run(
        [*bench, *options], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def facts(soaked: Path) -> dict[str, Any]:
    return dict(json.loads((soaked / "soak.json").read_text(encoding="utf-8")))


def test_it_trains_to_its_last_step_and_nothing_is_lost_or_left(facts: dict[str, Any]) -> None:
    assert (facts["problems"], facts["exit_status"], facts["num_steps"]) == ([], 0, _STEPS)
    assert (facts["lost"], facts["trained_twice"], facts["left"]) == (0, 0, 0)
    assert all(rank["trained"] > 0 for rank in facts["account"]["ranks"])


def test_both_faults_reach_the_learner(facts: dict[str, Any], soaked: Path) -> None:
    refused, stopped = facts["kinds"]
    assert (refused["kind"], refused["times"], refused["hangs"]) == ("HTTP 500", 1, 0)
    assert refused["failed_posts"] == {"error_answer": 2}
    assert (stopped["kind"], stopped["times"], stopped["hangs"]) == ("rank stopped", 1, 0)
    (planned,) = [fault for fault in facts["plan"] if fault["kind"] == "rank stopped"]
    times = [
        record["time"]
        for record in read_audit(audit_path(soaked / "job" / "run", 0))
        if record["kind"] == "step"
    ]
    # Ranks agree at every step, so that the other one begins at most one while this one stands still.
    assert max(b - a for a, b in pairwise(times[planned["step"] :])) > planned["seconds"] / 2


def test_ranks_courier_and_server_are_looked_at_while_they_train(facts: dict[str, Any], soaked: Path) -> None:
    for process in ("rank 0", "rank 1", "courier", "server"):
        seen = [sample for sample in facts["samples"] if sample["process"] == process]
        assert len(seen) >= 2
        assert all(sample["rss"] >= sample["uss"] > 1 << 24 for sample in seen)
        assert all(sample["num_threads"] >= 1 and sample["num_fds"] > 3 for sample in seen)
    assert "| rank stopped | 1 | 0 |" in (soaked / "soak.md").read_text(encoding="utf-8")
