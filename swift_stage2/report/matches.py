"""Turns lines of ``RUN_DIR/matches`` into checked records. Pure.

They hold what models and data sets said, so nothing in them is believed: a record that does not have the form is
counted and left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_stage2.telemetry.audit import Record

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 in the match's space."""
Key = tuple[int, int, int, int]
"""Epoch, position in the rank's shard, row of the data set, attempt; of an evaluation only the row tells anything."""
EVALUATION = "evaluation"
_MOST = 2**53
_MOST_CHARACTERS = 20_000  # of a text that is shown


@dataclass(frozen=True, slots=True)
class Labelled:
    """One object."""

    label: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMatch:
    """One rollout against its ground truth."""

    time: float
    rank: int
    sample: Key
    purpose: str
    version: int
    images: tuple[str | None, ...]
    space: tuple[int, int]
    """Width and height that the boxes are measured in."""
    truth: tuple[Labelled, ...]
    predicted: tuple[Labelled, ...]
    pairs: tuple[tuple[int, int, float], ...]
    """(prediction, truth, IoU)."""
    rollout: str
    target: str
    truncated: bool
    dropped: Mapping[str, int]
    """Objects that the parser dropped, by reason."""

    @property
    def row(self) -> int:
        """Of its data set."""
        return self.sample[2]

    @property
    def missed(self) -> frozenset[int]:
        """Ground truth without a partner."""
        return frozenset(range(len(self.truth))) - {truth for _, truth, _ in self.pairs}

    @property
    def false(self) -> frozenset[int]:
        """Predictions without a partner."""
        return frozenset(range(len(self.predicted))) - {prediction for prediction, _, _ in self.pairs}


def matches_of(records: Iterable[Record]) -> tuple[list[LoggedMatch], int]:
    """The matches of all ranks by time, and how many records had another form.

    A draw that a resumed process repeated counts once, as it was answered last. Evaluations repeat their keys, so a key
    counts once for every version.
    """
    found: dict[tuple[int, str, Key, int], LoggedMatch] = {}
    num_odd = 0
    for record in records:
        try:
            match = _match(record)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError):
            num_odd += 1
        else:
            found[match.rank, match.purpose, match.sample, match.version] = match
    return sorted(found.values(), key=lambda match: match.time), num_odd


def _match(record: Record) -> LoggedMatch:
    epoch, position, row, attempt = (int(number) for number in record["sample"])
    width, height = (int(side) for side in record["space"])
    truth, predicted = _objects(record["truth"]), _objects(record["predicted"])
    pairs = tuple((int(one), int(other), float(iou)) for one, other, iou in record["pairs"])
    version, moment = int(record["version"]), float(record["time"])
    if width < 1 or height < 1:
        raise ValueError("a space without area")
    for numbers, limit in (
        ([one for one, _, _ in pairs], len(predicted)),
        ([t for _, t, _ in pairs], len(truth)),
    ):
        if len(set(numbers)) < len(numbers) or not all(0 <= number < limit for number in numbers):
            raise ValueError("pairs of what is not there")
    if max(width, height, epoch, position, row, attempt, abs(version)) > _MOST or not math.isfinite(moment):
        raise ValueError("a number that no run comes to")
    return LoggedMatch(
        time=moment,
        rank=int(record["rank"]),
        sample=(epoch, position, row, attempt),
        purpose=str(record["purpose"]),
        version=version,
        images=tuple(path if isinstance(path, str) else None for path in record["images"]),
        space=(width, height),
        truth=truth,
        predicted=predicted,
        pairs=pairs,
        rollout=_text(record["rollout"]),
        target=_text(record["target"]),
        truncated=bool(record["truncated"]),
        dropped={str(reason): int(count) for reason, count in record["dropped"].items()},
    )


def _objects(found: Iterable[Mapping[str, Any]]) -> tuple[Labelled, ...]:
    return tuple(Labelled(str(one["label"]), _box(one["box"])) for one in found)


def _box(sides: Iterable[float]) -> Box:
    x1, y1, x2, y2 = (float(side) for side in sides)
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        raise ValueError("a side that is not finite")
    return x1, y1, x2, y2


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    more = len(text) - _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]} … and {more} characters more" if more > 0 else text
