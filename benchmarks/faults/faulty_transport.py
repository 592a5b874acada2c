"""A weight transport that commits faults on demand: what a round sends is held, wrong, or what it sent before."""

from __future__ import annotations

from enum import StrEnum

import torch

from benchmarks.faults.switches import PUSH, PUSH_HELD, PUSH_RELEASED, Switches
from swift_stage2.server_session import Deadline, ServerSession
from swift_stage2.weight_transport import ServerEndpoint, WeightTransport

_HELD_BUCKET = 1
_LONGEST_HOLD_S = 30.0


class PushFault(StrEnum):
    """What happens to the weights of a round on their way."""

    HOLD = "hold"  # the second bucket waits until the bench lets it go
    ZEROS = "zeros"  # announced honestly, but zeros are sent
    REPEAT = "repeat"  # the round before is sent once more: weights that do not move


class PushHistory:
    """The buckets of the present and of the last round; outlives transports, which may be made anew for each.

    Two sets of buffers take turns: memory that comes and goes with every round would look like a leak of the learner.
    """

    def __init__(self) -> None:
        self.last: list[torch.Tensor] = []
        self.present: list[torch.Tensor] = []

    def begin_round(self) -> None:
        self.last, self.present = self.present, self.last

    def keep(self, number: int, flat: torch.Tensor) -> None:
        """Copies one bucket of the present round; ``number`` counts from 0."""
        if number < len(self.present) and self.present[number].shape == flat.shape:
            self.present[number].copy_(flat)
        else:
            self.present[number:] = [flat.clone()]


class FaultyTransport:
    """A real transport; ``switches`` say what becomes of what it is given."""

    def __init__(self, real: WeightTransport, switches: Switches, history: PushHistory) -> None:
        self._real = real
        self._switches = switches
        self._history = history
        self._num_sent = 0

    def open(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> None:
        self._num_sent = 0
        self._history.begin_round()
        self._real.open(session, endpoint, deadline)

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        fault, number = self._switches.read(PUSH), self._num_sent
        self._num_sent += 1
        if fault == PushFault.HOLD and number == _HELD_BUCKET:
            self._switches.set(PUSH_HELD)
            self._switches.wait(PUSH_RELEASED, _LONGEST_HOLD_S)
        elif fault == PushFault.ZEROS:
            flat = torch.zeros_like(flat)
        elif fault == PushFault.REPEAT:
            flat = self._history.last[number]
        self._history.keep(number, flat)
        self._real.send(flat, deadline)

    def is_lost(self) -> bool:
        return self._real.is_lost()

    def close(self) -> None:
        self._real.close()
