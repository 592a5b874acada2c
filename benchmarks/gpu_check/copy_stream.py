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
from swift_stage2.weights.copy_stream import CopiesBesideTraining, Copy, CopyStream, CudaCopyStream
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.snapshot import Snapshot

_GIB = 1 << 30
_LEARNING_RATE = 0.01
_REPEATS = 10
_STEPS_AFTER = 4  # what is still on its way after the first step shows in these


class WholeCopyStream:
    """A ``CopyStream`` that queues everything at once: the first form, kept to be compared with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def copy(self, work: Callable[[Copy], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work(partial(torch.Tensor.copy_, non_blocking=True))
            self._copied.record(self._stream)

    def wait_before_write(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def is_done(self) -> bool:
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._copied.synchronize()


def copy_stream(context: Context) -> None:
    """Raises ``CheckFailed`` where an optimizer that steps right behind a copy writes into it."""
    model = make_model(TINY if context.rehearsal else QWEN25_VL_3B, context)
    _examine(context, "full", model)
    free_memory(context.device)
    _examine(context, "lora", with_lora(model))


def _examine(context: Context, name: str, model: Any) -> None:
    export = WeightExport(model)
    snapshot = Snapshot(export.manifest(), pinned=export.on_gpu)
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
    context.note(f"{name}_read_backs_of_text", _num_read_backs(context, partial(step, text)))
    _, seconds = timed(context.device, lambda: copy_all(export, snapshot))
    context.note(f"{name}_blocking_s", seconds)

    ways: dict[str, tuple[CopyStream | None, dict[str, torch.Tensor]]] = {"cpu": (None, picture)}
    if (gpu := export.gpu) is not None:
        large = CudaCopyStream(gpu, snapshot.num_bytes)
        large.piece_bytes = 256 << 20
        ways = {
            "d_staged": (CudaCopyStream(gpu, snapshot.num_bytes), picture),
            "c_pieces": (CudaCopyStream(gpu, snapshot.num_bytes, stages=False), picture),
            "a_whole": (WholeCopyStream(gpu), picture),
        }
        if name == "full":
            ways |= {
                "b_whole_text": (WholeCopyStream(gpu), text),
                "d_staged_text": (CudaCopyStream(gpu, snapshot.num_bytes), text),
                "d_staged_in_256_mib": (large, picture),
            }
    for way, (stream, batch) in ways.items():
        copies = CopiesBesideTraining(stream, on_step=lambda: None)
        step(batch)  # copies go beside training once an optimizer has passed their hook
        label = f"{name}_{way}"
        copy = partial(copies.copy, partial(copy_all, export, snapshot))
        _time(context, label, copies, copy, partial(step, batch))
        _require_whole(label, export, snapshot, copies, copy, optimizer)
        copies.close()
        if stream is not None:  # without the hook: shows that the optimizer comes soon enough to do harm
            before = _copied_once(export, snapshot)
            copy()
            optimizer.step()
            copies.wait()  # deadline: the stage's
            context.note(f"{label}_spoiled_without_hook", sums_of(snapshot) != before)
    optimizer.zero_grad()


def _time(
    context: Context,
    label: str,
    copies: CopiesBesideTraining,
    copy: Callable[[], None],
    step: Callable[[], None],
) -> None:
    """Notes medians over turns of a step, and of a copy with steps behind it; ratios are of the same turn."""
    device = context.device

    def steps(number: int, *, beside: bool) -> float:
        def work() -> None:
            if beside:
                copy()
            for _ in range(number):
                step()
            if device != "cpu":
                torch.cuda.current_stream().synchronize()

        copies.wait()  # deadline: the stage's
        return _seconds(device, work)

    alone, first, later, whole = [], [], [], []
    for turn in range(2 if context.rehearsal else _REPEATS):
        alone.append(steps(1, beside=False))
        first.append(steps(1, beside=True) / alone[-1])
        if turn > 2:
            continue
        plain = steps(_STEPS_AFTER, beside=False)
        later.append((steps(_STEPS_AFTER, beside=True) - plain) / plain * _STEPS_AFTER)
        copies.wait()  # deadline: the stage's
        whole.append(timed(device, lambda: (copy(), copies.wait()))[1])
    context.note(f"{label}_step_s", statistics.median(alone))
    context.note(f"{label}_alone_s", statistics.median(whole))
    context.note(f"{label}_ratio", statistics.median(first))
    context.note(f"{label}_ratio_most", max(first))
    context.note(f"{label}_extra_steps_in_{_STEPS_AFTER}", statistics.median(later))


def _seconds(device: str, work: Callable[[], None]) -> float:
    """Of ``work``, which waits itself for what it wants done; other streams may still be busy after it."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _num_read_backs(context: Context, step: Callable[[], None]) -> int:
    """How often a step waits for the device, by torch's own count."""
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
    label: str, export: WeightExport, snapshot: Snapshot, copies: CopiesBesideTraining,
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


def _copied_once(export: WeightExport, snapshot: Snapshot) -> dict[str, str]:
    """The sums of the weights now; leaves zeros, so that the next copy has to do something."""
    copy_all(export, snapshot)
    sums = sums_of(snapshot)
    snapshot.put((spec.name, torch.zeros(())) for spec in export.manifest())
    return sums
