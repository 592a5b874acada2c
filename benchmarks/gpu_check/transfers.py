"""Stages *streams* and *handover*: weights that leave the learner while it trains, sent or given to another process.

The peer of a send is a stand-in: on a GPU its broadcast is a wait on the stream for a word in host memory, as NCCL's
kernel waits for its peer; on the CPU a wait of the calling thread, as gloo's.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from benchmarks.gpu_check.device import synchronise, timed
from benchmarks.gpu_check.stage import CheckFailed, Context
from swift_stage2.errors import ServerFault
from swift_stage2.runtime.background import BackgroundCall
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.stock_transport import StockTransport
from swift_stage2.weights.tensors import checksum_tensor

_LATE_S = 1.0
_DEADLINE_S = 3.0
_MARGIN_S = 20.0
_SENT_BYTES = 64 << 20
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_UINT8 = 1  # ncclUint8


def streams(context: Context) -> None:
    """Raises ``CheckFailed`` where a send does not end as it must, or training stands still beside it."""
    device = context.device
    flat = torch.ones(1 << 16 if context.rehearsal else _SENT_BYTES, dtype=torch.uint8, device=device)

    peer = StandInPeer(device)
    timer = threading.Timer(_LATE_S, peer.release)
    timer.start()
    error = _send_beside_training(context, "late_send", flat, peer)
    timer.join(timeout=_MARGIN_S)
    if error is not None or peer.aborted:
        raise CheckFailed(f"a late peer must be waited for, got {error!r}")
    peer = StandInPeer(device)
    error = _send_beside_training(context, "never_ending_send", flat, peer)
    if error is None:
        raise CheckFailed("a peer that never comes must be the server's fault, the send ended well")
    if device != "cpu" and not peer.aborted:
        raise CheckFailed("a transfer past its deadline must be aborted, it was not")
    _use_nccl(context, flat)


def _send_beside_training(
    context: Context, name: str, flat: torch.Tensor, peer: StandInPeer
) -> ServerFault | None:
    """Returns how the send failed; notes its seconds and the steps that were taken meanwhile."""
    device = context.device
    transport = StockTransport(torch.device(device))
    transport._communicator = peer  # in the place of what ``open`` makes with a server
    started = time.monotonic()

    def send() -> ServerFault | None:
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
        if device != "cpu":  # the training stream alone; of all streams one hangs
            torch.cuda.current_stream(device).synchronize()
        steps += 1
        if time.monotonic() > started + _DEADLINE_S + _MARGIN_S:
            peer.destroy()
            raise CheckFailed("a send must end by its deadline, it did not")
    context.note(f"{name}_s", time.monotonic() - started)
    context.note(f"steps_beside_{name}", steps)
    if steps == 0:
        raise CheckFailed("training must go on beside a transfer that does not end, got no step")
    return sending.result_within(_MARGIN_S)


def _use_nccl(context: Context, flat: torch.Tensor) -> None:
    if context.rehearsal:
        context.note("nccl", "left out: the rehearsal has no GPU")
        return
    communicator = LoneNccl(torch.device(context.device))
    context.note("nccl", communicator.version)
    stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(context.device))
    communicator.broadcast(flat, src=0, stream=stream)
    synchronise(context.device)
    started = time.monotonic()
    communicator.destroy()
    context.note("nccl_abort_s", time.monotonic() - started)
    if int(flat[-1]) != 1:
        raise CheckFailed("a broadcast of one rank must leave its bytes as they are")


class _Group:
    """A store and a barrier that are always there."""

    def __init__(self) -> None:
        self.store = self

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing here waits."""

    def check(self, keys: list[str]) -> bool:
        """It answers."""
        return True

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


_READER_S = 60.0
_GIB = 1 << 30


def handover(context: Context) -> None:
    """Raises ``CheckFailed`` where what arrived is not what was sent."""
    num_bytes, device = 1 << 20 if context.rehearsal else _GIB, context.device
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)
    expected = checksum_tensor(weights)
    snapshot = torch.empty(weights.shape, dtype=torch.uint8, pin_memory=device != "cpu")
    snapshot.fill_(0)  # touched before anything is measured
    _, seconds = timed(device, lambda: snapshot.copy_(weights, non_blocking=True))
    context.note("snapshot_alone_gib_per_s", num_bytes / _GIB / seconds)
    if checksum_tensor(snapshot) != expected:
        raise CheckFailed("a snapshot must hold the weights, it does not")
    descriptor = os.memfd_create("gpu-check")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        file = _map(descriptor, num_bytes)
        file.fill_(0)  # touched before anything is measured
        _, seconds = timed("cpu", lambda: file.copy_(snapshot))
        context.note("memory_file_write_gib_per_s", num_bytes / _GIB / seconds)
        where = {"descriptor": descriptor, "num_bytes": num_bytes}
        _compare_elsewhere(context, "memory_file", where, expected, descriptor)
    finally:
        os.close(descriptor)


def _compare_elsewhere(
    context: Context, name: str, where: dict[str, Any], expected: str, *descriptors: int
) -> None:
    """A second process sums the bytes that ``where`` names. Raises ``CheckFailed`` unless they are as expected."""
    try:
        done = subprocess.run(  # ends and reaps it on every path
            [sys.executable, "-m", "benchmarks.gpu_check.transfers"],
            input=json.dumps(where), capture_output=True, text=True, timeout=_READER_S, pass_fds=descriptors,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"the reading process must end within {_READER_S:.0f} s, it did not") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise CheckFailed(f"the reading process ended with status {done.returncode}: {last}")
    seen = json.loads(done.stdout)
    context.note(f"{name}_open_s", seen["open_s"])
    context.note(f"{name}_sum_s", seen["sum_s"])
    if seen["checksum"] != expected:
        raise CheckFailed(f"{name}: the other process must see the same bytes, it does not")


def read() -> None:
    """The second process: prints the checksum of what stdin names and how long it took.

    stdin holds {"descriptor", "num_bytes"} of a memory file.
    """
    where = json.load(sys.stdin)
    tensor, open_s = timed("cpu", lambda: _map(where["descriptor"], where["num_bytes"]))
    checksum, sum_s = timed("cpu", lambda: checksum_tensor(tensor))
    print(json.dumps({"open_s": open_s, "sum_s": sum_s, "checksum": checksum}))


def _map(descriptor: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


if __name__ == "__main__":
    read()
