"""The run directory of a launch that has ended, and commands for its last checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_stage2.dataset.files import local_files
from swift_stage2.errors import UserError
from swift_stage2.runtime.checkpoints import checkpoints_in

_BEGUN = "args.json"  # ms-swift's, written at every start
_LINK = "last-checkpoint"  # ms-swift's, to what was saved last


def newest_run(output_dir: Path, since: float) -> Path | None:
    """Of a run that began after ``since``, in Unix seconds; ms-swift may have made a folder ``vN-DATE`` for it."""
    begun = [*output_dir.glob(_BEGUN), *output_dir.glob(f"v*/{_BEGUN}")]
    newest = max(begun, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None or newest.stat().st_mtime < since else newest.parent


def next_commands(run_dir: Path, swift: Mapping[str, Any]) -> Iterator[str]:
    """The last checkpoint, and commands that merge and evaluate it; none without a checkpoint.

    ``swift`` are the run's arguments of ms-swift: without a validation set of its own there is no command to evaluate.
    """
    steps, checkpoint = checkpoints_in(run_dir), run_dir / _LINK
    if not checkpoint.is_dir():
        if not steps:
            return
        checkpoint = steps[max(steps)]
    yield f"last checkpoint: {checkpoint}"
    if (checkpoint / "adapter_config.json").is_file():
        adapter = checkpoint.resolve()
        checkpoint = adapter.with_name(f"{adapter.name}-merged")
        words = ("--adapters", adapter, "--merge_lora", "true", "--output_dir", checkpoint)
        yield f"merge it: {shlex.join(['swift', 'export', *map(str, words)])}"
    with suppress(UserError):  # they have been moved since
        for validation in local_files(swift)["val_dataset"][:1]:
            yield f"evaluate it: {evaluate_command(validation, checkpoint)}"


def evaluate_command(data: Path, checkpoint: Path) -> str:
    """Of the rows of ``data``; its files go beside the checkpoints."""
    output = checkpoint.with_name("evaluation")
    words = ("--data", data.absolute(), "--model", checkpoint, "--output", output)
    return shlex.join(["swift-stage2", "evaluate", *map(str, words)])
