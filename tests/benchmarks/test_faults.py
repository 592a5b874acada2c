"""The fault bench: its faults, their data and server, what is left behind; and short runs of it for real."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks import benches
from benchmarks.faults.kills import newest_whole_checkpoint
from benchmarks.faults.leftovers import stopped
from benchmarks.faults.server import lasting_port
from benchmarks.faults.table import FAULTS
from benchmarks.servers import ServerKind
from swift_stage2.demo.demo_config import held_ports

_DEADLINE_S = 1600


def test_every_fault_is_offered_and_what_a_server_cannot_suffer_is_said() -> None:
    assert tuple(FAULTS) == benches.FAULTS
    kinds = (ServerKind.TRANSFORMERS, ServerKind.STOCK, ServerKind.VLLM)
    impossible = {kind: {name for name, each in FAULTS.items() if kind in each.why_not} for kind in kinds}
    assert impossible == {
        ServerKind.TRANSFORMERS: set(),
        ServerKind.STOCK: {"kill_in_round"},
        ServerKind.VLLM: set(),
    }


def test_a_servers_port_is_free_and_not_one_that_outgoing_connections_get() -> None:
    port = lasting_port()
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert port < lowest
    assert not held_ports((port,))


def test_only_a_checkpoint_that_was_written_to_its_end_is_resumed(tmp_path: Path) -> None:
    assert newest_whole_checkpoint(tmp_path) is None
    for name in ("checkpoint-5", "checkpoint-10", "checkpoint-15"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    for name in ("checkpoint-5", "checkpoint-10"):
        (tmp_path / name / "trainer_state.json").touch()
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_stopped_process_runs_again_also_when_the_block_raises() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        with suppress(ValueError), stopped([psutil.Process(child.pid)]):
            assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
            raise ValueError("no luck")
        assert os.WIFCONTINUED(os.waitpid(child.pid, os.WCONTINUED)[1])


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.parametrize(
    "options",
    [
        "--faults kill_server kill_courier",
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
