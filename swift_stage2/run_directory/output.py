"""Claims a directory for one demo, bench or replay, without ever removing what somebody else wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

from swift_stage2.errors import UserError

_MARKER = ".swift-stage2"


def claim_directory(path: Path, *, keep: bool, marker: str = _MARKER) -> Path:
    """An empty directory: ``path``, cleared of an earlier claim, or with ``keep`` the first free ``path-N``.

    Only what an earlier claim with the same ``marker``, the name of a hidden file, covers is ever cleared.

    Raises:
        UserError: the directory is a file, holds something that no claim covers, or cannot be written.
    """
    directory, number = path.absolute(), 1
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--output must be a directory, got {directory}, a file; name another one")
    while keep and directory.exists():
        number += 1
        directory = directory.with_name(f"{path.name}-{number}")
    try:
        if directory.exists() and any(directory.iterdir()):
            if not (directory / marker).exists():
                raise UserError(
                    "--output must be a new directory or one that an earlier run of this command made, "
                    f"got {directory} with other files; name another one"
                )
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / marker).touch()
    except OSError as error:
        raise UserError(
            f"--output must be a directory that can be written, got {directory} ({error}); name another one"
        ) from error
    return directory
