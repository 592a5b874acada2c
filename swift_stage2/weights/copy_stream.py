"""Copies weights on a GPU's stream of their own, beside training; whatever first writes parameters waits for them.

Every optimizer that derives from torch's calls torch's hook before it writes, whoever steps it: the loop, Accelerate's
wrapper, DeepSpeed's engine (inside ``backward``; its ZeRO-1 and 2 write a group's weights only after the optimizer in
them has stepped it), a hook of a backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class CopyStream(Protocol):
    """The copies of one round at a time."""

    def copy(self, work: Callable[[], None]) -> None:
        """Queues what ``work`` copies, behind all that the calling thread has queued to write the weights.

        Raises what ``work`` does; what it has queued until then is done all the same.
        """

    def wait_before_write(self) -> None:
        """Lets all that the calling thread queues from now on follow the copies; the thread itself goes on at once."""

    def is_done(self) -> bool:
        """Whether the copies have ended, well or not; for any thread."""

    def wait(self) -> None:
        """Returns when they have ended, however long that takes. Raises RuntimeError if the device has failed."""


class CudaCopyStream:
    """A ``CopyStream`` of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def copy(self, work: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            # Memory that a merge takes here belongs to this stream: when Python lets go of it, it is used again
            # only behind the copy out of it.
            with torch.cuda.stream(self._stream):
                work()
        finally:
            self._copied.record(self._stream)

    def wait_before_write(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def is_done(self) -> bool:
        try:
            return bool(self._copied.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # ``wait`` says why

    def wait(self) -> None:
        self._copied.synchronize()


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

    @property
    def on_stream(self) -> bool:
        """Whether copies are queued on a stream of their own."""
        return self._stream is not None

    def copy(self, work: Callable[[], None]) -> None:
        """Does ``work``, which copies weights. Raises as ``CopyStream.copy`` and ``wait``."""
        if self._stream is None:
            work()
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
