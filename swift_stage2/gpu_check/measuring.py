"""Seconds and peak memory of work on a device, and a device whose memory runs out on purpose."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

_GIB = 1 << 30
_BALLAST_BYTES = 1 << 20
_MOST_BALLAST = 4096

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


@contextmanager
def starved(device: str) -> Iterator[None]:
    """A context in which this process gets no more memory on the device: a limit, and all below it taken."""
    if device == "cpu":
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + 4 * _BALLAST_BYTES, before[1]))
    else:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
    ballast: list[torch.Tensor] = []
    try:
        try:
            while len(ballast) < _MOST_BALLAST:
                ballast.append(torch.empty(_BALLAST_BYTES, dtype=torch.uint8, device=device))
        except RuntimeError:
            pass  # that is what was wanted
        yield
    finally:
        ballast.clear()
        if device == "cpu":
            resource.setrlimit(resource.RLIMIT_AS, before)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
