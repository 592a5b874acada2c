"""One rank's event log: whole lines, appended and never changed, and what a reader may believe of them.

A process killed in the middle of a line leaves it torn; readers pass over a last line without its end, and the next
process cuts it off. A log that cannot be written keeps nothing from then on, so that the file is always a beginning of
what happened; the learner asks for ``failure`` at every step and ends the run on all ranks.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from swift_stage2.errors import StorageFull, UserError
from swift_stage2.telemetry.events import (
    EVENT,
    AnyEvent,
    Checkpoint,
    Damaged,
    End,
    Event,
    Metrics,
    Start,
    Step,
)
from swift_stage2.whole_file import MOST_BYTES, flush_directory, open_regular

EventT = TypeVar("EventT", bound=Event)
Process = Sequence[AnyEvent]
"""What one process wrote; the first event is its ``Start``, unless a log begins without one."""
_FOLDER = "events"


def event_path(run_dir: Path, rank: int) -> Path:
    return run_dir / _FOLDER / f"rank{rank}.jsonl"


class EventLog:
    """Appends one rank's events. Safe for any number of threads; only ``flush_to_disk`` raises for the disk's sake."""

    def __init__(self, path: Path | None) -> None:
        """``path`` None keeps nothing."""
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._name_is_flushed = False
        self._closed = path is None
        self.failure = ""
        """Why it cannot be written any more."""

    def write(self, event: Event) -> int:
        """Append an event; returns its bytes, 0 once the log has failed or was closed."""
        with self._lock:
            return self._write(event)

    def flush_to_disk(self) -> None:
        """Make what was written outlast the machine's end.

        Raises:
            StorageFull: an event of this log could not be written.
        """
        with self._lock:
            if self._descriptor is not None and self._path is not None:
                try:
                    os.fsync(self._descriptor)
                    if not self._name_is_flushed:
                        flush_directory(self._path.parent)
                        self._name_is_flushed = True
                except OSError as error:
                    self._fail(error)
            if self.failure:
                raise unwritten(self.failure)

    def close(self, last: Event | None = None) -> None:
        """Close the file, behind the event ``last``; later ones are dropped. May be called again."""
        with self._lock:
            if last is not None:
                self._write(last)
            self._closed = True
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                try:
                    os.close(descriptor)
                except OSError as error:  # a network file system may tell only now
                    self._fail(error)

    def _write(self, event: Event) -> int:
        if self._closed or self.failure:
            return 0
        line = rest = _line(event)
        try:
            if self._descriptor is None:
                assert self._path is not None
                self._descriptor = _open_behind_last_line(self._path)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._fail(error)
            return 0
        return len(line)

    def _fail(self, error: OSError) -> None:
        self.failure = f"{self._path}: {error.strerror or error}"


def unwritten(failures: str) -> StorageFull:
    """The end of a run whose logs ``failures`` names."""
    return StorageFull(
        "every event of a run must be written",
        got=failures,
        remedy="make room there, then go on from the last checkpoint by --resume",
    )


def _line(event: Event) -> bytes:
    try:
        return event.model_dump_json(fallback=str).encode() + b"\n"
    except PydanticSerializationError:  # half a surrogate pair, in a model's words or a path
        text = json.dumps(event.model_dump(), ensure_ascii=False, default=str)
        return text.encode(errors="replace") + b"\n"


def _open_behind_last_line(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe is not waited for
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG((found := os.fstat(descriptor)).st_mode):
        size = found.st_size
        while size and os.pread(descriptor, 1, size - 1) != b"\n":
            size -= 1
        if size < found.st_size:
            os.ftruncate(descriptor, size)
    return descriptor


def event_of(line: bytes) -> AnyEvent | None:
    """The event that a whole line holds; None for one of another program's kind."""
    try:
        return EVENT.validate_json(line)
    except ValidationError as error:
        return None if error.errors()[0]["type"] == "union_tag_invalid" else Damaged()


class EventTail:
    """One growing log, read from where the last look ended. The file may appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Those that have become whole since the last call. Raises UserError: the file cannot be read."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                while (line := file.readline(MOST_BYTES)).endswith(b"\n"):
                    self._offset += len(line)
                    yield line
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(
                "an event log can be read", got=f"path={self._path}: {error}", remedy="make it readable"
            ) from error

    def read(self) -> Iterator[AnyEvent]:
        events = map(event_of, self.lines())
        return (event for event in events if event is not None)


def read_events(path: Path) -> list[AnyEvent]:
    """The events of one log; none without the file. Raises UserError: it cannot be read."""
    return [*EventTail(path).read()]


def log_paths(run_dir: Path) -> dict[int, Path]:
    """The logs in a run's directory, by rank."""
    found = {path.stem.removeprefix("rank"): path for path in (run_dir / _FOLDER).glob("rank*.jsonl")}
    return {int(rank): path for rank, path in sorted(found.items()) if rank.isdecimal()}


