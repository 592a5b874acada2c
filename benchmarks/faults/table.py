"""The faults: how each is committed and healed; every one in a job of its own, or at random in a soak."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.faults.accounting import account_sentence, num_disagreements, report
from benchmarks.faults.leftovers import stopped
from benchmarks.faults.scene import Scene
from benchmarks.faults.training_job import JobSettings, TrainingJob, Victim
from benchmarks.results import ResultTable, say
from benchmarks.servers import ServerKind
from swift_stage2 import wire
from swift_stage2.errors import ChildFailed

if TYPE_CHECKING:
    from benchmarks.faults.bench import FaultBench

REQUEST_TIMEOUT_S = 6.0
_NUM_STEPS_BROKEN = 20
_LATEST_KILL_S = 2.0
_NUM_PUBLISHER_KILLS = 10
_SHORT_STOP_S = 4.0
_LONGEST_QUOTE = 100
_NO_SWITCH = "an unmodified server does not tell of its rounds"


@dataclass(frozen=True, slots=True)
class Fault:
    """``commit`` is called when the job is warm."""

    title: str
    commit: Callable[[Scene], None]
    settings: JobSettings = field(default_factory=JobSettings)
    why_not: dict[ServerKind, str] = field(default_factory=dict)
    """Servers that cannot have it, each with the reason."""


def _kill_server(scene: Scene) -> None:
    """All of it at once; started again after some steps, with the weights of its checkpoint."""
    scene.moments.fault = time.time()
    scene.server.kill()
    _train_on_and_restart(scene)


def _kill_in_round(scene: Scene) -> None:
    """The server installs a round's weights."""
    url = f"http://127.0.0.1:{scene.server.port}{wire.HEALTH}"

    def installs() -> bool:
        with suppress(httpx.HTTPError):
            return bool(httpx.get(url, trust_env=False, timeout=1.0).json()["state"] == wire.INSTALLING_STATE)
        return False

    scene.job.wait_for(installs, "the server installs weights")
    _kill_server(scene)


def _kill_between_installs(scene: Scene) -> None:
    """It has installed weights under its rollouts, and not the next ones."""
    scene.job.wait_for(partial(scene.proves_after, time.time()), "a version that the server proves")
    _kill_server(scene)


def _train_on_and_restart(scene: Scene) -> None:
    scene.wait_until_noticed()
    scene.job.wait_for_steps(_NUM_STEPS_BROKEN)
    scene.server.kill()
    scene.start_server()


def _stop_server(scene: Scene) -> None:
    """For longer than a call may take, so that every reply is late."""
    scene.moments.fault = time.time()
    with stopped(scene.server.processes):
        scene.job.wait_s(2 * REQUEST_TIMEOUT_S)
    scene.moments.healed = time.time()


def _stop_rank(scene: Scene) -> None:
    scene.moments.fault = time.time()
    with stopped(scene.job.processes_of(Victim.RANK_1)):
        scene.job.wait_s(_SHORT_STOP_S)
    scene.moments.healed = time.time()


def _kill_publisher(scene: Scene) -> None:
    """At drawn moments, of which some fall into a round; each time the next round must be proven."""
    scene.moments.fault = time.time()
    draw = random.Random(_NUM_PUBLISHER_KILLS)
    for _ in range(_NUM_PUBLISHER_KILLS):
        scene.job.wait_s(draw.uniform(0.0, _LATEST_KILL_S))
        for publisher in scene.job.publisher:
            publisher.kill()
        after = partial(scene.proves_after, time.time())
        scene.job.wait_for(after, "a round after it is proven")
    scene.moments.healed = time.time()


FAULTS = {
    "kill_server": Fault("kill -9 of the server, restarted later", _kill_server),
    "kill_in_round": Fault(
        "kill -9 of the server in a round", _kill_in_round, why_not={ServerKind.STOCK: _NO_SWITCH}
    ),
    "kill_between_installs": Fault(
        "kill -9 of the server between two installs under its rollouts",
        _kill_between_installs,
        why_not={ServerKind.STOCK: "it takes new weights only when it is drained"},
    ),
    "late_reply": Fault(
        f"replies after their deadline ({REQUEST_TIMEOUT_S:g} s)",
        _stop_server,
        settings=JobSettings(request_timeout_s=REQUEST_TIMEOUT_S),
    ),
    "stop_rank": Fault(f"a rank stopped for {_SHORT_STOP_S:g} s", _stop_rank),
    "kill_publisher": Fault(
        f"kill -9 of the publisher at {_NUM_PUBLISHER_KILLS} random moments of rounds", _kill_publisher
    ),
}
HEADINGS = ("fault", "noticed as", "steps to proof, to B", "longest wait, s", "samples", "problems")


def run_table(bench: FaultBench, names: Sequence[str]) -> tuple[list[ResultTable | str], bool]:
    """The table, and whether every fault went as it should."""
    rows = [_run(bench, FAULTS[name], bench.directory / name) for name in names]
    return [ResultTable("", HEADINGS, rows)], all(row[-1] in ("none", "") for row in rows)


def _run(bench: FaultBench, fault: Fault, place: Path) -> tuple[str, ...]:
    """One row; of a fault that breaks the bench, the reason alone."""
    say(fault.title)
    if why_not := fault.why_not.get(bench.kind):
        return (fault.title, f"not possible here: {why_not}", "", "", "", "")
    server = bench.ready_server()
    try:
        with bench.start_job(place.name, place, fault.settings) as job:
            scene = Scene(server, job)
            scene.warm_up()
            fault.commit(scene)
            scene.wait_until_healed()
            status = job.stop()
    except ChildFailed as error:
        server.kill()
        return (fault.title, "", "", "", "", f"broke: {error}")
    found, account = report(job.records, scene.moments), job.account()
    problems = [*found.problems, *problems_of(job, status)]
    return (
        fault.title,
        found.noticed_as[:_LONGEST_QUOTE],
        f"{found.steps_until_proof}, {found.steps_until_b}",
        f"{found.longest_wait_s:.2f}",
        account_sentence(account),
        "; ".join(problems) or "none",
    )


def problems_of(job: TrainingJob, status: int) -> list[str]:
    """All that must not be of a job that has ended."""
    problems = [f"left: {name}" for name in job.what_is_left()]
    problems += [] if job.account().is_balanced else ["the account does not balance"]
    problems += [f"the learner ended with status {status}"] if status else []
    number = num_disagreements(job.records)
    return problems + ([f"ranks disagree on {number} steps"] if number else [])
