"""Seconds and peak memory of work on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch

_GIB = 1 << 30

ResultT = TypeVar("ResultT")


def synchronise(device: str) -> None:
    """Waits until the device has done all that was queued."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def timed(device: str, work: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """Returns the result of ``work``, and its seconds with all that it queued."""
    synchronise(device)
    started = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - started


def free_memory(device: str) -> None:
    """Gives back what nobody holds any more, and starts a new peak."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: str) -> float:
    """The most that tensors held on the GPU since ``free_memory``, GiB; 0 on the CPU, where nothing counts it."""
    return 0.0 if device == "cpu" else torch.cuda.max_memory_allocated(device) / _GIB
