"""A real filesystem of some mebibytes that can be filled and made read-only. Needs the right to mount.

Used by tests of what writes files.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


def may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=30).returncode == 0


class SmallDisk:
    """Mounted at ``path``. Whoever makes one unmounts it."""

    def __init__(self, path: Path, size: str = "1m") -> None:
        self.path = path
        self.filler = path / "filler"
        path.mkdir(parents=True, exist_ok=True)
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))

    def fill(self, *, leaving_bytes: int = 0) -> None:
        """Takes all room, but for some; a page is the smallest part."""
        descriptor = os.open(self.filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            with contextlib.suppress(OSError):
                while os.write(descriptor, bytes(4096)):
                    pass
            assert os.statvfs(self.path).f_bavail == 0
        finally:
            os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - leaving_bytes))
            os.close(descriptor)

    def make_room(self) -> None:
        self.filler.unlink()

    def make_read_only(self) -> None:
        self._mount("-o", "remount,ro", str(self.path))

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True, timeout=30)

    @staticmethod
    def _mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True, timeout=30)
