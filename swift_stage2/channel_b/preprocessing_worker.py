"""The process that preprocesses for one rank: ``python -m swift_stage2.channel_b.preprocessing_worker FD PARENT``.

Serves its rank over a socket that only these two hold, and ends with it: at the end of the stream, and by the kernel's
hand (``PR_SET_PDEATHSIG``) if it is in the middle of something when the rank dies. Issues no request and no collective.

A batch comes back in memory that both processes share, written once and never copied by the rank. It is an anonymous
file (memfd_create(2)): no name can outlive its processes, and the kernel takes it back with the last tensor in it.
"""

from __future__ import annotations

import importlib.util
import io
import math
import mmap
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from swift_stage2.runtime.worker import serve_rank

if TYPE_CHECKING:  # what loads torch is imported once the rank's import path is known
    import torch

    from swift_stage2.channel_b.preprocessing import Judged, Prepared, Refusal, ThreadPreprocessor
    from swift_stage2.records import Pack, Rollout, SampleKey, Segment

_ALIGNMENT = 64  # bytes; a cache line, and more than any element needs
_TENSOR = "tensor"
_MESSAGES = ("prepare", "judge", "compare", "pack", "forget")  # methods of a ``Worker``

Interval = tuple[str, int, int]
"""Name, start and end of a stage, in nanoseconds of ``time.perf_counter_ns``: one clock for a machine's processes."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message. Every later one is a tuple of a ``Worker``'s method and its arguments.

    ``parts`` is a pickled ``(encoder, task, packing_length)``; ``plugins`` are files of modules that the rank imported
    under names which no import path leads to.
    """

    import_path: tuple[str, ...]
    plugins: Mapping[str, str]
    parts: bytes
    is_traced: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """``found`` is what was asked for.

    ``failure`` is what stopped it and where, as text: the class of what was raised need not exist on the other side.
    """

    found: Any = None
    intervals: tuple[Interval, ...] = ()
    failure: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class BatchOutline:
    """A batch without its tensors' contents. Pickled: for the process that started this one, or was started by it."""

    pickled: bytes
    num_bytes: int


class Worker:
    """Answers a rank's messages: each method is one of them."""

    def __init__(self, preprocessor: ThreadPreprocessor) -> None:
        self._preprocessor = preprocessor
        self._segments: dict[SampleKey, Segment] = {}

    def prepare(self, rollouts: Sequence[Rollout]) -> list[Prepared | Refusal]:
        """Prepares rollouts. The encodings of their segments are large and stay in this process."""
        from swift_stage2.channel_b.preprocessing import Prepared

        replies: list[Prepared | Refusal] = []
        for prepared in self._preprocessor.prepare(rollouts):
            if isinstance(prepared, Prepared):
                segment = prepared.segment
                self._segments[segment.key] = segment
                prepared = replace(prepared, segment=replace(segment, encodings=()))
            replies.append(prepared)
        return replies

    def judge(self, rollouts: Sequence[Rollout]) -> list[Judged | Refusal]:
        return list(self._preprocessor.judge(rollouts))

    def compare(self, rollouts: Sequence[Rollout], with_target: bool) -> list[Judged | Refusal]:
        """The matches of rollouts that wait for others of their row. Keeps nothing."""
        return list(self._preprocessor.compare(rollouts, with_target=with_target))

    def pack(self, pack_id: str, keys: Sequence[SampleKey]) -> tuple[Pack, BatchOutline, int]:
        """A pack without its batch, the batch's outline, and the descriptor of its memory."""
        pack = self._preprocessor.pack(pack_id, [self._segments.pop(key) for key in keys])
        return replace(pack, batch={}), *write_batch(pack.batch)

    def forget(self, keys: Sequence[SampleKey]) -> None:
        """Drops segments that nobody will pack. Not answered."""
        for key in keys:
            del self._segments[key]


