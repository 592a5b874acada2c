"""Refuses a missing or cut checkpoint with one line, before a hub client would go looking for it outside.

Looks at directories and the heads of weight files only; a hub id is ms-swift's own business. Called by ``launch`` and
by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from swift_stage2.config.swift_arguments import named_places
from swift_stage2.errors import ConfigError

# ms-swift's argument, and the file that makes a directory what the argument asks for.
_MARKS = {
    "model": "config.json",
    "adapters": "adapter_config.json",
    "resume_from_checkpoint": "trainer_state.json",
}


def check_model(swift_arguments: Mapping[str, Any]) -> None:
    """Checks every local directory that ``model``, ``adapters`` and ``resume_from_checkpoint`` name.

    Raises:
        ConfigError: none of them is given, one is no path, or a directory is missing, no checkpoint or not whole.
    """
    named = 0
    for argument, mark in _MARKS.items():
        for place in named_places(swift_arguments, argument):
            named += 1
            if argument == "resume_from_checkpoint" or _is_local(place):  # no hub holds what a run left
                _check_directory(argument, Path(place).expanduser(), mark)
    if named == 0:
        raise ConfigError(
            "swift.model must name a checkpoint, got none; write the directory of a stage-1 checkpoint"
        )


def _is_local(place: str) -> bool:
    """A hub id is ``owner/name`` and names nothing on this machine."""
    return place.startswith((".", "/", "~")) or place.count("/") != 1 or Path(place).exists()


def _check_directory(argument: str, directory: Path, mark: str) -> None:
    if not directory.is_dir():
        raise ConfigError(
            f"swift.{argument} must be a directory that exists, got {argument}={str(directory)!r}; check the path"
        )
    if not (directory / mark).is_file():
        raise ConfigError(
            f"swift.{argument} must hold {mark}, got {argument}={str(directory)!r} without it; name a checkpoint"
        )
    for path in sorted(directory.glob("*.safetensors")):
        try:
            safe_open(path, framework="np")  # reads where the tensors lie, and that the file goes as far
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"swift.{argument} must hold whole weights, got {path} of {path.stat().st_size:,} bytes: "
                f"{' '.join(str(error).split())}; copy or save it again, a full disk or a broken copy has cut it"
            ) from error
