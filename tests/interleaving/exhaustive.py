"""Every schedule of a scene small enough to have them counted, or every one with few preemptions.

A schedule is the list of its choices. One run follows a list and from its end on lets whoever runs go on; the next list
differs from it at the last place where something was left to choose. So no schedule is run twice and none is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from interleaving.scheduler import Scheduler, Strand, Violation
from interleaving.virtual_threading import running

_HORIZON_S = 1000.0


class PathChooser:
    """Follows ``path``, and notes at each choice how many options there were.

    A preemption is a choice against somebody who could go on; after ``max_preemptions`` there are no more.
    """

    notices_wakes = True

    def __init__(self, path: Sequence[int], max_preemptions: int | None) -> None:
        self._path = path
        self._preemptions_left = max_preemptions
        self.taken: list[tuple[int, int]] = []

    def choose(self, ready: Sequence[Strand], current: Strand | None) -> Strand:
        options = list(ready)
        if current is not None:
            options.remove(current)
            options.insert(0, current)
            if self._preemptions_left == 0:
                return current
        position = len(self.taken)
        chosen = self._path[position] if position < len(self._path) else 0
        self.taken.append((chosen, len(options)))
        if current is not None and chosen and self._preemptions_left is not None:
            self._preemptions_left -= 1
        return options[chosen]

    def stay(self) -> int:
        return 0

    def stalls(self) -> bool:
        return False


def run_all(make_work: Callable[[], Callable[[], None]], *, max_preemptions: int | None = None) -> int:
    """Runs every schedule and returns their number. ``make_work`` makes a new scene; its result starts the strands.

    Raises:
        Violation: an invariant does not hold in one of them; the message names the choices.
    """
    path: list[int] = []
    num_schedules = 0
    while True:
        chooser = PathChooser(path, max_preemptions)
        scheduler = Scheduler(chooser, horizon_s=_HORIZON_S)
        with running(scheduler):
            try:
                scheduler.run(make_work())
            except Violation as violation:
                violation.add_note(f"choices {[chosen for chosen, _ in chooser.taken]}")
                raise
        num_schedules += 1
        taken = chooser.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return num_schedules
        path = [*(chosen for chosen, _ in taken[:-1]), taken[-1][0] + 1]
