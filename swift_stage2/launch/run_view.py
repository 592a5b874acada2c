"""The live view of a run that other processes train, on the launcher's terminal, read from the run's audit.

Elsewhere than on a terminal rank 0's own lines, which the launcher follows, say the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from swift_stage2.launch.run_end import newest_run
from swift_stage2.telemetry.live_view import LiveView
from swift_stage2.telemetry.run_progress import RunProgress


class RunView:
    """A context manager around the time in which the run may go on; ``refresh`` often."""

    def __init__(self, output_dir: Path, since: float) -> None:
        """``since``: Unix seconds; what was written before is of an earlier run."""
        self._output_dir = output_dir
        self._since = since
        self._view = LiveView(sys.stdout) if sys.stdout.isatty() else None
        self._progress: RunProgress | None = None

    def __enter__(self) -> RunView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._view is not None:
            self._view.close()

    def refresh(self) -> None:
        """Shows what the run has told since the last call."""
        if self._view is None:
            return
        if self._progress is None:
            run_dir = newest_run(self._output_dir, self._since)
            self._progress = RunProgress.of_run(run_dir) if run_dir is not None else None
        if self._progress is not None and self._progress.refresh().step:
            self._view.update(self._progress.state)
