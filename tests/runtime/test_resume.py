"""Each rank's file of a checkpoint: whole, its own, and of one save; anything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.errors import ConfigError
from swift_stage2.runtime import checkpoints

STATE = {"learner": {"version": 7, "source": {"outstanding": [[0, 3, 9, 1]]}}, "telemetry": {}}


def _write(directory: Path, *, rank: int = 0, world_size: int = 2, step: int = 40, **changes: Any) -> None:
    arguments: dict[str, Any] = {"a_batches_in_epoch": 17, "state": STATE} | changes
    checkpoints.write_state(str(directory), rank=rank, world_size=world_size, step=step, **arguments)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoint-40"
    _write(directory, rank=1)
    assert checkpoints.read_state(str(directory), rank=1, world_size=2, step=40) == STATE
    assert checkpoints.read_a_batches(str(directory), 1) == 17
    assert [file.name for file in directory.iterdir()] == ["stage2_rank1.json"]


def test_a_state_that_cannot_be_written_leaves_the_old_file_whole(tmp_path: Path) -> None:
    """The state ends in something that is no JSON, after much that is."""
    _write(tmp_path)
    with pytest.raises(TypeError):
        _write(tmp_path, step=41, state={"long": list(range(5000)), "last": {1, 2}})
    assert checkpoints.read_state(str(tmp_path), rank=0, world_size=2, step=40) == STATE


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"step": 41}, "step=41, .* has step=40; resume from a checkpoint whose files are all of one save"),
        ({"world_size": 4}, "world_size=4, .* has world_size=2; start as many ranks as before"),
        ({"world_size": 4, "rank": 3}, "world_size=4, .* has world_size=2"),  # which has no file
    ],
)
def test_a_checkpoint_of_another_step_or_world_is_refused(
    tmp_path: Path, asked: dict[str, int], name: str
) -> None:
    _write(tmp_path)
    _write(tmp_path, rank=1)
    with pytest.raises(ConfigError, match=f"got {name}"):
        checkpoints.read_state(str(tmp_path), **{"rank": 0, "world_size": 2, "step": 40, **asked})


def test_another_number_of_ranks_is_told_before_any_rank_reads_its_own(tmp_path: Path) -> None:
    checkpoints.check_world_size(str(tmp_path), 4)  # nothing there: the missing file is named later
    _write(tmp_path)
    checkpoints.check_world_size(str(tmp_path), 2)
    with pytest.raises(ConfigError, match=r"got world_size=4, .* has world_size=2.*nproc_per_node"):
        checkpoints.check_world_size(str(tmp_path), 4)
    (tmp_path / "stage2_rank0.json").rename(tmp_path / "stage2_rank1.json")
    with pytest.raises(ConfigError, match=r"its own rank, got rank=1, .* has rank=0"):
        checkpoints.read_state(str(tmp_path), rank=1, world_size=2, step=40)


@pytest.mark.parametrize(
    "content", ["", "[]", {"format": 1}, {"state": "text"}, {"a_batches_in_epoch": "17"}], ids=str
)
def test_an_unreadable_file_or_one_of_another_form_is_named(
    tmp_path: Path, content: str | dict[str, Any]
) -> None:
    _write(tmp_path)
    path = tmp_path / "stage2_rank0.json"
    whole = json.loads(path.read_text())
    path.write_text(content if isinstance(content, str) else json.dumps(whole | content))
    named = r"cannot read .*stage2_rank0\.json: .*; resume from another checkpoint"
    with pytest.raises(ConfigError, match=named):
        checkpoints.read_state(str(tmp_path), rank=0, world_size=2, step=40)
    with pytest.raises(ConfigError, match=named):
        checkpoints.read_a_batches(str(tmp_path), 0)
