"""The line of a logging step, told once; and curves on a full disk."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from event_files import EventFiles
from small_disk import SmallDisk
from telemetry.run_facts import PLAN_B, pack, skipped, step

from swift_stage2.telemetry.display import StatusLine, TensorBoardSink
from swift_stage2.telemetry.facade import Telemetry


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_tells_step_pace_loss_and_channel_b() -> None:
    clock = Clock()
    status = StatusLine(400, 8, clock)
    status.take(10, 0.5, {"rollouts_received": 20.0})
    clock.now_s += 25.0
    values = {
        "rollouts_received": 70.0,
        "b_steps_run": 5,
        "b_steps_wanted": 8,
        "b_steps_skipped/not_enough_packs": 3,
        "b_steps_skipped/servers_suspect": 0,
        "ver_current": 4,
        "ver_lag": 1,
        "queue_depth": 2,
    }
    status.take(20, 1.25, values)
    assert status.line(0.43214) == (
        "step 20/400, epoch 1.25, loss 0.4321 | 2.50 s/step, 0:15:50 left | B 5 of 8 wanted, not_enough_packs 3 | "
        "queue 2 of 8 | version 4, lag 1 | 2 rollouts/s"
    )
    assert status.line(0.4) == "", "it is told once"


def test_a_run_without_channel_b_says_nothing_about_it() -> None:
    status = StatusLine(4, None)
    status.take(2, None, {})
    assert status.line() == "step 2/4"


def test_rank_0_tells_each_logging_step_once_with_its_loss_and_the_last_one_at_the_end(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False, say=told.append, total_steps=4, queue_limit=8)
    for number in range(4):
        plan, packs = (PLAN_B, (pack(),)) if number else (skipped(), ())
        telemetry.record_step(step(number, plan, packs=packs, queue_depth=number))
        if number % 2:
            telemetry.merge_and_write(number + 1, lambda text: [text])
        if number == 1:
            telemetry.record_loss(0.5)
    telemetry.record_warning("a server is lost")
    telemetry.close()
    first, warning, last = told
    assert first.startswith("step 2/4, loss 0.5000 | B 1 of 2 wanted, not_enough_packs 1 | queue 1 of 8")
    assert warning == "warning: a server is lost"
    assert last.startswith("step 4/4 | ")


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of the writer's own thread
def test_a_full_disk_gives_one_warning_and_keeps_what_was_written(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    sink = TensorBoardSink(small_disk.path / "runs")
    sink.write_scalars(1, {"a": 1.0})
    assert sink._writer is not None
    worker = sink._writer._get_file_writer().event_writer._async_writer._worker
    small_disk.fill()
    with caplog.at_level(logging.WARNING):
        for at in range(2, 4000):
            sink.write_scalars(at, {"a" * 100: 1.0})
        sink.close()
    worker.join(timeout=60.0)  # its own words of the end belong to this test
    (told,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "No space left on device" in told.getMessage()
    assert EventFiles(small_disk.path / "runs").series("a") == [(1, 1.0)]


def test_two_processes_of_one_run_make_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at, started in enumerate((1000.0, 2000.0)):
        with monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda started=started: started)
            sink = TensorBoardSink(tmp_path)
            sink.write_scalars(at, {"a": float(at)})
            sink.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert EventFiles(tmp_path).series("a") == [(0, 0.0), (1, 1.0)]
