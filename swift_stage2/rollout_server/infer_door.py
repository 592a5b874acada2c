"""The door of ``/infer/``: whom it lets in, who is inside, and where callers wait while weights are installed."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from swift_stage2.errors import RoundRefused
from swift_stage2.wire import RefusalReason, RoundRequest


class DoorShut(Exception):
    """Weights are being installed. ``opened`` ends when their round does; then the caller may try again."""

    def __init__(self, opened: Future[None]) -> None:
        super().__init__("weights are being installed")
        self.opened = opened


class InferDoor:
    """Counts the calls inside. All of it is used under the lock that it is given."""

    def __init__(self, lock: threading.Lock) -> None:
        self._left = threading.Condition(lock)
        self._opened: Future[None] | None = None
        self.num_inside = 0

    def enter(self, round_id: str | None, open_round: RoundRequest | None, *, is_unproven: bool) -> bool:
        """Lets a call in that names ``round_id``, or none; says whether it is one of the open round's own.

        Raises:
            RoundRefused: a round is open that is not staged and not this call's, or the weights are unproven.
            DoorShut: a staged round installs its weights.
        """
        is_own = open_round is not None and open_round.round_id == round_id
        if open_round is None and round_id is not None:
            raise RoundRefused(RefusalReason.NO_ROUND, f"round {round_id} is not open")
        if open_round is not None and not is_own and not (open_round.staged and round_id is None):
            raise RoundRefused(
                RefusalReason.ROUND_OPEN,
                f"round {open_round.round_id} is open; until it ends only its own requests count",
            )
        if self._opened is not None and not is_own:
            raise DoorShut(self._opened)
        if is_unproven and not is_own:
            raise RoundRefused(
                RefusalReason.UNPROVEN, "the model holds weights that no round has proven; run a sync round"
            )
        self.num_inside += 1
        return is_own

    def leave(self) -> None:
        self.num_inside -= 1
        self._left.notify_all()

    def shut(self) -> None:
        """Lets in the open round's own calls alone, until ``open``; who is inside may stay."""
        self._opened = Future()
        self._opened.set_running_or_notify_cancel()  # no caller that goes ends it for the others

    def open(self) -> None:
        """Ends what callers wait for. Does nothing to an open door."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set_result(None)

    def wait_for_leave(self, timeout_s: float) -> None:
        """Lets go of the lock until somebody leaves, or for so long."""
        self._left.wait(timeout_s)
