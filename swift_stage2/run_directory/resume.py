"""Writes and reads what a resumed run needs beside Hugging Face's checkpoint: one JSON file per rank.

Each file names the step, rank and world size it belongs to, and in its state the save, so that two checkpoints
cannot be mixed. All ranks' are written before any rank writes the trainer's own state, so a checkpoint that Hugging
Face can resume from is complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_stage2.errors import ConfigError
from swift_stage2.whole_file import read_regular_text, write_whole

_FORMAT = 2
_ONE_SAVE = "resume from a checkpoint whose files are all of one save"
_AS_MANY_RANKS = (
    "start as many ranks as before (launch.learner.nproc_per_node, or torchrun's --nproc_per_node): every rank goes on "
    "in its own share of the data"
)


def void_older(directory: str) -> None:
    """Makes a checkpoint that is about to be written over one that Hugging Face cannot resume from.

    It writes its own state last, so the directory cannot be taken for a checkpoint before it is whole again.
    """
    Path(directory, "trainer_state.json").unlink(missing_ok=True)


def write_state(
    directory: str,
    *,
    rank: int,
    world_size: int,
    step: int,
    a_batches_in_epoch: int,
    state: dict[str, Any],
) -> None:
    """Writes this rank's file, whole or not at all."""
    path = _path(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": _FORMAT,
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "a_batches_in_epoch": a_batches_in_epoch,
        "state": state,
    }
    write_whole(path, json.dumps(content))


def check_world_size(directory: str, world_size: int) -> None:
    """Refuses another number of ranks before anything is loaded; a rank too many has no file that would tell it.

    Raises:
        ConfigError: any rank's file is not whole, or was written by another number of ranks.
    """
    for path in sorted(Path(directory).glob("stage2_rank*.json"))[:1]:
        _refuse_another(path, _read(path), "world_size", world_size)


def read_state(directory: str, *, rank: int, world_size: int, step: int) -> dict[str, Any]:
    """This rank's state at ``step``.

    Raises:
        ConfigError: the file is missing, unreadable or not whole, or belongs to another step, rank or world size.
    """
    check_world_size(directory, world_size)
    path = _path(directory, rank)
    content = _read(path)
    for name, now in (("world_size", world_size), ("step", step), ("rank", rank)):
        _refuse_another(path, content, name, now)
    state: dict[str, Any] = content["state"]
    return state


def read_a_batches(directory: str, rank: int) -> int:
    """Batches of the epoch's dataloader that channel A had trained when the checkpoint was written.

    Raises:
        ConfigError: the file is missing, unreadable or not whole.
    """
    return int(_read(_path(directory, rank))["a_batches_in_epoch"])


def _refuse_another(path: Path, content: dict[str, Any], name: str, now: int) -> None:
    if (before := content.get(name)) != now:
        remedy = _AS_MANY_RANKS if name == "world_size" else _ONE_SAVE
        raise ConfigError(
            f"a checkpoint resumes with its own {name}, got {name}={now}, {path} has {name}={before}; {remedy}"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular_text(path))
        is_whole = (
            content["format"] == _FORMAT
            and isinstance(content["state"], dict)
            and isinstance(content["a_batches_in_epoch"], int)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"a checkpoint needs stage-2 state of every rank, cannot read {path}: {error!r}; "
            "resume from another checkpoint, or start a new run from its weights"
        ) from error
    if not is_whole:
        raise ConfigError(
            f"{path} must have format={_FORMAT} with state and a_batches_in_epoch, got format={content['format']!r}; "
            "resume from another checkpoint"
        )
    record: dict[str, Any] = content
    return record


def _path(directory: str, rank: int) -> Path:
    return Path(directory) / f"stage2_rank{rank}.json"
