"""Shows which weights a model of vLLM holds after a load: of our engine, and of a stock server with the plugin.

vLLM fuses parameters (q, k and v in one; gate and up in one) and cuts them over ranks, so a parameter's checksum cannot
be compared by name. ``LoadTrace`` records every copy out of the given tensors while the model's own loader runs; read
back, each copy's destination shows the bytes of one piece of one tensor where the model now keeps it. ``LoadRecord``
keeps that in each worker, as checksums and places, never as weights; ``combine`` makes one answer of all of them.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from swift_stage2.servers.stock import WeightSums
from swift_stage2.weights.tensors import checksum_tensor, checksum_tensors

Report = dict[str, Any]
_log = logging.getLogger(__name__)
WORKER_EXTENSION = "swift_stage2.rollout_server.vllm_worker.WeightSumsExtension"
_MAX_ERROR_CHARS = 500


class TensorPiece(NamedTuple):
    """A part of one tensor (offset, shape and stride count its elements), with its checksums as given and as held now.

    A list of these fields passes through vLLM's own encoding.
    """

    name: str
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]
    given: str
    held: str = ""


class CopiedPart(NamedTuple):
    """The place that a piece was copied to; keeps neither tensor nor memory alive."""

    piece: TensorPiece
    storage: StorageWeakRef
    dtype: torch.dtype
    target: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and stride in the storage


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies while it is entered."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """``weights`` are all on one device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = dict(weights)
        self._devices = {tensor.device for tensor in weights.values()}
        self._spans = sorted((tensor.data_ptr(), name) for name, tensor in weights.items() if tensor.numel())
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._owner(args[1])) is not None:
            self._copies.append((name, args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def parts(self, read: Mapping[str, str]) -> list[CopiedPart]:
        """Every part that was copied, wherever to, with its checksum as given.

        ``read`` holds the checksums of the given tensors: one that was copied whole is not summed again.
        """
        parts = []
        for name, target, source in self._copies:  # one at a time: each may need a copy of its own
            if self._is_whole(name, target, source):
                given = read[name]
            else:
                given = checksum_tensor(source.expand(target.shape).to(target.dtype))
            offset = (source.data_ptr() - self._weights[name].data_ptr()) // source.element_size()
            piece = TensorPiece(name, offset, list(source.shape), list(source.stride()), given)
            storage = StorageWeakRef(target.untyped_storage())  # type: ignore[no-untyped-call]
            place = (int(target.storage_offset()), tuple(target.shape), tuple(target.stride()))
            parts.append(CopiedPart(piece, storage, target.dtype, place))
        return parts

    def _is_whole(self, name: str, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether this copy took all bytes of the given tensor, in the same order and dtype."""
        given = self._weights[name]
        return (
            source.shape == target.shape
            and source.numel() == given.numel()
            and source.dtype == target.dtype == given.dtype
            and source.is_contiguous()
            and given.is_contiguous()
        )

    def _owner(self, source: torch.Tensor) -> str | None:
        """The given tensor that ``source`` is a view of."""
        if not isinstance(source, torch.Tensor) or source.device not in self._devices or not source.numel():
            return None
        address = source.data_ptr()
        index = bisect.bisect_right(self._spans, address, key=lambda span: span[0]) - 1
        if index < 0:
            return None
        start, name = self._spans[index]
        return name if address < start + self._weights[name].nbytes else None


class LoadRecord:
    """One worker's record of the push in progress, or of the last one. A push ends with ``end``."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets everything: another learner connects, or the first tensors of another push come."""
        self._ended = False
        self._arrived: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[CopiedPart]] = {}
        self._errors: list[str] = []

    def end(self) -> None:
        """All tensors of a push have come; the next one begins another."""
        self._ended = True

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Logs and keeps what goes wrong inside, which ms-swift only logs.

        It goes no further: from then on vLLM would take one worker's answers to a call for those to the next.
        """
        try:
            yield
        except Exception as error:  # top of a call that ms-swift makes
            _log.exception("%s failed", what)
            # The first tells why: every later bucket of a push may fail for the same reason.
            self._errors = self._errors or [f"{what}: {type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]]

    def load(
        self,
        given: Mapping[str, torch.Tensor],
        read: Mapping[str, str],
        load_weights: Callable[..., Any],
        **rest: Any,
    ) -> Any:
        """The model's ``load_weights``; notes where each part of the given tensors went. ``read``: their checksums."""
        if self._ended:
            self.begin()
        self._arrived |= read
        self._shapes |= {name: tuple(tensor.shape) for name, tensor in given.items()}
        for name in given:  # for the second time in one push: what it was then counts no more
            self._parts.pop(name, None)
        trace = LoadTrace(given)
        with torch.no_grad(), trace:
            loaded = load_weights(weights=list(given.items()), **rest)
        for part in trace.parts(read):
            self._parts.setdefault(part.piece.name, []).append(part)
        return loaded

    def report(self, question: str, parameters: Mapping[str, torch.Tensor]) -> Report:
        """Tells vLLM, in plain records, what arrived, each piece as it is held now, and what nothing was copied to."""
        parts = [part for parts in self._parts.values() for part in parts]
        with torch.no_grad():
            pieces = held_pieces(parts, parameters.values())
        return {
            "question": question,
            "arrived": self._arrived,
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
            "pieces": [list(piece) for piece in pieces],
            "left_out": untouched(parts, parameters) if self._arrived else [],
            "errors": self._errors,
        }


def held_pieces(parts: Iterable[CopiedPart], parameters: Iterable[torch.Tensor]) -> list[TensorPiece]:
    """Every part in storage that the model's parameters still use, its checksum taken there now."""
    in_use = {storage._cdata: storage for storage in (each.untyped_storage() for each in parameters)}
    kept = [(part, in_use[part.storage.cdata]) for part in parts if part.storage.cdata in in_use]
    held = checksum_tensors(
        [
            torch.empty(0, dtype=part.dtype, device=storage.device).set_(storage, *part.target)
            for part, storage in kept
        ]
    )
    return [part.piece._replace(held=now) for (part, _), now in zip(kept, held, strict=True)]


def untouched(parts: Iterable[CopiedPart], parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters into whose storage nothing was copied."""
    touched = {part.storage.cdata for part in parts}
    return [
        name
        for name, parameter in parameters.items()
        if parameter.numel() and parameter.untyped_storage()._cdata not in touched
    ]


def combine(
    incarnation: str, question: str, engines: Sequence[Sequence[Any] | None], num_workers: int
) -> WeightSums:
    """One answer of all workers of all engines. Where they do not agree it names no checksum.

    ``engines`` holds None for one that did not answer: its words about that are in the server's log. An
    answer of a worker to another ``question`` does not count.
    """
    errors: list[str] = []
    answers: list[list[Report]] = [
        [report for report in reports if isinstance(report, dict) and report.get("question") == question]
        for reports in engines
        if reports
    ]
    if (num_answers := sum(map(len, answers))) != num_workers:
        errors.append(f"{num_answers} of {num_workers} workers answered; the server's log says why")
    for index, reports in enumerate(answers):
        for rank, report in enumerate(reports):
            errors += [f"engine {index} worker {rank}: {error}" for error in report["errors"]]
    workers = [report for reports in answers for report in reports]
    arrived = _agreed([report["arrived"] for report in workers])
    resident = _agreed([_of_engine(reports) for reports in answers])
    return WeightSums(
        incarnation=incarnation,
        arrived=arrived,
        resident=resident,
        left_out=tuple(sorted({name for report in workers for name in report["left_out"]})),
        errors=tuple(errors),
    )


def _agreed(sums: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A name that any of them lacks is left out; one that they tell differently has no checksum's form."""
    if not sums:
        return {}
    common = set(sums[0]).intersection(*sums[1:])
    return {name: " or ".join(sorted({each[name] for each in sums})) for name in sums[0] if name in common}


def _of_engine(reports: Sequence[Report]) -> dict[str, str]:
    """By name what one engine holds; a tensor that is not traced whole is left out.

    A tied output layer, of which there is no copy, is told as what it is tied to.
    """
    read = _agreed([report["arrived"] for report in reports])
    shapes = {name: shape for report in reports for name, shape in report["shapes"].items()}
    by_name: dict[str, list[TensorPiece]] = defaultdict(list)
    for fields in (fields for report in reports for fields in report["pieces"]):
        by_name[fields[0]].append(TensorPiece(*fields))
    sums = {name: _resident(shapes[name], given, by_name[name]) for name, given in read.items()}
    as_sent = {checksum for name, checksum in sums.items() if checksum == read[name]}
    sums |= {
        name: given
        for name, given in read.items()
        if "lm_head" in name and not sums[name] and given in as_sent
    }
    return {name: held for name, held in sums.items() if held is not None}


def _resident(shape: Sequence[int], given: str, pieces: Sequence[TensorPiece]) -> str | None:
    """As given once every piece is held so and they together cover the tensor; else its first wrong piece, or None."""
    num_elements = math.prod(shape)
    if num_elements == 0:
        return given
    wrong = next((piece for piece in pieces if piece.held != piece.given), None)
    if wrong is not None:
        return wrong.held
    covered = torch.zeros(num_elements, dtype=torch.bool)
    for piece in pieces:
        covered.as_strided(list(piece.shape), list(piece.stride), piece.offset).fill_(True)
    return given if bool(covered.all()) else None


@contextmanager
def in_place_of(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside; afterwards what it was, the class's own included."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
