"""Reads a round's weights from a directory that its learner has written, below the server's ``--weights-root``.

Whoever may call the server names the directory. So it is one name in the root, no link is followed, and its manifest
must be that of the open round. Nothing is mapped or unpickled: bytes are read into the round's buffers, and only those
with the manifest's checksums are handed on. A file that is cut or removed meanwhile is the round's error alone.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch

from swift_stage2.errors import ProtocolError, RoundFailed
from swift_stage2.rollout_server.staging import StagingBuffers
from swift_stage2.rollout_server.weight_receiver import ENDED, Bucket, ReceivedWeights
from swift_stage2.weights.disk_manifest import MANIFEST, DiskManifest
from swift_stage2.weights.tensors import all_finite, checksums_by_name, num_bytes, torch_dtype
from swift_stage2.wire import RoundRequest, TensorSpec, integer_list, mapping, parse_json

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_MAX_SHOWN = 3
_MOST_DESCRIBED_BYTES = 256 << 20  # a manifest, or a shard's header
_READ_BYTES = 64 << 20  # between two looks at whether anybody still wants it
_LENGTH_BYTES = 8  # of the length of a header; the format is safetensors


class DiskWeights:
    """Stands in the place of a ``WeightReceiver``: what is expected lies in the directory."""

    failed = False

    def __init__(self, root: Path, name: str, request: RoundRequest, staging: StagingBuffers) -> None:
        """Raises RoundFailed: no directory of the root, not this round's, or not with its tensors."""
        self._root, self._name = root, name
        self._staging = staging
        self._buckets: list[Bucket] = []
        self._closed = threading.Event()
        self._reading = threading.Lock()  # held while the buffers are written
        try:
            with _directory(root, name) as directory, _file(directory, MANIFEST) as file:
                size = min(os.fstat(file).st_size, _MOST_DESCRIBED_BYTES)
                self._manifest = DiskManifest.parse(bytes(_read(file, bytearray(size), 0)))
            _compare(self._manifest, request)
        except (OSError, ProtocolError) as error:
            raise RoundFailed(f"{self._where} does not hold this round's weights: {error}") from error
        self._specs = {spec.name: spec for spec in self._manifest.tensors}

    def expect(self, bucket: Bucket) -> None:
        """Notes a bucket, in the dtypes of the engine. Raises RoundFailed when the round has ended."""
        if self._closed.is_set():
            raise RoundFailed(ENDED)
        self._buckets.append(bucket)

    def collect(self, timeout_s: float, given_up: threading.Event) -> ReceivedWeights:
        """All that was announced, read, compared with its checksums, and cast to the engine's dtypes.

        Raises:
            RoundFailed: a shard is missing, cut or damaged, the time ran out, ``given_up`` was set, or the round ended.
        """
        end = time.monotonic() + timeout_s

        def require_wanted() -> None:
            if self._closed.is_set() or given_up.is_set() or time.monotonic() > end:
                why = ENDED if self._closed.is_set() else f"timeout_s={timeout_s:.1f} is over"
                raise RoundFailed("the caller has gone" if given_up.is_set() else why)

        tensors: dict[str, torch.Tensor] = {}
        sums: dict[str, str] = {}
        with self._reading:
            for index, bucket in enumerate(self._buckets):
                require_wanted()
                flat = self._staging.buffer(index, bucket.num_bytes)
                views = bucket.views(flat)
                try:
                    sums |= self._fill(views, require_wanted)
                except (OSError, ProtocolError) as error:
                    raise RoundFailed(f"{self._where} cannot be read: {error}") from error
                tensors |= views
            self._staging.trim(len(self._buckets))
        non_finite = tuple(name for name, tensor in tensors.items() if not all_finite(tensor))
        return ReceivedWeights(tensors, non_finite, sums=sums)

    def close(self) -> None:
        """Ends its use; who reads hears of it soon. May be called again."""
        self._closed.set()

    def join(self, timeout_s: float) -> bool:
        """True once nobody writes the buffers any more."""
        is_free = self._reading.acquire(timeout=timeout_s)
        if is_free:
            self._reading.release()
        return is_free

    @property
    def _where(self) -> str:
        return f"the directory {shown(self._name)} of --weights-root {self._root}"

    def _fill(
        self, views: Mapping[str, torch.Tensor], require_wanted: Callable[[], None]
    ) -> Mapping[str, str]:
        """Reads into ``views``, which may have other dtypes, and returns the sums of what they hold then."""
        given = {
            name: view
            if view.dtype is (dtype := torch_dtype(self._specs[name].dtype))
            else torch.empty(view.shape, dtype=dtype)
            for name, view in views.items()
        }
        with _directory(self._root, self._name) as directory:
            for shard in dict.fromkeys(self._manifest.shards[name] for name in given):
                with _file(directory, shard) as file:
                    start, entries = _header(file, shard)
                    for name in (name for name in given if self._manifest.shards[name] == shard):
                        at = start + _place(entries.get(name), self._specs[name])
                        memory = given[name].reshape(-1).view(torch.uint8).numpy()
                        _read(file, memory, at, require_wanted, what=f"{name} in {shard}")
        sums = checksums_by_name(given)
        wrong = [name for name, each in sums.items() if each != self._manifest.checksums[name]]
        if wrong:
            raise RoundFailed(
                f"{self._where} must hold tensors with its manifest's checksums, got num_differing={len(wrong)}: "
                f"{', '.join(f'{name} in {self._manifest.shards[name]}' for name in wrong[:_MAX_SHOWN])}"
            )
        cast = [name for name, view in views.items() if view is not given[name]]
        for name in cast:
            views[name].copy_(given[name])
        return sums | checksums_by_name({name: views[name] for name in cast})


