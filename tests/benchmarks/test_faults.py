"""One row of the fault table for real: torchrun ranks, our server on the transformers engine, the proxy between."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]
_DEADLINE_S = 1200


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process of its own, because the bench adopts orphans and takes signals."""
    out = tmp_path_factory.mktemp("bench") / "faults"
    command = [
        sys.executable,
        "-m",
        "swift_stage2",
        "bench",
        "faults",
        "--rows",
        "cut_reply",
        "--output",
        str(out),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads((out / "faults-transformers.json").read_text(encoding="utf-8"))
    assert found["left_at_the_end"] == 0
    (only,) = found["rows"]
    return dict(only)


def test_a_reply_cut_in_half_costs_no_sample(row: dict[str, Any]) -> None:
    samples = row["report"]["samples"]
    assert samples["trained"] > 0
    assert samples["drawn"] == samples["trained"] + samples["quarantined"] + samples["in_hand"]
    assert (samples["broken_rules"], samples["records_lost"], samples["quarantined"]) == ([], 0, 0)


def test_the_server_is_suspect_until_a_round_proves_it_and_then_b_runs(row: dict[str, Any]) -> None:
    report = row["report"]
    assert report["failed_posts"].get("lost", 0) >= 1  # with it all POSTs that are out are cut, on both ranks
    assert any("suspect" in warning for warning in report["warnings"])
    assert report["proofs_passed"] == ["checksums+canary"]
    assert report["steps_until_proof"] > 0
    assert report["b_again_at_step"] > report["steps_until_proof"]


def test_nothing_is_left_and_the_learner_ends_well(row: dict[str, Any]) -> None:
    assert row["exit_status"] == 0
    assert row["problems"] == []
    assert row["left"] == {"processes": [], "ports": [], "shared_memory": []}
