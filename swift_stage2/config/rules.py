"""The few rules that most settings obey. Each raises ``ConfigError`` with rule, value and remedy."""

from __future__ import annotations

import math

from swift_stage2.errors import ConfigError


def at_least(name: str, value: float, minimum: float, remedy: str = "") -> None:
    """``value >= minimum`` and finite."""
    _refuse_unless(math.isfinite(value) and value >= minimum, f"at least {minimum}", name, value, remedy)


def in_unit_range(name: str, value: float, remedy: str = "") -> None:
    """``0 <= value <= 1``."""
    _refuse_unless(0 <= value <= 1, "in the range 0..1", name, value, remedy)


def deadline(name: str, value: float) -> None:
    """A deadline is finite and positive: nothing may wait for ever."""
    remedy = "write a number of seconds, because every wait needs a deadline"
    _refuse_unless(
        math.isfinite(value) and value > 0, "a finite number of seconds above 0", name, value, remedy
    )


def above_zero(name: str, value: float, maximum: float = math.inf, remedy: str = "") -> None:
    """``0 < value <= maximum`` and finite."""
    allowed = "above 0" if math.isinf(maximum) else f"above 0 and at most {maximum:g}"
    _refuse_unless(math.isfinite(value) and 0 < value <= maximum, allowed, name, value, remedy)


def not_blank(name: str, value: str) -> None:
    """Text with something other than blanks in it."""
    _refuse_unless(bool(value.strip()), "a text that is not blank", name, value, "")


def _refuse_unless(holds: bool, allowed: str, name: str, value: object, remedy: str) -> None:
    if not holds:
        tail = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{name} must be {allowed}, got {name}={value!r}{tail}")
