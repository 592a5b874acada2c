"""Turns events into JSON lines, one file per rank, so that a run can be counted after it ended in any way.

A record is one ``write`` of one whole line; a process killed in the middle leaves a torn line, which the
reader drops and the next writer steps over. A full disk loses records, never the run: the next record that
fits is preceded by one that says how many are missing.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from swift_stage2.telemetry.storage_warning import StorageWarning

Record = dict[str, Any]
GAP = "gap"


def audit_path(run_dir: Path, rank: int) -> Path:
    """Where ``rank`` of a run writes."""
    return run_dir / "audit" / f"rank{rank}.jsonl"


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
        """``path`` None keeps nothing. Every record carries ``kind``, ``time`` (Unix seconds) and ``rank``."""
        self._path = path
        self._rank = rank
        self._warning = warning or StorageWarning()
        self._now = now
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._mid_line = False
        self._num_lost = 0
        self._closed = path is None
        self.num_bytes = 0
        """That this log has written."""

    def write(self, kind: str, **values: Any) -> None:
        """Append a record. Values may be numbers, text, enums, paths, records, and containers of them."""
        if self._closed:
            return
        with self._lock:
            if self._closed:
                return
            try:
                if self._num_lost:
                    self._append(self._line(GAP, {"records_lost": self._num_lost}))
                    self._num_lost = 0
                self._append(self._line(kind, values))
            except OSError as error:
                self._num_lost += 1
                self._warning.report(self._path, error)

    def flush_to_disk(self) -> None:
        """Make what was written outlast the machine's end."""
        with self._lock:
            if self._descriptor is None:
                return
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self._warning.report(self._path, error)

    def close(self) -> None:
        """Close the file; later records are dropped. May be called again."""
        with self._lock:
            self._closed = True
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None:
                return
            try:
                os.close(descriptor)
            except OSError as error:
                self._warning.report(self._path, error)

    def _line(self, kind: str, values: Mapping[str, Any]) -> bytes:
        record = {"kind": kind, "time": self._now(), "rank": self._rank, **values}
        try:
            text = _ENCODER.encode(record)
        except (TypeError, ValueError):  # odd keys, numbers that are not finite
            text = _ENCODER.encode(to_json(record))
        return text.encode() + b"\n"

    def _append(self, line: bytes) -> None:
        descriptor = self._open()
        rest = b"\n" + line if self._mid_line else line
        while rest:
            written = AuditLog.put(descriptor, rest)
            self.num_bytes += written
            rest = rest[written:]
            self._mid_line = bool(rest)

    def _open(self) -> int:
        if self._descriptor is None:
            assert self._path is not None
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._mid_line = _ends_mid_line(self._path)
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        return self._descriptor


def read_audit(path: Path) -> list[Record]:
    """The records of one file, in the order in which they were written.

    Lines that are no whole record, torn by a crash or a full disk, are dropped.

    Raises:
        OSError: the file cannot be read.
    """
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[Record], int]:
    """The records of one file, and how many lines are none; a last line without its end may still be written.

    Raises:
        OSError: the file cannot be read.
    """
    records: list[Record] = []
    num_unreadable = 0
    with path.open("rb") as file:
        for line in file:
            if (record := _record(line)) is not None:
                records.append(record)
            elif line.endswith(b"\n"):
                num_unreadable += 1
    return records, num_unreadable


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def to_json(value: Any) -> Any:
    """What JSON can hold of ``value``: numbers that are not finite and unknown objects become text."""
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


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=to_json)


def _ends_mid_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False  # there is no file yet, or a device without an end
