"""One rank of ``bench plan``: plans steps that want channel B, in turns with the bare all-reduce.

``torchrun … -m benchmarks.plan_rank DIRECTORY REPEATS NUM_PACKS LIMIT…`` writes ``DIRECTORY/rankN.json``: per
queue limit the seconds of every whole plan, of what is not its all-reduce, and of every bare all-reduce.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.collectives import GlooControlGroup, join_job, leave_job
from swift_stage2.scheduling.feasibility_gate import RankFacts, decide, vector_length
from swift_stage2.scheduling.step_plan import Channel

NUM_WARMUP = 10
TIMEOUT_S = 120.0
PLAN, OWN, BARE = "plan_s", "own_s", "bare_s"
_NUM_SERVERS = 1
_VERSION = 7
_WINDOW = 2


@dataclass(frozen=True, slots=True)
class NumberedPack:
    """A pack as the queue sees it."""

    version: int
    number: int


class PlannedSteps:
    """The learner's way from a queue to packs, step by step: reserve, agree with all ranks, hand over."""

    def __init__(self, control: GlooControlGroup, queue_limit: int, num_packs: int) -> None:
        self._control = control
        self._limit = queue_limit
        self._num_packs = num_packs
        self._queue: ReadyQueue[NumberedPack] = ReadyQueue(queue_limit, _WINDOW)
        self._numbers = count()

    def fill(self) -> None:
        """Packs up to the limit, as a pipeline that is ahead leaves them."""
        while self._queue.statistics().depth < self._limit:
            self._queue.offer(NumberedPack(_VERSION, next(self._numbers)), current_version=_VERSION)

    def plan(self) -> tuple[float, float]:
        """Seconds of one step's plan, and of all of it but the all-reduce.

        Raises:
            RuntimeError: the step did not become channel B, so that nothing was measured.
        """
        began = time.perf_counter()
        reservation = self._queue.reserve(self._num_packs, current_version=_VERSION)
        facts = RankFacts(
            not_reserved=reservation is None,
            production_steps=1.5,
            servers_suspect=(False,) * _NUM_SERVERS,
            servers_answer_again=(False,) * _NUM_SERVERS,
        )
        vector = facts.encode()
        asked = time.perf_counter()
        agreed = self._control.reduce_max(vector)
        answered = time.perf_counter()
        plan = decide(agreed, num_servers=_NUM_SERVERS).plan(wants_b=True)
        packs = reservation.take() if reservation is not None and plan.channel is Channel.B else []
        ended = time.perf_counter()
        if len(packs) != self._num_packs:
            raise RuntimeError(f"a full queue must give {self._num_packs} packs, got {len(packs)}")
        return ended - began, (asked - began) + (ended - answered)


def main(argv: Sequence[str]) -> int:
    """Measures and writes; all ranks alike."""
    directory, repeats, num_packs, *limits = argv
    join_job(TIMEOUT_S)
    control = GlooControlGroup(TIMEOUT_S)
    seconds = measure(control, int(repeats), int(num_packs), [int(limit) for limit in limits])
    path = Path(directory) / f"rank{control.rank}.json"
    path.write_text(json.dumps(seconds) + "\n", encoding="utf-8")
    control.close()
    leave_job()
    return 0


def measure(
    control: GlooControlGroup, repeats: int, num_packs: int, limits: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Seconds by queue limit and kind. Who of a pair goes first alternates."""
    torch.set_num_threads(1)
    steps = {limit: PlannedSteps(control, limit, num_packs) for limit in limits}
    seconds: dict[str, dict[str, list[float]]] = {
        str(limit): {PLAN: [], OWN: [], BARE: []} for limit in limits
    }
    bare = torch.zeros(vector_length(_NUM_SERVERS), dtype=torch.int64)
    for repetition in range(repeats + NUM_WARMUP):
        for limit in limits:
            steps[limit].fill()
            pair: dict[str, float] = {}
            for planned in (True, False) if repetition % 2 == 0 else (False, True):
                control.reduce_max((0,))  # a barrier: what follows must not count how late others are
                if planned:
                    pair[PLAN], pair[OWN] = steps[limit].plan()
                else:
                    began = time.perf_counter()
                    control.max_in_place(bare)
                    pair[BARE] = time.perf_counter() - began
            if repetition >= NUM_WARMUP:
                for kind, value in pair.items():
                    seconds[str(limit)][kind].append(value)
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
