"""How a run goes that other processes train, and how it ended, read from rank 0's audit.

On a terminal a live panel, elsewhere a line every few steps. ``verbose`` shows the ranks' own lines instead, of which
rank 0 writes the same, and on a terminal the panel below them. The last line comes from the audit's end: its last
``metrics`` record, which every learner writes when it closes, and what it may write after that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.live_state import LiveState, RunProgress
from swift_stage2.telemetry.live_view import LiveView, plain_line
from swift_stage2.telemetry.reading import record_of
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, has_form
from swift_stage2.telemetry.summary import share_of_b
from swift_stage2.whole_file import open_regular

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
        return self

    def __exit__(self, *_: object) -> None:
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
        state = self._progress.refresh() if self._progress is not None else LiveState()
        if not state.step:
            return  # the learner itself says what goes on
        if self._panel is not None:
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


_TAIL_BYTES = 1 << 20


def describe_end(output_dir: Path, status: int, since: float) -> str:
    """The launch's last words. ``since``: Unix seconds of its start; what was written before is of an earlier run."""
    run_dir = newest_run(output_dir, since)
    words = "finished" if status == 0 else f"ended with status {status}"
    if run_dir is None:
        return f"{words}; no audit of this run in {output_dir}"
    records = _last_records(run_dir / "audit" / "rank0.jsonl")
    numbers = records["metrics"]["numbers"] if "metrics" in records else {}
    steps = f", {numbers['steps']:g} steps" if "steps" in numbers else ""
    ran = f", {told}" if (told := share_of_b(numbers)) else ""
    unused = f"; WARNING: {records['unused_b']['cause']}" if "unused_b" in records else ""
    return f"{words}{steps}{ran}; run directory {run_dir}{unused}"


def newest_run(output_dir: Path, since: float) -> Path | None:
    """The run directory that was written to since, if any; ms-swift may have made a folder ``vN-DATE`` of its own."""
    audits = [*output_dir.glob("audit/rank0.jsonl"), *output_dir.glob("v*/audit/rank0.jsonl")]
    written = {audit: audit.stat().st_mtime for audit in audits}
    newest = max(written, key=lambda audit: written[audit], default=None)
    return None if newest is None or written[newest] < since else newest.parent.parent


def _last_records(path: Path) -> dict[str, Record]:
    """The last ``metrics`` record, and those behind it, by kind."""
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    records: dict[str, Record] = {}
    for line in reversed(lines):
        record = record_of(line)  # None: torn by a kill, or cut by where the tail begins
        if record is None or not has_form(record, AUDIT_FORMS):
            continue
        records.setdefault(record["kind"], record)
        if record["kind"] == "metrics":
            break
    return records


_EVERY_S = 5.0


class WaitNotice:
    """Counts from its construction."""

    def __init__(
        self,
        say: Callable[[str], object],
        every_s: float = _EVERY_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._now_s = now_s
        self._started = now_s()
        self._next = self._started + every_s

    def remind(self, what: str, limit_s: float | None = None) -> None:
        """Says ``what``, the seconds passed and those there are, if it is time to."""
        now = self._now_s()
        if now < self._next:
            return
        self._next = now + self._every_s
        limit = "" if limit_s is None else f" of {limit_s:g} s"
        self._say(f"{what}, {now - self._started:.0f} s{limit}")
