"""Receives one round's flattened buckets into memory, compares them with the manifest; touches no model.

A thread of its own waits for the learner, then fills one buffer per announced bucket, in order.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swift_stage2.errors import ProtocolError, RoundFailed, RoundRefused
from swift_stage2.rollout_server.staging import StagingBuffers, typed_view
from swift_stage2.weights.stream import WeightListener, WeightStream
from swift_stage2.weights.tensors import all_finite, num_bytes, torch_dtype
from swift_stage2.wire import RefusalReason, TensorSpec, optional_integer

if TYPE_CHECKING:
    from swift_stage2.rollout_server.mapped_snapshot import MappedSnapshot

_GIVEN_UP_POLL_S = 0.25
ENDED = "the round has ended"
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One tensor in a bucket; ``start`` and ``end`` are byte offsets."""

    spec: TensorSpec
    start: int
    end: int

    @classmethod
    def from_json(cls, item: Any) -> BucketEntry:
        """Raises ProtocolError unless it is a tensor's spec with offsets."""
        spec = TensorSpec.from_json(item)
        start, end = item.get("start_idx"), item.get("end_idx")
        if not isinstance(start, int) or not isinstance(end, int):
            raise ProtocolError(f"start_idx and end_idx must be byte offsets, got {start!r} and {end!r}")
        return cls(spec, start, end)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of one broadcast: entries that fill ``num_bytes`` without a gap.

    ``offset`` is the byte of a learner's memory file at which it begins, None if it comes by a stream.
    """

    entries: tuple[BucketEntry, ...]
    num_bytes: int
    offset: int | None = None

    @classmethod
    def from_json(cls, body: Any) -> Bucket:
        """The body of ``/update_flattened_params/``. Raises ProtocolError for a layout that has no meaning."""
        metadatas = body.get("metadatas") if isinstance(body, dict) else None
        if not isinstance(metadatas, list):
            raise ProtocolError("update_flattened_params takes {metadatas: [...]}")
        return cls.from_entries([BucketEntry.from_json(item) for item in metadatas], _offset(body))

    @classmethod
    def of_one(cls, body: Any) -> Bucket:
        """The body of ``/update_named_param/``. Raises ProtocolError."""
        spec = TensorSpec.from_json(body)
        return cls.from_entries([BucketEntry(spec, 0, num_bytes(spec))], _offset(body))

    @classmethod
    def from_entries(cls, entries: Sequence[BucketEntry], offset: int | None = None) -> Bucket:
        """Raises ProtocolError for no entry, a gap or overlap, or a length that is not shape times item size."""
        if not entries:
            raise ProtocolError("a bucket must hold at least one tensor, got metadatas=[]")
        position = 0
        for entry in entries:
            size = num_bytes(entry.spec)
            if entry.start != position or entry.end - entry.start != size:
                raise ProtocolError(
                    f"tensors of a bucket must follow each other byte by byte, got name={entry.spec.name} "
                    f"start_idx={entry.start} end_idx={entry.end}, expected {position} to {position + size}"
                )
            position = entry.end
        return cls(tuple(entries), position, offset)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Its tensors by name, where they lie in ``flat``, which begins with them."""
        return {
            spec.name: typed_view(flat[entry.start : entry.end], torch_dtype(spec.dtype), spec.shape)
            for entry in self.entries
            for spec in (entry.spec,)
        }


def _offset(body: Mapping[str, Any]) -> int | None:
    offset = optional_integer(body, "offset")
    if offset is not None and offset < 0:
        raise ProtocolError(f"offset must be a byte of the memory file, got offset={offset}")
    return offset


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """Tensors that arrived, by name (views of the buffers), and names of those with NaN or infinity.

    ``snapshot`` is the learner's memory that they are views of, None if they were received. ``sums`` are the tensors'
    checksums where they are known.
    """

    tensors: dict[str, torch.Tensor]
    non_finite: tuple[str, ...]
    snapshot: MappedSnapshot | None = None
    sums: Mapping[str, str] | None = None


