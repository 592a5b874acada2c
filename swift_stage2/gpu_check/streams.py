"""Stage *streams*: real sends of the stock transport to a peer that is late, and to one that never comes.

Training goes on beside them on the default stream, with allocations. On a GPU NCCL itself is made, used and aborted.
"""

from __future__ import annotations

import threading
import time

import torch

from swift_stage2.errors import CheckFailed, ServerFault
from swift_stage2.gpu_check.lone_nccl import LoneNccl
from swift_stage2.gpu_check.measuring import synchronise
from swift_stage2.gpu_check.stage import Context
from swift_stage2.gpu_check.stand_in_peer import StandInPeer
from swift_stage2.process.background import BackgroundCall
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.transport import StockTransport

_LATE_S = 1.0
_DEADLINE_S = 3.0
_MARGIN_S = 20.0
_BYTES = 64 << 20


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
        synchronise_default(device)
        steps += 1
        if time.monotonic() > started + _DEADLINE_S + _MARGIN_S:
            peer.destroy()
            raise CheckFailed("a send must end by its deadline, it did not")
    return sending.result_within(_MARGIN_S), time.monotonic() - started, steps


def synchronise_default(device: str) -> None:
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
