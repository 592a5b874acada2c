"""Checkpoints: each rank's part of one, written whole or removed again, and checked before a run goes on from one.

Beside Hugging Face's files there is one JSON file per rank, which names the step, rank and world size it belongs to and
the save, so that two checkpoints cannot be mixed. All are written before any rank writes the trainer's own state.

A check opens every file without loading a tensor: a cut file is found, a flipped bit is not. Writers of weights tell
of a full disk each in their own way (an OSError, safetensors' own error, torch's RuntimeError); it becomes one line.
"""

from __future__ import annotations

import errno
import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from swift_stage2.errors import ConfigError, StorageFull
from swift_stage2.whole_file import read_regular, read_regular_text, write_whole

_STATE = "trainer_state.json"  # written last, by rank 0, once every rank has written its part
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_MIB = 2**20
_DEEPSPEED = "latest"  # names the folder in which DeepSpeed keeps its part
_SHARDS = ("pytorch_model_fsdp_0", "optimizer_0")  # folders in which all ranks write their shards under FSDP2
_WRITTEN_LAST = ".metadata"  # into each, when every rank has written
_FORMAT = 2
_ONE_SAVE = "resume from a checkpoint whose files are all of one save"
_AS_MANY_RANKS = (
    "start as many ranks as before (launch.learner.nproc_per_node, or torchrun's --nproc_per_node): every rank goes on "
    "in its own share of the data"
)


def checkpoint_step(directory: Path) -> int | None:
    """The N of a directory ``checkpoint-N``."""
    prefix, _, number = directory.name.rpartition("-")
    return int(number) if prefix == "checkpoint" and number.isdecimal() and directory.is_dir() else None


def checkpoints_in(run_dir: Path) -> dict[int, Path]:
    """Those of a run by their steps."""
    found = {checkpoint_step(path): path for path in run_dir.glob("checkpoint-*")}
    return {step: path for step, path in found.items() if step is not None}


def why_not_whole(directory: Path, *, needs_stage2: bool) -> str:
    """Why no run can resume from ``directory``, empty if one can. ``needs_stage2``: the run has a channel B."""
    if broken := [path.name for path in sorted(directory.rglob("*")) if not _is_readable(path)]:
        return f"{broken[0]} is cut or damaged"
    try:
        step = _read_json(directory / _STATE)["global_step"]
        ranks = sorted(directory.glob("stage2_rank*.json"))
        world_size = int(_read_json(ranks[0])["world_size"]) if ranks else 0
        if missing := _missing(directory, world_size):
            return f"{missing} is missing"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"its state cannot be read ({type(error).__name__}: {error})"
    if step != checkpoint_step(directory):
        return f"trainer_state.json is of step {step}"
    if needs_stage2 and not ranks:
        return "stage2_rank0.json is missing"
    return _mixed(directory, world_size, step)


def was_saved(directory: Path) -> bool:
    """Whether its save came to its end: every rank had written its part. It may have been damaged since."""
    try:
        return isinstance(json.loads(read_regular(directory / _STATE)), dict)
    except (OSError, ValueError):
        return False


def _missing(directory: Path, world_size: int) -> str:
    """The first of the files that the ranks needed and nobody wrote; without ranks' files their number is not known."""
    names = {f"stage2_rank{rank}.json" for rank in range(world_size)}
    if world_size:
        names |= (
            {f"rng_state_{rank}.pth" for rank in range(world_size)} if world_size > 1 else {"rng_state.pth"}
        )
    for index in directory.glob("*.index.json"):
        names |= set(_read_json(index)["weight_map"].values())
    if (directory / _DEEPSPEED).is_file():
        names.add(read_regular_text(directory / _DEEPSPEED).strip())
    elif (directory / _SHARDS[0]).is_dir():
        names |= {f"{folder}/{_WRITTEN_LAST}" for folder in _SHARDS}
    else:
        names.add("optimizer.pt")
        if not any(directory.glob("*.safetensors")) and not any(directory.glob("*model*.bin")):
            return "model.safetensors"
    return next((name for name in sorted(names) if not (directory / name).exists()), "")


