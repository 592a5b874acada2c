"""Whether an engine can be asked, from the start of its thread to its end: the part that all engines share.

Written by the engine's thread and by whoever closes it, read by any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from swift_stage2.errors import EngineUnavailable
from swift_stage2.rollout_server.engine import EngineState

_ALIVE = (EngineState.LOADING, EngineState.READY)


class EngineLife:
    """One engine's thread and the state that it is in. ``BROKEN`` is for good, whatever is said later."""

    def __init__(self, run: Callable[[], None]) -> None:
        """``run`` is the whole work of the thread, loading included; ``start`` begins it."""
        self._run = run
        self._state, self._detail = EngineState.LOADING, ""
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run_to_the_end, name="rollout-engine", daemon=True)

    def start(self) -> None:
        """Begins to load and returns at once."""
        self._thread.start()

    @property
    def state(self) -> tuple[EngineState, str]:
        """The state and its reason; never waits."""
        state, detail = self._state, self._detail
        if state in _ALIVE and not self._thread.is_alive():
            return EngineState.BROKEN, "the engine's thread has died"
        return state, detail

    @property
    def is_loading(self) -> bool:
        """Whether the model is still being built."""
        return not self._loaded.is_set()

    def become_ready(self) -> None:
        """The model is loaded; an engine that was ended meanwhile stays ended."""
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY
        self._loaded.set()

    def end(self, state: EngineState, detail: str) -> None:
        """``BROKEN`` or ``CLOSED``, and why."""
        if self._state is not EngineState.BROKEN:
            self._state, self._detail = state, detail

    def wait_loaded(self, timeout_s: float) -> bool:
        """True when the model is loaded, or could not be, within the time."""
        return self._loaded.wait(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end."""
        self._thread.join(timeout_s)

    def _run_to_the_end(self) -> None:
        try:
            self._run()
        finally:
            self._loaded.set()


def require_ready(state: EngineState, detail: str) -> None:
    """Raises EngineUnavailable unless ``state`` is ready."""
    if state is not EngineState.READY:
        raise EngineUnavailable(f"the engine is {state}: {detail or 'ask again later'}")
