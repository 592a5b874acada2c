"""Finds the file and the line that a row came from: ms-swift concatenates and shuffles before anybody sees rows.

A row is known by its content (prompt, answer, images, objects), which survives ms-swift; of equal rows the first line
is told. The index is made when a run starts, because the learner's own thread asks it and must not wait. Immutable.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swift_stage2.records import RowOrigin, image_paths

logger = logging.getLogger(__name__)

_LINE_BITS = 40
_NUM_MESSAGES = 2  # ms-swift may put a system prompt before them


class RowOrigins:
    """The rows of some JSONL files: 16 bytes for each."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        """Reads all of them once. What cannot be read is left out: whoever trains it has refused it before."""
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
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
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
