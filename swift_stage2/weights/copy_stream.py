"""Copies weights out of a GPU on a stream of their own, beside training; what first writes parameters waits for them.

Every optimizer that derives from torch's calls torch's hook before it writes, whoever steps it: the loop, Accelerate's
wrapper, DeepSpeed's engine (inside ``backward``; its ZeRO-1 and 2 write a group's weights only after the optimizer in
them has stepped it), a hook of a backward pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swift_stage2.errors import WeightSyncError

logger = logging.getLogger(__name__)

_STAGED_AT_ONCE = 512 << 20  # bytes; what is merged for them is held as long
_PIECE_BYTES = 32 << 20
_PAUSE_CYCLES = 6_000_000  # of the GPU's clock, some 3 ms; a piece takes 0.7 ms
_SPARE = 0.25  # of the weights' bytes: what a copy on the device leaves free beyond training's own peak

Copy = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies its second tensor into its first, as ``torch.Tensor.copy_`` does, now or later."""
_Pair = tuple[torch.Tensor, torch.Tensor]


class CudaCopyStream:
    """The copies of one round at a time on one GPU, by way of a copy on the device.

    That takes milliseconds and leaves the weights free. From there the copy leaves in pieces with pauses between: what
    a forward pass reads back (Qwen-VL: sizes of its pictures, in every block) waits for what is queued in that
    direction. Without room on the device for a second copy the weights themselves are read at once, and an optimizer
    waits until they have left.
    """

    def __init__(self, device: torch.device, num_bytes: int, *, stages: bool = True) -> None:
        """``num_bytes``: of the weights. ``stages=False`` never takes memory of the device."""
        self._device = device
        self._num_bytes = num_bytes
        self._stages = stages
        self.piece_bytes, self.pause_cycles = _PIECE_BYTES, _PAUSE_CYCLES
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._free = self._copied  # behind it nothing reads the weights

    def copy(self, work: Callable[[Copy], None]) -> None:
        """Has ``work`` copy, by the function that it is given, weights as all that the calling thread has queued leaves
        them. Raises what ``work`` does; what it has copied until then is done all the same.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._free = self._copied
        try:
            # Memory that is taken here belongs to this stream: when Python lets go of it, it is used again only behind
            # the copy out of it.
            with torch.cuda.stream(self._stream):
                if not (self._stages and self._has_room() and self._stage(work)):
                    work(_queue)
        finally:
            self._copied.record(self._stream)

    def wait_before_write(self) -> None:
        """Lets all that the calling thread queues from now on follow the last read of the weights."""
        torch.cuda.current_stream(self._device).wait_event(self._free)

    def is_done(self) -> bool:
        """Whether the copies have ended, well or not; for any thread."""
        try:
            return bool(self._copied.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # ``wait`` says why

    def wait(self) -> None:
        """Returns when they have ended, however long that takes. Raises RuntimeError if the device has failed."""
        self._copied.synchronize()

    def _has_room(self) -> bool:
        """Whether a second copy of the weights fits beside the most that training, and earlier copies, held at once."""
        free, _ = torch.cuda.mem_get_info(self._device)
        most = torch.cuda.max_memory_allocated(self._device)
        room = free + torch.cuda.memory_reserved(self._device) - most
        return room >= self._num_bytes * (1 + _SPARE)

    def _stage(self, work: Callable[[Copy], None]) -> bool:
        """Copies on the device and queues the rest; False if that failed, for want of memory for instance."""
        pairs: list[_Pair] = []
        staged: list[_Pair] = []
        num_bytes = 0

        def add(target: torch.Tensor, source: torch.Tensor) -> None:
            nonlocal num_bytes
            pairs.append((target, source))
            num_bytes += source.nbytes
            if num_bytes >= _STAGED_AT_ONCE:
                flush()

        def flush() -> None:
            nonlocal num_bytes
            for run in _runs(pairs):
                flat = _flattened([source for _, source in run])
                staged.append((_whole(run[0][0], flat.numel()), flat))
            pairs.clear()
            num_bytes = 0

        try:
            work(add)
            flush()
        except (
            torch.OutOfMemoryError,
            WeightSyncError,
        ):  # the direct copy raises what is not for want of memory
            logger.warning("the weights' copy on the device failed; they leave without it", exc_info=True)
            return False
        self._staged.record(self._stream)
        self._free = self._staged
        for target, flat in staged:
            piece = self.piece_bytes // flat.element_size()
            for into, part in zip(target.split(piece), flat.split(piece), strict=True):  # type: ignore[no-untyped-call]
                _queue(into, part)
                torch.cuda._sleep(self.pause_cycles)  # type: ignore[no-untyped-call]
        return True


def _flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A copy of them, one behind the other. torch's own flattening of one tensor is a view of it."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).clone()
    flat: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def _whole(first: torch.Tensor, num_items: int) -> torch.Tensor:
    """So many items of its memory, from the first of ``first`` on."""
    return first.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), (num_items,), (1,))


def _queue(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _runs(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Pairs of one dtype whose targets lie one behind the other."""
    run: list[_Pair] = []
    end = 0
    for target, source in pairs:
        if run and (target.data_ptr() != end or source.dtype != run[0][1].dtype):
            yield run
            run = []
        run.append((target, source))
        end = target.data_ptr() + target.nbytes
    if run:
        yield run


class CopiesBesideTraining:
    """The copies of every round; each is waited for by the first optimizer that steps after it.

    Without a stream they are done before ``copy`` returns, as they are before an optimizer has been seen at the hook:
    one that never passes it (LOMO, which writes in the backward pass) would write into them.
    """

    def __init__(self, stream: CudaCopyStream | None, on_step: Callable[[], object]) -> None:
        """``on_step`` is called after that wait at every step of an optimizer on the main thread, if there is a stream.

        Backward passes on a GPU have threads of their own, in which optimizers may step as well.
        """
        self._stream = stream
        self._on_step = on_step
        self._has_stepped = self._is_awaited = False
        self._hook = register_optimizer_step_pre_hook(self._before_step) if stream is not None else None

    def copy(self, work: Callable[[Copy], None]) -> None:
        """Does ``work``, which copies weights. Raises as ``CudaCopyStream.copy`` and ``wait``."""
        if self._stream is None:
            work(torch.Tensor.copy_)
            return
        self._is_awaited = self._has_stepped
        self._stream.copy(work)
        if not self._has_stepped:
            self._stream.wait()  # deadline: the round's watch

    def is_done(self) -> bool:
        return self._stream is None or self._stream.is_done()

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.wait()  # deadline: the round's watch

    def close(self) -> None:
        """Waits for what is being copied; no optimizer is seen any more. May be called again."""
        if self._hook is not None:
            self._hook.remove()
        with suppress(RuntimeError):  # of a device that has failed, which training meets as well
            self.wait()  # deadline: the round's watch

    def _before_step(self, *_: Any) -> None:
        self._has_stepped = True
        if self._is_awaited and self._stream is not None:
            self._is_awaited = False
            self._stream.wait_before_write()
        if threading.current_thread() is threading.main_thread():
            self._on_step()
