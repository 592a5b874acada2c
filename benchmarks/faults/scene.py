"""One fault in progress: a running job, its server, and the few moves that faults are made of."""

from __future__ import annotations

import time

from benchmarks.faults.accounting import Moments, Record, first_notice, is_proof
from benchmarks.faults.server import TestedServer
from benchmarks.faults.training_job import TrainingJob

START_S = 400.0
_NUM_WARM_STEPS = 14
_NUM_WARM_ROUNDS = 2
_NUM_LAST_STEPS = 4


class Scene:
    """One fault in progress: a running job, its server, and the moments that are noted."""

    def __init__(self, server: TestedServer, job: TrainingJob) -> None:
        self.server = server
        self.job = job
        self.moments = Moments(fault=time.time())

    def warm_up(self) -> None:
        """Trains until both channels run and rounds come as they should."""

        def is_warm() -> bool:
            steps, rounds = self.job.of_kind("step"), self.job.of_kind("round")
            committed = sum(record["committed"] for record in rounds)
            has_both = any(step["channel"] == "B" for step in steps)
            return has_both and len(steps) >= _NUM_WARM_STEPS and committed >= _NUM_WARM_ROUNDS

        self.job.wait_for(is_warm, "both channels run", START_S)

    def wait_until_noticed(self) -> None:
        """Until a rank has written something that only the fault explains."""
        fault = self.moments.fault
        self.job.wait_for(lambda: first_notice(self.job.records, fault), "the fault is noticed")

    def start_server(self) -> None:
        """Starts it on the port that it had, with the weights of a checkpoint, while training goes on."""
        self.moments.restarted = time.time()
        self.server.start()
        self.server.wait_until_it_answers(self.job.step)
        self.moments.healed = time.time()

    def wait_until_healed(self) -> None:
        """Until the server is proven again and B has run on what it said since, and some steps more."""
        since = self.moments.fault if self.moments.healed is None else self.moments.healed

        def proof() -> list[Record]:
            told = (*self.job.of_kind("round", since), *self.job.of_kind("catch_up", since))
            return sorted(filter(is_proof, told), key=lambda record: float(record["time"]))

        proven = self.job.wait_for(proof, "the server is proven again")[0]
        self.job.wait_for(
            lambda: any(step["channel"] == "B" for step in self.job.of_kind("step", proven["time"])),
            "channel B runs again",
        )
        self.job.wait_for_steps(_NUM_LAST_STEPS)

    def proves_after(self, since: float) -> bool:
        """True once a round that began since has proven a server."""
        rounds = self.job.of_kind("round", since)
        return any(each["committed"] and each["time"] - each["seconds"] >= since for each in rounds)
