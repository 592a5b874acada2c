"""Stage *copy-stream*: a round's snapshot of the real shapes, copied beside training as the learner copies it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.device import free_memory, synchronise, timed
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
from swift_stage2.weights.snapshot import Snapshot

_GIB = 1 << 30
_LEARNING_RATE = 0.01


def copy_stream(context: Context) -> None:
    """Raises ``CheckFailed`` where an optimizer that steps right behind a copy writes into it."""
    model = make_model(TINY if context.rehearsal else QWEN25_VL_3B, context)
    _examine(context, "full", model)
    free_memory(context.device)
    _examine(context, "lora", with_lora(model))


def _examine(context: Context, name: str, model: Any) -> None:
    note, device = context.note, context.device
    export = WeightExport(model)
    snapshot = Snapshot(export.manifest(), pinned=export.on_gpu)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=_LEARNING_RATE)
    batch = image_batch(model, context)
    copies = CopiesBesideTraining(
        CudaCopyStream(export.gpu) if export.gpu is not None else None, on_step=lambda: None
    )
    copy = partial(copies.copy, partial(copy_all, export, snapshot, non_blocking=copies.on_stream))

    def copy_and_wait() -> None:
        copy()
        copies.wait()  # deadline: the stage's

    def step() -> None:
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()

    step()  # the first one also loads kernels; the copies below go beside training, since it passed their hook
    _, seconds = timed(device, lambda: copy_all(export, snapshot))
    note(f"{name}_blocking_s", seconds)
    _, seconds = timed(device, copy_and_wait)
    note(f"{name}_alone_gib_per_s", snapshot.num_bytes / _GIB / seconds)
    note(f"{name}_step_s", timed(device, step)[1])
    synchronise(device)
    began = time.perf_counter()
    copy()
    note(f"{name}_pause_s", time.perf_counter() - began)
    step()
    synchronise(device)
    note(f"{name}_pause_and_step_s", time.perf_counter() - began)

    before = _copied_once(export, snapshot)
    copy()
    optimizer.step()  # with the last gradients: no pass lies between
    copies.wait()  # deadline: the stage's
    if sums_of(snapshot) != before:
        raise CheckFailed(
            f"{name}: a copy beside training must hold the weights that it began with, it does not"
        )
    before, earlier = _copied_once(export, snapshot), before
    if before == earlier:
        raise CheckFailed(f"{name}: the optimizer must have changed the weights, it has not")
    copies.close()
    if copies.on_stream:  # without the hook, which shows that the optimizer comes soon enough to do harm
        copy()
        optimizer.step()
        copies.wait()  # deadline: the stage's
        note(f"{name}_spoiled_without_hook", sums_of(snapshot) != before)
    optimizer.zero_grad()


def _copied_once(export: WeightExport, snapshot: Snapshot) -> dict[str, str]:
    """The sums of the weights now; leaves zeros, so that the next copy has to do something."""
    copy_all(export, snapshot)
    sums = sums_of(snapshot)
    snapshot.put((spec.name, torch.zeros(())) for spec in export.manifest())
    return sums
