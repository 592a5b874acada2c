"""The only user of ``torch.distributed``: a control group over the ranks, a communicator for stock servers. As program
``python -m swift_stage2.collectives`` it is torchrun for the ranks of one machine, whose store listens on loopback.

The control group is gloo with a timeout of its own, so that a training collective and a decision can
never be confused or share a deadline; its calls run on the main thread, on all ranks alike. Bytes for our own
server travel without it: ``weights/stream.py``.
"""

from __future__ import annotations

import datetime
import json
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from swift_stage2.errors import Stage2Error, UserError
from swift_stage2.runtime.background import BackgroundCall
from swift_stage2.runtime.network import local_address_towards

logger = logging.getLogger(__name__)

_COMMUNICATOR_TIMEOUT_S = 300.0  # a server cannot be told of another; a push has a deadline of its own

_NOTE_TIMEOUT_S = 5.0

ResultT = TypeVar("ResultT")


class StoreNotes:
    """Short texts that ranks leave for each other outside of every collective; for any thread.

    For what a rank must tell others that may be stuck in a collective. Kept in the job's own store, which under
    torchrun outlives the ranks.
    """

    def __init__(self, store: Any = None) -> None:
        """Without a ``store`` the notes of a run with one process."""
        self._store = store
        self._own: dict[str, str] = {}

    def write(self, key: str, text: str) -> None:
        """Leaves a note. Raises RuntimeError when the store does not take it within a few seconds."""
        self._own[key] = text
        if self._store is not None:
            body = text.encode(errors="backslashreplace")
            BackgroundCall(lambda: self._store.set(key, body), "writing a note").result_within(
                _NOTE_TIMEOUT_S
            )

    def read(self, key: str) -> str | None:
        """The note, or None if nobody has left it. Raises RuntimeError as ``write`` does."""
        if key in self._own or self._store is None:
            return self._own.get(key)
        return BackgroundCall(lambda: self._ask(key), "reading a note").result_within(_NOTE_TIMEOUT_S)

    def has(self, key: str, *, otherwise: bool) -> bool:
        """Returns whether a rank has left the note, or ``otherwise`` if the store does not answer within seconds."""
        try:
            return self.read(key) is not None
        except RuntimeError as error:
            logger.warning("the job's store does not tell of a note: %s", error)
            return otherwise

    def _ask(self, key: str) -> str | None:
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None


