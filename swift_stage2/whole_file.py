"""Puts files in their place whole or not at all, so that they outlast the machine's end, and opens files to read.

Files to read may come from others: only regular ones are opened, so that no pipe is waited for and no device is read
without end. What is refused is an ``OSError``, as a file that is not there. ``tests/test_architecture.py`` holds that
every reader of the package opens through here.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

MOST_BYTES = 256 * 2**20
"""Of what is held at once: a whole file, or one line of a longer one."""


def write_whole(path: Path, text: str, *, errors: str = "strict", is_private: bool = False) -> None:
    """Writes ``text`` to ``path`` as ``whole_file`` does. Raises OSError as it does."""
    with whole_file(path, errors=errors, is_private=is_private) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path, *, errors: str = "strict", is_private: bool = False) -> Iterator[TextIO]:
    """A file to write to that takes ``path``'s place in one move when the block ends well.

    Readers see the old file or the new one, and nothing is left beside it. A link is followed. With ``is_private`` no
    other user reads it, as the event log: it holds rows or answers. Raises:
        OSError: it cannot be written, or is a device or a pipe; what was there before is untouched.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # the move would put a file where /dev/null was
        raise FileExistsError(errno.EEXIST, "not a regular file, which is never replaced", str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.touch(
        0o600 if is_private else 0o666, exist_ok=False
    )  # what cannot be begun leaves nothing to remove
    file = partial.open("w", encoding="utf-8", errors=errors)
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


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a file of any size for reading. Raises OSError: it cannot be opened, or is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe opens without a writer
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path) -> bytes:
    """A whole file. Raises OSError: as ``open_regular``, or it has more than ``MOST_BYTES``."""
    with open_regular(path) as file:
        return _bounded(file.read(MOST_BYTES + 1), path)


def read_regular_text(path: str | Path, encoding: str = "utf-8") -> str:
    """A whole file of text. Raises OSError as ``read_regular``, UnicodeDecodeError."""
    return read_regular(path).decode(encoding)


def regular_lines(path: str | Path) -> Iterator[bytes]:
    """Lines with their ends. Raises OSError: as ``open_regular``, or a line has more than ``MOST_BYTES``."""
    with open_regular(path) as file:
        while line := file.readline(MOST_BYTES + 1):
            yield _bounded(line, path)


def _bounded(content: bytes, path: str | Path) -> bytes:
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES >> 20} MiB at once", str(path))
    return content


def find_image(path: str) -> str:
    """``path``, or the file that ms-swift takes for it: it resolves relative images against ``ROOT_IMAGE_DIR``."""
    root = os.environ.get("ROOT_IMAGE_DIR")
    return os.path.join(root, path) if root and not os.path.exists(path) else path
