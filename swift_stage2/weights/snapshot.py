"""A snapshot: the learner's weights of one step as a safetensors file in memory, so that training goes on meanwhile.

Rank 0's memory is the file, laid out once and filled anew for each version. Whose weights it holds, and the checksum of
each, stand in its header, so that a server may take it by its path, by a stream or from a disk, and know it again.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from swift_stage2.errors import ProtocolError, WeightSyncError
from swift_stage2.runtime.memory import MemoryFile, available_memory_bytes
from swift_stage2.weights.copy_stream import Copy
from swift_stage2.weights.tensors import all_finite, checksums_by_name, in_buckets, num_bytes, snapshot_bytes
from swift_stage2.wire import TensorSpec

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 8
_PAGE_BYTES = 4096
_ROOM_FOR_IDENTITY = 1024
_SUM_PREFIX = "checksum:"  # of a tensor's name, in the header's metadata
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightIdentity:
    """Whose weights lie in a snapshot; ``version`` is what the run calls them once they are proven."""

    run_id: str
    version: int
    step: int | None = None

    @property
    def name(self) -> str:
        """Of a file on a disk, without its suffix."""
        return f"{self.run_id}-{self.version}"

    def to_metadata(self) -> dict[str, str]:
        """As a safetensors file says it of itself, and that torch can read it."""
        step = "" if self.step is None else str(self.step)
        names = {"run_id": self.run_id, "version": str(self.version), "step": step}
        return {"format": "pt"} | names

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> WeightIdentity:
        """Raises KeyError, ValueError: it says so of no snapshot."""
        step = int(metadata["step"]) if metadata["step"] else None
        return cls(metadata["run_id"], int(metadata["version"]), step)


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Tensors that lie one behind the other in ``flat`` (uint8), as a stock server takes them at once."""

    specs: tuple[TensorSpec, ...]
    flat: torch.Tensor

    @property
    def metadata(self) -> list[dict[str, object]]:
        """Where each lies, in bytes; the fields are those of ms-swift's ``FlattenedTensorMetadata``."""
        sizes = [num_bytes(spec) for spec in self.specs]
        return [
            {
                **spec.to_json(),
                "dtype": f"torch.{spec.dtype}",
                "start_idx": end - size,
                "end_idx": end,
                "numel": size,
            }
            for spec, size, end in zip(self.specs, sizes, accumulate(sizes), strict=True)
        ]


