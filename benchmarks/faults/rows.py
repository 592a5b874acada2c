"""The faults, one row each: how it is committed, and how it is healed. Data and short scripts, nothing else.

A row that is not possible on a server says why. Called by the bench, one after another, on servers that are
started anew only where a row has killed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.accounting import Moments, first_notice
from benchmarks.faults.commit import (
    INSTALL,
    INSTALL_SEEN,
    PUSH,
    PUSH_HELD,
    PUSH_RELEASED,
    PushFault,
    Switches,
)
from benchmarks.faults.proxy import FaultProxy, ReplyFault
from benchmarks.faults.server import TestedServer, engine_processes
from benchmarks.faults.training_job import JobSettings, TrainingJob, after
from benchmarks.servers import ServerKind
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.errors import ChildFailed
from swift_stage2.rollout_server.engine import InstallFault
from swift_stage2.telemetry.audit import Record

_NUM_STEPS_BROKEN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault. ``commit`` is called when the job is warm, or at its start where ``foreign`` is set."""

    name: str
    title: str
    commit: Callable[[Scene], None]
    settings: JobSettings = field(default_factory=JobSettings)
    through_proxy: bool = False
    poison: bool = False
    """One row of the data set has an image that no processor reads."""
    foreign: bool = False
    """At the start, the server on the port serves another model."""
    why_not: Callable[[ServerKind], str] = lambda kind: ""
    """Why a server cannot have this fault; empty if it can."""


def kill_server(scene: Scene) -> None:
    """All of it at once; started again after some steps, with the weights of its checkpoint."""
    scene.mark_fault()
    scene.kill_server()
    _train_on_and_restart(scene)


def kill_engine_process(name: str) -> Callable[[Scene], None]:
    """One process of the engine; its HTTP front may live on. The operator then ends and restarts the server."""

    def commit(scene: Scene) -> None:
        scene.mark_fault()
        scene.server.kill_engine_process(name)
        scene.wait_until_noticed()
        scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
        scene.kill_server()
        _restart(scene)

    return commit


def kill_in_the_middle_of_a_push(scene: Scene) -> None:
    """The first bucket has arrived and the second is about to be sent."""
    scene.switches.set(PUSH, PushFault.HOLD)
    scene.wait_for(lambda: scene.switches.read(PUSH_HELD), "a push has sent its first bucket")
    scene.mark_fault()
    scene.kill_server()
    scene.switches.clear(PUSH)
    scene.switches.set(PUSH_RELEASED)
    _train_on_and_restart(scene)


def poisonous_image(scene: Scene) -> None:
    """It is in the data set from the start, at a place that comes when the job is warm."""

    def batches() -> list[Record]:
        return [batch for batch in scene.job.all_of_kind("batch") if batch["num_quarantined"]]

    scene.wait_for(batches, "the poisonous sample is quarantined")
    batch = batches()[0]
    scene.mark_fault(batch["time"] - batch["seconds"])


def cut_reply(scene: Scene) -> None:
    """Half of one reply, then the connection ends."""
    scene.proxy.commit_next(ReplyFault.CUT)
    scene.wait_for(lambda: scene.proxy.committed, "a reply is cut in half")
    scene.mark_fault(scene.proxy.committed[0].at)
    scene.wait_until_noticed()


def late_reply(scene: Scene) -> None:
    """One reply is kept back until the learner has given the call up."""
    scene.proxy.commit_next(ReplyFault.DELAY)
    scene.wait_for(lambda: scene.proxy.committed, "a reply comes after its deadline")
    scene.mark_fault(scene.proxy.committed[0].asked_at)
    scene.wait_until_noticed()


