"""The faults, one row each: how it is committed and healed, and the scene with the few moves that rows are made of.

A row that is not possible on a server says why. Called by the bench, one after another; a row that kills the server
starts it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.faults.accounting import Moments, first_notice
from benchmarks.faults.commit import INSTALL, INSTALL_SEEN, PUSH, PUSH_HELD, PUSH_RELEASED, PushFault
from benchmarks.faults.proxy import FaultProxy, ReplyFault
from benchmarks.faults.server import TestedServer
from benchmarks.faults.training_job import JobSettings, TrainingJob
from benchmarks.servers import Found, ServerKind
from swift_stage2.errors import ChildFailed
from swift_stage2.rollout_server.engine import InstallFault
from swift_stage2.telemetry.audit import Record

START_S = 400.0
_SOON_S = 180.0
_NUM_WARM_STEPS = 14
_NUM_WARM_ROUNDS = 2
_NUM_STEPS_BROKEN = 20
_NUM_LAST_STEPS = 4


class Scene:
    """One fault in progress: a running job, its server, what stands between them, and the moments that are noted."""

    def __init__(self, server: TestedServer, job: TrainingJob, proxy: FaultProxy | None = None) -> None:
        self.server = server
        self.job = job
        self.switches = server.switches
        self.moments = Moments(fault=time.time())
        self._proxy = proxy

    @property
    def proxy(self) -> FaultProxy:
        """Between learner and server. Raises ChildFailed where they talk directly."""
        if self._proxy is None:
            raise ChildFailed("this row needs a proxy; set through_proxy")
        return self._proxy

    def mark(self, **moments: float) -> None:
        """Notes fields of ``Moments``, as the audit's clock has them."""
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
        """Until a round has proven the server and B has run on what it said since, and some steps more."""
        since = self.moments.fault if self.moments.healed is None else self.moments.healed

        def proof() -> Record | None:
            return next((record for record in self.job.of_kind("round", since) if record["committed"]), None)

        proven = self.wait_for(proof, "a round proves the server again")
        assert proven is not None
        self.wait_for(
            lambda: any(step["channel"] == "B" for step in self.job.of_kind("step", proven["time"])),
            "channel B runs again",
        )
        self.job.wait_for_steps(_NUM_LAST_STEPS)


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
    needs_process: bool = False
    """Only where the engine has processes of its own."""

    def why_not(self, kind: ServerKind) -> str:
        """Why a server cannot have this fault; empty if it can."""
        is_thread = self.needs_process and kind is ServerKind.TRANSFORMERS
        return "the engine is a thread of the server's one process" if is_thread else ""


def _train_on_and_restart(scene: Scene) -> None:
    scene.wait_until_noticed()
    scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
    scene.server.kill()
    scene.start_server()


def _kill_server(scene: Scene) -> None:
    """All of it at once; started again after some steps, with the weights of its checkpoint."""
    scene.mark(fault=time.time())
    scene.server.kill()
    _train_on_and_restart(scene)


def _kill_engine_process(name: str) -> Callable[[Scene], None]:
    """One process of the engine; its HTTP front may live on. The operator then ends and restarts the server."""

    def commit(scene: Scene) -> None:
        scene.mark(fault=time.time())
        scene.server.kill_engine_process(name)
        _train_on_and_restart(scene)

    return commit


def _kill_in_push(scene: Scene) -> None:
    """The first bucket has arrived and the second is about to be sent."""
    scene.switches.set(PUSH, PushFault.HOLD)
    scene.wait_for(lambda: scene.switches.read(PUSH_HELD), "a push has sent its first bucket")
    scene.mark(fault=time.time())
    scene.server.kill()
    scene.switches.clear(PUSH)
    scene.switches.set(PUSH_RELEASED)
    _train_on_and_restart(scene)


def _poison(scene: Scene) -> None:
    """It is in the data set from the start, at a place that comes when the job is warm."""

    def batches() -> list[Record]:
        batches = [record for records in scene.job.records for record in records if record["kind"] == "batch"]
        return sorted((each for each in batches if each["num_quarantined"]), key=lambda each: each["time"])

    batch = scene.wait_for(batches, "the poisonous sample is quarantined")[0]
    scene.mark(fault=batch["time"] - batch["seconds"])


