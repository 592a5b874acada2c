"""Available main memory: the machine's, or the container's where that is less; what the C library keeps goes back."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from swift_stage2.errors import WeightSyncError
from swift_stage2.runtime.memory import HeapTrim, available_memory_bytes
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.tensors import snapshot_bytes
from swift_stage2.wire import TensorSpec


def cgroup(directory: Path, limit: str, used: int, caches: int) -> Path:
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {caches}\nactive_file 7\n")
    return directory


def test_a_container_has_what_its_limit_leaves_and_the_caches_it_may_drop(tmp_path: Path) -> None:
    assert available_memory_bytes(cgroup(tmp_path, "1000000", 900_000, 50_000)) == 150_000
    assert available_memory_bytes(cgroup(tmp_path, "1000", 2000, 0)) == 0


@pytest.mark.parametrize("limit", ["max", "not a number"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str) -> None:
    for place in (tmp_path / "no such place", cgroup(tmp_path, limit, 1, 1)):
        found = available_memory_bytes(place)
        assert abs(found - psutil.virtual_memory().available) < 2 << 30
        assert found > 100 << 20


def test_a_snapshot_that_main_memory_has_no_room_for_is_refused_with_both_numbers() -> None:
    huge = [TensorSpec("a", (1 << 30, 1 << 20), "bfloat16"), TensorSpec("b", (), "float32")]
    assert snapshot_bytes(huge) == (1 << 51) + 4
    with pytest.raises(
        WeightSyncError, match=r"got 2251799\.8 GB of weights and \d+\.\d GB available; give its"
    ):
        SnapshotFile(huge, bucket_bytes=1)


_CHUNK = 100 << 10  # below the size from which glibc maps memory by itself
_NUM_CHUNKS = 600


def test_what_a_thread_freed_goes_back_to_the_system() -> None:
    last: list[bytearray] = []

    def work() -> None:
        chunks = [bytearray(b"x") * _CHUNK for _ in range(_NUM_CHUNKS)]
        last.append(chunks[-1])  # what lies before it is not at the heap's end

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    process = psutil.Process()
    before = process.memory_full_info().uss
    times = iter((0.0, 10.0, 10.0))
    HeapTrim(lambda: next(times)).after_round()
    assert process.memory_full_info().uss < before - _CHUNK * _NUM_CHUNKS // 2