class WeightReceiver:
    """The weights of one round. ``start``, any number of ``expect``, ``collect``, ``close``."""

    def __init__(self, host: str, port: int, timeout_s: float, staging: StagingBuffers) -> None:
        self._host, self._port = host, port
        self._staging = staging
        self._end = time.monotonic() + timeout_s
        self._changed = threading.Condition()
        self._expected: list[Bucket] = []
        self._num_received = 0
        self._closed = self._ended = False
        self._failure: str | None = None
        self._open: WeightListener | WeightStream | None = None
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)

    def start(self) -> str:
        """Listens, and returns the secret that the learner must present there.

        Raises:
            RoundFailed: the address cannot be listened on, or ``close`` was called.
        """
        try:
            listener = WeightListener(self._host, self._port)
        except (OSError, OverflowError) as error:
            self._failure = f"{type(error).__name__}: {error}"
            is_elsewhere = (
                isinstance(error, socket.gaierror) or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL
            )
            remedy = "choose a free group_port"
            if is_elsewhere:
                remedy = "start the server with a --group-bind that is an address of its machine"
            raise RoundFailed(
                f"the server cannot listen for weights on {self._host}:{self._port}: {self._failure}; {remedy}"
            ) from error
        self._own(listener)
        self._thread.start()
        return listener.secret

    def expect(self, bucket: Bucket) -> None:
        """Announces the next broadcast. Raises RoundFailed when the learner is lost or the round has ended."""
        with self._changed:
            if self._failure or self._closed:
                raise RoundFailed(self._failure or ENDED)
            self._expected.append(bucket)
            self._changed.notify_all()

    def collect(self, timeout_s: float, given_up: threading.Event) -> ReceivedWeights:
        """Everything that was announced, once it has arrived.

        Raises:
            RoundFailed: the learner was lost, the time ran out or ``given_up`` was set; names how many buckets had
                arrived.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while (left_s := end - time.monotonic()) > 0 and not given_up.is_set():
                if self._changed.wait_for(
                    lambda: self._num_received == len(self._expected) or self._ended,
                    min(left_s, _GIVEN_UP_POLL_S),
                ):
                    break
            num_received, buckets = self._num_received, list(self._expected)
            failure = "the caller has gone" if given_up.is_set() else self._failure
        if num_received < len(buckets) or given_up.is_set():
            cause = failure or f"timeout_s={timeout_s:.1f} is over"
            raise RoundFailed(f"{num_received} of {len(buckets)} buckets arrived: {cause}")
        self._staging.trim(len(buckets))
        return describe(
            (bucket, self._staging.buffer(index, bucket.num_bytes)) for index, bucket in enumerate(buckets)
        )

    def close(self) -> None:
        """Frees the port and ends the thread, also in the middle of a transfer. May be called again."""
        with self._changed:
            self._closed = True
            held = self._open
            self._changed.notify_all()
        if held is not None:
            held.close()

    @property
    def failed(self) -> bool:
        """True once the learner did not come or was lost."""
        return self._failure is not None

    def join(self, timeout_s: float) -> bool:
        """True once the thread has ended and the port is free."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            assert isinstance(self._open, WeightListener)
            stream = self._open.accept(self._end - time.monotonic())
            self._own(stream)
            while (bucket := self._next_bucket()) is not None:
                memory = self._staging.buffer(self._num_received, bucket.num_bytes)
                stream.receive(memory, self._end - time.monotonic())
                with self._changed:
                    self._num_received += 1
                    self._changed.notify_all()
        except Exception as error:  # top of the thread; told by expect and collect
            cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._failure = ENDED if self._closed else cause
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self.close()

    def _own(self, held: WeightListener | WeightStream) -> None:
        with self._changed:
            self._open = held
            closed = self._closed
        if closed:
            held.close()
            raise RoundFailed(ENDED)

    def _next_bucket(self) -> Bucket | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._num_received < len(self._expected),
                max(0.0, self._end - time.monotonic()),
            )
            if self._closed or self._num_received == len(self._expected):
                return None
            return self._expected[self._num_received]


def describe(
    buckets: Iterable[tuple[Bucket, torch.Tensor]], snapshot: MappedSnapshot | None = None
) -> ReceivedWeights:
    """All tensors of buckets and their bytes."""
    tensors = {name: view for bucket, flat in buckets for name, view in bucket.views(flat).items()}
    non_finite = tuple(name for name, tensor in tensors.items() if not all_finite(tensor))
    return ReceivedWeights(tensors, non_finite, snapshot)


def compare_manifests(own: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> None:
    """Raises RoundRefused, with up to five differences, unless both hold the same tensors in any order."""
    here = {spec.name: spec for spec in own}
    there = {spec.name: spec for spec in theirs}
    differences = [
        f"{name}: server {_shown(here.get(name))}, learner {_shown(there.get(name))}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if differences:
        raise RoundRefused(
            RefusalReason.MANIFEST_DIFFERS,
            f"a round must bring the model's own tensors, got num_differences={len(differences)}: "
            f"{'; '.join(differences[:_MAX_SHOWN])}; serve the model that is trained",
        )


def compare_bucket(manifest: Sequence[TensorSpec], bucket: Bucket, announced: set[str]) -> None:
    """Adds the bucket's tensors to those that the round has ``announced``: all together are one manifest at most.

    Raises RoundFailed for a tensor that the manifest does not hold with that shape and dtype, or that comes again.
    """
    known = {spec.name: spec for spec in manifest}
    for entry in bucket.entries:
        if entry.spec.name in announced:
            raise RoundFailed(f"a round must announce every tensor once, got {entry.spec.name} again")
        announced.add(entry.spec.name)
        if known.get(entry.spec.name) != entry.spec:
            raise RoundFailed(
                f"a bucket must hold tensors of the round's manifest, got {entry.spec.name} "
                f"{_shown(entry.spec)}, manifest {_shown(known.get(entry.spec.name))}"
            )


def require_all(manifest: Sequence[TensorSpec], received: ReceivedWeights) -> None:
    """Raises RoundFailed unless every tensor of the manifest has arrived."""
    missing = [spec.name for spec in manifest if spec.name not in received.tensors]
    if missing:
        raise RoundFailed(
            f"every tensor of the manifest must arrive, got num_missing={len(missing)}: "
            f"{', '.join(missing[:_MAX_SHOWN])}"
        )


def _shown(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"
