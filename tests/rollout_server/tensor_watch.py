"""Notes which files of the package hold a tensor while a round runs: of this process, or of a server's.

``python tensor_watch.py FILE ARGUMENT…`` is ``swift-stage2 rollout ARGUMENT…`` and appends to FILE the path of every
module, once, in which a function ends while an argument, a local or its result holds a tensor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import swift_stage2

_PACKAGE = f"{Path(swift_stage2.__file__).parent}/"


def _holds_tensor(value: Any, depth: int = 4) -> bool:
    """In itself, in a container, or in a record of the package."""
    if isinstance(value, torch.Tensor):
        return True
    if not depth:
        return False
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = list(value)
    elif (
        type(value).__module__.startswith("swift_stage2.weights.")
        or type(value).__name__ == "ReceivedWeights"
    ):
        names = getattr(type(value), "__slots__", None) or vars(value)
        items = [getattr(value, name, None) for name in names]
    else:
        return False
    return any(_holds_tensor(item, depth - 1) for item in items)


def _watcher(note: Callable[[str], object]) -> Callable[[FrameType, str, Any], None]:
    noted: set[str] = set()

    def look(frame: FrameType, event: str, result: Any) -> None:
        path = frame.f_code.co_filename
        if event != "return" or not path.startswith(_PACKAGE) or path in noted:
            return
        held = [value for name, value in frame.f_locals.items() if name != "self"]
        if _holds_tensor([*held, result]):
            noted.add(path)
            note(path.removeprefix(_PACKAGE))

    return look


@contextmanager
def watched(note: Callable[[str], object]) -> Iterator[None]:
    """Calls ``note`` with the paths; sees this thread, and threads that start while the context lasts."""
    look = _watcher(note)
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def main(file: Path, arguments: list[str]) -> int:
    """Looks from the moment at which the model is loaded: at the engine's thread, and at threads that start later."""
    from swift_stage2.rollout_server.command_line import serve, transformers_command

    notes = file.open("a", encoding="utf-8", buffering=1)
    look = _watcher(lambda path: notes.write(f"{path}\n"))

    def load_generator() -> Any:
        from swift_stage2.rollout_server.swift_generator import SwiftGenerator

        class WatchedGenerator(SwiftGenerator):
            def prepare(self) -> None:
                super().prepare()
                threading.setprofile(look)
                sys.setprofile(look)

        return WatchedGenerator

    return serve(transformers_command(arguments, load_generator))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
