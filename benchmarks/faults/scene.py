"""Where one row happens: a running job, its server, what stands between them, and the moments that are noted.

The few moves that rows are made of live here, each with its own deadline. Called by the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.accounting import Moments, first_notice
from benchmarks.faults.commit import Switches
from benchmarks.faults.proxy import FaultProxy
from benchmarks.faults.server import TestedServer
from benchmarks.faults.training_job import TrainingJob, after
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.errors import ChildFailed
from swift_stage2.telemetry.audit import Record

START_S = 400.0
SOON_S = 180.0
_NUM_WARM_STEPS = 14
_NUM_WARM_ROUNDS = 2


class Scene:
    """One row in progress. ``proxy`` is None where learner and server talk directly."""

    def __init__(
        self, server: TestedServer, job: TrainingJob, switches: Switches, proxy: FaultProxy | None
    ) -> None:
        self.server = server
        self.job = job
        self.switches = switches
        self._proxy = proxy
        self._fault: float | None = None
        self._healed: float | None = None
        self._restarted: float | None = None
        self._spoilt_round: float | None = None

    @property
    def proxy(self) -> FaultProxy:
        """What stands between learner and server."""
        if self._proxy is None:
            raise ChildFailed("this row needs a proxy; set through_proxy")
        return self._proxy

    @property
    def moments(self) -> Moments:
        """What was noted."""
        if self._fault is None:
            raise ChildFailed("a row must say when its fault happened")
        return Moments(
            fault=self._fault, healed=self._healed, restarted=self._restarted, spoilt_round=self._spoilt_round
        )

    def warm_up(self) -> None:
        """Trains until both channels run and rounds come as they should."""
        self.job.wait_for(self._is_warm, "both channels run", START_S)

    def mark_fault(self, at: float | None = None) -> None:
        """The fault happens now, or happened at a moment of the audit's clock."""
        self._fault = time.time() if at is None else at

    def mark_healed(self) -> None:
        """Nothing stands in the way of a proof any more."""
        self._healed = time.time()

    def mark_unproven(self, since: float) -> None:
        """From then on no rollout of the server may be taken before a round proves it."""
        self._restarted = since

    def mark_spoilt_round(self, at: float) -> None:
        """The round that ended then was given weights other than the learner's."""
        self._spoilt_round = at
        self.mark_unproven(at)

    def wait_until_noticed(self, timeout_s: float = SOON_S) -> None:
        """Until a rank has written something that only the fault explains."""
        fault = self.moments.fault
        self.job.wait_for(lambda: first_notice(self.job.records, fault), "the fault is noticed", timeout_s)

    def wait_for(self, holds: Callable[[], object], what: str, timeout_s: float = SOON_S) -> None:
        """Trains on until something holds."""
        self.job.wait_for(holds, what, timeout_s)

    def kill_server(self) -> None:
        """SIGKILL to all of it."""
        self.server.kill()

    def start_server(self, model: Path = STAGE1) -> None:
        """Starts it on the port that it had, with the weights of a checkpoint, while training goes on."""
        self.mark_unproven(time.time())
        self.server.start(model)
        self.server.wait_until_it_answers(self.job.step)

    def wait_until_healed(self) -> None:
        """Until a round has proven the server and B has run on what it said since, and some steps more."""
        moments = self.moments
        since = moments.fault if moments.healed is None else moments.healed

        def rounds() -> list[Record]:
            return [record for record in after(self.job.of_kind("round"), since) if record["committed"]]

        self.job.wait_for(rounds, "a round proves the server again", SOON_S)
        proven_at = rounds()[0]["time"]
        self.job.wait_for(
            lambda: any(step["channel"] == "B" for step in after(self.job.of_kind("step"), proven_at)),
            "channel B runs again",
            SOON_S,
        )
        self.job.wait_for_steps(4)

    def _is_warm(self) -> bool:
        steps, rounds = self.job.of_kind("step"), self.job.of_kind("round")
        return (
            len(steps) >= _NUM_WARM_STEPS
            and any(step["channel"] == "B" for step in steps)
            and sum(record["committed"] for record in rounds) >= _NUM_WARM_ROUNDS
        )
