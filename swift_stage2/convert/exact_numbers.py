"""Coordinates as exact decimals: an edge ``x + width`` that is written and read again gives ``width`` back.

Binary sums would not: 0.1 + 0.2 - 0.1 is not 0.2. A number of a file is taken for the shortest decimal that means the
same double, which is how every JSON writer writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Any

_EXACT = Context(prec=800)  # digits that a sum of any two doubles may need
_FINEST = Decimal("0.000001")
MOST = 1e9
"""Pixels; a coordinate beyond is no coordinate."""
_NUMBERS = (float, int, Decimal)
Quad = tuple[Decimal, Decimal, Decimal, Decimal]
added, subtracted = _EXACT.add, _EXACT.subtract  # without rounding


def exact(value: float) -> Decimal:
    """The shortest decimal that means ``value``."""
    return Decimal(int(value)) if value == int(value) else Decimal(repr(float(value)))


def exact_quad(values: Iterable[float]) -> Quad:
    """Four numbers as decimals."""
    x1, y1, x2, y2 = map(exact, values)
    return x1, y1, x2, y2


def multiplied(one: Decimal, other: Decimal) -> Decimal:
    """The product, to a millionth: a share of a picture came from pixels, and is rounded already."""
    return _EXACT.multiply(one, other).quantize(_FINEST, ROUND_HALF_EVEN, _EXACT)


def number_text(value: Decimal) -> str:
    """As JSON has it, without trailing zeros."""
    return str(int(value)) if value == int(value) else str(_EXACT.normalize(value))


def are_coordinates(values: Any, count: int) -> bool:
    """True if ``values`` is a list of ``count`` finite numbers, each below ``MOST``."""
    return (
        isinstance(values, Sequence)
        and len(values) == count
        # By exact type, which bool is not; and no comparison is true of NaN.
        and all(type(value) in _NUMBERS and -MOST <= value <= MOST for value in values)
    )