def spoilt_round(*, install: InstallFault, push: PushFault) -> Callable[[Scene], None]:
    """One round's weights: spoilt in the engine's load where our server can do that, else on their way."""

    def commit(scene: Scene) -> None:
        on_its_way = scene.server.kind is ServerKind.STOCK
        if on_its_way:
            scene.switches.set(PUSH, push)
        else:
            scene.switches.set(INSTALL, install)
            scene.wait_for(lambda: scene.switches.read(INSTALL_SEEN) == install, "the engine knows its fault")
        since = time.time()

        def begun_since() -> list[Record]:
            return [each for each in scene.job.of_kind("round") if each["time"] - each["seconds"] >= since]

        scene.wait_for(begun_since, "a round ends")
        scene.switches.clear(PUSH, INSTALL)
        spoilt = begun_since()[0]
        scene.mark_fault(spoilt["time"] - spoilt["seconds"])
        scene.mark_spoilt_round(spoilt["time"])
        scene.mark_healed()

    return commit


def foreign_server(scene: Scene) -> None:
    """The learner starts against it; after some steps the right server takes its place."""
    scene.mark_fault(scene.server.started_at)
    scene.mark_unproven(scene.server.started_at)
    scene.wait_for(
        lambda: any(not r["committed"] for r in scene.job.of_kind("round")), "a round fails", START_S
    )
    scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
    scene.kill_server()
    scene.server.start()
    scene.server.wait_until_it_answers(scene.job.step)
    scene.mark_healed()


def quick_restart(scene: Scene) -> None:
    """No POST is on its way when the server dies, and the next one is answered by its successor."""
    proxy = scene.proxy
    proxy.hold()
    scene.wait_for(lambda: proxy.num_held_rollouts and not proxy.num_passing, "a rollout waits at the gate")
    scene.mark_fault()
    scene.kill_server()
    scene.start_server()
    proxy.release()
    scene.mark_fault(time.time())
    scene.mark_unproven(time.time())
    scene.mark_healed()


def _train_on_and_restart(scene: Scene) -> None:
    scene.wait_until_noticed()
    scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
    _restart(scene)


def _restart(scene: Scene) -> None:
    scene.start_server()
    scene.mark_healed()


def _has_no(process: str) -> Callable[[ServerKind], str]:
    return lambda kind: (
        "" if process in engine_processes(kind) else "the engine is a thread of the server's one process"
    )


ROWS = (
    Row(name="kill_server", title="kill -9 of the server, restarted later", commit=kill_server),
    Row(
        name="kill_worker",
        title="kill -9 of VLLM::Worker only",
        commit=kill_engine_process("VLLM::Worker"),
        why_not=_has_no("VLLM::Worker"),
    ),
    Row(
        name="kill_engine_core",
        title="kill -9 of VLLM::EngineCore only",
        commit=kill_engine_process("VLLM::EngineCore"),
        why_not=_has_no("VLLM::EngineCore"),
    ),
    Row(name="kill_in_push", title="kill -9 in the middle of a push", commit=kill_in_the_middle_of_a_push),
    Row(name="poison", title="one poisonous image", commit=poisonous_image, poison=True),
    Row(name="cut_reply", title="a reply cut in half", commit=cut_reply, through_proxy=True),
    Row(
        name="late_reply",
        title="a reply after its deadline (6 s)",
        commit=late_reply,
        settings=JobSettings(request_timeout_s=6.0),
        through_proxy=True,
    ),
    Row(
        name="wrong_weights",
        title="wrong weights in one round",
        commit=spoilt_round(install=InstallFault.FLIP_ELEMENT, push=PushFault.ZEROS),
    ),
    Row(
        name="unchanged_weights",
        title="unchanged weights in one round",
        commit=spoilt_round(install=InstallFault.SKIP_COPY, push=PushFault.REPEAT),
    ),
    Row(
        name="foreign_server",
        title="port taken by a server with another model",
        commit=foreign_server,
        foreign=True,
    ),
    Row(
        name="quick_restart",
        title="restarted with old weights between two POSTs",
        commit=quick_restart,
        settings=JobSettings(request_timeout_s=600.0),  # a server may take as long to start
        through_proxy=True,
    ),
)

# Rows that leave the server alive come first, so that few servers have to be started.
ORDER = (
    "poison",
    "cut_reply",
    "late_reply",
    "wrong_weights",
    "unchanged_weights",
    "kill_in_push",
    "kill_server",
    "quick_restart",
    "kill_engine_core",
    "kill_worker",
    "foreign_server",
)


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
