"""Where the images of a row lie: the one rule for who sends them and for who looks at them later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def find_image(path: str) -> str:
    """``path``, or the file that ms-swift takes for it: it resolves relative images against ``ROOT_IMAGE_DIR``."""
    root = os.environ.get("ROOT_IMAGE_DIR")
    if root and not os.path.exists(path):
        return os.path.join(root, path)
    return path


def image_paths(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Absolute paths of a row's images; None for one that has no file of its own."""
    images = row.get("images") or ()
    paths = [image.get("path") if isinstance(image, Mapping) else image for image in images]
    return tuple(os.path.abspath(find_image(path)) if isinstance(path, str) else None for path in paths)
