"""How far this rank's Unix time is ahead of rank 0's, found by leaving a few collectives together.

Nobody leaves an all-reduce before the last rank has entered it, so that two ranks leave within the longer of the times
that either has spent inside. That is what the offset is known to, and of several meetings the shortest one counts.
Ranks of one machine share a clock, and machines whose clocks are kept alike differ by less than can be seen this
way: only an offset that is larger than its uncertainty is corrected. For the trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from swift_stage2.collectives import ControlGroup
from swift_stage2.telemetry.spans import ClockOffset

_NUM_MEETINGS = 9


def align_clocks(control: ControlGroup, now_ns: Callable[[], int] = time.time_ns) -> ClockOffset:
    """This rank's offset. Called on all ranks alike; takes a few collectives."""
    meetings = []
    for _ in range(_NUM_MEETINGS):
        entered = now_ns()
        control.reduce_max([0])
        left = now_ns()
        meetings.append((left, left - entered))
    first = json.loads(control.gather(json.dumps(meetings))[0])
    found = [
        (max(mine_ns, theirs_ns), mine - theirs)
        for (mine, mine_ns), (theirs, theirs_ns) in zip(meetings, first, strict=True)
    ]
    uncertainty_ns, offset_ns = min(found)
    return ClockOffset(offset_ns, uncertainty_ns)
