"""Reads a training JSONL before anything heavy starts and refuses it with one line that says what, where, how.

Checks what ms-swift would only trip over later: JSON, objects with boxes, images that exist and hold their
boxes. A bad sample that slips through (a remote data set, a broken pixel stream) is quarantined while training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from swift_stage2.channel_b.ground_truth import lists_objects, read_ground_truth
from swift_stage2.config import RowsWithoutObjects
from swift_stage2.config.swift_arguments import named_places
from swift_stage2.errors import ConfigError, DatasetError, SampleError

_SUFFIX = ".jsonl"
_FILE_SUFFIXES = (_SUFFIX, ".json", ".csv", ".txt", ".parquet")


def check_datasets(
    swift_arguments: Mapping[str, Any], rows_without_objects: RowsWithoutObjects = RowsWithoutObjects.REFUSE
) -> None:
    """Checks every local JSONL named by ms-swift's ``dataset`` and ``val_dataset`` arguments.

    Of a file in another format only that it is there: ms-swift would look for it on a hub. Hub ids are its business.
    Of a folder ms-swift would take what looks like a train split, or end in a traceback.

    Raises:
        DatasetError: names key, file, line, problem and remedy.
        ConfigError: an argument is neither a path nor a list of paths, or ``split_dataset_ratio`` is out of range.
    """
    _check_split(swift_arguments.get("split_dataset_ratio"))
    for argument in ("dataset", "val_dataset"):
        for name in named_places(swift_arguments, argument):
            path = Path(name.split("#", maxsplit=1)[0])  # ms-swift's `#N` asks for N rows
            is_local = path.suffix in _FILE_SUFFIXES or name.startswith(("/", "./", "../"))
            if is_local and not path.exists():
                raise DatasetError(
                    f"swift.{argument} must name files that exist, got {argument}={name!r}; correct the path "
                    f"(relative ones are read from the working directory, {Path.cwd()})"
                )
            if path.is_dir():
                raise DatasetError(
                    f"swift.{argument} must name files, got {argument}={name!r}, a folder; name the files in it"
                )
            if path.suffix == _SUFFIX:
                _check_named(argument, path, rows_without_objects)


def _check_split(ratio: Any) -> None:
    """YAML reads some numbers (``1e-2``) as text; ms-swift reads them as numbers."""
    try:
        holds = ratio is None or 0 <= float(ratio) < 1
    except (TypeError, ValueError):
        holds = False
    if not holds:
        raise ConfigError(
            "swift.split_dataset_ratio must be at least 0 and below 1, got "
            f"split_dataset_ratio={ratio!r}; write split_dataset_ratio: 0.01"
        )


def _check_named(argument: str, path: Path, rows_without_objects: RowsWithoutObjects) -> None:
    try:
        check_jsonl(path, rows_without_objects)
    except DatasetError as error:
        raise DatasetError(f"swift.{argument}: {error}") from error


def check_jsonl(path: Path, rows_without_objects: RowsWithoutObjects = RowsWithoutObjects.REFUSE) -> None:
    """Checks one file, line by line. Raises DatasetError as ``check_datasets`` does."""
    try:
        with path.open(encoding="utf-8") as lines:
            count = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    _check_line(line, f"{path}:{number}", rows_without_objects)
                    count += 1
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"a data set must be a readable UTF-8 file, got {path}: {error}") from error
    if count == 0:
        raise DatasetError(f"a data set must hold rows, got none in {path}; write one JSON object per line")


def _check_line(line: str, where: str, rows_without_objects: RowsWithoutObjects) -> None:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DatasetError(
            f"{where}: every line must be one JSON object: {error}; mend or remove the line"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list) or not row["messages"]:
        raise DatasetError(
            f"{where}: a row is an object with messages=[{{'role': ..., 'content': ...}}, ...]; write it so"
        )
    last = row["messages"][-1]
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise DatasetError(
            f"{where}: the last of a row's messages must be the assistant's, the answer; add it"
        )
    if rows_without_objects is RowsWithoutObjects.CHANNEL_A_ONLY and not lists_objects(row):
        return
    try:
        _, boxes = read_ground_truth(row)
    except SampleError as error:
        raise DatasetError(f"{where}: {error}; mend or remove the row") from error
    images = row.get("images") or []
    paths = [_image_path(image, where) for image in (images if isinstance(images, list) else [images])]
    sizes = [_image_size(path, where) for path in paths]
    if row["objects"].get("bbox_type", "real") == "real" and len(sizes) == 1:
        _check_bounds(boxes, sizes[0], where)


def _image_path(image: Any, where: str) -> str:
    path = image.get("path") if isinstance(image, Mapping) else image
    if not isinstance(path, str) or not path:
        raise DatasetError(
            f"{where}: an image must be the path of a file, got {image!r}; write images=['…/a.png']"
        )
    return path


def _image_size(image: str, where: str) -> tuple[int, int]:
    path = Path(image)
    root = os.environ.get("ROOT_IMAGE_DIR")
    if root and not path.exists():
        path = Path(root) / image
    try:
        with Image.open(path) as opened:
            return opened.size
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DatasetError(
            f"{where}: an image must be a readable picture, got {image}: {error}; mend the path "
            "(relative ones are read from the working directory or ROOT_IMAGE_DIR)"
        ) from error


def _check_bounds(boxes: Sequence[tuple[float, ...]], size: tuple[int, int], where: str) -> None:
    width, height = size
    for box in boxes:
        if box[2] > width or box[3] > height:
            raise DatasetError(
                f"{where}: a box must lie inside its image, got bbox={[round(v, 1) for v in box]} "
                f"width={width} height={height}; mend the annotation"
            )
