"""Stage *copy-stream*: a round's snapshot of the real shapes, copied beside training, by every way that was thought of.

What decides is how much longer a step takes for the copy: (copy + step) / step.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.device import free_memory, timed
from benchmarks.gpu_check.real_shapes import (
    QWEN25_VL_3B,
    TINY,
    copy_all,
    image_batch,
    make_model,
    sums_of,
    with_lora,
)
from benchmarks.gpu_check.stage import CheckFailed, Context
from swift_stage2.weights.copy_stream import CopiesBesideTraining, CudaCopyStream
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.snapshot import SnapshotFile

_LEARNING_RATE = 0.01
_REPEATS = 10


def copy_stream(context: Context) -> None:
    """Raises ``CheckFailed`` where an optimizer that steps right behind a copy writes into it."""
    model = make_model(TINY if context.rehearsal else QWEN25_VL_3B, context)
    _examine(context, "full", model)
    free_memory(context.device)
    _examine(context, "lora", with_lora(model))


def _examine(context: Context, name: str, model: Any) -> None:
    export = WeightExport(model)
    snapshot = SnapshotFile(export.manifest(), bucket_bytes=1 << 29, pinned=export.on_gpu)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=_LEARNING_RATE)
    picture = image_batch(model, context)
    length = picture["input_ids"].shape[1]
    text = {  # a step whose forward pass reads nothing back from the device
        "input_ids": picture["input_ids"].clamp(max=40),
        "labels": picture["labels"],
        "position_ids": torch.arange(length, device=context.device).expand(3, 1, length),
    }

    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()

    for batch in (picture, text):
        step(batch)  # the first one also loads kernels
    context.note(f"{name}_read_backs", _num_read_backs(context, partial(step, picture)))
    _, seconds = timed(context.device, lambda: copy_all(export, snapshot))
    context.note(f"{name}_blocking_s", seconds)

    def measure(
        way: str, batch: dict[str, torch.Tensor] = picture, *, stages: bool = True, checks: bool = False
    ) -> None:
        gpu = export.gpu
        stream = CudaCopyStream(gpu, snapshot.num_bytes, stages=stages) if gpu is not None else None
        copies = CopiesBesideTraining(stream, on_step=lambda: None)
        step(batch)  # copies go beside training once an optimizer has passed their hook
        copy = partial(copies.copy, partial(copy_all, export, snapshot))
        _time(context, f"{name}_{way}", copies, copy, partial(step, batch))
        if checks:
            _require_whole(f"{name}_{way}", export, snapshot, copies, copy, optimizer)
        copies.close()

    measure("staged", checks=True)
    if export.gpu is not None:
        measure("whole", stages=False, checks=True)
        measure("staged_text", text)
        measure("whole_text", text, stages=False)
    optimizer.zero_grad()


def _time(
    context: Context,
    label: str,
    copies: CopiesBesideTraining,
    copy: Callable[[], None],
    step: Callable[[], None],
) -> None:
    """Notes medians over turns of a step, and of a copy and a step, whose ratio is of the same turn."""
    alone, beside, ratios, queued, whole = [], [], [], [], []

    def copy_and_step() -> None:
        began = time.perf_counter()
        copy()
        queued.append(time.perf_counter() - began)
        step()

    for _ in range(2 if context.rehearsal else _REPEATS):
        alone.append(_until_stepped(context.device, step))
        began = time.perf_counter()
        beside.append(_until_stepped(context.device, copy_and_step))
        ratios.append(beside[-1] / alone[-1])
        copies.wait()  # deadline: the stage's
        whole.append(time.perf_counter() - began)
    context.note(f"{label}_step_s", statistics.median(alone))
    context.note(f"{label}_copy_and_step_s", statistics.median(beside))
    context.note(f"{label}_ratio", statistics.median(ratios))
    context.note(f"{label}_ratio_of_medians", statistics.median(beside) / statistics.median(alone))
    context.note(f"{label}_queued_s", statistics.median(queued))
    context.note(f"{label}_whole_s", statistics.median(whole))


def _until_stepped(device: str, work: Callable[[], None]) -> float:
    """Seconds until the training's stream has done ``work``; what copies beside it may go on."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began


def _num_read_backs(context: Context, step: Callable[[], None]) -> int:
    """Number of synchronizing CUDA calls in one step, as torch's sync debug mode counts them."""
    if context.rehearsal:
        return 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return len(told)


def _require_whole(
    label: str, export: WeightExport, snapshot: SnapshotFile, copies: CopiesBesideTraining,
    copy: Callable[[], None], optimizer: torch.optim.Optimizer,
) -> None:  # fmt: skip
    """Raises CheckFailed: a copy does not hold the weights that it began with."""
    before = _copied_once(export, snapshot)
    copy()
    optimizer.step()  # with the last gradients: no pass lies between
    copies.wait()  # deadline: the stage's
    if sums_of(snapshot) != before:
        raise CheckFailed(
            f"{label}: a copy beside training must hold the weights that it began with, it does not"
        )
    if _copied_once(export, snapshot) == before:
        raise CheckFailed(f"{label}: the optimizer must have changed the weights, it has not")


def _copied_once(export: WeightExport, snapshot: SnapshotFile) -> dict[str, str]:
    """The sums of the weights now; leaves zeros, so that the next copy has to do something."""
    copy_all(export, snapshot)
    sums = sums_of(snapshot)
    snapshot.put((spec.name, torch.zeros(())) for spec in export.manifest())
    return sums
