"""Turns the data set into this rank's own endless, resumable stream of samples.

Channel A orders the same rows by ``seed + epoch``; this stream by a hash, so that both never train in step. Every
position of an epoch's shard is *outstanding* from its first draw until it is settled (trained, quarantined, or unused);
whatever is outstanding when a checkpoint is written is drawn again, first, after resume. Every change is told to
the event log under the one lock, so that log and state agree at any moment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swift_stage2.channel_b.task import Rows, Task
from swift_stage2.config import RowsWithoutObjects
from swift_stage2.errors import DatasetError
from swift_stage2.records import ReturnReason, RowOrigin, Sample, SampleKey, UnusedReason, image_paths
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.telemetry.events import (
    Checkpoint,
    Drawn,
    Quarantined,
    Returned,
    StreamState,
    Trained,
    Unused,
)
from swift_stage2.whole_file import regular_lines

logger = logging.getLogger(__name__)

_LINE_BITS = 40
_NUM_MESSAGES = 2  # ms-swift may put a system prompt before them
Place = tuple[int, int]  # a sample's epoch and position
_STREAM = "channel_b/1"
"""Names the permutations: another name is another order, so checkpoints keep it."""


@dataclass(eq=False, repr=False)
class SampleSource:
    """This rank's share of the data set, epoch after epoch.

    The share is every ``world_size``-th row of a permutation seeded by a hash of (stream, seed, epoch). Unlike
    ``DistributedSampler`` it is never padded, so no row is drawn twice in an epoch; ranks may hold one
    row more or less, which is harmless because no collective depends on this stream.

    Raises:
        DatasetError: there are fewer rows that may be drawn than ranks.
    """

    rows: Rows
    task: Task
    _: KW_ONLY
    rank: int
    world_size: int
    seed: int
    log: EventLog = field(default_factory=lambda: EventLog(None))
    usable: InitVar[Sequence[int] | None] = None
    """Numbers of the rows that may be drawn, all by default; to the stream there are no others."""
    origins: RowOrigins = field(default_factory=lambda: RowOrigins())
    num_generations: int = 1
    """So many positions, one after another, are of one row: a group."""

    def __post_init__(self, usable: Sequence[int] | None) -> None:
        self._usable = range(len(self.rows)) if usable is None else usable
        if len(self._usable) < self.world_size:
            others = f" (of {len(self.rows)}; the others list no objects)" if usable is not None else ""
            raise DatasetError(
                "channel B needs at least one row per rank",
                got=f"num_rows={len(self._usable)}{others} world_size={self.world_size}",
                remedy="add data or use fewer ranks",
            )
        self._lock = threading.Lock()
        self._epoch = 0
        self._position = 0
        self._shard = self._shard_of(0)
        self._again: deque[SampleKey] = deque()
        self._outstanding: dict[Place, SampleKey] = {}

    def draw(self, count: int) -> list[SampleKey]:
        """The keys of the next ``count`` samples: those that came back first, then new ones."""
        with self._lock:
            keys = [self._next_key() for _ in range(count)]
            if keys:
                self.log.write(Drawn(samples=tuple(keys)))
        return keys

    def read(self, key: SampleKey) -> Sample:
        """The sample behind a key. Raises SampleError as ``read_sample`` does."""
        return read_sample(self.rows, self.task, key)

    def give_back(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None:
        """Puts drawn samples back to be drawn again, in the order given, before any new one."""
        with self._lock:
            kept = [key for key in keys if _place(key) in self._outstanding]
            if reason.counts_attempt:
                kept = [key._replace(attempt=key.attempt + 1) for key in kept]
            self._outstanding.update((_place(key), key) for key in kept)
            self._again.extend(kept)
            if kept:
                self.log.write(Returned(samples=tuple(kept), reason=reason))

    def settle_trained(self, keys: Sequence[SampleKey], *, pack_id: str, step: int, version: int) -> None:
        """Ends the life of a pack's samples: ``step`` trains them under ``version``."""
        with self._lock:
            self._settle(keys)
            samples = tuple(keys)
            self.log.write(Trained(samples=samples, pack_id=pack_id, step=step, version=version))

    def settle_quarantined(self, key: SampleKey, reason: str, message: str) -> RowOrigin:
        """Ends its life without training; returns where its row stands."""
        origin = self.origin_of(key)
        with self._lock:
            self._settle([key])
            self.log.write(Quarantined(samples=(key,), reason=reason, message=message, **asdict(origin)))
        return origin

    def settle_unused(self, keys: Sequence[SampleKey], reason: UnusedReason) -> None:
        with self._lock:
            self._settle(keys)
            self.log.write(Unused(samples=tuple(keys), reason=reason))

    def group_of(self, key: SampleKey) -> tuple[int, int]:
        """Epoch and number of the group of a sample."""
        return key.epoch, key.position // self.num_generations

    def members_of(self, group: tuple[int, int]) -> list[SampleKey]:
        """Samples of a group that were drawn and are not settled."""
        epoch, number = group
        positions = range(number * self.num_generations, (number + 1) * self.num_generations)
        with self._lock:
            return [key for each in positions if (key := self._outstanding.get((epoch, each))) is not None]

    def is_drawn(self, group: tuple[int, int]) -> bool:
        """True once ``draw`` has given every sample of the group at least once."""
        epoch, number = group
        return (self._epoch, self._position) >= (epoch, (number + 1) * self.num_generations)

    @property
    def num_to_whole_group(self) -> int:
        """Samples that are to be drawn before the newest group is whole; 0 between two groups."""
        return -self._position % self.num_generations

    def origin_of(self, key: SampleKey) -> RowOrigin:
        return self.origins.find(self.rows[key.index])

    def state_dict(self) -> dict[str, Any]:
        """Cursor and outstanding keys, as JSON; tensors and texts are made again after resume."""
        with self._lock:
            return self._state()

    def checkpoint(self, *, step: int, save_id: str) -> dict[str, Any]:
        """``state_dict`` for the checkpoint ``save_id`` before ``step``, told to the log in the same moment."""
        with self._lock:
            state = self._state()
            self.log.write(Checkpoint(step=step, save_id=save_id, state=StreamState(**state)))
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict`` was taken.

        Raises:
            DatasetError: the data set, the number of ranks, the seed or the stream is another one.
        """
        for name, now in (
            ("stream", _STREAM),
            ("num_rows", len(self._usable)),
            ("world_size", self.world_size),
            ("seed", self.seed),
            ("num_generations", self.num_generations),
        ):
            if state.get(name) != now:
                raise DatasetError(
                    f"resume needs the same {name} as the checkpoint",
                    got=f"{name}={now}, checkpoint {name}={state.get(name)}",
                    remedy="restore it or start a new run from the checkpoint's weights",
                )
        with self._lock:
            self._epoch = int(state["epoch"])
            self._position = int(state["position"])
            self._shard = self._shard_of(self._epoch)
            self._again = deque(SampleKey(*entry) for entry in state["outstanding"])
            self._outstanding = {_place(key): key for key in self._again}

    def _state(self) -> dict[str, Any]:
        keys = sorted(self._outstanding.values(), key=lambda key: (key.epoch, key.position))
        return {
            "epoch": self._epoch,
            "position": self._position,
            "stream": _STREAM,
            "num_rows": len(self._usable),
            "world_size": self.world_size,
            "seed": self.seed,
            "num_generations": self.num_generations,
            "outstanding": [list(key) for key in keys],
        }

    def _settle(self, keys: Sequence[SampleKey]) -> None:
        for key in keys:
            self._outstanding.pop(_place(key), None)

    def _next_key(self) -> SampleKey:
        if self._again:
            return self._again.popleft()
        if self._position == len(self._shard):
            self._epoch, self._position = self._epoch + 1, 0
            self._shard = self._shard_of(self._epoch)
        key = SampleKey(self._epoch, self._position, self._shard[self._position])
        self._position += 1
        self._outstanding[key.epoch, key.position] = key
        return key

    def _shard_of(self, epoch: int) -> list[int]:
        digest = hashlib.sha256(f"{_STREAM}/{self.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        permutation: list[int] = torch.randperm(len(self._usable), generator=generator).tolist()
        rows = (self._usable[number] for number in permutation[self.rank :: self.world_size])
        return [row for row in rows for _ in range(self.num_generations)]


def _place(key: SampleKey) -> Place:
    return key.epoch, key.position


def usable_rows(rows: Rows, task: Task, policy: RowsWithoutObjects) -> Sequence[int]:
    """Numbers of the rows that channel B may draw, in order. A row that is merely bad is quarantined when drawn.

    Raises:
        DatasetError: the rows have no messages, as those that ms-swift has cached as token ids.
    """
    if len(rows) and "input_ids" in rows[0] and "messages" not in rows[0]:
        raise DatasetError(
            "rows of a data set must have messages",
            got=f"columns {', '.join(rows[0])}",
            remedy="name the data set itself, or cache it anew (swift export --to_cached_dataset true)",
        )
    if policy is RowsWithoutObjects.REFUSE:
        return range(len(rows))
    return [number for number in range(len(rows)) if task.has_truth(rows[number])]


def read_sample(rows: Rows, task: Task, key: SampleKey) -> Sample:
    """The row behind a key, with its truth. Raises SampleError: the row cannot be used."""
    row = rows[key.index]
    return Sample(key=key, row=row, truth=task.read_truth(row))


class RowOrigins:
    """Finds the file and the line that a row came from: ms-swift concatenates and shuffles before anybody sees rows.

    A row is known by its content, which survives ms-swift; of equal rows the first line is told. 16 bytes for each. The
    index is made when a run starts, because the learner's own thread asks it and must not wait. Immutable.
    """

    def __init__(self, files: Sequence[Path] = ()) -> None:
        """Reads all of them once, without rows that cannot be read: whoever trains those has refused them before."""
        self._files = tuple(files)
        fingerprints, places = array("Q"), array("Q")
        for number, file in enumerate(self._files):
            try:
                for line, row in _rows(file):
                    fingerprints.append(_fingerprint(row))
                    places.append(number << _LINE_BITS | line)
            except OSError as error:
                logger.warning("rows of %s cannot be named: %s", file, error)
        found = np.frombuffer(fingerprints, dtype=np.uint64)
        order = np.argsort(found, kind="stable")
        self._fingerprints = found[order]
        self._places = np.frombuffer(places, dtype=np.uint64)[order]

    def find(self, row: Mapping[str, Any]) -> RowOrigin:
        """Never raises: what cannot be found is told without a line."""
        fingerprint = np.uint64(_fingerprint(row))
        number = int(np.searchsorted(self._fingerprints, fingerprint))
        if number == len(self._fingerprints) or self._fingerprints[number] != fingerprint:
            return RowOrigin(None, None, image_paths(row))
        place = int(self._places[number])
        file, line = self._files[place >> _LINE_BITS], place & ((1 << _LINE_BITS) - 1)
        return RowOrigin(str(file), line, image_paths(row))


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(regular_lines(file), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield number, row


def _fingerprint(row: Mapping[str, Any]) -> int:
    """64 bits of what ms-swift hands on unchanged; boxes as floats, because it may write 1 as 1.0."""
    messages, objects = row.get("messages"), row.get("objects")
    images = row.get("images") or row.get("image") or []
    objects = objects if isinstance(objects, Mapping) else {}
    kept = [
        [turn.get("content") for turn in messages[-_NUM_MESSAGES:] if isinstance(turn, Mapping)]
        if isinstance(messages, list)
        else None,
        [_path(image) for image in (images if isinstance(images, list) else [images])],
        objects.get("ref"),
        _as_floats(objects.get("bbox")),
    ]
    text = json.dumps(kept, default=str, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _path(image: Any) -> Any:
    return image.get("path") if isinstance(image, Mapping) else image


def _as_floats(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_floats(item) for item in value]
    is_number = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    return float(value) if is_number else value
