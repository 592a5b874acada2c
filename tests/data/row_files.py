"""Rows as a user writes them, and the files that hold them; each test spoils what it wants to see told."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

SIZE = (40, 30)
ANSWER = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'


def make_image(path: Path, size: tuple[int, int] = SIZE, orientation: int | None = None) -> str:
    """Noise, so that no encoder can shrink it, with an EXIF orientation where one is asked for."""
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.effect_noise(size, 60).convert("RGB").save(path, exif=exif.tobytes() if orientation else b"")
    return str(path)


def make_row(
    image: str | Sequence[str],
    *,
    answer: str = ANSWER,
    labels: Sequence[str] = ("cat",),
    boxes: Sequence[Sequence[float]] = ((1, 2, 30, 20),),
    prompt: str = "<image>Detect.",
    **objects: Any,
) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}],
        "images": [image] if isinstance(image, str) else list(image),
        "objects": {"ref": list(labels), "bbox": [list(box) for box in boxes], **objects},
    }


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Text is written as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
