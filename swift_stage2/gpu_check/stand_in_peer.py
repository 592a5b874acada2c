"""The other end of a transfer, in this process: takes a broadcast when it is released, or never.

On a GPU the broadcast is a wait on the stream for a word in host memory, as NCCL's kernel waits for its peer; on the
CPU a wait of the calling thread, as gloo's. Offers what ``StockTransport`` uses of a communicator.
"""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from typing import Any

import torch

from swift_stage2.errors import CheckFailed

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ


class _Group:
    """A store and a barrier that are always there."""

    def __init__(self) -> None:
        self.store = self

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing here waits."""

    def barrier(self, timeout_s: float) -> None:
        """The only member is here."""


class StandInPeer:
    """A communicator whose single broadcast ends after ``release`` or ``destroy``."""

    rank = 0

    def __init__(self, device: str) -> None:
        self.group = _Group()
        self._released = threading.Event()
        self.aborted = False
        self._on_gpu = device != "cpu"
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=self._on_gpu)

    def broadcast(
        self, tensor: torch.Tensor, src: int, stream: Any = None, timeout_s: float | None = None
    ) -> None:
        """Queues the wait on ``stream``, or waits; raises RuntimeError as gloo does when the time is over."""
        if self._on_gpu:
            driver = ctypes.CDLL("libcuda.so.1")
            status = driver.cuStreamWaitValue32_v2(
                ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(self._word.data_ptr()),
                ctypes.c_uint32(1), ctypes.c_uint(_GEQ),
            )  # fmt: skip
            if status != 0:
                raise CheckFailed(f"the driver must let a stream wait for a word, got status={status}")
        elif not self._released.wait(timeout_s):
            raise RuntimeError("the peer did not take the broadcast in time")

    def release(self) -> None:
        """The peer takes what was sent."""
        self._word[0] = 1
        self._released.set()

    def destroy(self) -> None:
        """Stands in for NCCL's abort, under the name that vLLM calls."""
        self.aborted = True
        self.release()
