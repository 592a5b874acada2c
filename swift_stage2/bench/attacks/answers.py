"""Attacks by a server's answers: odd ones, and ones without an end."""

from __future__ import annotations

from swift_stage2.bench.attacks.result import AttackResult


def attacks() -> list[AttackResult]:
    """Every attack of this group, one after the other."""
    return []
