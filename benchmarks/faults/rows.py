"""The faults, one row each: how it is committed and healed.

A row that is not possible on a server says why. Called by the bench, one after another; a row that kills the server
starts it again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from benchmarks.faults.commit import PushFault, Switch, Switches
from benchmarks.faults.proxy import ReplyFault
from benchmarks.faults.scene import START_S, Scene
from benchmarks.faults.small_disk import may_mount
from benchmarks.faults.training_job import JobSettings
from benchmarks.servers import ServerKind
from swift_stage2.config import Fenced
from swift_stage2.errors import ChildFailed
from swift_stage2.rollout_server.engine import InstallFault
from swift_stage2.telemetry.audit import Record

_NUM_STEPS_BROKEN = 20
_NUM_COURIER_KILLS = 50
_COURIER_KILLS_S = 1800.0
_LATEST_KILL = 1.2  # of the longest round before
_NUM_ROLLING_ROUNDS = 20
_TOO_FEW_BYTES = 3 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. ``commit`` is called when the job is warm, or at its start where ``foreign`` is set."""

    name: str
    title: str
    commit: Callable[[Scene], None]
    _: KW_ONLY
    settings: JobSettings = field(default_factory=JobSettings)
    through_proxy: bool = False
    poison: bool = False
    """One row of the data set has an image that no processor reads."""
    foreign: bool = False
    """At the start, the server on the port serves another model."""
    needs_process: bool = False
    """Only where the engine has processes of its own."""
    with_other: bool = False
    """There are two servers, whose rounds are staged."""
    by_disk: bool = False
    """Weights travel by a directory."""
    small_disk: bool = False
    """The weights' directory is a file system of its own, with room for a few versions."""

    def why_not(self, kind: ServerKind) -> str:
        """Why a server cannot have this fault; empty if it can."""
        if self.needs_process and kind is ServerKind.TRANSFORMERS:
            return "the engine is a thread of the server's one process"
        if self.small_disk and not may_mount():
            return "only root may mount a small disk"
        if kind is ServerKind.STOCK and self.by_disk:
            return "it reads no directory"
        return "its rounds are not staged" if kind is ServerKind.STOCK and self.with_other else ""


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
    _hold_push(scene)
    scene.server.kill()
    _release_push(scene)
    _train_on_and_restart(scene)


def _hold_push(scene: Scene) -> None:
    """By a directory, all of the round has been written then, and the server has read its manifest alone."""
    scene.switches.set(Switch.PUSH, PushFault.HOLD)
    scene.wait_for(lambda: scene.switches.read(Switch.PUSH_HELD), "a push has sent its first bucket")
    scene.mark(fault=time.time())


def _release_push(scene: Scene) -> None:
    scene.switches.clear(Switch.PUSH)
    scene.switches.set(Switch.PUSH_RELEASED)


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


def _spoil_round(install: InstallFault | None, push: PushFault) -> Callable[[Scene], None]:
    """One round's weights: by ``install`` in the engine's load where our server can do that, else on their way."""

    def commit(scene: Scene) -> None:
        if install is None or scene.server.kind is ServerKind.STOCK:
            scene.switches.set(Switch.PUSH, push)
        else:
            _spoil_installs(scene, scene.switches, install)
        spoilt = scene.wait_for(scene.rounds_begun_since(time.time()), "a round ends")[0]
        scene.switches.clear(Switch.PUSH, Switch.INSTALL)
        ended = spoilt["time"]
        began = ended - spoilt["seconds"]
        scene.mark(fault=began, spoilt_round=ended, restarted=ended, healed=time.time())

    return commit


def _spoil_installs(scene: Scene, switches: Switches, fault: InstallFault) -> None:
    switches.set(Switch.INSTALL, fault)
    scene.wait_for(lambda: switches.read(Switch.INSTALL_SEEN) == fault, "the engine knows its fault")


def _fill_disk(scene: Scene) -> None:
    """No round fits until there is room again."""
    scene.wait_for(scene.rounds_begun_since(time.time()), "a round ends")
    scene.job.wait_for_steps(1)  # meanwhile the version goes whose place this round's takes
    scene.small_disk.fill(leaving_bytes=_TOO_FEW_BYTES)
    failed = scene.wait_for(scene.rounds_begun_since(time.time(), False), "a round fails")[0]
    scene.mark(fault=failed["time"] - failed["seconds"])
    scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
    scene.small_disk.make_room()
    scene.mark(healed=time.time())


def kill_courier(scene: Scene, after_s: float) -> None:
    """Its process, so many seconds into its next errand, which the round may be over by; then a round is proven."""
    (courier,) = scene.job.courier
    scene.switches.set(Switch.KILL_COURIER, str(after_s))
    scene.wait_for(lambda: not courier.is_running(), "the courier is killed")
    ended = scene.rounds_begun_since(time.time())
    scene.wait_for(lambda: any(each["committed"] for each in ended()), "a round after it is proven")


