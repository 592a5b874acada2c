"""How real runs end that cannot go on: no half checkpoint is left, and the last words name the cause."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_disk import SmallDisk
from torchrun_job import ENVIRONMENT, MODEL, TEMPLATE, Server, free_port, write_config

from swift_stage2.runtime.checkpoints import why_not_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def write_run(directory: Path, rows: Path, output: Path, **swift: Any) -> Path:
    directory.mkdir(exist_ok=True)
    return write_config(directory / "run", rows, None, b_ratio=0, swift={"output_dir": str(output), **swift})


def launch(config: Path) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "swift_stage2", "launch", str(config)], config)


def torchrun(config: Path, *, ranks: int) -> subprocess.CompletedProcess[str]:
    return _run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
         "--master_port", str(free_port()), "-m", "swift_stage2", "train", str(config)],
        config,
    )  # fmt: skip


def _run(command: list[str], config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        env=os.environ | ENVIRONMENT | {"RECORD_DIR": str(config.parent / "micro_steps")},
    )


def checkpoints(run_dir: Path) -> dict[str, bool]:
    """By name, whether it can be resumed from."""
    return {
        path.name: bool(json.loads((path / "trainer_state.json").read_text()))
        for path in run_dir.glob("checkpoint-*")
    }


@pytest.mark.parametrize(
    ("small_disk", "kept"),
    [("20m", ["checkpoint-1"]), pytest.param("26m", ["checkpoint-1"], marks=pytest.mark.slow)],
    ids=["no room for weights", "no room for the optimizer's state"],
    indirect=["small_disk"],
)
def test_a_disk_that_fills_up_leaves_whole_checkpoints_and_one_line(
    small_disk: SmallDisk, tmp_path: Path, rows_file: Path, kept: list[str]
) -> None:
    """A checkpoint takes 14.3 MiB."""
    run_dir = small_disk.path / "run"
    config = write_run(tmp_path / "c", rows_file, run_dir, max_steps=3, save_strategy="steps", save_steps=1)
    done = launch(config)
    assert done.returncode == 2, done.stdout[-3000:]
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        f"swift-stage2 launch: error: a checkpoint needs a disk that takes it whole, got {run_dir}"
    )
    assert "go on from the last whole one by --resume" in last
    assert checkpoints(run_dir) == dict.fromkeys(kept, True)


_NO_ROOM_ON_RANK_1 = """
import errno, os
from transformers import Trainer
save_rng = Trainer._save_rng_state
def _save_rng_state(self, directory):
    if os.environ["RANK"] == "1" and self.state.global_step == 3:
        raise OSError(errno.ENOSPC, "No space left on device")
    save_rng(self, directory)
Trainer._save_rng_state = _save_rng_state
"""


def test_no_older_checkpoint_goes_before_every_rank_has_written_the_newest(
    tmp_path: Path, rows_file: Path
) -> None:
    plugin, run_dir = tmp_path / "no_room_plugin.py", tmp_path / "run"
    plugin.write_text(_NO_ROOM_ON_RANK_1)
    swift = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    plugins = [str(TEMPLATE), str(plugin)]
    done = torchrun(write_run(tmp_path / "c", rows_file, run_dir, external_plugins=plugins, **swift), ranks=2)
    assert done.returncode != 0
    whole = [path.name for path in run_dir.glob("checkpoint-*") if not why_not_whole(path, needs_stage2=True)]
    assert whole == ["checkpoint-2"], done.stdout[-3000:]
    assert not (run_dir / "checkpoint-1").exists()
    assert "go on from the last whole one by --resume" in done.stdout


def test_a_model_that_was_cut_is_told_in_one_line_by_every_start(tmp_path: Path, rows_file: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    config = write_run(tmp_path / "c", rows_file, tmp_path / "run", model=str(model), max_steps=1)
    done = launch(config)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert f"swift.model must hold whole weights, got {weights} of 3,333,084 bytes" in line
    done = torchrun(config, ranks=2)
    assert "swift-stage2 train: error: swift.model must hold whole weights" in done.stdout


@pytest.mark.parametrize("action", ["warn", pytest.param("off", marks=pytest.mark.slow)])
def test_a_run_whose_rounds_prove_nothing_says_so_in_its_last_line(
    tmp_path: Path, rows_file: Path, server: Server, action: str
) -> None:
    """However far ``starvation.grace_steps`` is."""
    directory = tmp_path / "run"
    path = write_config(directory, rows_file, server, b_ratio=0.5, swift={"max_steps": 4})
    config = yaml.safe_load(path.read_text())
    config["stage2_ab"]["starvation"] = {"action": action, "grace_steps": 1000}
    config["rollout"]["servers"][0]["group_host"] = "127.0.0.9"  # where nothing listens
    config["rollout"].setdefault("sync", {})["transport"] = "tcp"
    path.write_text(yaml.safe_dump(config))
    done = torchrun(path, ranks=1)
    unused = (
        "channel B ran at none of the 2 steps that wanted it: none of 1 sync rounds proved a server, mostly: "
        f"{server.base_url}: the weight group did not form at 127.0.0.9:{server.group_port}: "
    )
    if action == "off":
        assert done.returncode == 0, done.stdout[-3000:]
        assert done.stdout.splitlines()[-1].startswith(f"swift-stage2 train: warning: {unused}")
    else:
        assert done.returncode != 0
        assert "exitcode  : 3" in done.stdout  # as torchrun tells it
        assert f"swift-stage2 train: error: ChannelBStarved: {unused}" in done.stdout
        assert "Traceback (most recent call last):\n  File" not in done.stdout.split("ChannelBStarved")[0]
