"""Computes what a knob would have to be set to, from one run's own times. Pure."""

from __future__ import annotations

import math

from swift_stage2.report.course import Course
from swift_stage2.report.verdict import Speed

ROUNDS_SHARE = 0.05
"""Of the training part; more than this is worth a knob."""


def sustained_b_ratio(speed: Speed, course: Course) -> float:
    """The highest share of B steps that these rollouts feed, at this run's step times; rounded down to 1/100."""
    share = course.num_b_run / course.num_steps * speed.learner_s / speed.rollouts_s
    return min(1.0, math.floor(share * 100) / 100)


def servers_needed(speed: Speed, num_servers: int) -> int | None:
    """With how many servers the learner would bind; None if the pipeline's other work alone takes too long."""
    asking = speed.working_s["asking"]
    left = speed.learner_s - (speed.rollouts_s - asking)
    return math.ceil(asking * num_servers / left) if left > 0 else None


def sync_every_steps_needed(speed: Speed, course: Course) -> int:
    """From how many steps on a round, as long as it now is, takes ``ROUNDS_SHARE`` of the time."""
    round_s = speed.rounds_s / course.num_rounds
    step_s = speed.steps_s / course.num_steps
    return math.ceil(round_s * (1 - ROUNDS_SHARE) / (ROUNDS_SHARE * step_s))


def window_needed(course: Course, sync_every_steps: int, version_window: int) -> int:
    """In which POSTs of such unlike lengths all arrive fresh: they spread over at most window × sync_every_steps."""
    quick, slow = course.post_steps or (0.0, 0.0)
    return max(version_window + 1, math.ceil((slow - quick + 1) / sync_every_steps))
