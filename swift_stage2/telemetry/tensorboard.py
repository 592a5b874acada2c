"""Turns scalars into one TensorBoard event file, written by rank 0 at logging steps.

Records go straight to the file, without a thread. A write that fails is taken back whole, because readers
stop at a torn record, and the next one is tried again: a full disk costs points of a curve, never the run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from swift_stage2.telemetry.chart_layout import layout_summary
from swift_stage2.telemetry.storage_warning import StorageWarning


class TensorBoardSink:
    """One event file in ``directory``, made at the first write. Not for several threads at once."""

    def __init__(self, directory: Path, *, warning: StorageWarning | None = None) -> None:
        host = socket.gethostname()
        self._path = directory / f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.stage2"
        self._warning = warning or StorageWarning()
        self._file: FileIO | None = None
        self._closed = False

    def write_scalars(self, step: int, scalars: Mapping[str, float], wall_time: float | None = None) -> None:
        """Write all ``scalars`` (by full tag) as one event."""
        if not scalars:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)), wall_time)

    def write_text(self, tag: str, text: str) -> None:
        """Write ``text`` (Markdown) once, at step 0."""
        self._write(Event(step=0, summary=text_pb(tag, text)), None)

    def close(self) -> None:
        """Close the file; later writes are dropped. May be called again."""
        self._closed = True
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._warning.report(self._path, error)

    def _write(self, event: Event, wall_time: float | None) -> None:
        if self._closed:
            return
        event.wall_time = time.time() if wall_time is None else wall_time
        try:
            self._append(self._open(), event)
        except OSError as error:
            self._warning.report(self._path, error)

    def _open(self) -> FileIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(self._path, "ab")
            try:
                self._append(file, Event(wall_time=time.time(), file_version="brain.Event:2"))
                self._append(file, Event(wall_time=time.time(), summary=layout_summary()))
            except OSError:
                _close_quietly(file)
                raise
            self._file = file
        return self._file

    def _append(self, file: FileIO, event: Event) -> None:
        good = file.tell()
        try:
            RecordWriter(_Whole(file)).write(event.SerializeToString())
        except OSError:
            _truncate_quietly(file, good)
            raise


class _Whole:
    """The writer that ``RecordWriter`` asks for: a short write goes on until all of it is in the file."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]


def _truncate_quietly(file: FileIO, size: int) -> None:
    try:
        file.truncate(size)
    except OSError:
        return  # a device, or a disk that is gone; nothing was to be saved there


def _close_quietly(file: FileIO) -> None:
    try:
        file.close()
    except OSError:
        return
