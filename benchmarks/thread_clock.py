"""ms-swift plugin: a callback that reads ``thread_times`` at the end of every step and writes them when training ends.

Given as a file to the learners of the benches interference, overlap and peer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swift_stage2.cpu_torchvision import declare_operators

declare_operators()  # before ms-swift imports torchvision

from swift.callbacks import TrainerCallback, callbacks_map  # noqa: E402

from benchmarks.thread_times import (  # noqa: E402
    CLOCK_FILE,
    CLOCK_NAME,
    DIRECTORY_VARIABLE,
    read_times,
)


class ThreadClock(TrainerCallback):  # type: ignore[misc]
    """The one rank's clock. Keeps all readings in memory while it trains."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        self._readings: list[dict[str, int]] = []

    def read(self) -> dict[str, int]:
        """What is noted of one moment, by column."""
        return read_times()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._readings.append(self.read())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        columns = {name: [reading[name] for reading in self._readings] for name in self.read()}
        path = Path(os.environ[DIRECTORY_VARIABLE]) / CLOCK_FILE
        path.write_text(json.dumps(columns) + "\n", encoding="utf-8")


callbacks_map[CLOCK_NAME] = ThreadClock
