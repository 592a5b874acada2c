"""Where a run will write: that it can, found out by writing, and how much room is left for checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from swift_stage2.config import Stage2Config
from swift_stage2.doctor.finding import Outcome, failed, ok, warning

_GIB = 1024**3
_FIX = "write a swift.output_dir that this user can write"


def check_run_directory(config: Stage2Config) -> Outcome[None]:
    """Makes a directory beside what is there already, and removes it; of the run's own directory nothing is left."""
    written = config.swift.get("output_dir")
    if written is not None and not (isinstance(written, str) and written.strip()):
        return failed(f"swift.output_dir must be a path, got output_dir={written!r}", _FIX)
    directory = Path(written or "output").expanduser().absolute()  # as ms-swift does
    there = next(place for place in (directory, *directory.parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".swift-stage2-doctor-", dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return failed(f"{directory} cannot be written: {error}", _FIX)
    needed = _weights_bytes(config)
    found = f"{directory} can be written, {free / _GIB:.1f} GiB free"
    if needed and free < needed:
        return warning(
            f"{found}, and the weights alone of one checkpoint take {needed / _GIB:.1f} GiB",
            "free room there, or write another swift.output_dir",
        )
    return ok(found)


def _weights_bytes(config: Stage2Config) -> int:
    """Of the model's own files; a LoRA checkpoint is far smaller, and a hub id tells nothing."""
    model = config.swift.get("model")
    if config.swift.get("tuner_type") != "full" or not isinstance(model, str):
        return 0
    return sum(file.stat().st_size for file in Path(model).expanduser().glob("*.safetensors"))
