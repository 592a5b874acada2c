"""A growing log becomes prefixed lines."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swift_stage2.launch.job import LogFollower
from swift_stage2.runtime.output import SAID, going_on


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "server0.log"
    file.write_bytes(b"of an earlier run\n")
    return file


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as file:
        file.write(data)


def test_only_what_is_new_is_shown_line_by_line(log: Path) -> None:
    shown: list[str] = []
    follower = LogFollower(log, "server0", shown.append)
    append(log, b"one\ntw")
    follower.pump()
    assert shown == ["[server0] one"]
    append(log, b"o\r\n\n  \nthree")
    follower.pump()
    assert shown == ["[server0] one", "[server0] two"]
    follower.close()
    assert shown[2:] == ["[server0] three"]


def test_a_progress_bar_is_thinned_and_its_end_is_kept(log: Path) -> None:
    shown: list[str] = []
    follower = LogFollower(log, "learner", shown.append)
    append(log, b"".join(b"step %d\r" % step for step in range(500)) + b"step 500\n")
    follower.pump()
    follower.close()
    assert shown == ["[learner] step 0", "[learner] step 500"]


def test_what_is_over_at_once_is_not_told_and_of_several_ranks_the_first_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    with going_on("train", "loading", said.append):
        pass
    monkeypatch.setenv("RANK", "1")
    with going_on("train", "loading", said.append, moments_s=(0.0, 0.0)):
        assert not [thread for thread in threading.enumerate() if thread.name == "going-on"]
    assert said == []


def test_bytes_that_are_no_text_do_not_end_the_show(log: Path) -> None:
    shown: list[str] = []
    follower = LogFollower(log, "learner", shown.append)
    append(log, b"\xff ok\n")
    follower.close()
    assert shown == ["[learner] \ufffd ok"]


_RANK = """
import sys
from tqdm import tqdm
from swift_stage2.runtime.output import print_error
from swift_stage2.runtime.output import say_beside_bar
for step in tqdm(range(6), desc="Train", file=sys.stderr, mininterval=0):
    if step % 2:
        say_beside_bar("train", f"step {step}/6 | loss 1.0")
print_error("train", "no such thing")
"""


def test_of_a_rank_what_it_tells_is_shown_apart_from_its_bar_and_its_errors_are_left_to_the_end(
    log: Path,
) -> None:
    """All go to one log, the bar without an end of line."""
    shown: dict[bool, list[str]] = {True: [], False: []}
    followers = [
        LogFollower(log, "learner", told.append, only=None if is_verbose else SAID)
        for is_verbose, told in shown.items()
    ]
    with log.open("ab") as file:
        command = [sys.executable, "-c", _RANK]
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=100, check=True)
    for follower in followers:
        follower.close()
    steps = [f"step {number}/6 | loss 1.0" for number in (1, 3, 5)]
    assert shown[False] == [f"[learner] {step}" for step in steps]
    assert sum(line.endswith(f"swift-stage2 train: {step}") for line in shown[True] for step in steps) == 3
    assert any("Train:" in line for line in shown[True])
