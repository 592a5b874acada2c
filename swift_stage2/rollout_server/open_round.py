"""The round that holds a server: whose it is, how far it has come, and what proves it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum

from swift_stage2.errors import RoundRefused
from swift_stage2.rollout_server.engine import InstalledWeights, WeightStamp
from swift_stage2.rollout_server.weight_source import WeightSource
from swift_stage2.wire import (
    INSTALLING_STATE,
    FinishRequest,
    RefusalReason,
    RoundProof,
    RoundRequest,
)

_JOIN_TIMEOUT_S = 2.0

LEASE_S = 30.0
"""A round whose learner has been silent for so long gives way to another run's: the learner is dead."""


class RoundState(StrEnum):
    """Decides over ``/infer/``: all calls are answered, the round's own only unless it is staged, or none.

    Weights may still be copied for a round that has ended: then none is, and no other round can install its own.
    """

    SERVING = "serving"
    ROUND_OPEN = "round_open"
    INSTALLING = INSTALLING_STATE
    UNPROVEN = "unproven"


@dataclass(slots=True)
class OpenRound:
    """One round. Used under the lock of ``WeightRounds``; times are its clock's."""

    request: RoundRequest
    end: float
    last_call: float
    source: WeightSource | None = None
    given_up: threading.Event | None = None
    """Of the load: set once it has ended, or its caller has gone."""
    installed: InstalledWeights | None = None
    failure: str | None = None

    @property
    def stamp(self) -> WeightStamp:
        """Of completions that its weights make."""
        return WeightStamp(self.request.version, self.request.run_id, self.request.round_id)

    @property
    def is_loading(self) -> bool:
        """Whether its load has begun, also once that has ended."""
        return self.given_up is not None

    def give_way(self, run_id: str, now: float) -> None:
        """To a round of that run. Raises RoundRefused: it is another run's, whose learner may still come."""
        is_lost = self.failure is not None or (self.source is not None and self.source.failed)
        if run_id != self.request.run_id and not is_lost and now - self.last_call < LEASE_S:
            raise RoundRefused(
                RefusalReason.ROUND_OPEN,
                f"run {self.request.run_id} holds the server with round {self.request.round_id}; give every run a "
                f"server of its own, or wait {LEASE_S:.0f} s if that learner is dead",
            )

    def without_source(self) -> OpenRound:
        """Itself. Raises RoundRefused once it has a way for weights."""
        if self.source is not None:
            raise RoundRefused(RefusalReason.WRONG_ORDER, "the round has a way for its weights already")
        return self

    def fail(self, why: str) -> None:
        """Nothing of it is taken any more; the first cause counts."""
        self.failure = self.failure or why
        if self.source is not None:
            self.source.close()

    def why_over(self, now: float, *, is_idle: bool) -> str:
        """Why nobody is going to prove it any more; empty while somebody may. An engine may hang in its load.

        ``is_idle``: the server answers nobody at the moment, not even the learner's canary.
        """
        if self.installed is None and self.given_up is not None and self.given_up.is_set():
            return "lost its learner while it loaded"
        if self.installed is not None and is_idle and now - self.last_call >= LEASE_S:
            return "lost its learner before it was proven"
        return "ran out of time" if now > self.end else ""

    def begin_load(self, given_up: threading.Event) -> WeightSource:
        """Counts as heard of while it loads. Raises RoundRefused: it loads or has loaded, or has no way for weights."""
        if self.is_loading:
            raise RoundRefused(
                RefusalReason.WRONG_ORDER, "the round's weights are loaded already, or about to be"
            )
        if self.source is None:
            raise RoundRefused(
                RefusalReason.WRONG_ORDER, "init_communicator comes first: no weights are on their way"
            )
        self.given_up = given_up
        self.last_call = self.end
        return self.source

    def proof(self, installed: InstalledWeights, incarnation: str) -> RoundProof:
        """Everything that the server can show of these weights."""
        return RoundProof(
            round_id=self.request.round_id,
            incarnation=incarnation,
            weight_version=self.request.version,
            arrived=installed.arrived,
            resident=installed.resident,
            loaded=installed.loaded,
        )


def release_port(ended: OpenRound | None) -> None:
    """Waits, not for long, until nothing of that round listens any more."""
    if ended is not None and ended.source is not None:
        ended.source.join(_JOIN_TIMEOUT_S)


def is_vouched_for(proof: RoundProof, wanted: FinishRequest) -> bool:
    """True if every tensor arrived, and is resident, with the learner's checksum."""
    arrived = dict(proof.arrived)
    return (
        dict(proof.resident) == arrived
        and set(arrived) <= set(proof.loaded)
        and wanted.checksums is not None
        and dict(wanted.checksums) == arrived
    )
