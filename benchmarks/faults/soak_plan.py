"""Turns a seed and a number of steps into the faults of a soak: which, before which step, how long, how much. Pure.

Every fault has room: steps in which it can heal before the next. Every kind comes equally often; what room is left over
lies between the faults at random. Called by the soak.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

from benchmarks.faults.commit import LONGEST_WRITE_S
from swift_stage2.errors import UserError

NUM_WARM_STEPS = 16
NUM_LAST_STEPS = 40
"""Without a new fault, so that the last one may heal late without meeting the end of the run."""
ROOM_STEPS = 20
FEWEST_STEPS = NUM_WARM_STEPS + ROOM_STEPS + NUM_LAST_STEPS
_SPREAD = 1.4  # of all steps, over those that faults need to heal


class FaultKind(StrEnum):
    """One kind is committed; ``count`` and ``seconds`` of a ``PlannedFault`` say how much of it."""

    KILL_SERVER = "server killed, restarted"  # After ``count`` steps without it
    LATE_REPLIES = "late replies"  # ``count`` replies are kept for ``seconds`` each
    HTTP_500 = "HTTP 500"  # ``count`` requests are answered so
    CUT_REPLY = "reply cut in half"  # ``count`` of them
    SLOW_DISK = "slow disk"  # For ``count`` steps, every write of audit and ledger takes ``seconds`` longer
    STOP_RANK = "rank stopped"  # SIGSTOP to ``rank``, SIGCONT after ``seconds``
    STOP_SERVER = "server stopped"  # SIGSTOP to all of it, SIGCONT after ``seconds``
    KILL_COURIER = "courier killed"  # ``seconds`` into its next errand


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault: committed once ``step`` has begun, or later if the one before has not healed by then."""

    step: int
    kind: FaultKind
    count: int = 1
    seconds: float = 0.0
    rank: int = 0


_DRAWN: Mapping[FaultKind, Mapping[str, tuple[Any, Any]]] = {
    FaultKind.KILL_SERVER: {"count": (1, 8)},
    FaultKind.LATE_REPLIES: {"count": (1, 2), "seconds": (0.5, 3.0)},
    FaultKind.HTTP_500: {"count": (1, 3)},
    FaultKind.CUT_REPLY: {},
    FaultKind.SLOW_DISK: {"seconds": (0.02, LONGEST_WRITE_S), "count": (2, 5)},
    FaultKind.STOP_RANK: {"seconds": (0.5, 4.0), "rank": (0, 1)},
    FaultKind.STOP_SERVER: {"seconds": (0.5, 4.0)},
    FaultKind.KILL_COURIER: {"seconds": (0.0, 1.0)},
}
"""From where to where, in the order in which a seed draws them."""


def plan_faults(seed: int, num_steps: int, *, kill_room_steps: int) -> tuple[PlannedFault, ...]:
    """The faults of a run of ``num_steps``, in order. Too few steps for one of each kind get as many as have room.

    Raises UserError: there is room for none.
    """
    rng = random.Random(seed)
    rooms = dict.fromkeys(FaultKind, ROOM_STEPS) | {FaultKind.KILL_SERVER: kill_room_steps}
    usable = num_steps - NUM_WARM_STEPS - NUM_LAST_STEPS
    times = max(1, int(usable / (_SPREAD * sum(rooms.values()))))
    kinds = list(FaultKind) * times
    rng.shuffle(kinds)
    fitting: list[FaultKind] = []
    for kind in kinds:
        if sum(rooms[each] for each in fitting) + rooms[kind] <= usable:
            fitting.append(kind)
    if not fitting:
        raise UserError(f"--steps must leave room for a fault, got {num_steps}; write {FEWEST_STEPS} or more")
    steps = _spread([rooms[kind] for kind in fitting], usable, rng)
    return tuple(_fault(kind, NUM_WARM_STEPS + step, rng) for kind, step in zip(fitting, steps, strict=True))


def _spread(rooms: Sequence[int], usable: int, rng: random.Random) -> list[int]:
    """Where each room begins, if all lie in ``usable`` steps, in order and apart."""
    slack = usable - sum(rooms)
    offsets = sorted(rng.randint(0, slack) for _ in rooms)
    before = accumulate(rooms[:-1], initial=0)
    return [start + offset for start, offset in zip(before, offsets, strict=True)]


def _fault(kind: FaultKind, step: int, rng: random.Random) -> PlannedFault:
    drawn: dict[str, Any] = {
        name: rng.randint(low, high) if isinstance(low, int) else rng.uniform(low, high)
        for name, (low, high) in _DRAWN[kind].items()
    }
    return PlannedFault(step=step, kind=kind, **drawn)
