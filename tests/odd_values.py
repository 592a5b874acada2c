"""Values of JSON that no member of a message has, or only one of many."""

from __future__ import annotations

ODD_VALUES: tuple[object, ...] = (
    10**400, -1, 1.5, 2**63, True, "abc", None, [], {}, "\0", "a\nb", [[[]]], "x" * 10_000,
)  # fmt: skip
