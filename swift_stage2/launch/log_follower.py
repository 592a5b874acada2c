"""A growing log file into lines with a coloured prefix on the launcher's own output."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

_COLOURS = ("\033[36m", "\033[33m", "\033[35m", "\033[32m", "\033[34m")
_RESET = "\033[0m"
_REDRAW_INTERVAL_S = 1.0
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])")


class LogFollower:
    """Shows what is appended to one file. A progress bar redraws itself after ``\\r``: one state a second is shown."""

    def __init__(self, path: Path, name: str, show: Callable[[str], None], colour: int | None = None) -> None:
        self._show = show
        self._prefix = (
            f"[{name}]" if colour is None else f"{_COLOURS[colour % len(_COLOURS)]}[{name}]{_RESET}"
        )
        self._redrawn_at = -_REDRAW_INTERVAL_S
        self._rest = b""
        self._file = path.open("rb")
        self._file.seek(0, 2)

    def pump(self) -> None:
        """Shows every whole line since the last call."""
        data = self._rest + self._file.read()
        end = 0
        for found in _LINE.finditer(data):
            end = found.end()
            self._emit(found.group())
        self._rest = data[end:]

    def close(self) -> None:
        """Shows the rest, also without an end of line."""
        self.pump()
        self._emit(self._rest)
        self._file.close()

    def _emit(self, line: bytes) -> None:
        text = line.rstrip(b"\r\n").decode("utf-8", errors="replace")
        if not text.strip():
            return
        if line.endswith(b"\r"):
            now = time.monotonic()
            if now - self._redrawn_at < _REDRAW_INTERVAL_S:
                return
            self._redrawn_at = now
        self._show(f"{self._prefix} {text}")