class SnapshotFile:
    """The file of one manifest, in the learner's own dtypes; its owner fills it, its publisher says what it holds."""

    def __init__(
        self,
        manifest: Sequence[TensorSpec],
        *,
        bucket_bytes: int,
        path: str | None = None,
        pinned: bool = False,
    ) -> None:
        """``path``: that of its owner, in another process. ``bucket_bytes``: what stock servers take at once.

        ``pinned``: a GPU copies straight into it. Raises:
            WeightSyncError: main memory has no room for it, or a dtype is none that such a file may hold.
            OSError: the kernel refuses the memory, or the owner is gone.
        """
        self._manifest = tuple(manifest)
        # By item size: one behind the other without a gap, each begins where a view of its dtype may.
        self._specs = sorted(manifest, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
        sizes = [num_bytes(spec) for spec in self._specs]
        self._ends = list(accumulate(sizes, initial=0))
        blank = {
            spec.name: f"{spec.dtype}:{size}:{0:016x}:{0:016x}"
            for spec, size in zip(self._specs, sizes, strict=True)
        }
        room = _LENGTH_BYTES + len(self._header(WeightIdentity("", 0), blank)) + _ROOM_FOR_IDENTITY
        self._header_bytes = -(-room // _PAGE_BYTES) * _PAGE_BYTES
        self.file = _allocate(self._header_bytes + self.num_bytes) if path is None else MemoryFile.open(path)
        whole = torch.frombuffer(self.file.memory, dtype=torch.uint8)
        if pinned:
            _pin(whole)
        self._flat = whole[self._header_bytes :]
        self.tensors = {
            spec.name: part.view(getattr(torch, spec.dtype)).reshape(spec.shape)
            for spec, part in zip(self._specs, torch.split(self._flat, sizes), strict=True)
        }
        self.bucket_bytes = bucket_bytes
        self.buckets = self._cut(bucket_bytes)
        self._lock = threading.Lock()
        self._identity: WeightIdentity | None = None
        self._checksums: Mapping[str, str] = {}

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Another process that unpickles it opens the same memory, once."""
        return _opened, (self._manifest, self.bucket_bytes, self.file.path)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self._ends[-1]

    @property
    def header(self) -> memoryview:
        """The file's bytes before its tensors."""
        return self.file.memory[: self._header_bytes]

    def put(self, tensors: Iterable[tuple[str, torch.Tensor]], copy: Copy = torch.Tensor.copy_) -> None:
        """Copies tensors in, from whatever device holds them."""
        for name, tensor in tensors:
            copy(self.tensors[name], tensor)

    def describe(self, identity: WeightIdentity) -> Mapping[str, str]:
        """Writes the version's header, and returns every tensor's checksum; who comes second waits for them.

        Raises:
            WeightSyncError: a tensor is not finite.
        """
        with self._lock:
            if identity != self._identity:
                _require_finite(self.tensors)
                checksums = checksums_by_name(self.tensors)
                header, room = self._header(identity, checksums), self._header_bytes - _LENGTH_BYTES
                self.header[:] = room.to_bytes(_LENGTH_BYTES, "little") + header.ljust(room)
                self._identity, self._checksums = identity, checksums
            return self._checksums

    def _header(self, identity: WeightIdentity, checksums: Mapping[str, str]) -> bytes:
        metadata = identity.to_metadata() | {_SUM_PREFIX + name: each for name, each in checksums.items()}
        entries = {
            spec.name: {"dtype": _file_dtype(spec), "shape": spec.shape, "data_offsets": [start, end]}
            for spec, (start, end) in zip(self._specs, pairwise(self._ends), strict=True)
        }
        return json.dumps({"__metadata__": metadata} | entries).encode()

    def _cut(self, max_bytes: int) -> tuple[WeightBucket, ...]:
        cut = in_buckets(self._specs, max_bytes)
        flats = torch.split(self._flat, [snapshot_bytes(specs) for specs in cut])
        return tuple(WeightBucket(specs, flat) for specs, flat in zip(cut, flats, strict=True))


@lru_cache(1)
def _opened(manifest: tuple[TensorSpec, ...], bucket_bytes: int, path: str) -> SnapshotFile:
    return SnapshotFile(manifest, bucket_bytes=bucket_bytes, path=path)


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """A snapshot as its readers see it: tensors lie where the file does, and what is written to them reaches nobody."""

    identity: WeightIdentity
    tensors: dict[str, torch.Tensor]  # in the file's order
    checksums: Mapping[str, str]  # as the file says

    @classmethod
    def open(cls, path: str) -> ReadSnapshot:
        """The snapshot at ``path``, which must be a file that nobody cuts while its tensors are used.

        Raises:
            OSError: it cannot be opened.
            ProtocolError: it holds no snapshot.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
            identity = WeightIdentity.from_metadata(metadata)
            return cls(identity, tensors, {name: metadata[_SUM_PREFIX + name] for name in tensors})
        except (SafetensorError, KeyError, ValueError) as error:
            raise ProtocolError(
                f"a snapshot must be a safetensors file with its header, got {error}"
            ) from error

    def specs(self) -> dict[str, TensorSpec]:
        """Of its tensors, by name."""
        return {
            name: TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors.items()
        }

    def differing(self, checksums: Mapping[str, str]) -> list[str]:
        """Names of the tensors whose checksums are not what the file says."""
        return [name for name, each in checksums.items() if each != self.checksums.get(name)]


def _file_dtype(spec: TensorSpec) -> str:
    if spec.dtype not in _DTYPES:
        raise WeightSyncError(
            f"weights must be of a dtype that safetensors knows, got {spec.name}: {spec.dtype}"
        )
    return _DTYPES[spec.dtype]


def _allocate(size: int) -> MemoryFile:
    available = available_memory_bytes()
    if size > available:
        raise WeightSyncError(
            f"rank 0 keeps a copy of the weights in main memory, got {size / 1e9:.1f} GB of weights and "
            f"{available / 1e9:.1f} GB available; give its machine or container more, or train a smaller model"
        )
    return MemoryFile("snapshot", size)


def _pin(memory: torch.Tensor) -> None:
    """In place: PyTorch's own allocator of pinned memory takes the next power of two, up to twice the weights."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if status := int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)):
        logger.warning(
            "the weights' copy in main memory cannot be pinned (CUDA error %d): copies are slower", status
        )
    else:
        weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, memory.data_ptr())


def _require_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise WeightSyncError(
                f"weights must be finite to be pushed, got a NaN or infinity in tensor={name}; "
                "lower the learning rate or resume from an earlier checkpoint"
            )


def describe_fault(what: str, error: Exception) -> str:
    """The learner's fault in one line; ours says it by itself."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, WeightSyncError) else f"{what} failed: {type(error).__name__}: {text}"
