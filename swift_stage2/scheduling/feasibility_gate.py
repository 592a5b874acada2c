"""Turns rank-local facts into one integer vector, and its element-wise MAX over ranks into one outcome.

The vector's length depends on the number of servers only, and every entry reads "bad or wanted
somewhere", so that one all-reduce MAX per optimizer step makes all ranks decide alike. The learner
encodes, reduces and decides at every step, whatever the schedule wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan

_FLAGS = (
    "not_reserved", "pipeline_failed", "stop_requested", "truncation_guard", "evaluation_wanted", "update_news",
    "publishing", "server_waits", "makes_stale", "log_failed",
)  # fmt: skip
_PER_SERVER = ("servers_proven", "servers_suspect", "servers_closed", "servers_busy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Everything at the start of a step that one rank knows and that may change the plan of all."""

    not_reserved: bool = False
    """This rank holds no reservation; true as well when B is not wanted."""
    pipeline_failed: bool = False
    stop_requested: bool = False
    truncation_guard: bool = False
    """This rank's `TruncationGuard` pauses channel B."""
    evaluation_wanted: bool = False
    update_news: bool = False
    """Rank 0's: all ranks should be told how pushes have ended, or who a server is that joins."""
    publishing: bool = False
    """Rank 0's: the copy of the weights is being made or pushed, and must not be changed."""
    server_waits: bool = False
    """Rank 0's: a server could take weights, and no version that is kept would do."""
    makes_stale: bool = False
    """This rank has rollouts at hand that the next version makes too old for training."""
    log_failed: bool = False
    """This rank's event log cannot be written any more."""
    servers_proven: tuple[int, ...] = ()
    """Rank 0's, per server in the order of the configuration: the version that it has proven and is asked under; 0 if
    nobody may ask it."""
    servers_suspect: tuple[bool, ...] = ()
    """Per server: this rank has found a fault since it said so last."""
    servers_closed: tuple[bool, ...] = ()
    """Rank 0's, per server: nothing new may be asked, because other weights are about to come or coming."""
    servers_busy: tuple[bool, ...] = ()
    """Per server: this rank may still have something in flight there, or may still ask."""

    def encode(self) -> tuple[int, ...]:
        """Return the vector: integers >= 0, as many for as many servers, ready for an element-wise MAX."""
        return (
            *(int(getattr(self, flag)) for flag in _FLAGS),
            *(int(each) for name in _PER_SERVER for each in getattr(self, name)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcome(RankFacts):
    """The worst of every rank's facts at this step; equal on every rank."""

    @property
    def servers_asked(self) -> tuple[int, ...]:
        """Versions of the servers that may be asked, by number: proven, and suspected by no rank."""
        pairs = zip(self.servers_proven, self.servers_suspect, strict=True)
        return tuple(0 if is_suspect else version for version, is_suspect in pairs)

    @property
    def skip_reason(self) -> SkipReason:
        """The cause that binds if a wanted B cannot run now: the one whose cure comes first."""
        if self.pipeline_failed:
            return SkipReason.PIPELINE_FAILED
        if self.servers_proven and not any(self.servers_asked):
            return SkipReason.SERVERS_SUSPECT
        if self.truncation_guard:
            return SkipReason.TRUNCATION_GUARD
        return SkipReason.NOT_ENOUGH_PACKS

    def plan(self, *, wants_b: bool) -> StepPlan:
        """B iff it is wanted, reserved everywhere, and neither a failed pipeline nor a truncation guard forbids it.

        Servers that nobody may ask stop nothing: packs that are ready stay valid.
        """
        if not wants_b:
            return StepPlan(Channel.A)
        if self.not_reserved or self.pipeline_failed or self.truncation_guard:
            return StepPlan(Channel.A, self.skip_reason)
        return StepPlan(Channel.B)


def decide(vector: Sequence[int], *, num_servers: int) -> GateOutcome:
    """Read the element-wise MAX of all ranks' vectors, which were encoded for ``num_servers`` servers."""
    entries = iter(vector)
    flags: dict[str, Any] = {flag: next(entries) > 0 for flag in _FLAGS}
    proven, *others = (tuple(islice(entries, num_servers)) for _ in _PER_SERVER)
    suspect, closed, busy = (tuple(entry > 0 for entry in each) for each in others)
    return GateOutcome(
        **flags,
        servers_proven=proven,
        servers_suspect=suspect,
        servers_closed=closed,
        servers_busy=busy,
    )
