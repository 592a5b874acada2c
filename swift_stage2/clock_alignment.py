"""How far this rank's Unix time is ahead of rank 0's, found by leaving a few collectives together.

Nobody leaves an all-reduce before everybody has entered it, so that all ranks leave within the time of its last
messages. The median over several of the differences to rank 0 is the offset, half their range what it is known to.
Ranks of one machine share a clock, and machines whose clocks are kept alike differ by less than can be seen this
way: only an offset that is larger than its uncertainty is corrected. For the trace.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from swift_stage2.collectives import ControlGroup
from swift_stage2.telemetry.spans import ClockOffset

_NUM_MEETINGS = 9


def align_clocks(control: ControlGroup, now_ns: Callable[[], int] = time.time_ns) -> ClockOffset:
    """This rank's offset. Called on all ranks alike; takes a few collectives."""
    moments = []
    for _ in range(_NUM_MEETINGS):
        control.reduce_max([0])
        moments.append(now_ns())
    first = json.loads(control.gather(json.dumps(moments))[0])
    differences = [mine - theirs for mine, theirs in zip(moments, first, strict=True)]
    half_range = (max(differences) - min(differences)) // 2
    return ClockOffset(round(statistics.median(differences)), half_range)
