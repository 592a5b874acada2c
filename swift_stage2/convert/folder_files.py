"""The files of a folder by their relative names, in an order that does not depend on the disk."""

from __future__ import annotations

import os
from pathlib import Path

from swift_stage2.errors import DatasetError

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


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
        raise DatasetError(
            f"{option} must be a folder that holds {', '.join(suffixes)} files, got none below {folder}; name another"
        )
    return found
