"""The life of one rollout server as rank 0 sees it: a pure state machine, and its transitions as a table.

A server is asked for rollouts under weights that it has proven, and for as long. One that takes new weights beside the
old ones (``stages``) goes on answering meanwhile; any other is drained first: no rank asks it anything until it has
proven the new ones. Holds no thread, socket or collective; ``weights.updates`` drives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class LifeState(StrEnum):
    """Where a server stands. What ends each state stands beside it."""

    AWAY = "away"
    """Nobody asks it: it failed, was lost, or has never answered. Ends when the health check hears it."""
    READY = "ready"
    """It answers and holds no weights of this run that count. Ends by a push, after a back-off."""
    DRAINING = "draining"
    """No rank asks it anything new. Ends once every rank has said that nothing is in flight there, each by its own
    deadlines."""
    PUSHING = "pushing"
    """Weights are on their way and nobody asks it. Ends with the push, by its deadline."""
    PROVEN = "proven"
    """It is asked. Ends by newer weights or a fault."""
    ASLEEP = "asleep"
    """It is asked nothing and has given up its device's memory, beside a learner that trains. Ends by newer weights."""
    UPDATING = "updating"
    """It is asked while newer weights are on their way. Ends with the push, by its deadline."""


class LifeEvent(StrEnum):
    ANSWERED = "answered"
    DRAIN = "drain"
    SLEEP = "sleep"
    PUSH = "push"
    PROVED = "proved"
    FAILED = "failed"


TRANSITIONS: dict[tuple[LifeState, LifeEvent], LifeState] = {
    (LifeState.AWAY, LifeEvent.ANSWERED): LifeState.READY,
    (LifeState.READY, LifeEvent.PUSH): LifeState.PUSHING,
    (LifeState.READY, LifeEvent.DRAIN): LifeState.DRAINING,
    (LifeState.DRAINING, LifeEvent.PUSH): LifeState.PUSHING,
    (LifeState.PUSHING, LifeEvent.PROVED): LifeState.PROVEN,
    (LifeState.PROVEN, LifeEvent.PUSH): LifeState.UPDATING,
    (LifeState.PROVEN, LifeEvent.DRAIN): LifeState.DRAINING,
    (LifeState.UPDATING, LifeEvent.PROVED): LifeState.PROVEN,
    (LifeState.PROVEN, LifeEvent.SLEEP): LifeState.ASLEEP,
    (LifeState.ASLEEP, LifeEvent.PUSH): LifeState.PUSHING,
    **{(state, LifeEvent.FAILED): LifeState.AWAY for state in LifeState if state is not LifeState.AWAY},
}
"""Every other pair changes nothing: an event that comes late, of a push that was given up for instance."""


@dataclass(slots=True)
class ServerLife:
    """One server. Steps are optimizer steps."""

    backoff_steps: int
    max_backoff_steps: int
    stages: bool = False
    """Whether it takes new weights beside the old ones while it answers."""
    state: LifeState = LifeState.READY
    version: int = 0
    """That it has proven and may be asked under; 0: none."""
    retry_step: int = 0
    """Nothing is pushed to it before."""

    _next_backoff: int = field(init=False)

    def __post_init__(self) -> None:
        self._next_backoff = self.backoff_steps

    @property
    def is_pushing(self) -> bool:
        """Whether weights are on their way."""
        return self.state in (LifeState.PUSHING, LifeState.UPDATING)

    @property
    def is_closed(self) -> bool:
        """Whether no rank may ask it anything new although it may have a version."""
        return self.state in (LifeState.DRAINING, LifeState.PUSHING, LifeState.ASLEEP)

    def wants(self, newest: int, step: int) -> bool:
        """Whether weights of version ``newest`` should be brought to it at ``step``, or it be drained for them."""
        if self.state is LifeState.READY:
            return step >= self.retry_step
        return self.state in (LifeState.PROVEN, LifeState.ASLEEP) and self.version < newest

    def answered(self) -> None:
        """The health check has heard it."""
        self._take(LifeEvent.ANSWERED)

    def drain(self) -> None:
        self._take(LifeEvent.DRAIN)

    def sleep(self) -> None:
        self._take(LifeEvent.SLEEP)

    def push(self) -> None:
        self._take(LifeEvent.PUSH)

    def proved(self, version: int) -> bool:
        """It has proven ``version``; False if its push does not count any more."""
        counts = self._take(LifeEvent.PROVED)
        if counts:
            self.version, self._next_backoff = version, self.backoff_steps
        return counts

    def failed(self, step: int) -> bool:
        """It is suspect, was lost, or its push has failed; False if nobody asks it anyway."""
        counts = self._take(LifeEvent.FAILED)
        if counts:
            self.version, self.retry_step = 0, step + self._next_backoff
            self._next_backoff = min(2 * self._next_backoff, self.max_backoff_steps)
        return counts

    def _take(self, event: LifeEvent) -> bool:
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True
