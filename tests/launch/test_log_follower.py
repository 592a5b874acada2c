"""A growing file becomes prefixed lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_stage2.launch.log_follower import LogFollower


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


def test_bytes_that_are_no_text_do_not_end_the_show(log: Path) -> None:
    shown: list[str] = []
    follower = LogFollower(log, "learner", shown.append, colour=0)
    append(log, b"\xff ok\n")
    follower.close()
    (line,) = shown
    assert line.endswith("\ufffd ok")
    assert line.startswith("\033[36m[learner]\033[0m ")
