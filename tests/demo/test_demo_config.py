from __future__ import annotations

import shlex
from pathlib import Path

from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import (
    CHILD_ENVIRONMENT,
    STAGE1,
    DemoJob,
    write_config,
)


def _job(directory: Path, b_ratio: float = 0.3, **changes: object) -> DemoJob:
    rows = directory / "train" / "rows.jsonl"
    return DemoJob(directory=directory, rows=rows, num_steps=7, b_ratio=b_ratio, **changes)  # type: ignore[arg-type]


def test_the_written_yaml_is_the_configuration_that_launch_reads(tmp_path: Path) -> None:
    path = write_config(_job(tmp_path), (4001, 4002))
    config = load_config(path)
    assert config.rollout.servers[0].base_url == "http://127.0.0.1:4001"
    assert config.rollout.servers[0].group_port == 4002
    assert config.launch.learner.nproc_per_node == 2
    assert config.swift["max_steps"] == 7
    assert config.swift["model"] == str(STAGE1)
    assert config.warnings == ()


def test_its_first_line_is_the_command_that_starts_it_again(tmp_path: Path) -> None:
    path = write_config(_job(tmp_path), (4001, 4002))
    words = shlex.split(path.read_text().splitlines()[0].removeprefix("# "))
    assert words[-3:] == ["swift-stage2", "launch", str(path)]
    assert dict(word.split("=", 1) for word in words[:-3]) == CHILD_ENVIRONMENT
