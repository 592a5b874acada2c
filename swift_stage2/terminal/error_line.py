"""The line with which a command gives up, spelt as argparse spells its own: ``swift-stage2 X: error: …``."""

from __future__ import annotations

import sys
from contextlib import suppress


def print_error(command: str, message: object) -> None:
    """Writes ``message`` to stderr as one line, whatever breaks it holds; progress bars end before it."""
    if "tqdm" in sys.modules:  # a bar that is closed later, at exit, would stand behind the error
        from tqdm import tqdm

        with suppress(OSError, ValueError):  # its stream is gone
            for bar in list(tqdm._instances):
                bar.close()
    print(f"swift-stage2 {command}: error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