def read_logs(run_dirs: Sequence[Path]) -> dict[int, list[AnyEvent]]:
    """Every rank's events, those of the first directory first.

    Raises:
        UserError: a directory holds no log, or one of its logs cannot be read.
    """
    logs: dict[int, list[AnyEvent]] = defaultdict(list)
    for run_dir in run_dirs:
        paths = log_paths(run_dir)
        if not paths:
            raise no_log(run_dir)
        for rank, path in paths.items():
            logs[rank] += read_events(path)
    return dict(logs)


def no_log(run_dir: Path) -> UserError:
    inside = " or ".join(sorted(str(path.parent) for path in run_dir.glob(f"v*/{_FOLDER}")))
    named = inside or "the swift.output_dir of a run with telemetry.audit: true, the default"
    missing = "" if run_dir.is_dir() else ", which is no directory"
    return UserError(
        f"a run's directory holds {_FOLDER}/rank*.jsonl", got=f"{run_dir}{missing}", remedy=f"name {named}"
    )


class RankEvents:
    """One rank's events as far as they count, in the order in which they were written."""

    def __init__(self, rank: int, history: Sequence[Process] = ()) -> None:
        self.rank = rank
        self.history = history
        """The part of each process that counts, oldest first."""
        self._by_kind: dict[type[Event], list[AnyEvent]] = defaultdict(list)
        for event in self:
            self._by_kind[type(event)].append(event)

    def __iter__(self) -> Iterator[AnyEvent]:
        for process in self.history:
            yield from process

    def of(self, kind: type[EventT]) -> list[EventT]:
        return self._by_kind[kind]  # type: ignore[return-value]

    @cached_property
    def steps(self) -> dict[int, Step]:
        return {step.step: step for step in self.of(Step)}

    @property
    def start(self) -> Start | None:
        """Of the last process."""
        return self.of(Start)[-1] if self.of(Start) else None

    @property
    def metrics(self) -> Metrics | None:
        """The last ones."""
        return self.of(Metrics)[-1] if self.of(Metrics) else None

    @property
    def has_ended(self) -> bool:
        """Whether the last process told its orderly end; one that was killed or still runs did not."""
        return bool(self.history) and any(isinstance(event, End) for event in self.history[-1])


def ranks_of(logs: Mapping[int, Sequence[AnyEvent]]) -> dict[int, RankEvents]:
    """By rank, what counts: without what a resume made void, because its checkpoint did not cover it."""
    processes = {rank: split_by_process(events) for rank, events in sorted(logs.items())}
    # A process that some rank never began cannot have trained, for every step is agreed on by all.
    begun = [{run_of(process) for process in every} for every in processes.values()]
    common = set.intersection(*begun) if begun else set()
    return {
        rank: RankEvents(rank, _effective([process for process in every if run_of(process) in common]))
        for rank, every in processes.items()
    }


def split_by_process(events: Sequence[AnyEvent]) -> list[Process]:
    begins = [index for index, event in enumerate(events) if isinstance(event, Start)]
    bounds = [0, *(index for index in begins if index), len(events)]
    return [events[begin:end] for begin, end in pairwise(bounds) if events[begin:end]]


def run_of(process: Process) -> str | None:
    """The id that the run's ranks agreed on; None for a process without a ``Start``."""
    return process[0].run_id if isinstance(process[0], Start) else None


def _effective(processes: Sequence[Process]) -> list[Process]:
    """The part of each process on the way to where the last one stands.

    Without the checkpoint that a process's ``Start`` names, nothing before it counts.
    """
    history: list[Process] = []
    number, end = len(processes) - 1, None
    while number >= 0:
        part = processes[number][:end]
        history.append(part)
        save_id = part[0].save_id if isinstance(part[0], Start) else None
        found = _find_checkpoint(processes[:number], save_id) if save_id else None
        number, end = found or (-1, None)
    return history[::-1]


def _find_checkpoint(processes: Sequence[Process], save_id: str) -> tuple[int, int] | None:
    """(process, number of its events up to and with the checkpoint)."""
    for number in reversed(range(len(processes))):
        for index, event in enumerate(processes[number]):
            if isinstance(event, Checkpoint) and event.save_id == save_id:
                return number, index + 1
    return None
