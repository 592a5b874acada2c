"""The fault bench: its faults, their data and server, what is left behind; and short runs of it for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import benches
from benchmarks.faults.table import FAULTS
from benchmarks.servers import ServerKind

_DEADLINE_S = 1600


def test_every_fault_is_offered_and_what_a_server_cannot_suffer_is_said() -> None:
    assert tuple(FAULTS) == benches.FAULTS
    kinds = (ServerKind.TRANSFORMERS, ServerKind.STOCK, ServerKind.VLLM)
    impossible = {kind: {name for name, each in FAULTS.items() if kind in each.why_not} for kind in kinds}
    assert impossible == {
        ServerKind.TRANSFORMERS: set(),
        ServerKind.STOCK: {"kill_in_round", "kill_between_installs"},
        ServerKind.VLLM: set(),
    }


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.parametrize(
    "options",
    [
        "--faults kill_server kill_publisher",
        "--part kills --points 2",
        "--part outage --steps 10 --cycles 1",
        "--part soak --steps 220",
    ],
)
def test_a_short_run_loses_nothing_and_leaves_nothing(tmp_path: Path, options: str) -> None:
    """A process of its own, because the bench adopts orphans and takes signals."""
    bench = [sys.executable, "-m", "swift_stage2", "bench", "faults", *options.split()]
    ended = subprocess.run(
        [*bench, "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    page = (tmp_path / "out" / "faults.md").read_text(encoding="utf-8")
    assert "balanced" in page
    assert "Left by servers: nothing." in page
