"""The process that preprocesses for one rank: ``python -m swift_stage2.channel_b.preprocessing_worker FD PARENT``.

Serves its rank over a socket that only these two hold, and ends with it: at the end of the stream, and by the kernel's
hand (``PR_SET_PDEATHSIG``) if it is in the middle of something when the rank dies. Issues no request and no collective.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what loads torch is imported once the rank's import path is known
    from swift_stage2.channel_b.preprocessing import Judged, Prepared, Refusal, ThreadPreprocessor
    from swift_stage2.channel_b.shared_batch import BatchOutline
    from swift_stage2.records import Pack, Rollout, SampleKey, Segment

_PR_SET_PDEATHSIG = 1

Interval = tuple[str, int, int]
"""Name, start and end of a stage, in nanoseconds of ``time.perf_counter_ns``: one clock for a machine's processes."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message. ``parts`` is a pickled ``(encoder, task, packing_length)``.

    ``plugins``: files of modules that the rank imported under names which no import path leads to.
    """

    import_path: tuple[str, ...]
    plugins: Mapping[str, str]
    parts: bytes
    is_traced: bool


@dataclass(frozen=True, slots=True)
class Prepare:
    """Asks what becomes of rollouts. Their segments come back without encodings, which stay here."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Judge:
    """Asks for the matches of rollouts."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class MakePack:
    """Asks for a pack of segments that wait here; its batch follows the reply as a file descriptor."""

    pack_id: str
    keys: tuple[SampleKey, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Segments that nobody will pack; not answered."""

    keys: tuple[SampleKey, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """``found`` is what was asked for, a ``Failure`` what stopped it."""

    found: Any
    intervals: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What was raised here, as text: its class need not exist on the other side."""

    summary: str
    trace: str


class _Parts(pickle.Unpickler):
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

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._span(name)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            self._closed.append((name, started, time.perf_counter_ns()))

    def take(self) -> tuple[Interval, ...]:
        closed, self._closed = self._closed, []
        return tuple(closed)


class Worker:
    """Answers one message after the other."""

    def __init__(self, preprocessor: ThreadPreprocessor) -> None:
        self._preprocessor = preprocessor
        self._segments: dict[SampleKey, Segment] = {}

    def prepare(self, rollouts: Sequence[Rollout]) -> list[Prepared | Refusal]:
        """Keeps what is heavy of every segment."""
        from swift_stage2.channel_b.preprocessing import Prepared

        replies: list[Prepared | Refusal] = []
        for prepared in self._preprocessor.prepare(rollouts):
            if isinstance(prepared, Prepared):
                segment = prepared.segment
                self._segments[segment.key] = segment
                prepared = replace(prepared, segment=replace(segment, encoding={}))
            replies.append(prepared)
        return replies

    def judge(self, rollouts: Sequence[Rollout]) -> list[Judged | Refusal]:
        """Keeps nothing."""
        return list(self._preprocessor.judge(rollouts))

    def pack(self, pack_id: str, keys: Sequence[SampleKey]) -> tuple[Pack, BatchOutline, int]:
        """A pack without its batch, the batch's outline, and the descriptor of its memory."""
        from swift_stage2.channel_b.shared_batch import write_batch

        pack = self._preprocessor.pack(pack_id, [self._segments.pop(key) for key in keys])
        outline, descriptor = write_batch(pack.batch)
        return replace(pack, batch={}), outline, descriptor

    def forget(self, keys: Sequence[SampleKey]) -> None:
        """Drops segments."""
        for key in keys:
            del self._segments[key]


def serve(channel: socket.socket, connection: Connection) -> None:
    """Answers until the rank closes its end. Both are of one socket: descriptors go out through the first."""
    intervals = _Intervals()
    try:
        worker = _set_up(connection.recv(), intervals)  # deadline: the rank's life
    except EOFError:
        return
    except Exception as error:  # told to the rank, which ends its run with it
        connection.send_bytes(pickle.dumps(Reply(_failure(error))))
        return
    connection.send_bytes(pickle.dumps(Reply(None)))
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
    encoder, task, packing_length = _Parts(setup).load()
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
        match message:
            case Prepare(rollouts):
                found: Any = worker.prepare(rollouts)
            case Judge(rollouts):
                found = worker.judge(rollouts)
            case MakePack(pack_id, keys):
                *found, descriptor = worker.pack(pack_id, keys)
            case Forget(keys):
                worker.forget(keys)
                return
            case _:
                raise TypeError(f"no message of this protocol: {message!r}")
        reply = pickle.dumps(Reply(found, intervals.take()))
    except Exception as error:  # told to the rank, which fails with it (after a Forget: when it asks next)
        if descriptor is not None:
            os.close(descriptor)
            descriptor = None
        reply = pickle.dumps(Reply(_failure(error), intervals.take()))
    connection.send_bytes(reply)
    if descriptor is not None:
        socket.send_fds(channel, [b"\0"], [descriptor])
        os.close(descriptor)


def _failure(error: Exception) -> Failure:
    return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


def _end_with(parent: int) -> None:
    """The kernel kills this process when its rank's main thread is gone, however that ended.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("the rank that started this process is gone")


def main(descriptor: int, parent: int) -> None:
    """Serves the rank ``parent`` over the socket ``descriptor``."""
    _end_with(parent)
    # A signal to the whole group asks the rank, which lets this process finish what the last steps need.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)  # whatever the template starts must not keep the socket open
    with socket.socket(fileno=descriptor) as channel, Connection(os.dup(descriptor)) as connection:
        channel.settimeout(None)
        try:
            serve(channel, connection)
        except (BrokenPipeError, ConnectionResetError):
            return  # the rank is gone


if __name__ == "__main__":
    # Not as __main__: messages must be of the same classes on both sides.
    from swift_stage2.channel_b import preprocessing_worker

    preprocessing_worker.main(int(sys.argv[1]), int(sys.argv[2]))
