"""A real run is recorded and taken again without a server: every loss and the weights at the end are the same bits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchrun_job import DROPOUT, LearnerRun, Server, assert_replays, run_learner, run_replay, write_config

from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import event_path, read_logs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS = 20
SWIFT = {"max_steps": NUM_STEPS, **DROPOUT}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, server: Server) -> LearnerRun:
    directory = tmp_path_factory.mktemp("runs") / "recorded"
    config = write_config(
        directory, rows_file, server, b_ratio=0.5, swift=SWIFT, record=True, preprocessing="process"
    )
    awaited = ",".join(f"*:{step}:await_packs" for step in (1, 7, 13))  # whose windows are whole
    run = run_learner(config, directory, ranks=2, inject=f"{awaited},0:1:await_rounds")
    assert run.status == 0, run.output[-3000:]
    channels = [record["channel"] for record in run.audit(0, "step")]
    assert channels.count("B") >= 3, channels
    assert len([record for record in run.audit(0, "round") if record["committed"]]) >= 2
    completions = run.audit(0, "completion")
    assert completions
    assert all(len(line["columns"]["log_probs"]) == len(line["token_ids"]) for line in completions)
    return run


def test_every_loss_every_batch_and_the_last_weights_are_the_same_bits(
    recorded: LearnerRun, tmp_path: Path
) -> None:
    assert_replays(recorded, NUM_STEPS, tmp_path / "replay")


def test_rollouts_that_went_on_under_new_weights_replay_to_the_same_bits(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    """A version at every step, so that a rollout outlives several."""
    prefetch = {"queue_limit": 6, "version_window": 3, "sync_every_steps": 1, "prefetch_target_packs": 6}
    directory = tmp_path / "run"
    config = write_config(
        directory, rows_file, server, b_ratio=0.5, swift=SWIFT, record=True, prefetch=prefetch
    )
    awaited = ",".join(f"*:{step}:await_packs" for step in (1, 7, 13, 17))
    run = run_learner(config, directory, ranks=2, inject=awaited)
    assert run.status == 0, run.output[-3000:]
    trained = {tuple(key) for each in run.audit(0, "trained") for key in each["samples"]}
    matched = [each for each in run.audit(0, "matched") if trained.intersection(map(tuple, each["samples"]))]
    assert sum(len(each["spans"]) > 1 for each in matched) > 0, "no rollout of several versions was trained"
    assert_replays(run, NUM_STEPS, tmp_path / "replay")


def _copy(recorded: LearnerRun, directory: Path) -> Path:
    """Copies the files that a replay reads, and nothing else."""
    shutil.copytree(recorded.directory / "events", directory / "events")
    return directory


def _edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _b_steps(recorded: LearnerRun) -> list[int]:
    return [record["step"] for record in recorded.audit(0, "step") if record["channel"] == "B"]


def test_changed_completions_are_found_at_the_first_step_that_trained_one(
    recorded: LearnerRun, tmp_path: Path
) -> None:
    """On rank 1 every server is made to have found the objects in the opposite order."""
    run_dir = _copy(recorded, tmp_path / "changed")

    def change(line: dict[str, Any]) -> dict[str, Any]:
        if line["kind"] != "completion":
            return line
        objects = re.findall(r"{[^{}]*}", line["text"])
        return line | {"text": f"[{', '.join(reversed(objects))}]"}

    _edit(event_path(run_dir, 1), change)
    replay = run_replay(run_dir, tmp_path / "replay")
    assert replay.status == 1, replay.output[-3000:]
    first = _b_steps(recorded)[0]
    last_line = replay.output.splitlines()[-1]
    assert f"differs: step {first} (channel B) is the first that differs, rank 1: micro_step" in last_line
    assert f"steps before it, all bit-equal: {first}" in last_line


def test_a_changed_plan_is_found(recorded: LearnerRun, tmp_path: Path) -> None:
    """On rank 0 the packs of the last two B steps change places."""
    run_dir = _copy(recorded, tmp_path / "changed")
    *_, one, other = [step for step in _b_steps(recorded) if len(_packs(run_dir, step)) == 3]
    swapped = {one: other, other: one}

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"step": swapped.get(line["step"], line["step"])} if line["kind"] == "trained" else line

    _edit(event_path(run_dir, 0), change)
    replay = run_replay(run_dir, tmp_path / "replay")
    assert replay.status == 1, replay.output[-3000:]
    assert (
        f"differs: step {one} (channel B) is the first that differs, rank 0" in replay.output.splitlines()[-1]
    )


def _packs(run_dir: Path, step: int) -> list[str]:
    lines = LearnerRun(0, "", run_dir).audit(0, "trained")
    return [line["pack_id"] for line in lines if line["step"] == step]


_PACKED = {"packing": True, "packing_length": 512, "per_device_train_batch_size": 1, "dataset_num_proc": 1}


@pytest.mark.parametrize(
    ("more", "b_ratio"),
    [pytest.param({}, 0.5, marks=pytest.mark.ci), pytest.param(_PACKED, 0.3, id="packing")],
)
def test_a_killed_run_replays_to_its_last_whole_step_and_a_resumed_one_from_its_checkpoint(
    tmp_path: Path, rows_file: Path, server: Server, more: dict[str, Any], b_ratio: float
) -> None:
    directory = tmp_path / "run"
    swift = SWIFT | {"save_strategy": "steps", "save_steps": 5} | more
    config = write_config(directory, rows_file, server, b_ratio=b_ratio, swift=swift, record=True)
    killed = run_learner(config, directory, ranks=2, inject="*:1:await_packs,1:12:SIGKILL")
    assert killed.status != 0
    for rank in (0, 1):
        with event_path(directory, rank).open("ab") as file:
            file.write(b'{"kind":"losses","ti')  # as a kill in the middle of a line leaves it
    replay = run_replay(directory, tmp_path / "replay1")
    assert replay.status == 0, replay.output[-3000:]
    assert "equal: every loss of steps 0 to 11" in replay.output
    for rank in (0, 1):
        whole = [record for record in killed.micro_steps(rank) if record["step"] < 12]
        assert replay.micro_steps(rank) == whole
    assert not list((tmp_path / "replay1").glob("checkpoint-*"))

    resumed = tmp_path / "resumed"  # its own directory of what was trained, the run's own for everything else
    swift |= {"resume_from_checkpoint": str(directory / "checkpoint-10"), "output_dir": str(directory)}
    config = write_config(resumed, rows_file, server, b_ratio=b_ratio, swift=swift, record=True)
    rest = run_learner(config, resumed, ranks=2)
    assert rest.status == 0, rest.output[-3000:]
    assert account_of(read_logs([directory])).is_balanced
    replay = run_replay(directory, tmp_path / "replay2")
    assert replay.status == 0, replay.output[-3000:]
    assert f"equal: every loss of steps 10 to {NUM_STEPS - 1}" in replay.output
    for rank in (0, 1):
        assert replay.micro_steps(rank) == rest.micro_steps(rank)
        assert replay.last_weights(rank) == rest.last_weights(rank)
