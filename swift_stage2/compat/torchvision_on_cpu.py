"""Lets a CUDA-built torchvision import beside a CPU build of torch.

torchvision's Python files attach fake kernels to operators that its compiled library declares. Next to a
CPU torch the CUDA library does not load, the operators are missing and ``import torchvision`` raises.
Declaring their schemas first is enough: its pure-Python transforms, which image processors use, then work.
Called by everything that imports ms-swift, before it does.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

# What torchvision 0.28 refers to while it is imported; calling them still raises, as it should.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A library object undoes its declarations when it is collected.
_declared: list[torch.library.Library] = []


def declare_operators() -> None:
    """Declares torchvision's operators where its own library cannot; idempotent.

    Does nothing when torchvision is absent or already imported, when its library loads (a build that
    fits this torch), or when the operators exist.
    """
    if "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    if _own_library_loads(Path(spec.submodule_search_locations[0])):
        return
    missing = [schema for name, schema in _SCHEMAS.items() if not _is_declared(name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in missing:
            library.define(schema)  # type: ignore[no-untyped-call]
        _declared.append(library)


def _own_library_loads(directory: Path) -> bool:
    for path in (*directory.glob("_C*.so"), *directory.glob("_C*.pyd")):
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except (ImportError, OSError):
            continue
        return True
    return False


def _is_declared(name: str) -> bool:
    return hasattr(torch.ops.torchvision, name)
