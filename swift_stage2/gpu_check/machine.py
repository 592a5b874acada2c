"""Stage *machine*: the device and the versions that every other figure belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from swift_stage2.errors import CheckFailed
from swift_stage2.gpu_check.stage import Context

_GIB = 1 << 30
_PACKAGES = ("transformers", "accelerate", "peft", "ms-swift", "vllm", "deepspeed", "flash-attn")


def run(context: Context) -> None:
    """Notes device, memory, cores and versions.

    Raises:
        CheckFailed: there is no device, or it computes nothing.
    """
    note = context.figures.note
    note("python", platform.python_version())
    note("torch", torch.__version__)
    for package in _PACKAGES:
        try:
            note(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            note(package, "none")
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