def _compare(manifest: DiskManifest, request: RoundRequest) -> None:
    """Raises ProtocolError unless it is of that round, with its names and shapes, in dtypes that there are."""
    if (manifest.run_id, manifest.round_id) != (request.run_id, request.round_id):
        raise ProtocolError(
            f"its manifest must be of run {request.run_id}, round {request.round_id}, got "
            f"run_id={shown(manifest.run_id)} round_id={shown(manifest.round_id)}"
        )
    theirs = {spec.name: spec.shape for spec in manifest.tensors}
    wanted = {spec.name: spec.shape for spec in request.manifest}
    wrong = sorted(name for name in theirs.keys() | wanted.keys() if theirs.get(name) != wanted.get(name))
    if wrong:
        raise ProtocolError(
            f"its manifest must hold the round's tensors, got num_differences={len(wrong)}: "
            f"{', '.join(wrong[:_MAX_SHOWN])}"
        )
    for spec in manifest.tensors:
        torch_dtype(spec.dtype)


@contextmanager
def _directory(root: Path, name: str) -> Iterator[int]:
    """A descriptor of that directory in the root. Raises OSError, also for a link."""
    if not _NAME.fullmatch(name):
        raise OSError("it must be one name, of letters, digits, '_', '-' and '.'")
    above = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _file(directory: int, name: str) -> Iterator[int]:
    """A descriptor of that regular file in it. Raises OSError, also for a link."""
    if not _NAME.fullmatch(name):
        raise OSError(f"a file must be one name, got {shown(name)}")
    # Not blocking: the opening of a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{name} must be a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _header(file: int, shard: str) -> tuple[int, Mapping[str, Any]]:
    """The byte of a shard at which its tensors begin, and what it says of each. Raises OSError, ProtocolError."""
    what = f"the header of {shard}"
    length = int.from_bytes(_read(file, bytearray(_LENGTH_BYTES), 0, what=what), "little")
    if length > _MOST_DESCRIBED_BYTES:
        raise ProtocolError(f"{what} must be one of safetensors, got num_bytes={length}")
    text = _read(file, bytearray(length), _LENGTH_BYTES, what=what)
    return _LENGTH_BYTES + length, mapping(parse_json(text, what), what)


def _place(entry: Any, spec: TensorSpec) -> int:
    """The byte behind the header at which a tensor begins. Raises ProtocolError: it lies there otherwise, or not."""
    record = mapping(entry, spec.name)
    shape, place = integer_list(record, "shape"), integer_list(record, "data_offsets")
    if (
        tuple(shape) != spec.shape
        or len(place) != 2
        or place[0] < 0
        or place[1] - place[0] != num_bytes(spec)
    ):
        raise ProtocolError(
            f"{spec.name} must lie in its shard as the manifest says, got shape={shape} data_offsets={place}"
        )
    return place[0]


def _read(
    file: int,
    memory: Any,
    start: int,
    require_wanted: Callable[[], None] = lambda: None,
    *,
    what: str = MANIFEST,
) -> Any:
    """Fills ``memory`` from that byte of the file on, and returns it. Raises OSError: the file ends before."""
    view, done = memoryview(memory), 0
    while done < len(view):
        require_wanted()
        num_read = os.preadv(file, [view[done : done + _READ_BYTES]], start + done)
        if not num_read:
            raise OSError(f"{what} is cut: {len(view) - done} of {len(view)} bytes are missing")
        done += num_read
    return memory
