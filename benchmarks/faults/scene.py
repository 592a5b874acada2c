"""One fault in progress: a running job, its server, and the few moves that rows and soak are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.faults.accounting import Moments, first_notice, is_proof
from benchmarks.faults.proxy import FaultProxy
from benchmarks.faults.server import TestedServer
from benchmarks.faults.small_disk import SmallDisk
from benchmarks.faults.training_job import TrainingJob
from benchmarks.servers import Found
from swift_stage2.errors import ChildFailed
from swift_stage2.telemetry.audit import Record

START_S = 400.0
_SOON_S = 180.0
_NUM_WARM_STEPS = 14
_NUM_WARM_ROUNDS = 2
_NUM_LAST_STEPS = 4


class Scene:
    """One fault in progress: a running job, its server, what stands between them, and the moments that are noted."""

    def __init__(
        self,
        server: TestedServer,
        job: TrainingJob,
        proxy: FaultProxy | None = None,
        small_disk: SmallDisk | None = None,
    ) -> None:
        self.server = server
        self.other = server
        """Of a row with two servers the one behind the proxy."""
        self.job = job
        self.switches = server.switches
        self.moments = Moments(fault=time.time())
        self._proxy = proxy
        self._small_disk = small_disk

    @property
    def proxy(self) -> FaultProxy:
        """Between learner and server. Raises ChildFailed where they talk directly."""
        if self._proxy is None:
            raise ChildFailed("this row needs a proxy; set through_proxy")
        return self._proxy

    @property
    def small_disk(self) -> SmallDisk:
        """The file system that weights travel by. Raises ChildFailed in a row whose weights take another way."""
        if self._small_disk is None:
            raise ChildFailed("this row needs a small disk; set small_disk")
        return self._small_disk

    def mark(self, **moments: Any) -> None:
        """Notes fields of ``Moments``; times as the audit's clock has them."""
        self.moments = replace(self.moments, **moments)

    def wait_for(self, holds: Callable[[], Found], what: str, timeout_s: float = _SOON_S) -> Found:
        return self.job.wait_for(holds, what, timeout_s)

    def warm_up(self) -> None:
        """Trains until both channels run and rounds come as they should."""

        def is_warm() -> bool:
            steps, rounds = self.job.of_kind("step"), self.job.of_kind("round")
            committed = sum(record["committed"] for record in rounds)
            has_both = any(step["channel"] == "B" for step in steps)
            return has_both and len(steps) >= _NUM_WARM_STEPS and committed >= _NUM_WARM_ROUNDS

        self.wait_for(is_warm, "both channels run", START_S)

    def wait_until_noticed(self) -> None:
        """Until a rank has written something that only the fault explains."""
        fault = self.moments.fault
        self.wait_for(lambda: first_notice(self.job.records, fault), "the fault is noticed")

    def start_server(self) -> None:
        """Starts it on the port that it had, with the weights of a checkpoint, while training goes on."""
        self.mark(restarted=time.time())
        self.server.start()
        self.server.wait_until_it_answers(self.job.step)
        self.mark(healed=time.time())

    def wait_until_healed(self) -> None:
        """Until the server is proven again and B has run on what it said since, and some steps more."""
        since = self.moments.fault if self.moments.healed is None else self.moments.healed

        def proof() -> Record | None:
            told = (*self.job.of_kind("round", since), *self.job.of_kind("catch_up", since))
            return min(filter(is_proof, told), key=lambda record: float(record["time"]), default=None)

        proven = self.wait_for(proof, "the server is proven again")
        assert proven is not None
        self.wait_for(
            lambda: any(step["channel"] == "B" for step in self.job.of_kind("step", proven["time"])),
            "channel B runs again",
        )
        self.job.wait_for_steps(_NUM_LAST_STEPS)

    def rounds_begun_since(self, since: float, *proven: bool) -> Callable[[], list[Record]]:
        """Looks for rounds that have ended, by default all; ``proven``: by server, in order, whether they proved it."""

        def holds(record: Record) -> bool:
            servers = [record["servers"][server]["proven"] for server in sorted(record["servers"])]
            return record["time"] - record["seconds"] >= since and (not proven or servers == list(proven))

        return lambda: [record for record in self.job.of_kind("round") if holds(record)]
