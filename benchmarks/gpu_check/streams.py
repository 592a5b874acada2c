"""Stage *streams*: real sends of the stock transport to a peer that is late, and to one that never comes.

Training goes on beside them on the default stream, with allocations. The peer is a stand-in: on a GPU the broadcast is
a wait on the stream for a word in host memory, as NCCL's kernel waits for its peer; on the CPU a wait of the calling
thread, as gloo's. On a GPU NCCL itself is also made, used and aborted, with one rank.
"""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from benchmarks.gpu_check.measuring import synchronise
from benchmarks.gpu_check.stage import Context
from swift_stage2.errors import CheckFailed, ServerFault
from swift_stage2.process.background import BackgroundCall
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.transport import StockTransport

_LATE_S = 1.0
_DEADLINE_S = 3.0
_MARGIN_S = 20.0
_BYTES = 64 << 20
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_UINT8 = 1  # ncclUint8


def run(context: Context) -> None:
    """Raises ``CheckFailed`` where a send does not end as it must, or training stands still beside it."""
    note, device = context.figures.note, context.device
    flat = torch.ones(1 << 16 if context.rehearsal else _BYTES, dtype=torch.uint8, device=device)

    peer = StandInPeer(device)
    timer = threading.Timer(_LATE_S, peer.release)
    timer.start()
    error, seconds, steps = _send_beside_training(device, flat, peer)
    timer.join(timeout=_MARGIN_S)
    if error is not None or peer.aborted:
        raise CheckFailed(f"a late peer must be waited for, got {error!r}")
    note("late_send_s", seconds)
    note("steps_beside_late_send", steps)

    peer = StandInPeer(device)
    error, seconds, steps = _send_beside_training(device, flat, peer)
    if not isinstance(error, ServerFault):
        raise CheckFailed(f"a peer that never comes must be the server's fault, got {error!r}")
    if device != "cpu" and not peer.aborted:
        raise CheckFailed("a transfer past its deadline must be aborted, it was not")
    note("never_ending_send_s", seconds)
    note("steps_beside_never_ending_send", steps)
    if steps == 0:
        raise CheckFailed("training must go on beside a transfer that does not end, got no step")
    _use_nccl(context, flat)


def _send_beside_training(
    device: str, flat: torch.Tensor, peer: StandInPeer
) -> tuple[BaseException | None, float, int]:
    """Returns the end of the send, its seconds, and the steps that were taken meanwhile."""
    transport = StockTransport(torch.device(device))
    transport._communicator = peer  # in the place of what ``open`` makes with a server
    started = time.monotonic()

    def send() -> BaseException | None:
        try:
            transport.send(flat, Deadline(_DEADLINE_S))
        except ServerFault as fault:
            return fault
        return None

    sending = BackgroundCall(send, "the send under test")
    weights = torch.ones(256, 256, device=device, requires_grad=True)
    steps = 0
    while not sending.ended_within(0.0):
        torch.relu(weights @ weights.clone()).sum().backward()  # type: ignore[no-untyped-call]
        _synchronise_default(device)
        steps += 1
        if time.monotonic() > started + _DEADLINE_S + _MARGIN_S:
            peer.destroy()
            raise CheckFailed("a send must end by its deadline, it did not")
    return sending.result_within(_MARGIN_S), time.monotonic() - started, steps


def _synchronise_default(device: str) -> None:
    """Waits for the training stream alone; all streams of the device would include the one that hangs."""
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()


def _use_nccl(context: Context, flat: torch.Tensor) -> None:
    if context.rehearsal:
        context.figures.note("nccl", "left out: the rehearsal has no GPU")
        return
    communicator = LoneNccl(torch.device(context.device))
    context.figures.note("nccl", communicator.version)
    stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(context.device))
    communicator.broadcast(flat, src=0, stream=stream)
    synchronise(context.device)
    started = time.monotonic()
    communicator.destroy()
    context.figures.note("nccl_abort_s", time.monotonic() - started)
    if int(flat[-1]) != 1:
        raise CheckFailed("a broadcast of one rank must leave its bytes as they are")


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


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class LoneNccl:
    """One rank on ``device``, called as vLLM's communicator is, which may not be here; torch's own abort may hang."""

    rank = 0

    def __init__(self, device: torch.device) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._communicator = ctypes.c_void_p()
        number = ctypes.c_int()
        self._check(self._nccl.ncclGetVersion(ctypes.byref(number)))
        self.version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
        unique = _UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        with torch.cuda.device(device):
            self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._communicator), 1, unique, 0))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        """Queues a broadcast of a contiguous uint8 tensor on ``stream``."""
        memory = ctypes.c_void_p(tensor.data_ptr())
        self._check(
            self._nccl.ncclBroadcast(
                memory, memory, ctypes.c_size_t(tensor.numel()), _UINT8, src, self._communicator,
                ctypes.c_void_p(stream.cuda_stream),
            )
        )  # fmt: skip

    def destroy(self) -> None:
        """NCCL's abort."""
        self._check(self._nccl.ncclCommAbort(self._communicator))

    def _check(self, status: int) -> None:
        if status != 0:
            raise CheckFailed(f"NCCL failed: {self._nccl.ncclGetErrorString(status).decode()}")
