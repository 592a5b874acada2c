"""Puts files in their place whole or not at all, and so that they outlast the machine's end."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def write_whole(path: Path, text: str, *, errors: str = "strict") -> None:
    """Writes ``text`` to ``path`` as ``whole_file`` does. Raises OSError as it does."""
    with whole_file(path, errors=errors) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path, *, errors: str = "strict") -> Iterator[TextIO]:
    """A file to write to that takes ``path``'s place in one move when the block ends well.

    Readers see the old file or the new one, and nothing is left beside it. A link is followed. Raises:
        OSError: it cannot be written, or is a device or a pipe; what was there before is untouched.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # the move would put a file where /dev/null was
        raise FileExistsError(errno.EEXIST, "not a regular file, which is never replaced", str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = partial.open("x", encoding="utf-8", errors=errors)  # what cannot be begun leaves nothing to remove
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Makes names in a directory outlast the machine's end, which a file's own flush does not. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
