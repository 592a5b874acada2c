"""Says that channel B was wanted and never ran, or that no sync round proved a server, and why. Pure.

Told at the end of every such run, however short: by ``train``, by ``launch`` and on the report's page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swift_stage2.telemetry.facts import RoundFacts, StepFacts

_CAUSES = {
    "not_enough_packs": "packs were not ready in time",
    "truncation_guard": "too many rollouts were cut off, raise rollout.decoding.max_new_tokens",
    "servers_suspect": "no proven server was left",
    "pipeline_failed": "the pipeline had failed",
}
_MOST_CHARACTERS = 600  # of a server's error


class UnusedB:
    """What a run has wanted of channel B so far, and what came of it. Equal on all ranks."""

    def __init__(self) -> None:
        self._num_wanted = self._num_run = self._num_proven = self._num_rounds = 0
        self._skips: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def step(self, facts: StepFacts) -> None:
        """Take in one step."""
        plan = facts.plan
        self._num_wanted += plan.wanted_b
        self._num_run += plan.channel == "B"
        if plan.skip_reason is not None:
            self._skips[str(plan.skip_reason)] += 1

    def round(self, outcome: RoundFacts) -> None:
        """Take in a sync round that has ended."""
        self._num_rounds += 1
        self._num_proven += any(report.proven for report in outcome.reports.values())
        self._errors.update(str(report.error) for report in outcome.reports.values() if not report.proven)

    def describe(self) -> str:
        """See ``describe_unused``."""
        return describe_unused(
            num_wanted=self._num_wanted,
            num_run=self._num_run,
            skips=self._skips,
            num_rounds=self._num_rounds,
            num_proven=self._num_proven,
            errors=self._errors,
        )


def describe_unused(
    *,
    num_wanted: int,
    num_run: int,
    skips: Mapping[str, int],
    num_rounds: int,
    num_proven: int,
    errors: Mapping[str, int],
) -> str:
    """One sentence without a full stop; empty when a B step ran, or none was wanted and nothing else went wrong.

    ``num_proven`` of ``num_rounds`` sync rounds proved a server; ``skips`` and ``errors`` count causes.
    """
    if num_run:
        return ""
    cause = ""
    if num_rounds and not num_proven:
        cause = f"none of {num_rounds} sync rounds proved a server"
        if errors:
            cause += f", mostly: {' '.join(_most(errors).split())[:_MOST_CHARACTERS]}"
    elif skips:
        reason = _most(skips)
        cause = _CAUSES.get(reason, reason)
    if num_wanted:
        return f"channel B ran at none of the {num_wanted} steps that wanted it: {cause or 'no cause is recorded'}"
    return cause


def _most(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda key: counts[key])
