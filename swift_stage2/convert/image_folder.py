"""The pictures of a folder by the names that sources give them, in an order that does not depend on the disk."""

from __future__ import annotations

import os
import unicodedata
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from swift_stage2.convert.import_report import ImportIssue, ImportReport
from swift_stage2.errors import DatasetError

# Those that are read, then others that people have: they are looked at, too, and told.
IMAGE_SUFFIXES = (
    *(
        ".avif",
        ".bmp",
        ".dib",
        ".gif",
        ".j2k",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".pbm",
        ".pgm",
        ".png",
    ),
    *(".pnm", ".ppm", ".tif", ".tiff", ".webp"),
    *(
        ".arw",
        ".cr2",
        ".dng",
        ".exr",
        ".hdr",
        ".heic",
        ".heif",
        ".ico",
        ".jxl",
        ".nef",
        ".psd",
        ".svg",
        ".tga",
    ),
)


def files_below(folder: Path, suffixes: tuple[str, ...], option: str) -> list[str]:
    """Names relative to ``folder`` of all files in and below it that end so, whatever their case.

    Raises:
        DatasetError: it is no folder that can be read, or holds no such file; ``option`` is told to have named it.
    """

    def refuse(error: OSError) -> None:
        raise DatasetError(
            f"{option} must be a folder that can be read, got {error.filename}: {error.strerror}; check the path"
        ) from error

    found = sorted(
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if name.lower().endswith(suffixes) and not name.startswith(".")
    )
    if not found:
        shown = suffixes[0] if len(suffixes) == 1 else "picture"
        raise DatasetError(
            f"{option} must be a folder that holds {shown} files, got none below {folder}; name another"
        )
    return found


class ImageFolder:
    """``folder`` and all folders in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def names(self) -> list[str]:
        """All pictures. Raises DatasetError: there is none."""
        return files_below(self.folder, IMAGE_SUFFIXES, "--images")

    @cached_property
    def by_stem(self) -> Mapping[str, list[str]]:
        """Pictures by their name without its suffix, composed (NFC)."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.names:
            found[stem_of(name)].append(name)
        return found

    def find(self, written: str, where: str, report: ImportReport) -> str | None:
        """The picture that a source calls ``written``; None if there is none or more than one, which is told.

        A name may have its suffix in other capitals or none, backslashes, and %20 for a space.
        """
        slashed = written.replace("\\", "/")
        spellings = list(dict.fromkeys((written, slashed, unquote(written), unquote(slashed))))
        for name in spellings:
            if _is_file(self.folder, name):
                return os.path.normpath(name)
        for name in spellings:
            suffix = os.path.splitext(name)[1].lower()
            wanted = suffix if suffix in IMAGE_SUFFIXES else ""
            fitting = [each for each in self.by_stem.get(stem_of(name), ()) if each.lower().endswith(wanted)]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                report.add(ImportIssue.SEVERAL_PICTURES, f"{where}: {', '.join(fitting)}")
                return None
        report.add(ImportIssue.NO_PICTURE, f"{where}: {written}")
        return None


def stem_of(name: str) -> str:
    """A picture's name without the suffix of one, by which label files are called, too."""
    stem, suffix = os.path.splitext(os.path.normpath(name))
    known = suffix.lower() in (*IMAGE_SUFFIXES, ".txt", ".xml")
    return unicodedata.normalize("NFC", stem if known else stem + suffix)


def _is_file(folder: Path, name: str) -> bool:
    try:
        return os.path.isfile(os.path.join(folder, name))
    except ValueError:  # a zero byte or half a character, which no file's name has
        return False
