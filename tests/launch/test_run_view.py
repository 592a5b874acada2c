"""The launcher's panel, read from what real ranks write."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from telemetry.run_facts import step
from telemetry.terminal import Terminal

from swift_stage2.launch.run_view import RunView
from swift_stage2.telemetry.facade import Telemetry


def rank(run_dir: Path) -> Telemetry:
    return Telemetry(run_dir, 0, 1, tensorboard=False, queue_limit=8, total_steps=40)


def test_a_terminal_shows_the_run_that_began_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    since = time.time()
    with RunView(tmp_path, since, print) as view:
        view.refresh()
        assert terminal.getvalue() == "", "there is no run yet"
        telemetry = rank(tmp_path / "v0-20261121")
        telemetry.record_start(0)
        view.refresh()
        assert terminal.getvalue() == "", "no step has begun"
        telemetry.record_step(step(0, queue_depth=3))
        telemetry.record_step(step(1, queue_depth=5))
        view.refresh()
        telemetry.close()
    shown = "\n".join(terminal.screen())
    assert "2/40" in shown
    assert "5 of 8" in shown


def test_an_earlier_run_in_the_same_place_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    telemetry = rank(tmp_path)
    telemetry.record_start(0)
    telemetry.record_step(step(0))
    telemetry.close()
    with RunView(tmp_path, time.time() + 1, print) as view:
        view.refresh()
    assert terminal.getvalue() == ""


def test_a_resumed_run_counts_from_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for first in (0, 20):
        telemetry = rank(tmp_path)
        telemetry.record_start(first)
        telemetry.record_step(step(first))
        telemetry.close()
    with RunView(tmp_path, 0.0, print) as view:
        view.refresh()
    assert any("21/40" in line for line in terminal.screen())


@pytest.mark.parametrize("verbose", [False, True])
def test_elsewhere_a_line_is_told_every_few_steps_unless_the_ranks_own_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    shown: list[str] = []
    telemetry = rank(tmp_path)
    telemetry.record_start(0)
    with RunView(tmp_path, 0.0, shown.append, verbose=verbose) as view:
        for number in range(23):
            telemetry.record_step(step(number))
            view.refresh()
        telemetry.audit.write("warning", message="the queue is empty")
        view.refresh()
        view.refresh()
        telemetry.close()
    beginnings = [line.split(" | ")[0] for line in shown]
    steps = [f"[launch] step {number}/40" for number in (1, 11, 21)]
    last = ["[launch] warning: the queue is empty", "[launch] step 23/40"]
    assert beginnings == ([] if verbose else steps + last)
    assert all("\n" not in line for line in shown)
