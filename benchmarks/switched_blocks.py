"""Which steps of a run have channel B's pipeline switched on, and which of them can be compared. Pure.

Blocks go off, on, on, off and again, so that a drift of the machine falls on both; every two neighbours are a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.scheduling.bresenham import wants_channel_b

STEPS_VARIABLE = "SWIFT_STAGE2_BLOCK_STEPS"
"""Tells the learner how long a block is."""
SWITCH_INTERVAL_VARIABLE = "SWIFT_STAGE2_SWITCH_INTERVAL_S"
"""Tells the learner its ``sys.setswitchinterval``; not set: as Python has it."""
_ON = (1, 2)


@dataclass(frozen=True, slots=True)
class SwitchedBlocks:
    """``num_pairs`` pairs of blocks of ``num_steps`` steps, of which the first ``num_settling`` are not compared."""

    num_steps: int
    num_settling: int
    num_pairs: int

    @property
    def total_steps(self) -> int:
        """Of the whole run."""
        return 2 * self.num_pairs * self.num_steps

    def compared_steps(self, pair: int, b_ratio: float) -> tuple[list[int], list[int]]:
        """Steps of a pair's block without and of its block with the pipeline, at the same places in both.

        They are those that channel A trains by the schedule, in both blocks.
        """
        first = 2 * pair * self.num_steps
        blocks = [range(start, start + self.num_steps) for start in (first, first + self.num_steps)]
        off, on = sorted(blocks, key=lambda steps: is_on(steps[0], self.num_steps))
        places = [
            place
            for place in range(max(1, self.num_settling), self.num_steps)
            if not any(wants_channel_b(steps[place], b_ratio) for steps in blocks)
        ]
        return [off[place] for place in places], [on[place] for place in places]


def is_on(step: int, num_block_steps: int) -> bool:
    """Whether the pipeline may produce in this step."""
    return (step // num_block_steps) % 4 in _ON
