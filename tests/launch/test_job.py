"""A growing log becomes prefixed lines."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift_stage2.launch.job import LogFollower
from swift_stage2.terminal.progress import GOES_ON, going_on


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


def test_of_a_quiet_job_only_what_goes_on_is_shown(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.put, flush=lambda: None))
    servers = ["b"]
    with going_on("train", lambda: f"waiting for {servers[0]}", moments_s=(0.0, 0.01)):
        first = said.get(timeout=60)
        servers[0] = "a"
        while "for a" not in (last := said.get(timeout=60)):
            pass
    shown: list[str] = []
    follower = LogFollower(log, "learner", shown.append, only=GOES_ON)
    append(log, b"Train:   0%| | 0/4" + first.encode() + b"\n")  # a bar leaves its line open
    append(log, b"swift-stage2 train: warning: no\nother\n" + last.encode() + b"\n")
    follower.close()
    assert shown == ["[learner] waiting for b … 0 s", "[learner] waiting for a … 0 s"]


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
    follower = LogFollower(log, "learner", shown.append, colour=0)
    append(log, b"\xff ok\n")
    follower.close()
    (line,) = shown
    assert line.endswith("\ufffd ok")
    assert line.startswith("\033[36m[learner]\033[0m ")


_RANK = """
import sys
from tqdm import tqdm
from swift_stage2.telemetry.live_state import LiveState
from swift_stage2.telemetry.live_view import LiveView
view = LiveView(sys.stdout, plain_every_steps=2)
for step in tqdm(range(6), desc="Train", file=sys.stderr, mininterval=0):
    view.update(LiveState(step=step, total_steps=6))
"""


def test_a_status_line_is_not_glued_to_a_progress_bar(log: Path) -> None:
    """Both go to one log, the bar by stderr and without an end of line."""
    shown: list[str] = []
    follower = LogFollower(log, "learner", shown.append)
    with log.open("ab") as file:
        subprocess.run(
            [sys.executable, "-u", "-c", _RANK],
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=100,
            check=True,
        )
    follower.close()
    lines = [line for line in shown if "step" in line]
    assert [line.split(" | ")[0] for line in lines] == ["[learner] step 2/6", "[learner] step 4/6"]
    assert any("Train:" in line for line in shown)