def _mixed(directory: Path, world_size: int, step: int) -> str:
    """Whether a rank's file is of another save."""
    try:
        states = [
            read_state(str(directory), rank=rank, world_size=world_size, step=step)
            for rank in range(world_size)
        ]
    except ConfigError as error:
        return str(error)
    saves = {state.get("save_id") for state in states}
    return "its ranks' files are of different saves" if len(saves) > 1 else ""


def _is_readable(path: Path) -> bool:
    """Of files that the trainer wrote, as far as their format tells."""
    if not path.is_file():
        return True
    try:
        match path.suffix:
            case ".json":
                _read_json(path)
            case ".safetensors":
                with safe_open(str(path), framework="numpy"):
                    return True
            case ".pt" | ".pth" | ".bin":
                return zipfile.is_zipfile(path)
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def _read_json(path: Path) -> Any:
    return json.loads(read_regular(path))


@contextmanager
def whole_checkpoint(directory: Path, *, is_owner: bool) -> Iterator[None]:
    """Removes ``directory`` again if what is done inside does not make a whole checkpoint of it.

    Only its owner removes it, the rank that writes the weights and the trainer's state: under a rank that still
    writes, a new directory would appear that looks whole and is not.

    Raises:
        StorageFull: the disk did not take it.
    """
    try:
        yield
    except Exception as error:
        if is_owner and was_saved(directory):
            raise  # what failed came after it
        if is_owner:
            shutil.rmtree(directory, ignore_errors=True)
        if not is_storage_failure(error):
            raise
        words, free_mib = " ".join(str(error).split())[:200], shutil.disk_usage(directory.parent).free / _MIB
        raise StorageFull(
            "a checkpoint needs a disk that takes it whole",
            got=f"{directory}: {words} ({free_mib:,.0f} MiB free now)",
            remedy="make room, then go on from the last whole one by --resume",
        ) from error


def is_storage_failure(error: BaseException) -> bool:
    """Whether a disk did not take what was written."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    words = str(error)
    return (isinstance(error, SafetensorError) and "os error" in words) or (
        isinstance(error, RuntimeError) and ("PytorchStreamWriter" in words or "inline_container" in words)
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
        _refuse_another(path, _read_state(path), "world_size", world_size)


def read_state(directory: str, *, rank: int, world_size: int, step: int) -> dict[str, Any]:
    """This rank's state at ``step``.

    Raises:
        ConfigError: the file is missing, unreadable or not whole, or belongs to another step, rank or world size.
    """
    check_world_size(directory, world_size)
    path = _path(directory, rank)
    content = _read_state(path)
    for name, now in (("world_size", world_size), ("step", step), ("rank", rank)):
        _refuse_another(path, content, name, now)
    state: dict[str, Any] = content["state"]
    return state


def read_a_batches(directory: str, rank: int) -> int:
    """Batches of the epoch's dataloader that channel A had trained when the checkpoint was written.

    Raises:
        ConfigError: the file is missing, unreadable or not whole.
    """
    return int(_read_state(_path(directory, rank))["a_batches_in_epoch"])


def _refuse_another(path: Path, content: dict[str, Any], name: str, now: int) -> None:
    if (before := content.get(name)) != now:
        remedy = _AS_MANY_RANKS if name == "world_size" else _ONE_SAVE
        raise ConfigError(
            f"a checkpoint resumes with its own {name}",
            got=f"{name}={now}, {path} has {name}={before}",
            remedy=remedy,
        )


def _read_state(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(read_regular_text(path))
        if content["format"] != _FORMAT:
            raise ValueError(f"format must be {_FORMAT}, got {content['format']!r}")
        if not (isinstance(content["state"], dict) and isinstance(content["a_batches_in_epoch"], int)):
            raise ValueError("state or a_batches_in_epoch are something else")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"a checkpoint needs stage-2 state of every rank, cannot read {path}: {error!r}",
            remedy="resume from another checkpoint, or start a new run from its weights",
        ) from error
    return content


def _path(directory: str, rank: int) -> Path:
    return Path(directory) / f"stage2_rank{rank}.json"
