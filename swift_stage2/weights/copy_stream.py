"""Copies weights out of a GPU on a stream of their own, beside training; what first writes parameters waits for them.

Every optimizer that derives from torch's calls torch's hook before it writes, whoever steps it: the loop, Accelerate's
wrapper, DeepSpeed's engine (inside ``backward``; its ZeRO-1 and 2 write a group's weights only after the optimizer in
them has stepped it), a hook of a backward pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_PIECE_BYTES = 32 << 20
_SPARE = 0.25  # of the weights' bytes: what a copy on the device leaves free beyond training's own peak

Copy = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies its second tensor into its first, as ``torch.Tensor.copy_`` does, now or later."""


class CopyStream(Protocol):
    """The copies of one round at a time."""

    def copy(self, work: Callable[[Copy], None]) -> None:
        """Has ``work`` copy weights by the function that it is given, as they are once all that the calling thread has
        queued has written them.

        Raises what ``work`` does, here or in ``wait``.
        """

    def wait_before_write(self) -> None:
        """Lets all that the calling thread queues from now on follow the last read of the weights."""

    def is_done(self) -> bool:
        """Whether the copies have ended, well or not; for any thread."""

    def wait(self) -> None:
        """Returns when they have ended, however long that takes. Raises what they failed with."""


class CudaCopyStream:
    """A ``CopyStream`` of one GPU by way of a copy on the device, which takes milliseconds and leaves the weights free.

    Without room for that it reads the weights themselves, and an optimizer waits until they have left. Both go to main
    memory in pieces, each queued when the one before has arrived: what a forward pass reads back (Qwen-VL: the sizes of
    its pictures) stands behind all that is queued in that direction, so that a whole snapshot would hold training up.
    """

    def __init__(self, device: torch.device, num_bytes: int, *, stages: bool = True) -> None:
        """``num_bytes``: of the weights. ``stages=False`` never copies on the device."""
        self._device = device
        self._num_bytes = num_bytes
        self._stages = stages
        self._has_staged = self._reads_weights = False
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.piece_bytes = _PIECE_BYTES
        self._num_queued = 0  # bytes
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def copy(self, work: Callable[[Copy], None]) -> None:
        self.wait()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._reads_weights = not (self._stages and self._has_room())
        if self._reads_weights:
            self._start(work)
            return
        self._has_staged = True
        staged: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

        def drain(copy: Copy) -> None:
            while staged:  # each is let go of as it leaves
                copy(*staged.popleft())

        def stage(target: torch.Tensor, source: torch.Tensor) -> None:
            try:
                staged.append((target, source.clone()))
            except torch.OutOfMemoryError:  # others have taken the room; what is staged leaves first
                drain(self._send)
                self._send(target, source)
                self._await_pieces()

        try:
            # Memory that is taken here belongs to this stream: it is used again only behind the copy out of it.
            with torch.cuda.stream(self._stream):
                work(stage)
        finally:
            self._staged.record(self._stream)
        self._start(drain)

    def wait_before_write(self) -> None:
        if self._reads_weights and self._thread is not None:
            self._thread.join()  # deadline: the round's watch
        else:
            torch.cuda.current_stream(self._device).wait_event(self._staged)

    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()  # deadline: the round's watch
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _has_room(self) -> bool:
        """Whether a second copy of the weights fits beside the most that training has held at once."""
        free, _ = torch.cuda.mem_get_info(self._device)
        most = torch.cuda.max_memory_allocated(self._device)  # an earlier copy's own included
        room = free + torch.cuda.memory_reserved(self._device) - most
        return room >= self._num_bytes * (_SPARE + (not self._has_staged))

    def _start(self, work: Callable[[Copy], None]) -> None:
        # A daemon: a device that hangs must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, args=(work,), name="stage2-copies", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Copy], None]) -> None:
        try:
            with torch.cuda.stream(self._stream):
                work(self._send)
                self._await_pieces()
        except Exception as error:
            self._failure = error

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        piece = max(1, self.piece_bytes // source.element_size())
        for into, part in zip(target.view(-1).split(piece), source.view(-1).split(piece), strict=True):
            into.copy_(part, non_blocking=True)
            self._num_queued += part.nbytes
            if self._num_queued >= self.piece_bytes:
                self._await_pieces()

    def _await_pieces(self) -> None:
        self._num_queued = 0
        self._arrived.record(self._stream)
        self._arrived.synchronize()


class CopiesBesideTraining:
    """The copies of every round; each is waited for by the first optimizer that steps after it.

    Without a stream they are done before ``copy`` returns, as they are before an optimizer has been seen at the hook:
    one that never passes it (LOMO, which writes in the backward pass) would write into them.
    """

    def __init__(self, stream: CopyStream | None, on_step: Callable[[], object]) -> None:
        """``on_step`` is called after that wait at every step of an optimizer on the main thread, if there is a stream.

        Backward passes on a GPU have threads of their own, in which optimizers may step as well.
        """
        self._stream = stream
        self._on_step = on_step
        self._has_stepped = self._is_awaited = False
        self._hook = register_optimizer_step_pre_hook(self._before_step) if stream is not None else None

    def copy(self, work: Callable[[Copy], None]) -> None:
        """Does ``work``, which copies weights. Raises as ``CopyStream.copy`` and ``wait``."""
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
        with suppress(Exception):  # of a device that has failed, which training meets as well
            self.wait()  # deadline: the round's watch

    def _before_step(self, *_: Any) -> None:
        self._has_stepped = True
        if self._is_awaited and self._stream is not None:
            self._is_awaited = False
            self._stream.wait_before_write()
        if threading.current_thread() is threading.main_thread():
            self._on_step()