def _kill_courier(scene: Scene) -> None:
    """At drawn moments of rounds. Raises ChildFailed when that takes too long."""
    end = time.monotonic() + _COURIER_KILLS_S
    moments = random.Random(_NUM_COURIER_KILLS)
    latest_s = _LATEST_KILL * max(each["seconds"] for each in scene.job.of_kind("round") if each["staged"])
    scene.mark(fault=time.time())
    for number in range(_NUM_COURIER_KILLS):
        if time.monotonic() > end:
            raise ChildFailed(
                f"{_NUM_COURIER_KILLS} kills must end within {_COURIER_KILLS_S:.0f} s, got {number}"
            )
        kill_courier(scene, moments.uniform(0.0, latest_s))
    scene.mark(healed=time.time())


def _one_of_two(scene: Scene) -> None:
    """One server's installs are wrong, round after round. Nobody may ask it meanwhile; the other one goes on."""
    _spoil_installs(scene, scene.other.switches, InstallFault.FLIP_ELEMENT)
    spoilt = scene.rounds_begun_since(time.time(), True, False)
    failed = scene.wait_for(spoilt, "a round proves one server")[0]
    asked = scene.proxy.num_rollouts
    scene.mark(fault=failed["time"] - failed["seconds"])
    scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
    scene.mark(asked_unproven=scene.proxy.num_rollouts - asked)
    scene.other.switches.clear(Switch.INSTALL)
    scene.wait_for(lambda: not scene.other.switches.read(Switch.INSTALL), "the engine has no fault")
    _wait_for_both(scene, 1)


def _rolling_installs(scene: Scene) -> None:
    """No fault: both servers get new weights one after the other, and are asked all the time."""
    scene.mark(fault=time.time())
    _wait_for_both(scene, _NUM_ROLLING_ROUNDS)


def _wait_for_both(scene: Scene, num_rounds: int) -> None:
    found = scene.rounds_begun_since(time.time(), True, True)
    scene.wait_for(lambda: len(found()) >= num_rounds, f"{num_rounds} rounds prove both servers", START_S)
    scene.mark(healed=found()[-1]["time"])


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


_LONG = JobSettings(request_timeout_s=600.0, fenced=Fenced.ALWAYS)
"""A server may take so long to start, and meanwhile no round may find out that it is another one."""
_OFTEN = JobSettings(
    # Packs must live as many steps as with rarer rounds.
    prefetch={"sync_every_steps": 2, "version_window": 8},
    sync={"backoff_steps": 1},
)
_DISK = "weights by a directory"


def _killing(name: str, process: str) -> Row:
    return Row(name, f"kill -9 of {process} only", _kill_engine_process(process), needs_process=True)


ROWS = (
    Row("kill_server", "kill -9 of the server, restarted later", _kill_server),
    _killing("kill_worker", "VLLM::Worker"),
    _killing("kill_engine_core", "VLLM::EngineCore"),
    Row("kill_in_push", "kill -9 in the middle of a push", _kill_in_push),
    Row("poison", "one poisonous image", _poison, poison=True),
    Row("cut_reply", "a reply cut in half", _disturb_reply(ReplyFault.CUT), through_proxy=True),
    Row(
        "late_reply",
        "a reply after its deadline (6 s)",
        _disturb_reply(ReplyFault.DELAY),
        through_proxy=True,
        settings=JobSettings(request_timeout_s=6.0),
    ),
    Row(
        "wrong_weights",
        "wrong weights in one round",
        _spoil_round(InstallFault.FLIP_ELEMENT, PushFault.ZEROS),
    ),
    Row(
        "unchanged_weights",
        "unchanged weights in one round",
        _spoil_round(InstallFault.SKIP_COPY, PushFault.REPEAT),
    ),
    Row("foreign_server", "port taken by a server with another model", _foreign_server, foreign=True),
    Row(
        "quick_restart",
        "restarted with old weights between two POSTs",
        _quick_restart,
        through_proxy=True,
        settings=_LONG,
    ),
    Row(
        "kill_courier",
        f"kill -9 of the courier at {_NUM_COURIER_KILLS} random moments of rounds",
        _kill_courier,
        settings=_OFTEN,
    ),
    Row(
        "one_of_two",
        "one of two servers proves, the other does not",
        _one_of_two,
        with_other=True,
        through_proxy=True,
    ),
    Row(
        "rolling_installs",
        f"no fault: {_NUM_ROLLING_ROUNDS} rounds of rolling installs into two servers under load",
        _rolling_installs,
        with_other=True,
        settings=JobSettings(b_ratio=0.8),
    ),
    Row("disk_kill", f"{_DISK}: kill -9 of the server between write and load", _kill_in_push, by_disk=True),
    Row("disk_full", f"{_DISK}: no room for a round", _fill_disk, by_disk=True, small_disk=True),
    Row(
        "disk_torn",
        f"{_DISK}: half of a round's manifest is lost",
        _spoil_round(None, PushFault.TEAR),
        by_disk=True,
    ),
)