class SingleRank:
    """The control group of a run with one process: every collective returns its own input."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.notes = StoreNotes()

    def reduce_max(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def broadcast(self, message: Any) -> Any:
        return json.loads(json.dumps(message))

    def gather(self, text: str) -> tuple[str, ...]:
        return (text,)

    def close(self) -> None:
        return None


class GlooControlGroup:
    """A gloo group over all ranks of the running job, on CPU, with a deadline for every call."""

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.notes = StoreNotes(PrefixStore("stage2_notes", _get_default_store()))

    def reduce_max(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise maximum over the ranks."""
        vector = torch.tensor(values, dtype=torch.int64)
        self.max_in_place(vector)
        return tuple(vector.tolist())

    def max_in_place(self, vector: torch.Tensor) -> None:
        """The collective of ``reduce_max`` alone, so that a bench can tell what the rest costs."""
        dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=self._group)

    def broadcast(self, message: Any) -> Any:
        """Rank 0's message, as JSON, on every rank; what other ranks pass is ignored."""
        body = json.dumps(message).encode() if self.rank == 0 else b""
        length = torch.tensor([len(body)], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        buffer = torch.frombuffer(bytearray(body or bytes(int(length.item()))), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self._group)
        return json.loads(bytes(buffer.numpy()))

    def gather(self, text: str) -> tuple[str, ...]:
        """Every rank's text, in rank order, on every rank."""
        body = text.encode(errors="backslashreplace")  # a file name may hold what UTF-8 cannot
        length = self.reduce_max([len(body)])[0]
        mine = torch.frombuffer(bytearray(body.ljust(length + 1, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self._group)
        return tuple(bytes(part.numpy()).rstrip(b"\0").decode() for part in parts)

    def close(self) -> None:
        """Leaves the group; later calls on it are errors."""
        dist.destroy_process_group(self._group)


ControlGroup = SingleRank | GlooControlGroup
"""Decisions that every rank takes alike. Vectors have the same length on every rank."""


def join_control_group(timeout_s: float) -> ControlGroup:
    """The control group of this job: gloo under torchrun, trivial in a single process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooControlGroup(timeout_s)
    return SingleRank()


def join_job(timeout_s: float) -> None:
    """Begins torch's own gloo group over the ranks that torchrun started, where no trainer does it."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))


def leave_job() -> None:
    """Ends torch's own groups, at the end of a run that went well.

    Left to the interpreter's end, gloo's threads may find it gone and abort a rank that has trained to its end.
    After a failure it must not be called: other ranks may be in a collective, and this would wait for them.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_on_all_ranks(control: ControlGroup, work: Callable[[], ResultT]) -> ResultT:
    """Returns what ``work`` returns here, once it has succeeded on every rank; so it is a barrier as well.

    Without it, a rank whose own files or data are bad would leave the others waiting in their next collective.

    Raises:
        Stage2Error, OSError: ``work`` raised it on this rank; on the others a ``UserError`` or ``Stage2Error``
            that names rank and cause.
    """
    failure: Exception | None = None
    try:
        result = work()
    except (Stage2Error, OSError) as error:
        failure = error
    failed, is_users = control.reduce_max([failure is not None, isinstance(failure, UserError)])
    if not failed:
        return result
    mine = f"rank {control.rank}: {type(failure).__name__}: {failure}" if failure else ""
    causes = "; ".join(cause for cause in control.gather(mine) if cause)
    if failure is not None:
        raise failure
    raise (UserError if is_users else Stage2Error)(causes)


class FatalNotes:
    """Why a rank ends in the middle of a collective, for the others, which wait in it; for any thread."""

    def __init__(self, control: ControlGroup) -> None:
        self._control = control

    def leave(self, why: str) -> None:
        """This rank's, in the place of what it has left before."""
        self._control.notes.write(_words_of(self._control.rank), f"rank {self._control.rank}: {why}")

    def leave_if_none(self, why: str) -> str:
        """This rank's, unless it has left some; returns what ``read`` does."""
        if self._control.notes.read(_words_of(self._control.rank)) is None:
            self.leave(why)
        return self.read()

    def read(self) -> str:
        """Those of all ranks; empty if none has left any."""
        said = (self._control.notes.read(_words_of(rank)) for rank in range(self._control.world_size))
        return "; ".join(words for words in said if words)


def _words_of(rank: int) -> str:
    return f"end of rank {rank}"


class GlooCommunicator:
    """vLLM's ``PyNcclCommunicator`` over gloo, for a stock server without a GPU and for the learner beside it.

    Takes what that takes, vLLM's ``StatelessProcessGroup`` (rank, world_size, a TCPStore), and offers what
    ms-swift uses of it. Gloo reports a lost peer as ``RuntimeError``; NCCL may not. Server and learner may be on two
    hosts: each side binds its own address on the route to the other.
    """

    def __init__(
        self, group: Any, device: object = "cpu", timeout_s: float = _COMMUNICATOR_TIMEOUT_S
    ) -> None:
        self.group = group
        self.rank: int = group.rank
        self.world_size: int = group.world_size
        self.device = torch.device("cpu")
        self._timeout = datetime.timedelta(seconds=timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=self._own_address())]
        store = PrefixStore("gloo", group.store)
        self._members: Any = ProcessGroupGloo(store, self.rank, self.world_size, options)

    def broadcast(
        self, tensor: torch.Tensor, src: int, stream: object = None, timeout_s: float | None = None
    ) -> None:
        """Fills ``tensor``, contiguous on the CPU, on every rank but ``src``. Blocks until done or lost.

        Ends within ``timeout_s``, by default the communicator's own.
        """
        timeout = self._timeout if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = src, timeout
        self._members.broadcast([tensor], options).wait(timeout)

    def destroy(self) -> None:
        """Lets the other members go, as vLLM's weight transfer asks at its end."""
        self._members = None

    def _own_address(self) -> str:
        """The highest rank routes to the store and leaves its address there; the others route to that.

        The store's own host would not do for them: it may be a wildcard, or a name that only the learner uses.
        The highest rank is the learner beside a stock server, and a worker in vLLM's own weight transfer.
        """
        store = PrefixStore("gloo_address", self.group.store)
        if self.rank < self.world_size - 1:
            return local_address_towards(bytes(store.get("learner")).decode(), self.group.store.port)
        address = local_address_towards(self.group.store.host, self.group.store.port)
        store.set("learner", address)
        return address


_LOOPBACK, _HOST = "loopback", "127.0.0.1"
_RENDEZVOUS_TIMEOUT_S = 900  # torchrun's own


class LoopbackRendezvous(StaticTCPRendezvous):
    """Of one agent, whose ranks are clients of its store.

    ``torchrun --standalone`` opens two stores, and PyTorch binds one to every address unless it is handed a socket.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener = socket.create_server((_HOST, 0))
        port, run_id = listener.getsockname()[1], parameters.run_id
        super().__init__(_HOST, port, rank=0, world_size=1, run_id=run_id, timeout=_RENDEZVOUS_TIMEOUT_S)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            _HOST, port, 1, is_master=True, timeout=self.timeout, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return _LOOPBACK


if __name__ == "__main__":
    rendezvous_handler_registry.register(_LOOPBACK, LoopbackRendezvous)
    nodes = [f"--rdzv-backend={_LOOPBACK}", f"--rdzv-endpoint={_HOST}", f"--rdzv-id={uuid4()}"]
    torchrun.main([*nodes, *sys.argv[1:]])
