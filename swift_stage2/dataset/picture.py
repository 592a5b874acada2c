"""The images of a data set: stored size, EXIF orientation and wholeness without decoding; upright copies.

Whole means that the file ends as its format ends; where it does not, the image is decoded and the decoder has the
say. Damage in the middle of a whole file shows only when everything is decoded (``decode``).

``write_upright`` writes a JSONL anew whose boxes were drawn on turned images as viewers show them: these become upright
PNG files. Nothing in the data tells; boxes on the stored pixels need nothing, because they are trained so.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
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
    """As a viewer shows it."""
    STORED = "stored"
    """As its pixels lie in the file."""


def write_upright(source: Path, output: Path) -> tuple[int, int]:
    """Writes ``output`` and, beside it, a folder of upright images; boxes stay. Returns how many of both changed.

    Lines without a turned image are copied byte by byte. ``output`` appears whole or not at all; a failure takes the
    folder away again.

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
    num_rows, images = 0, dict[str, str]()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(output) as target:
            for line in read_lines(source):
                written = _with_upright_images(line, folder, images)
                num_rows += written is not line
                target.buffer.write(written)
    except BaseException as error:
        if not output.exists():
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise UserError(f"--output must be a file that can be written, got {output}: {error}") from error
    return num_rows, len(images)


def _with_upright_images(line: bytes, folder: Path, written: dict[str, str]) -> bytes:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the check tells of it
        return line
    images = images_of(row) if isinstance(row, dict) else []
    upright = [_upright(path_of(image), folder, written) or image for image in images]
    if upright == images:
        return line
    return json.dumps(row | {"images": upright}, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """A row's images as it names them."""
    images = row.get("images") or []
    return images if isinstance(images, list) else [images]


def path_of(image: Any) -> Any:
    """The path that an entry of a row's ``images`` names, if it is one."""
    return image.get("path") if isinstance(image, Mapping) else image


def _upright(path: Any, folder: Path, written: dict[str, str]) -> str | None:
    """The upright copy of an image; None of one that needs none, or that the check tells of."""
    try:
        if not isinstance(path, str) or look_at(path).orientation == UPRIGHT:
            return None
    except UNREADABLE:
        return None
    if path not in written:
        folder.mkdir(exist_ok=True)
        target = folder / f"{len(written):06d}-{Path(path).stem}.png"
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
        written[path] = str(target)
    return written[path]
