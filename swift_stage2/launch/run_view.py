"""What a launch shows of a run that other processes train, read from the run's audit.

On a terminal a live panel, elsewhere a line every few steps. ``verbose`` shows the ranks' own lines instead, of which
rank 0 writes the same, and on a terminal the panel below them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from swift_stage2.launch.run_end import newest_run
from swift_stage2.launch.wait_notice import WaitNotice
from swift_stage2.telemetry.live_state import LiveState, RunProgress
from swift_stage2.telemetry.live_view import LiveView, plain_line

_LINE_EVERY_STEPS = 10
_LINE_EVERY_S = 60.0


class RunView:
    """A context manager around the time in which the run may go on; ``refresh`` often."""

    def __init__(
        self, output_dir: Path, since: float, show: Callable[[str], None], *, verbose: bool = False
    ) -> None:
        """``since``: Unix seconds; what was written before is of an earlier run."""
        self.is_verbose = verbose
        self._output_dir = output_dir
        self._since = since
        self._show = show
        self._panel = LiveView(sys.stdout) if sys.stdout.isatty() else None
        self._progress: RunProgress | None = None
        self._warnings: tuple[str, ...] = ()
        self._line_step, self._line_s = 0, 0.0

    def __enter__(self) -> RunView:
        self._notice = WaitNotice(self._say)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._panel is not None:
            self._panel.close()
        elif self._progress is not None and not self.is_verbose:
            self._tell_line(self._progress.refresh(), at_once=True)

    def refresh(self) -> None:
        """Shows what the run has told since the last call."""
        if self._panel is None and self.is_verbose:
            return
        if self._progress is None:
            run_dir = newest_run(self._output_dir, self._since)
            self._progress = RunProgress.of_run(run_dir) if run_dir is not None else None
        if self._progress is None or not (state := self._progress.refresh()).step:
            self._notice.remind("no step yet: the learner loads")
        elif self._panel is not None:
            self._panel.update(state)
        else:
            self._tell_line(state)

    def _tell_line(self, state: LiveState, *, at_once: bool = False) -> None:
        for warning in state.warnings:
            if warning not in self._warnings:
                self._say(f"warning: {warning}")
        self._warnings = state.warnings
        is_due = state.step - self._line_step >= _LINE_EVERY_STEPS or time.monotonic() >= self._line_s
        if state.step != self._line_step and (is_due or at_once):
            self._line_step, self._line_s = state.step, time.monotonic() + _LINE_EVERY_S
            self._say(plain_line(state))

    def _say(self, text: str) -> None:
        self._show(f"[launch] {text}")
