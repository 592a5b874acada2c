"""That memory really goes back to the system, and how often."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import psutil
import pytest

from swift_stage2.process.heap_trim import HeapTrim

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


def test_rounds_that_follow_each_other_closely_share_a_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trims = [100.0], list[int]()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trims.append))
    heap = HeapTrim(now_s=lambda: now[0])
    for seconds in (0.0, 9.0, 10.0, 11.0, 19.0, 20.0):
        now[0] = 100.0 + seconds
        heap.after_round()
    assert trims == [0, 0]
