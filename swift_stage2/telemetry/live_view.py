"""Shows a run while it goes on: a panel on a terminal, a line every few steps elsewhere. Rank 0 only.

``render`` and ``plain_line`` are pure. On a terminal every log line that the process writes appears above
the panel: the view lends its stream to the loggers for as long as it is open. It draws only inside
``update``, at most once per interval, and has no thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from swift_stage2.telemetry.live_state import LiveState
from swift_stage2.terminal.console import SafeConsole


def render(state: LiveState) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in _rows(state):
        grid.add_row(name, text)
    notes = [Text(f"! {warning}", style="yellow") for warning in state.warnings]
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=max(1, state.total_steps), completed=state.step))
    return Panel(Group(bar, grid, *notes), title="stage 2", title_align="left", border_style="dim")


def plain_line(state: LiveState) -> str:
    """The same on one line, without colour."""
    return " | ".join(f"{name} {text}" for name, text in _rows(state))


class LiveView:
    """Owns ``stream`` between construction and ``close``."""

    def __init__(
        self,
        stream: TextIO,
        *,
        interval_s: float = 0.5,
        plain_every_steps: int = 10,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval_s`` bounds how often a terminal is drawn; elsewhere every ``plain_every_steps`` is a line."""
        self._stream = stream
        self._interval_s = interval_s
        self._plain_every_steps = plain_every_steps
        self._now_s = now_s
        self._drawn_s: float | None = None
        self._latest: LiveState | None = None
        self._num_shown = 0
        self._live: Live | None = None
        self._lent: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def update(self, state: LiveState) -> None:
        self._latest = state
        if self._stream.isatty():
            self._draw(state)
        elif state.step - self._num_shown >= self._plain_every_steps or state.step >= state.total_steps:
            self._print(state)

    def close(self) -> None:
        """Show the last state, and give the stream back. May be called again."""
        latest, self._latest = self._latest, None
        if self._live is not None:
            self._live.update(render(latest) if latest else self._live.renderable)
            self._live.stop()
            self._live = None
            self._take_back()
        elif latest is not None:
            self._print(latest)

    def _print(self, state: LiveState) -> None:
        if state.step == self._num_shown:
            return
        self._num_shown = state.step
        with tqdm.external_write_mode(file=self._stream):  # else it would go on where a progress bar ends
            self._stream.write(plain_line(state) + "\n")
            self._stream.flush()

    def _draw(self, state: LiveState) -> None:
        now = self._now_s()
        if self._drawn_s is not None and now - self._drawn_s < self._interval_s:
            return
        self._drawn_s = now
        if self._live is None:
            self._live = self._open(state)
        else:
            self._live.update(render(state), refresh=True)

    def _open(self, state: LiveState) -> Live:
        live = Live(
            render(state),
            console=SafeConsole(file=self._stream),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file goes on going there
            redirect_stderr=sys.stderr.isatty(),
        )
        self._lend(live.console)
        live.start(refresh=True)
        return live

    def _lend(self, console: Console) -> None:
        """Log handlers hold the terminal's stream itself and would write into the panel."""
        for handler in _terminal_handlers():
            self._lent.append((handler, handler.stream))
            handler.setStream(cast(TextIO, FileProxy(console, handler.stream)))

    def _take_back(self) -> None:
        for handler, stream in self._lent:
            handler.setStream(stream)
        self._lent.clear()


def _terminal_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    """Every logger's handler that holds a terminal; one that looks ``sys.stderr`` up at each line needs no help."""
    named = (item for item in logging.Logger.manager.loggerDict.values() if isinstance(item, logging.Logger))
    handlers = {id(handler): handler for logger in (logging.root, *named) for handler in logger.handlers}
    for handler in handlers.values():
        stream = vars(handler).get("stream")
        if (
            isinstance(handler, logging.StreamHandler)
            and stream is not None
            and not stream.closed
            and stream.isatty()
        ):
            yield handler


def _rows(state: LiveState) -> Iterator[tuple[str, str]]:
    yield "step", f"{state.step}/{state.total_steps}{_known(', epoch {:.2f}', state.epoch)}"
    yield "eta", f"{_duration(state.eta_s)}{_known(' ({:.2f} s/step)', state.seconds_per_step)}"
    yield "channel", f"{state.channel}{_known(', loss {:.4f}', state.loss)}"
    if not state.b_enabled:
        return
    last = "last: " * (state.num_b_skipped > 1)
    reason = f" ({last}{state.skip_reason})" if state.skip_reason else ""
    yield "B", f"{state.num_b_run} run, {state.num_b_skipped} skipped{reason}"
    yield "queue", _queue(state)
    pending = ", round pending" if state.round_pending else ", round in transfer" * state.round_in_transfer
    yield "version", f"{state.version}{_known(', lag {}', state.version_lag)}{pending}"
    rate = state.rollouts_per_s
    yield "rollouts", _known("{:.1f}/s" if (rate or 1) >= 1 else "{:.2g}/s", rate) or "-"
    yield "round", state.last_round
    if state.added_servers:
        yield "added", ", ".join(state.added_servers)
    if state.last_evaluation is not None:
        yield "evaluation", state.last_evaluation


def _queue(state: LiveState) -> str:
    if state.queue_depth_min is None:
        return "-"
    by_rank = "/".join("-" if depth is None else str(depth) for depth in state.queue_depths)
    ranks = f" (by rank {by_rank})" if len(state.queue_depths) > 1 else ""
    return f"{state.queue_depth_min}{_known(' of {}', state.queue_limit)}{ranks}"


def _known(pattern: str, value: float | None) -> str:
    return "" if value is None else pattern.format(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
