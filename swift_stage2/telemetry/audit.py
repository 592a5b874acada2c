"""Turns events into JSON lines, one file per rank, so that a run can be counted after it ended in any way.

A record is one ``write`` of one whole line; a process killed in the middle leaves a torn line, which the
reader drops and the next writer steps over. A full disk loses records, never the run: the next record that
fits is preceded by one that says how many are missing. Where none fits any more, that stands in a line for which room
was taken beside the first record: overwriting needs none.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from swift_stage2.whole_file import flush_directory, open_regular

logger = logging.getLogger(__name__)


class StorageWarning:
    """Shared by everything that writes for one rank: the first failure is told, later ones are not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False

    def report(self, path: object, error: OSError) -> None:
        """Log ``error`` if it is the first one."""
        with self._lock:
            if self._told:
                return
            self._told = True
        logger.warning(
            "telemetry cannot be written to %s: %s; training goes on, records are lost until there is room again",
            path,
            error,
        )


Record = dict[str, Any]
GAP = "gap"
_ROOM_WIDTH = 12  # digits of a number of lost records
_ROOM = re.compile(rb'"records_lost":([0-9 ]{%d})}\n' % _ROOM_WIDTH)


def rank_path(folder: str, run_dir: Path, rank: int) -> Path:
    return run_dir / folder / f"rank{rank}.jsonl"


audit_path = partial(rank_path, "audit")


class AuditLog:
    """Appends one rank's records. Safe for any number of threads; never raises for the disk's sake."""

    put: ClassVar[Callable[[int, bytes], int]] = staticmethod(os.write)
    """How bytes reach a descriptor; the fault bench sets a slow one."""

    def __init__(
        self,
        path: Path | None,
        rank: int = 0,
        *,
        warning: StorageWarning | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``path`` None keeps nothing.

        Every record carries ``kind``, ``time`` (Unix seconds), ``rank`` and ``sequence``: how many this log was told
        before, so that one that is missing shows.
        """
        self._path = path
        self._rank = rank
        self._warning = warning or StorageWarning()
        self._now = now
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._mid_line = False
        self._num_told = 0
        self._num_lost = 0
        self._room: int | None = None  # where in the file the number of lost records can always be written
        self._num_lost_before = 0  # by the process whose room it is
        self._has_own_room = False
        self._name_is_flushed = False
        self._closed = path is None
        self.num_bytes = 0
        """That this log has written."""

    def write(self, kind: str, **values: Any) -> None:
        """Append a record. Values may be numbers, text, enums, paths, records, and containers of them."""
        if self._closed:
            return
        with self._lock:
            self._write(kind, values)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._closed:
            return
        sequence, self._num_told = self._num_told, self._num_told + 1
        head = {"time": self._now(), "rank": self._rank}
        try:
            if self._num_lost:
                self._append(_line(GAP, {**head, "records_lost": self._num_lost}), head)
                self._num_lost = 0
                self._mark_loss()
            self._append(_line(kind, {**head, "sequence": sequence, **values}), head)
        except OSError as error:
            self._num_lost += 1
            self._warning.report(self._path, error)
            self._mark_loss()

    def flush_to_disk(self) -> None:
        """Make what was written outlast the machine's end."""
        with self._lock:
            if self._descriptor is None:
                return
            try:
                os.fsync(self._descriptor)
                if not self._name_is_flushed and self._path is not None:
                    flush_directory(self._path.parent)
                    self._name_is_flushed = True
            except OSError as error:
                self._warning.report(self._path, error)

    def close(self, *, last: str | None = None) -> None:
        """Close the file, behind a record of the kind ``last``; later ones are dropped. May be called again."""
        with self._lock:
            if last is not None:
                self._write(last, {})
            self._closed = True
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None:
                return
            try:
                os.close(descriptor)
            except OSError as error:
                self._warning.report(self._path, error)

    def _append(self, line: bytes, head: Mapping[str, Any]) -> None:
        descriptor = self._open()
        takes_room = not self._has_own_room and stat.S_ISREG(os.fstat(descriptor).st_mode)
        if takes_room:
            room = _line(GAP, {**head, "records_lost": 0})
            line += room.replace(b"0}", b"0".ljust(_ROOM_WIDTH) + b"}")
        rest = b"\n" + line if self._mid_line else line
        while rest:
            written = AuditLog.put(descriptor, rest)
            self.num_bytes += written
            rest = rest[written:]
            self._mid_line = bool(rest)
        if takes_room:
            self._room = os.fstat(descriptor).st_size - _ROOM_WIDTH - len(b"}\n")
            self._has_own_room, self._num_lost_before = True, 0

    def _mark_loss(self) -> None:
        """Writes into the room that was taken at the beginning how many records are lost."""
        try:
            if self._path is None or not self._path.is_file() or not self._path.stat().st_size:
                return
            with self._path.open("r+b", buffering=0) as file:  # a descriptor that appends cannot overwrite
                if self._room is None:
                    self._room, self._num_lost_before = _last_room(file.fileno())
                if self._room is not None:
                    num_lost = self._num_lost_before + self._num_lost
                    os.pwrite(file.fileno(), b"%-*d" % (_ROOM_WIDTH, num_lost), self._room)
        except OSError as error:
            self._warning.report(self._path, error)

    def _open(self) -> int:
        if self._descriptor is None:
            assert self._path is not None
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._mid_line = _ends_mid_line(self._path)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe is not waited for
            self._descriptor = os.open(self._path, flags | os.O_CLOEXEC, 0o600)
        return self._descriptor


def to_json(value: Any) -> Any:
    """``value`` as far as JSON can hold it: numbers that are not finite and unknown objects become text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return to_json(value.tolist()) if hasattr(value, "tolist") else str(value)


def _last_room(descriptor: int) -> tuple[int | None, int]:
    """The room of the process before, for one that was refused its own, and the number that stands in it."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        rooms = [(found.start(1), int(found[1].strip() or b"0")) for found in _ROOM.finditer(content)]
    return rooms[-1] if rooms else (None, 0)


def _line(kind: str, values: Mapping[str, Any]) -> bytes:
    record = {"kind": kind, **values}
    try:
        text = _ENCODER.encode(record)
    except (TypeError, ValueError):  # odd keys, numbers that are not finite
        text = _ENCODER.encode(to_json(record))
    return text.encode() + b"\n"


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=to_json)


def _ends_mid_line(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False  # there is no file yet, or a device without an end
