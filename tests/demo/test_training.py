from __future__ import annotations

from pathlib import Path

import pytest

from swift_stage2.demo.training import words_of_launcher
from swift_stage2.launch.job import LogFollower


@pytest.mark.parametrize("colour", [None, 0, 3])
def test_the_launchers_own_words_are_told_apart_on_any_terminal(tmp_path: Path, colour: int | None) -> None:
    log, shown = tmp_path / "launch.log", []
    log.touch()
    follower = LogFollower(log, "launch", shown.append, colour)
    log.write_text("[launch] server0 answers\n[learner] loss 0.5\nTraceback\n")
    follower.close()
    assert [words_of_launcher(line) for line in shown] == ["server0 answers", None, None]
