"""Turns rank-local facts into one integer vector, and its element-wise MAX over ranks into one outcome.

The vector's length depends on the number of servers only, and every entry reads "bad or wanted
somewhere", so that one all-reduce MAX per optimizer step makes all ranks decide alike. The learner
encodes, reduces and decides at every step, whatever the schedule wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_stage2.scheduling.horizon import INSTANT, ProductionPace
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan

_FLAGS = (
    "not_reserved", "pipeline_failed", "stop_requested", "truncation_guard", "evaluation_wanted", "round_news",
    "server_joins", "log_failed",
)  # fmt: skip
_NUM_COMMON_ENTRIES = len(_FLAGS) + 2
_MILLI = 1000  # durations travel as whole thousandths of a step


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
    round_news: bool = False
    """Rank 0's: of the round in transfer there is something to hear."""
    server_joins: bool = False
    """Rank 0's: a server that was absent at the start has answered, and passed the checks of a start."""
    log_failed: bool = False
    """This rank's event log cannot be written any more."""
    pace: ProductionPace = INSTANT
    """Of this rank's productions; in the outcome the slowest rank's, which paces all."""
    servers_suspect: tuple[bool, ...] = ()
    """Per server, in the order of the configuration."""
    servers_answer_again: tuple[bool, ...] = ()
    """Per suspect server, what rank 0's probe found; same order and length."""

    def __post_init__(self) -> None:
        if len(self.servers_suspect) != len(self.servers_answer_again):
            raise ValueError(
                "both server tuples have one entry per server, "
                f"got servers_suspect={self.servers_suspect} servers_answer_again={self.servers_answer_again}"
            )

    def encode(self) -> tuple[int, ...]:
        """Return the vector, `vector_length` integers >= 0, ready for an element-wise MAX."""
        return (
            *(int(getattr(self, flag)) for flag in _FLAGS),
            round(self.pace.typical_steps * _MILLI),
            round(self.pace.quick_steps * _MILLI),
            *map(int, self.servers_suspect),
            *map(int, self.servers_answer_again),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcome(RankFacts):
    """The worst of every rank's facts at this step; equal on every rank."""

    @property
    def skip_reason(self) -> SkipReason:
        """The cause that binds if a wanted B cannot run now: the one whose cure comes first."""
        if self.pipeline_failed:
            return SkipReason.PIPELINE_FAILED
        if self.servers_suspect and all(self.servers_suspect):
            return SkipReason.SERVERS_SUSPECT
        if self.truncation_guard:
            return SkipReason.TRUNCATION_GUARD
        return SkipReason.NOT_ENOUGH_PACKS

    def plan(self, *, wants_b: bool) -> StepPlan:
        """B iff it is wanted, reserved everywhere, and neither a failed pipeline nor a truncation guard forbids it.

        Suspect servers alone stop nothing: packs that are ready stay valid.
        """
        if not wants_b:
            return StepPlan(Channel.A)
        if self.not_reserved or self.pipeline_failed or self.truncation_guard:
            return StepPlan(Channel.A, self.skip_reason)
        return StepPlan(Channel.B)


def vector_length(num_servers: int) -> int:
    return _NUM_COMMON_ENTRIES + 2 * num_servers


def decide(vector: Sequence[int], *, num_servers: int) -> GateOutcome:
    """Read the element-wise MAX of all ranks' vectors.

    Raises:
        ValueError: the vector was not encoded for ``num_servers`` servers.
    """
    if len(vector) != vector_length(num_servers):
        raise ValueError(
            f"a step's vector has {vector_length(num_servers)} entries for {num_servers} servers, "
            f"got {len(vector)}; all ranks must read the same list of servers"
        )
    entries = iter(vector)
    flags = {flag: next(entries) > 0 for flag in _FLAGS}
    pace = ProductionPace(next(entries) / _MILLI, next(entries) / _MILLI)
    servers = tuple(entry > 0 for entry in entries)
    return GateOutcome(
        **flags, pace=pace, servers_suspect=servers[:num_servers], servers_answer_again=servers[num_servers:]
    )
