"""The images of a data set: stored size, EXIF orientation and wholeness without decoding; upright copies.

Whole means that the file ends as its format ends; where it does not, the image is decoded and the decoder has the
say. Damage in the middle of a whole file shows only when everything is decoded (``decode``).

``apply_orientation`` writes a JSONL anew so that no EXIF tag decides what its boxes mean: turned images become upright
PNG files. Whoever asks must say on which picture the boxes were drawn; nothing in the data tells. Lines without a
turned image are copied byte by byte.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from swift_stage2.channel_b.image_files import UPRIGHT, orientation_of
from swift_stage2.dataset.files import read_lines
from swift_stage2.errors import DatasetError, UserError
from swift_stage2.records import find_image
from swift_stage2.servers.image_opening import FORMATS, refuse_deep_pixels
from swift_stage2.whole_file import open_regular, whole_file

UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
PLAIN_MODES = ("RGB", "L")
"""Of pixels that stay what they are when they are read as RGB."""
_TAIL_BYTES = 4096
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
Corner = Callable[[float, float, float, float], tuple[float, float]]
"""x, y, width and height of the stored picture to x and y on the upright one."""
_TURNS: Mapping[int, Corner] = {
    2: lambda x, y, w, h: (w - x, y),
    3: lambda x, y, w, h: (w - x, h - y),
    4: lambda x, y, w, h: (x, h - y),
    5: lambda x, y, w, h: (y, x),
    6: lambda x, y, w, h: (h - y, x),
    7: lambda x, y, w, h: (h - y, w - x),
    8: lambda x, y, w, h: (y, w - x),
}


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """Width and height as stored, before any rotation; ``orientation`` is 1 for an upright picture.

    ``mode``: Pillow's, of the pixels; they are read as RGB, without what is transparent, whatever it is.
    """

    width: int
    height: int
    orientation: int
    mode: str = "RGB"

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as a viewer shows it."""
        turned = self.orientation >= 5
        return (self.height, self.width) if turned else (self.width, self.height)


def look_at(path: str | bytes, *, decode: bool = False) -> StoredPicture:
    """Reads the header and the end of an image file, or of its content; with ``decode`` all of it.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: it is no image of a format that is read, not all
            of it is there, or its pixels have more than 8 bits.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with (
            io.BytesIO(path) if isinstance(path, bytes) else open_regular(find_image(path)) as file,
            _open_image(file) as image,
        ):
            refuse_deep_pixels(image)
            width, height = image.size
            position = file.tell()
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read()
            file.seek(position)
            # A PNG may carry the tag behind its pixels, and says so only once it is decoded.
            late_tag = image.format == "PNG" and b"eXIf" in tail
            if decode or late_tag or _ENDS.get(str(image.format), b"\0none") not in tail:
                image.load()
            return StoredPicture(width, height, orientation_of(image), image.mode)


def _open_image(file: BinaryIO) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}, which are read") from error


class DrawnOn(StrEnum):
    """The picture that a data set's boxes were drawn on."""

    UPRIGHT = "upright"
    """As a viewer shows it: boxes stay as they are."""
    STORED = "stored"
    """As its pixels lie in the file: boxes are turned with the picture."""


@dataclass(slots=True)
class Rewritten:
    """A data set that was written anew. ``images``: old path to new one."""

    num_rows: int = 0
    images: dict[str, str] = field(default_factory=dict)


def apply_orientation(source: Path, output: Path, drawn_on: DrawnOn) -> Rewritten:
    """Writes ``output`` and, beside it, a folder of upright images. ``output`` appears whole or not at all; a failure
    takes the folder away again.

    Raises:
        UserError: ``output`` or its folder exists or cannot be written.
        DatasetError: ``source`` or one of its turned images cannot be read.
    """
    folder = output.with_name(f"{output.stem}-images")
    for path in (output, folder):
        if path.exists():
            raise UserError(
                f"--output must be a new file with a new folder beside it, got {path}, which exists; "
                "name another one"
            )
    done = Rewritten()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(output) as target:
            for line in read_lines(source):
                target.buffer.write(_rewritten(line, folder, drawn_on, done))
    except BaseException as error:
        if not output.exists():
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise UserError(f"--output must be a file that can be written, got {output}: {error}") from error
    return done


def _rewritten(line: bytes, folder: Path, drawn_on: DrawnOn, done: Rewritten) -> bytes:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the check tells of it
        return line
    if not isinstance(row, dict):
        return line
    images = images_of(row)
    pictures = [_look_at(image) for image in images]
    if all(picture is None or picture.orientation == UPRIGHT for picture in pictures):
        return line
    row["images"] = [
        image if picture is None else _upright(image, picture, folder, done)
        for image, picture in zip(images, pictures, strict=True)
    ]
    if drawn_on is DrawnOn.STORED and isinstance(row.get("objects"), dict):
        _turn_boxes(row["objects"], pictures)
    done.num_rows += 1
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """A row's images as it names them."""
    images = row.get("images") or []
    return images if isinstance(images, list) else [images]


def path_of(image: Any) -> Any:
    """The path that an entry of a row's ``images`` names, if it is one."""
    return image.get("path") if isinstance(image, Mapping) else image


def _look_at(image: Any) -> StoredPicture | None:
    """None for one that the check tells of."""
    try:
        return look_at(path) if isinstance(path := path_of(image), str) else None
    except UNREADABLE:
        return None


def _upright(image: Any, picture: StoredPicture, folder: Path, done: Rewritten) -> Any:
    path = path_of(image)
    if picture.orientation == UPRIGHT:
        return image
    if path not in done.images:
        folder.mkdir(exist_ok=True)
        target = folder / f"{len(done.images):06d}-{Path(path).stem}.png"
        if os.path.isabs(path):  # spelt like the other rows, from the working directory or not
            target = target.absolute()
        try:
            with open_regular(find_image(path)) as file, Image.open(file, formats=FORMATS) as stored:
                upright = ImageOps.exif_transpose(stored).convert("RGB")
        except UNREADABLE as error:
            raise DatasetError(
                f"an image must be whole, got {path}: {error}; replace the file, or take its row out"
            ) from error
        upright.save(target)
        done.images[path] = str(target)
    return done.images[path]


def _turn_boxes(objects: dict[str, Any], pictures: list[StoredPicture | None]) -> None:
    boxes, numbers = objects.get("bbox"), objects.get("image_id")
    numbers = numbers if isinstance(numbers, list) else []
    for index, box in enumerate(boxes if isinstance(boxes, list) else []):
        number = numbers[index] if index < len(numbers) else 0
        picture = pictures[number] if isinstance(number, int) and 0 <= number < len(pictures) else None
        if picture is None or picture.orientation == UPRIGHT or not _is_place(box):
            continue
        is_share = objects.get("bbox_type") == "norm1"
        size = (1, 1) if is_share else (picture.width, picture.height)
        turn = _TURNS[picture.orientation]
        (x1, y1), (x2, y2) = turn(box[0], box[1], *size), turn(box[-2], box[-1], *size)
        box[:] = [min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)][: len(box)]


def _is_place(box: Any) -> bool:
    """A box, or a point."""
    return (
        isinstance(box, list) and len(box) in (2, 4) and all(isinstance(value, int | float) for value in box)
    )
