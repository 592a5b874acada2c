"""The fault bench is made of rows, their data, switches, what a transport commits, what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from detection_task import make_task

from benchmarks import benches
from benchmarks.faults import rows
from benchmarks.faults.bench import POISON_POSITION, write_poisonous_rows
from benchmarks.faults.commit import Switches
from benchmarks.faults.rows import ROWS
from benchmarks.faults.server import Held, kill_all, lasting_port, tree_of
from benchmarks.servers import BenchServers, ServerKind
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.dataset.picture import look_at
from swift_stage2.demo.demo_config import held_ports
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.warden import mapped_by


def test_every_row_is_offered_by_its_name() -> None:
    assert tuple(row.name for row in ROWS) == benches.ROWS
    assert len(set(benches.ROWS)) == len(ROWS)


def test_what_a_server_cannot_suffer_is_said_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "may_mount", lambda: True)
    kinds = (ServerKind.TRANSFORMERS, ServerKind.STOCK, ServerKind.VLLM)
    impossible = {kind: {row.name for row in ROWS if row.why_not(kind)} for kind in kinds}
    assert impossible == {
        ServerKind.TRANSFORMERS: {"kill_worker", "kill_engine_core"},
        ServerKind.STOCK: {"one_of_two", "rolling_installs", "disk_kill", "disk_full", "disk_torn"},
        ServerKind.VLLM: set(),
    }
    monkeypatch.setattr(rows, "may_mount", lambda: False)
    assert {row.name for row in ROWS if row.why_not(ServerKind.VLLM)} == {"disk_full"}


def test_the_poisonous_row_lies_where_the_stream_of_rank_zero_meets_it(tmp_path: Path) -> None:
    rows = write_dataset(tmp_path / "scenes", SceneKind.SHAPES, 2 * POISON_POSITION + 4, Split.TRAIN, 0)
    poisoned = write_poisonous_rows(rows)
    before, after = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (rows, poisoned)
    )
    changed = [index for index in range(len(before)) if before[index] != after[index]]
    drawn = SampleSource(after, make_task(), rank=0, world_size=2, seed=0).draw(POISON_POSITION + 1)
    assert changed == [drawn[-1].index]
    image = after[changed[0]]["images"][0]
    look_at(image)  # a check before a run finds nothing
    with pytest.raises((OSError, SyntaxError)):
        look_at(image, decode=True)


def test_a_servers_port_is_free_and_not_one_that_outgoing_connections_get() -> None:
    port = lasting_port()
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert port < lowest
    assert not held_ports((port,))


def test_a_wait_returns_what_it_waited_for_and_says_what_did_not_come(tmp_path: Path) -> None:
    found: list[int] = []
    servers = BenchServers(tmp_path)
    assert servers.wait_for(lambda: found, "a number", 60.0, step=lambda: found.append(7)) == [7]
    with pytest.raises(ChildFailed, match="a miracle: it did not happen within 0 s"):
        servers.wait_for(lambda: None, "a miracle", 0.0, step=lambda: None)


def test_a_switch_is_seen_by_another_process(tmp_path: Path) -> None:
    switches = Switches(tmp_path)
    assert switches.read("push") == ""
    code = f"from benchmarks.faults.commit import *; Switches({tmp_path!r}).set('push', 'zeros')"
    code = code.replace(repr(tmp_path), f"__import__('pathlib').Path({str(tmp_path)!r})")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert switches.wait("push", 0.0)
    assert switches.read("push") == "zeros"
    switches.clear("push", "never_set")
    assert not switches.wait("push", 0.0)


def test_waiting_for_a_switch_ends_when_it_is_set(tmp_path: Path) -> None:
    switches, found = Switches(tmp_path), []
    waiter = threading.Thread(target=lambda: found.append(switches.wait("held", 30.0)), daemon=True)
    waiter.start()
    switches.set("held")
    waiter.join(30.0)
    assert found == [True]
    switches.clear_all()
    assert switches.read("held") == ""


def test_shared_memory_that_outlives_its_process_is_found() -> None:
    code = (
        "from multiprocessing import shared_memory, resource_tracker; import sys\n"
        "block = shared_memory.SharedMemory(create=True, size=4096)\n"
        "resource_tracker.unregister(block._name, 'shared_memory')\n"
        "print(block.name, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        tree = tree_of(process.pid)
        held = mapped_by(tree)
        assert f"/dev/shm/{name}" in held
        assert f"/dev/shm/{name}" not in mapped_by([psutil.Process(os.getpid())])
        assert not kill_all(lambda: tree_of(process.pid)[:1] if process.poll() is None else [], 20)
    psutil.wait_procs(tree, timeout=60)
    left = Held(tree, held).left(patience_s=0.0)
    assert left.processes == ()
    assert f"/dev/shm/{name}" in left.shared_memory
    Path(f"/dev/shm/{name}").unlink()  # opened as shared memory it would leave a tracker process behind
    assert Held(tree, {f"/dev/shm/{name}"}).left(patience_s=0.0).num == 0
