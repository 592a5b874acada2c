from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from event_files import EventFiles
from small_disk import SmallDisk

from swift_stage2.telemetry.display import TensorBoardSink


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of the writer's own thread
def test_a_full_disk_gives_one_warning_and_keeps_what_was_written(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    sink = TensorBoardSink(small_disk.path / "runs")
    sink.write_scalars(1, {"a": 1.0})
    small_disk.fill()
    with caplog.at_level(logging.WARNING):
        for step in range(2, 4000):
            sink.write_scalars(step, {"a" * 100: 1.0})
        sink.close()
    (told,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "No space left on device" in told.getMessage()
    assert EventFiles(small_disk.path / "runs").series("a") == [(1, 1.0)]


def test_two_processes_of_one_run_make_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, started in enumerate((1000.0, 2000.0)):
        with monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda started=started: started)
            sink = TensorBoardSink(tmp_path)
            sink.write_scalars(step, {"a": float(step)})
            sink.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert EventFiles(tmp_path).series("a") == [(0, 0.0), (1, 1.0)]
