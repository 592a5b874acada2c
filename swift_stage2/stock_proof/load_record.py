"""Notes what one worker of vLLM took and where its model holds it; makes one answer of what all workers say.

Kept are checksums and places, never weights: a part is found again in the storage that it was copied into, as long as
the model's parameters still use that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from swift_stage2.rollout_server.vllm_weights import (
    CopiedPart,
    LoadTrace,
    held_pieces,
    resident_checksums,
    untouched,
)
from swift_stage2.servers.stock import WeightSums
from swift_stage2.weights.tensors import checksums_by_name

Report = dict[str, Any]
_log = logging.getLogger(__name__)
_MAX_ERROR_CHARS = 500
_MAX_ERRORS = 8  # every later bucket of a push may fail for the same reason


class LoadRecord:
    """One worker's record of the push in progress, or of the last one. A push ends with ``end``."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets everything: another learner connects, or a new push begins."""
        self._ended = False
        self._arrived: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[CopiedPart]] = {}
        self._adapter: dict[str, str] = {}
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
            if len(self._errors) < _MAX_ERRORS:
                self._errors.append(f"{what}: {type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])

    def loading(self, what: str) -> AbstractContextManager[None]:
        """``noting`` around one call of a push of full weights, the first of which begins it."""
        if self._ended:
            self.begin()
        return self.noting(what)

    def adding(self, what: str) -> AbstractContextManager[None]:
        """``noting`` around one push of an adapter, which leaves what is known of the full weights as it is."""
        if self._ended:
            self._errors.clear()
        return self.noting(what)

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], load_weights: Callable[..., Any], **rest: Any
    ) -> Any:
        """The model's ``load_weights``: sums each tensor before, and notes where each of its parts went."""
        given = dict(weights)
        with torch.no_grad():
            read = checksums_by_name(given)
            self._arrived |= read
            self._shapes |= {name: tuple(tensor.shape) for name, tensor in given.items()}
            for name in given:  # for the second time in one push: what it was then counts no more
                self._parts.pop(name, None)
            trace = LoadTrace(given)
            with trace:
                loaded = load_weights(weights=list(given.items()), **rest)
            for part in trace.parts(read):
                self._parts.setdefault(part.piece.name, []).append(part)
        return loaded

    def take_adapter(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """An adapter, which comes whole. vLLM keeps it in forms of its own, in which it is not traced."""
        self._adapter = checksums_by_name(tensors)

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
            "adapter": self._adapter,
            "errors": self._errors,
        }


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
    resident = _agreed([_resident(reports) for reports in answers])
    return WeightSums(
        incarnation=incarnation,
        arrived=arrived,
        resident=resident,
        left_out=tuple(sorted({name for report in workers for name in report["left_out"]})),
        adapter=_agreed([report["adapter"] for report in workers]),
        errors=tuple(errors),
    )


def _agreed(sums: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A name that any of them lacks is left out; one that they tell differently has no checksum's form."""
    if not sums:
        return {}
    common = set(sums[0]).intersection(*sums[1:])
    return {name: " or ".join(sorted({each[name] for each in sums})) for name in sums[0] if name in common}


def _resident(reports: Sequence[Report]) -> dict[str, str]:
    """By name what one engine holds; a tied output layer, of which there is no copy, as what it is tied to."""
    read = _agreed([report["arrived"] for report in reports])
    shapes = {name: shape for report in reports for name, shape in report["shapes"].items()}
    pieces = [piece for report in reports for piece in report["pieces"]]
    resident = resident_checksums(shapes, read, pieces)
    as_sent = {checksum for name, checksum in resident.items() if checksum == read[name]}
    tied = {
        name: checksum
        for name, checksum in read.items()
        if "lm_head" in name and name not in resident and checksum in as_sent
    }
    return resident | tied
