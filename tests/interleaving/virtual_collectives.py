"""The control group of virtual ranks: every collective is a meeting of all ranks, in the same order or it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from interleaving.scheduler import Strand
from interleaving.virtual_threading import active

from swift_stage2.collectives import StoreNotes


class Meeting:
    """One collective of all ranks."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.values: dict[int, Any] = {}
        self.waiting: list[Strand] = []
        self.result: Any = None
        self.over = False


class MeetingRoom:
    """The ranks' common state."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.meetings: list[Meeting] = []
        self.notes = StoreNotes()


class VirtualControlGroup:
    """One rank's end. Raises ``RuntimeError`` when a peer does not come in time, as gloo does."""

    def __init__(self, rank: int, room: MeetingRoom) -> None:
        self.rank = rank
        self.world_size = room.world_size
        self.notes = room.notes
        self._room = room
        self._num_met = 0

    def reduce_max(self, values: Sequence[int]) -> tuple[int, ...]:
        what = f"reduce_max of {len(values)}"
        return self._meet(what, tuple(values), lambda all_: tuple(map(max, *all_)))  # type: ignore[no-any-return]

    def broadcast(self, message: Any) -> Any:
        text = json.dumps(message) if self.rank == 0 else ""
        return json.loads(self._meet("broadcast", text, lambda all_: all_[0]))

    def gather(self, text: str) -> tuple[str, ...]:
        return self._meet("gather", text, tuple)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Nothing is held."""

    def _meet(self, what: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        run = active()
        run.point(what)
        meetings = self._room.meetings
        if self._num_met == len(meetings):
            meetings.append(Meeting(what))
        meeting = meetings[self._num_met]
        self._num_met += 1
        if meeting.what != what:
            run.fail(f"ranks disagree: rank {self.rank} comes to {what}, another rank to {meeting.what}")
        meeting.values[self.rank] = value
        if len(meeting.values) == self.world_size:
            meeting.result = combine([meeting.values[rank] for rank in range(self.world_size)])
            meeting.over = True
            for strand in meeting.waiting:
                run.wake(strand)
        else:
            assert run.current is not None
            meeting.waiting.append(run.current)
            if not run.block(what, run.now + self._room.timeout_s):
                raise RuntimeError(f"{what}: a peer did not come within {self._room.timeout_s} s")
        return meeting.result
