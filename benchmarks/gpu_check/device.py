"""The check's device: timing and memory on it, and stages *machine* and *arithmetic*.

They say what device every figure belongs to, and that it computes what the CPU does.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from benchmarks.gpu_check.stage import CheckFailed, Context
from benchmarks.gpu_check.wheels import installed_version
from swift_stage2.weights.tensors import all_finite, checksum_tensor

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


def used_gib(device: str) -> float:
    """GiB of the GPU that all processes hold now; 0 on the CPU."""
    if device == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / _GIB


_PACKAGES = ("transformers", "accelerate", "peft", "ms-swift", "vllm", "deepspeed", "flash-attn")
# Around the sizes at which the checksum changes its way: words of 4 bytes, rows of 1024 words, chunks of 4096 rows.
_ODD_SIZES = (0, 1, 2, 3, 5, 1023, 1025, 4095, 4097, 4_194_305)
_REAL_SHAPES = ((2048,), (3420, 1280), (11_008, 2048), (151_936, 2048))
_REHEARSED_SHAPES = ((96,), (256, 96), (1301, 128))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_REPEATS = 5


def machine(context: Context) -> None:
    """Notes device, memory, cores and versions. Raises CheckFailed: there is no device, or it computes nothing."""
    note = context.note
    note("python", platform.python_version())
    note("torch", torch.__version__)
    for package in _PACKAGES:
        note(package, installed_version(package) or "none")
    note("num_cores", len(os.sched_getaffinity(0)))
    if context.rehearsal:
        note("device", f"CPU, {platform.machine()}")
    elif torch.cuda.is_available():
        note("device", torch.cuda.get_device_name(0))
        note("num_devices", torch.cuda.device_count())
        free, total = torch.cuda.mem_get_info(0)
        note("cuda", str(torch.version.cuda))
        note("free_gib", free / _GIB)
        note("total_gib", total / _GIB)
    else:
        raise CheckFailed("torch finds no CUDA device")
    ones = torch.ones(64, 64, device=context.device)
    if float((ones @ ones).sum()) != 64.0**3:
        raise CheckFailed("a product of matrices of ones is wrong on the device")


def arithmetic(context: Context) -> None:
    """Raises ``CheckFailed`` at the first tensor whose answers differ."""
    device, note = context.device, context.note
    shapes = _REHEARSED_SHAPES if context.rehearsal else _REAL_SHAPES
    num_compared = 0
    for name, tensor in _tensors(shapes):
        on_device = tensor.to(device)
        views = [(tensor, on_device)]
        if tensor.numel() > 2 and tensor.dim() == 1:
            views += [(tensor[1:], on_device[1:]), (tensor[::2], on_device[::2])]
        for here, there in views:
            if checksum_tensor(here) != checksum_tensor(there):
                raise CheckFailed(f"a checksum on {device} differs from the CPU's: {name}")
            if all_finite(here) != all_finite(there):
                raise CheckFailed(f"a look for NaN on {device} differs from the CPU's: {name}")
            num_compared += 1
    note("num_compared", num_compared)
    largest = torch.randn(shapes[-1], device=device).to(torch.bfloat16)
    for name, look in (("checksum", checksum_tensor), ("all_finite", all_finite)):
        look(largest)
        _, seconds = timed(device, lambda look=look: [look(largest) for _ in range(_REPEATS)])  # type: ignore[misc]
        note(f"{name}_gib_per_s", _REPEATS * largest.numel() * largest.element_size() / _GIB / seconds)


def _tensors(shapes: tuple[tuple[int, ...], ...]) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        for size in (*((odd,) for odd in _ODD_SIZES), *shapes):
            values = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
            yield f"{dtype} {list(size)}", values.to(dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        largest = torch.finfo(dtype).max
        for bad in (float("nan"), float("inf"), -float("inf"), largest):
            tensor = torch.full((1025,), largest, dtype=dtype)  # its sum overflows, which is no fault
            tensor[-1] = bad
            yield f"{dtype} with {bad} last", tensor