def write_batch(batch: Any) -> tuple[BatchOutline, int]:
    """Writes a batch's tensors into new shared memory; the caller owns the file descriptor.

    Raises:
        ValueError: a tensor is not a dense one in main memory.
        OSError: there is no memory for it.
    """
    file = io.BytesIO()
    pickler = _BatchPickler(file)
    pickler.dump(batch)
    descriptor = os.memfd_create("swift_stage2-batch", os.MFD_CLOEXEC)
    try:
        if pickler.num_bytes:
            _reserve(descriptor, pickler.num_bytes)
            memory = mmap.mmap(descriptor, pickler.num_bytes)
            for offset, tensor in pickler.placed:
                _view(memory, offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    except BaseException:
        os.close(descriptor)
        raise
    return BatchOutline(file.getvalue(), pickler.num_bytes), descriptor


def read_batch(outline: BatchOutline, descriptor: int) -> Any:
    """The batch, its tensors lying in the shared memory; takes over the file descriptor."""
    try:
        memory = mmap.mmap(descriptor, outline.num_bytes) if outline.num_bytes else None
    finally:
        os.close(descriptor)
    return _BatchUnpickler(io.BytesIO(outline.pickled), memory).load()


class _BatchPickler(pickle.Pickler):
    """Takes tensors out and gives each a place, wherever in the batch they are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.placed: list[tuple[int, torch.Tensor]] = []
        self.num_bytes = 0

    def persistent_id(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, torch.Tensor):
            return None
        if obj.device.type != "cpu" or obj.layout is not torch.strided:
            raise ValueError(
                f"a batch must hold dense tensors in main memory, got one of shape {tuple(obj.shape)} on {obj.device}, "
                f"{obj.layout}; let the template's collator return CPU tensors"
            )
        offset = self.num_bytes
        self.placed.append((offset, obj))
        self.num_bytes += -(-obj.numel() * obj.element_size() // _ALIGNMENT) * _ALIGNMENT
        return _TENSOR, offset, obj.dtype, tuple(obj.shape)


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap | None) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, pid: Any) -> torch.Tensor:
        _, offset, dtype, shape = pid
        return _view(self._memory, offset, dtype, shape)


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Memory that is not there is told now, not by SIGBUS when it is touched."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"a pack needs {num_bytes} bytes of main memory, got {error.strerror}; lower packing.packing_length or "
            "prefetch.queue_limit",
        ) from error


def _view(memory: mmap.mmap | None, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    count = math.prod(shape)
    if memory is None or count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


class _PartsUnpickler(pickle.Unpickler):
    """Imports a user's file as the rank did, once something in it is needed; other plugins stay unloaded."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(io.BytesIO(setup.parts))
        self._plugins = setup.plugins

    def find_class(self, module: str, name: str) -> Any:
        if module in self._plugins and module not in sys.modules:
            spec = importlib.util.spec_from_file_location(module, self._plugins[module])
            assert spec is not None, self._plugins[module]
            assert spec.loader is not None, self._plugins[module]
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
        return super().find_class(module, name)


class _Intervals:
    """Collects the stages of one message, where anybody wants to see them."""

    def __init__(self) -> None:
        self._closed: list[Interval] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            self._closed.append((name, started, time.perf_counter_ns()))

    def take(self) -> tuple[Interval, ...]:
        closed, self._closed = self._closed, []
        return tuple(closed)


def serve(channel: socket.socket, connection: Connection) -> None:
    """Answers until the rank closes its end. Both are of one socket: descriptors go out through the first."""
    intervals = _Intervals()
    try:
        worker = _set_up(connection.recv(), intervals)  # deadline: the rank's life
    except EOFError:
        return
    except Exception as error:  # told to the rank, which ends its run with it
        connection.send_bytes(pickle.dumps(Reply(failure=_text_of(error))))
        return
    connection.send_bytes(pickle.dumps(Reply()))
    while True:
        try:
            message = connection.recv()  # deadline: the rank's life
        except EOFError:
            return
        _answer(channel, connection, worker, message, intervals)


def _set_up(setup: Setup, intervals: _Intervals) -> Worker:
    sys.path[:] = setup.import_path
    from swift_stage2.compat import declare_operators

    declare_operators()  # before the template imports torchvision
    encoder, task, packing_length = _PartsUnpickler(setup).load()
    from swift_stage2.channel_b.preprocessing import ThreadPreprocessor

    encoder.attach_model()
    if setup.is_traced:
        encoder, task = encoder.with_span(intervals.span), task.with_span(intervals.span)
    return Worker(ThreadPreprocessor(encoder, task, packing_length=packing_length))


def _answer(
    channel: socket.socket, connection: Connection, worker: Worker, message: Any, intervals: _Intervals
) -> None:
    descriptor: int | None = None
    try:
        name, *arguments = message
        if name not in _MESSAGES:
            raise TypeError(f"no message of this protocol: {message!r}")
        found: Any = getattr(worker, name)(*arguments)
        if name == "forget":
            return
        if name == "pack":
            *found, descriptor = found
        reply = pickle.dumps(Reply(found, intervals.take()))
    except Exception as error:  # told to the rank, which fails with it (after a forget: when it asks next)
        if descriptor is not None:
            os.close(descriptor)
            descriptor = None
        reply = pickle.dumps(Reply(None, intervals.take(), _text_of(error)))
    connection.send_bytes(reply)
    if descriptor is not None:
        socket.send_fds(channel, [b"\0"], [descriptor])
        os.close(descriptor)


def _text_of(error: Exception) -> tuple[str, str]:
    return f"{type(error).__name__}: {error}", traceback.format_exc()


def main(descriptor: int, parent: int) -> None:
    with serve_rank(descriptor, parent) as (channel, connection):
        serve(channel, connection)


if __name__ == "__main__":
    # Not as __main__: messages must be of the same classes on both sides.
    from swift_stage2.channel_b import preprocessing_worker

    preprocessing_worker.main(int(sys.argv[1]), int(sys.argv[2]))
