"""A directory is never taken from an earlier run, which goes on only from a whole checkpoint, nor from other files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from builders import config_of
from commands import run_command
from safetensors.numpy import save_file
from telemetry.run_facts import step as step_facts

from swift_stage2.config import Stage2Config
from swift_stage2.errors import ConfigError, UserError
from swift_stage2.runtime import checkpoints
from swift_stage2.runtime.run_directory import (
    make_directory,
    refuse_earlier_run,
    resumed,
    run_lock,
)
from swift_stage2.telemetry.facade import Telemetry


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Stage2Config]:
    def configure(*, b_ratio: float = 0.5, **swift: Any) -> Stage2Config:
        place = {"output_dir": str(tmp_path / "run"), "add_version": False} | swift
        named = {f"swift.{key}": value for key, value in place.items()}
        return config_of(named, {"stage2_ab.schedule.b_ratio": b_ratio})

    return configure


Configure = Callable[..., Stage2Config]


def write_checkpoint(run_dir: Path, step: int, *, num_ranks: int = 2) -> Path:
    """As Hugging Face and the ranks leave it."""
    directory = run_dir / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    for rank in range(num_ranks):
        checkpoints.write_state(
            str(directory),
            rank=rank,
            world_size=num_ranks,
            step=step,
            a_batches_in_epoch=3,
            state={"save_id": f"save{step}"},
        )
        suffix = f"_{rank}" if num_ranks > 1 else ""
        torch.save({"rank": rank}, directory / f"rng_state{suffix}.pth")
    save_file({"weight": np.ones((8, 8), np.float32)}, directory / "model.safetensors")
    torch.save({"moments": torch.ones(8)}, directory / "optimizer.pt")
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return directory


def checkpoint_of(config: Stage2Config) -> Path:
    return Path(config.swift["resume_from_checkpoint"])


def train_one_step(run_dir: Path) -> None:
    telemetry = Telemetry(run_dir, 0, 1, tensorboard=False, queue_limit=8, total_steps=40)
    telemetry.record_start(run_id="r", step=0)
    telemetry.record_step(step_facts(0))
    telemetry.close()


# --- never over an earlier run ----------------------------------------------------------------------


def test_an_empty_directory_and_one_in_which_nothing_was_trained_are_free(
    configured: Configure, tmp_path: Path
) -> None:
    swift = configured().swift
    refuse_earlier_run(swift)
    telemetry = Telemetry(tmp_path / "run", 0, 1, tensorboard=False, queue_limit=8)
    telemetry.record_start(run_id="r", step=0)  # a start that failed before its first step
    telemetry.close()
    (tmp_path / "run" / "logs").mkdir()
    # ms-swift's, then
    (tmp_path / "run" / "logging.jsonl").write_text('{"global_step": 0, "log_history": []}\n')
    refuse_earlier_run(swift)


@pytest.mark.parametrize("trace", ["checkpoint", "events", "log"])
def test_an_earlier_run_is_not_written_over(configured: Configure, tmp_path: Path, trace: str) -> None:
    run_dir = tmp_path / "run"
    if trace == "checkpoint":
        write_checkpoint(run_dir, 9)
        write_checkpoint(run_dir, 10)
    elif trace == "events":
        train_one_step(run_dir)
    else:
        run_dir.mkdir()
        (run_dir / "logging.jsonl").write_text('{"loss": 1}\n')
    told = {"checkpoint": "checkpoint-10", "events": "events/rank0.jsonl", "log": "logging.jsonl"}[trace]
    for no in (False, "false"):
        with pytest.raises(ConfigError, match=rf"output_dir='{run_dir}' with .*{told}; go on .* by --resume"):
            refuse_earlier_run(configured(add_version=no).swift)
    for fresh in ({"add_version": True}, {"output_dir": str(tmp_path / "other")}):
        refuse_earlier_run(configured(**fresh).swift)
    with pytest.raises(ConfigError, match="must be a directory"):
        refuse_earlier_run(configured(output_dir=__file__).swift)


def test_a_run_that_names_its_own_checkpoint_goes_on_and_one_that_names_anothers_does_not(
    configured: Configure, tmp_path: Path
) -> None:
    own = write_checkpoint(tmp_path / "run", 5)
    other = write_checkpoint(tmp_path / "other", 5)
    (tmp_path / "link").symlink_to(own)
    for place in (own, tmp_path / "link"):
        refuse_earlier_run(configured(resume_from_checkpoint=str(place)).swift)
    with pytest.raises(ConfigError, match="must hold no earlier run"):
        refuse_earlier_run(configured(resume_from_checkpoint=str(other)).swift)


# --- from the last whole checkpoint -----------------------------------------------------------------


def test_an_output_directory_with_a_variable_is_refused(configured: Configure) -> None:
    for written in ("${HOME}/runs", "$SCRATCH/runs"):
        with pytest.raises(ConfigError, match="whose variable nobody replaces; write the path itself"):
            refuse_earlier_run(configured(output_dir=written).swift)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_last_whole_checkpoint_is_taken(configured: Configure, tmp_path: Path, num_ranks: int) -> None:
    for number in (5, 10, 100):
        last = write_checkpoint(tmp_path / "run", number, num_ranks=num_ranks)
    (tmp_path / "run" / "checkpoint-best").mkdir()
    (tmp_path / "run" / "last-checkpoint").symlink_to(last)
    config, notes = resumed(configured())
    assert checkpoint_of(config) == last
    assert notes == (f"resuming from {last}",)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no rank file": ("stage2_rank1.json is missing", lambda d: (d / "stage2_rank1.json").unlink()),
    "cut rank file": ("stage2_rank0.json is cut", lambda d: cut(d / "stage2_rank0.json")),
    "no rank files": (
        "stage2_rank0.json is missing",
        lambda d: [path.unlink() for path in d.glob("stage2_*")],
    ),
    "another save": (
        "files are of different saves",
        lambda d: rewrite(d / "stage2_rank1.json", "save10", "save5"),
    ),
    "another step": ("resumes with its own step", lambda d: rewrite(d / "stage2_rank1.json", "10,", "5,")),
    "no weights": ("model.safetensors is missing", lambda d: (d / "model.safetensors").unlink()),
    "cut weights": ("model.safetensors is cut", lambda d: cut(d / "model.safetensors")),
    "no shard": (
        "model-2.safetensors is missing",
        lambda d: (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
        ),
    ),
    "cut optimizer": ("optimizer.pt is cut", lambda d: cut(d / "optimizer.pt")),
    "no random state": ("rng_state_1.pth is missing", lambda d: (d / "rng_state_1.pth").unlink()),
    "no trainer state": ("cannot be read", lambda d: (d / "trainer_state.json").unlink()),
    "renamed": (
        "trainer_state.json is of step 9",
        lambda d: rewrite(d / "trainer_state.json", "10", "9"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_whole_is_passed_over_with_its_reason(
    configured: Configure, tmp_path: Path, damage: str
) -> None:
    reason, do = DAMAGES[damage]
    before, last = (write_checkpoint(tmp_path / "run", number) for number in (5, 10))
    do(last)
    config, notes = resumed(configured())
    assert checkpoint_of(config) == before
    assert len(notes) == 2
    assert notes[0].startswith(f"{last} is passed over: ")
    assert reason in notes[0]
    do(before)
    if damage == "no trainer state":  # which is written last: no save came to its end
        config, notes = resumed(configured())
        assert "resume_from_checkpoint" not in config.swift
        assert len(notes) == 3
    elif damage not in ("another step", "another save", "renamed"):  # of a step of their own
        with pytest.raises(ConfigError, match=r"--resume needs a whole checkpoint, got .*checkpoint-10.*; "):
            resumed(configured())


def test_a_run_without_channel_b_needs_no_ranks_files(configured: Configure, tmp_path: Path) -> None:
    last = write_checkpoint(tmp_path / "run", 10)
    for path in last.glob("stage2_*"):
        path.unlink()
    assert checkpoint_of(resumed(configured(b_ratio=0))[0]) == last


@pytest.mark.parametrize("is_trained", [False, True])
def test_where_no_checkpoint_was_saved_a_resume_begins_and_says_so(
    configured: Configure, tmp_path: Path, is_trained: bool
) -> None:
    run_dir = tmp_path / "run"
    if is_trained:
        train_one_step(run_dir)
    config, (note,) = resumed(configured())
    assert "resume_from_checkpoint" not in config.swift
    trained = f"no checkpoint was saved whole in {run_dir} with the steps in "
    assert note.startswith(trained if is_trained else f"nothing was trained in {run_dir} yet: ")
    assert note.endswith(": begins at step 0")


def test_of_several_versions_the_run_that_began_last_goes_on(configured: Configure, tmp_path: Path) -> None:
    for name, number in (("v0-20260101-000000", 40), ("v1-20260102-000000", 5)):
        last = write_checkpoint(tmp_path / "run" / name, number)
    assert checkpoint_of(resumed(configured(add_version=True))[0]) == last


def test_two_ways_to_say_where_to_begin_are_refused(configured: Configure, tmp_path: Path) -> None:
    last = write_checkpoint(tmp_path / "run", 10)
    with pytest.raises(ConfigError, match="remove one of the two"):
        resumed(configured(resume_from_checkpoint=str(last)))


@pytest.mark.parametrize("command", ["launch", "train"])
def test_a_second_start_is_one_line_and_changes_nothing(
    tmp_path: Path, rows_file: Path, command: str
) -> None:
    run_dir = tmp_path / "run"
    write_checkpoint(run_dir, 10)
    train_one_step(run_dir)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    path = tmp_path / "run.yaml"
    swift = {"model": str(model), "dataset": [str(rows_file)], "output_dir": "run", "add_version": False}
    path.write_text(yaml.safe_dump({"swift": swift, "stage2_ab": {"schedule": {"b_ratio": 0}}}))
    before = _files(run_dir)
    result = run_command(command, str(path), cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "checkpoint-10; go on with that run by --resume, or name another output_dir" in result.stderr
    assert _files(run_dir) == before


def _files(run_dir: Path) -> dict[Path, int]:
    """When each was written, but for the lock, which every start takes."""
    files = (each for each in run_dir.rglob("*") if each.is_file() and not each.match("run.*.*"))
    return {each: each.stat().st_mtime_ns for each in files}


def test_a_claim_is_absolute_and_replaces_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = make_directory(Path("a/demo"), keep=False)
    assert first == tmp_path / "a" / "demo"
    (first / "old").mkdir()
    (first / "result").touch()
    assert make_directory(first, keep=False) == first
    assert [each.name for each in first.iterdir()] == [".swift-stage2"]


def test_keep_takes_the_next_free_name(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        directory = make_directory(tmp_path / "demo", keep=True)
        (directory / "result").touch()
        names.append(directory.name)
    assert names == ["demo", "demo-2", "demo-3"]
    assert (tmp_path / "demo" / "result").exists()


def test_what_somebody_else_wrote_is_never_removed(tmp_path: Path) -> None:
    assert make_directory(tmp_path / "empty", keep=False).is_dir()
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UserError, match="with other files"):
        make_directory(tmp_path, keep=False)
    assert (tmp_path / "thesis.tex").read_text() == "ten years of work"


@pytest.mark.parametrize("place", ["file", "file/below"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_file_is_no_directory(tmp_path: Path, place: str, keep: bool) -> None:
    (tmp_path / "file").touch()
    if keep and place == "file":
        assert make_directory(tmp_path / place, keep=True).name == "file-2"
        return
    with pytest.raises(UserError, match=r"^--output must be a directory that can be written, got .*/file"):
        make_directory(tmp_path / place, keep=keep)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_whose_run_outlives_a_killed_command_is_not_cleared(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "demo", keep=False)
    with run_lock(directory / "run"):
        with pytest.raises(UserError, match=r"got .*/demo with a run in .*/demo/run; wait for"):
            make_directory(tmp_path / "demo", keep=False)
        assert (directory / "run" / "run.rank0.lock").exists()
    make_directory(tmp_path / "demo", keep=False)
    assert not (directory / "run").exists()
