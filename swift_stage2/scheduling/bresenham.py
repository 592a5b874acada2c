"""Turns a step number and ``b_ratio`` into "channel B is wanted here", as evenly as integers allow.

B is wanted at step s iff floor((s+1)·r) > floor(s·r), with r the decimal fraction as written. A pure
function of the step: resume continues it, and no step needs the steps before it.
Called by the learner at every step start and by the pacer, which looks ahead.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache


def wants_channel_b(step: int, b_ratio: float) -> bool:
    """Say whether step ``step`` (0-based) is wanted on channel B.

    The error-accumulation rule of Bresenham (1965), in closed form and in exact integers. ``b_ratio`` is in [0, 1].
    """
    return wanted_count(step, b_ratio) < wanted_count(step + 1, b_ratio)


def next_wanted_step(step: int, b_ratio: float) -> int | None:
    """The first step >= ``step`` that is wanted; None when ``b_ratio`` is 0."""
    wanted_before, ratio = wanted_count(step, b_ratio), _exact_ratio(b_ratio)
    if ratio == 0:
        return None
    # The step after which the count first reaches wanted_before + 1, by a ceiling division.
    return -(-(wanted_before + 1) * ratio.denominator // ratio.numerator) - 1


def wanted_count(steps: int, b_ratio: float) -> int:
    """Counts the steps before ``steps`` that want channel B: floor(steps · b_ratio)."""
    ratio = _exact_ratio(b_ratio)
    return steps * ratio.numerator // ratio.denominator


# A float prints as the shortest decimal that reads back as itself, which is what was written in the YAML:
# 0.3 is three tenths here, not the binary number next to it.
@lru_cache(maxsize=64)
def _exact_ratio(b_ratio: float) -> Fraction:
    return Fraction(str(b_ratio))