def _disturb_reply(fault: ReplyFault) -> Callable[[Scene], None]:
    """Half of one reply and then the end, or one that is kept back until the learner has given the call up."""

    def commit(scene: Scene) -> None:
        scene.proxy.commit_next(fault)
        committed = scene.wait_for(lambda: scene.proxy.committed, "a reply is disturbed")[0]
        scene.mark(fault=committed.at if fault is ReplyFault.CUT else committed.asked_at)
        scene.wait_until_noticed()

    return commit


def _spoil_round(install: InstallFault, push: PushFault) -> Callable[[Scene], None]:
    """One round's weights: spoilt in the engine's load where our server can do that, else on their way."""

    def commit(scene: Scene) -> None:
        if scene.server.kind is ServerKind.STOCK:
            scene.switches.set(PUSH, push)
        else:
            scene.switches.set(INSTALL, install)
            scene.wait_for(lambda: scene.switches.read(INSTALL_SEEN) == install, "the engine knows its fault")
        since = time.time()

        def begun_since() -> list[Record]:
            return [each for each in scene.job.of_kind("round") if each["time"] - each["seconds"] >= since]

        spoilt = scene.wait_for(begun_since, "a round ends")[0]
        scene.switches.clear(PUSH, INSTALL)
        ended = spoilt["time"]
        began = ended - spoilt["seconds"]
        scene.mark(fault=began, spoilt_round=ended, restarted=ended, healed=time.time())

    return commit


def _foreign_server(scene: Scene) -> None:
    """The learner starts against it; after some steps the right server takes its place."""
    began = scene.server.started_at
    scene.wait_for(
        lambda: any(not record["committed"] for record in scene.job.of_kind("round")),
        "a round fails",
        START_S,
    )
    scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
    scene.server.kill()
    scene.start_server()
    scene.mark(fault=began, restarted=began)


def _quick_restart(scene: Scene) -> None:
    """No POST is on its way when the server dies, and the next one is answered by its successor."""
    proxy = scene.proxy
    proxy.hold()
    scene.wait_for(lambda: proxy.num_held_rollouts and not proxy.num_passing, "a rollout waits at the gate")
    scene.server.kill()
    scene.start_server()
    proxy.release()
    scene.mark(**dict.fromkeys(("fault", "restarted", "healed"), time.time()))


_CUT, _LATE = _disturb_reply(ReplyFault.CUT), _disturb_reply(ReplyFault.DELAY)
_WRONG = _spoil_round(InstallFault.FLIP_ELEMENT, PushFault.ZEROS)
_UNCHANGED = _spoil_round(InstallFault.SKIP_COPY, PushFault.REPEAT)
_SHORT, _LONG = JobSettings(request_timeout_s=6.0), JobSettings(request_timeout_s=600.0)
"""A server may take as long as the second to start."""


def _killing(name: str, process: str) -> Row:
    title = f"kill -9 of {process} only"
    return Row(name=name, title=title, commit=_kill_engine_process(process), needs_process=True)


def _proxied(name: str, title: str, commit: Callable[[Scene], None], settings: JobSettings) -> Row:
    return Row(name=name, title=title, commit=commit, through_proxy=True, settings=settings)


_OLD_WEIGHTS = "restarted with old weights between two POSTs"
ROWS = (
    Row(name="kill_server", title="kill -9 of the server, restarted later", commit=_kill_server),
    _killing("kill_worker", "VLLM::Worker"),
    _killing("kill_engine_core", "VLLM::EngineCore"),
    Row(name="kill_in_push", title="kill -9 in the middle of a push", commit=_kill_in_push),
    Row(name="poison", title="one poisonous image", commit=_poison, poison=True),
    _proxied("cut_reply", "a reply cut in half", _CUT, JobSettings()),
    _proxied("late_reply", "a reply after its deadline (6 s)", _LATE, _SHORT),
    Row(name="wrong_weights", title="wrong weights in one round", commit=_WRONG),
    Row(name="unchanged_weights", title="unchanged weights in one round", commit=_UNCHANGED),
    Row(
        name="foreign_server",
        title="port taken by a server with another model",
        commit=_foreign_server,
        foreign=True,
    ),
    _proxied("quick_restart", _OLD_WEIGHTS, _quick_restart, _LONG),
)
