"""Turns rank-local facts into one integer vector, and its element-wise MAX over ranks into one outcome.

The vector's length depends on the number of servers only, and every entry reads "bad or wanted
somewhere", so that one all-reduce MAX per optimizer step makes all ranks decide alike. The learner
encodes, reduces and decides at every step, whatever the schedule wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_stage2.scheduling.outlook import INSTANT, ProductionPace
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan

_NUM_COMMON_ENTRIES = 7
_MILLI = 1000  # durations travel as whole thousandths of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank knows at the start of a step that may change the plan of all."""

    not_reserved: bool = False
    """This rank holds no reservation; true as well when B is not wanted."""
    pipeline_failed: bool = False
    stop_requested: bool = False
    truncation_guard: bool = False
    """This rank's `TruncationGuard` pauses channel B."""
    evaluation_wanted: bool = False
    pace: ProductionPace | None = None
    """Of this rank's productions; the slowest rank paces all."""
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
        pace = self.pace or INSTANT
        return (
            int(self.not_reserved),
            int(self.pipeline_failed),
            int(self.stop_requested),
            int(self.truncation_guard),
            int(self.evaluation_wanted),
            round(pace.typical_steps * _MILLI),
            round(pace.quick_steps * _MILLI),
            *(int(suspect) for suspect in self.servers_suspect),
            *(int(answers) for answers in self.servers_answer_again),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcome:
    """What holds for all ranks at this step; equal on every rank."""

    reserved_everywhere: bool
    pipeline_failed: bool
    stop_requested: bool
    truncation_guard: bool
    evaluation_wanted: bool
    slowest_pace: ProductionPace
    servers_suspect: tuple[bool, ...]
    servers_answer_again: tuple[bool, ...]

    @property
    def num_proven_servers(self) -> int:
        """How many servers no rank suspects."""
        return self.servers_suspect.count(False)

    @property
    def skip_reason(self) -> SkipReason:
        """The cause that binds if a wanted B cannot run now: the one whose cure comes first."""
        if self.pipeline_failed:
            return SkipReason.PIPELINE_FAILED
        if self.servers_suspect and not self.num_proven_servers:
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
        if self.reserved_everywhere and not (self.pipeline_failed or self.truncation_guard):
            return StepPlan(Channel.B)
        return StepPlan(Channel.A, self.skip_reason)


def vector_length(num_servers: int) -> int:
    """Return the number of integers that every rank contributes."""
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
    flags = [entry > 0 for entry in vector]
    return GateOutcome(
        reserved_everywhere=not flags[0],
        pipeline_failed=flags[1],
        stop_requested=flags[2],
        truncation_guard=flags[3],
        evaluation_wanted=flags[4],
        slowest_pace=ProductionPace(vector[5] / _MILLI, vector[6] / _MILLI),
        servers_suspect=tuple(flags[_NUM_COMMON_ENTRIES : _NUM_COMMON_ENTRIES + num_servers]),
        servers_answer_again=tuple(flags[_NUM_COMMON_ENTRIES + num_servers :]),
    )
