"""Reads what a run left behind: the logs of every rank, without what a resume made void, and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from swift_stage2.errors import UserError
from swift_stage2.runtime.run_directory import is_held
from swift_stage2.telemetry.event_log import RankEvents, ranks_of, read_logs
from swift_stage2.telemetry.events import AnyEvent, Checkpoint, Start
from swift_stage2.whole_file import read_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    run_dirs: tuple[Path, ...]
    logs: Mapping[int, Sequence[AnyEvent]]
    """By rank, as they were written."""
    ranks: tuple[RankEvents, ...]
    """What counts of them."""
    doubts: tuple[str, ...]
    """A sentence for each checkpoint of which the logs do not tell: they lack their end."""
    is_running: bool = False

    @property
    def first(self) -> RankEvents:
        """The lowest rank, which tells what is equal on all."""
        return self.ranks[0]

    @property
    def similarity(self) -> str:
        """The task's word for how close the objects of a pair are."""
        return self.first.start.similarity if self.first.start is not None else "IoU"


def read_run(run_dirs: Sequence[Path]) -> RunData:
    """Everything under these directories.

    Raises:
        UserError: a directory holds no log, one cannot be read, or these are several runs.
    """
    is_running = is_held(run_dirs[-1])  # asked first: a run that ends meanwhile has told its end by then
    _refuse_unrelated(run_dirs)
    logs = read_logs(run_dirs)
    return RunData(
        run_dirs=tuple(run_dirs),
        logs=logs,
        ranks=tuple(ranks_of(logs).values()),
        doubts=tuple(_doubts(run_dirs, logs)),
        is_running=is_running,
    )


def _refuse_unrelated(run_dirs: Sequence[Path]) -> None:
    saved: set[str] = set()
    for number, run_dir in enumerate(run_dirs if len(run_dirs) > 1 else ()):
        events = [event for log in read_logs([run_dir]).values() for event in log]
        begun = next((event.save_id for event in events if isinstance(event, Start)), None)
        if number and begun not in saved:
            raise UserError(
                "several directories are those of one run, each resumed from a checkpoint of those before it, oldest "
                "first",
                got=f"{run_dir}, which resumed none of them",
                remedy="run report on each, and swift-stage2 evaluate --compare on their predictions",
            )
        saved |= {event.save_id for event in events if isinstance(event, Checkpoint)}


def _doubts(run_dirs: Sequence[Path], logs: Mapping[int, Sequence[AnyEvent]]) -> Iterator[str]:
    for path in sorted(path for each in run_dirs for path in each.glob("checkpoint-*/stage2_rank*.json")):
        number = path.stem.removeprefix("stage2_rank")
        checkpoint = _read_checkpoint(path)
        if checkpoint is None or not number.isdecimal():
            continue
        log = logs.get(int(number), ())
        told = {event.save_id for event in log if isinstance(event, Start | Checkpoint)}
        first_step = min((event.step for event in log if isinstance(event, Start)), default=0)
        if checkpoint.save_id not in told and checkpoint.step > first_step:
            yield f"rank {number}: {path.parent.name} is of a save that the log does not tell of"


def _read_checkpoint(path: Path) -> Checkpoint | None:
    """One rank's file in a checkpoint; None if it is not whole, or of a run without channel B."""
    try:
        content = json.loads(read_regular(path))
        return Checkpoint(step=content["step"], save_id=content["state"]["save_id"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, ValidationError):
        return None
