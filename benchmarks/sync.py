"""``swift-stage2 bench sync``: what a sync round costs the learner, and how long it takes until it is proven.

Every way to a server in turns, on one machine, with untrained models of a wanted size. The learner's pause stands
beside a bare copy of the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.estimates import Spread, pair_ratios, verdict
from benchmarks.results import ResultTable, in_turns, publish, say
from benchmarks.servers import BenchServer, BenchServers, ServerKind
from benchmarks.sync_learner import BUCKET_MIB, MIB, SyncLearner, write_model
from swift_stage2.config import RolloutConfig, ServerConfig, Transport
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.errors import ChildFailed
from swift_stage2.records import RoundOutcome
from swift_stage2.stock_proof import PLUGIN
from swift_stage2.weights.publisher_process import ProcessPublisher
from swift_stage2.weights.waited_updates import WaitedUpdates

PAUSE_BUDGET = 1.5
PAUSE_BUDGET_FROM_MIB = 100
_TIMEOUT_S = 240.0
_PHASES = ("begin", "connect", "pack", "push", "turn", "acknowledge", "prove")


@dataclass(frozen=True, slots=True)
class System:
    """One way for weights to reach a server."""

    name: str
    kind: ServerKind
    transport: Transport = Transport.AUTO
    plugins: tuple[Path, ...] = ()


SYSTEMS = (
    System("transformers, shared memory", ServerKind.TRANSFORMERS),
    System("transformers, tcp", ServerKind.TRANSFORMERS, Transport.TCP),
    System("vllm, shared memory", ServerKind.VLLM),
    System("stock", ServerKind.STOCK),
    System("stock + plugin", ServerKind.STOCK, plugins=(PLUGIN,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMeasurement:
    """All repetitions of one system and size. Seconds, and ratios."""

    system: str
    num_bytes: int
    bare: list[float] = field(default_factory=list)
    """Copies of the weights into memory that was touched before."""
    pause: list[float] = field(default_factory=list)
    """The learner's main thread in a round's begin, without the canary."""
    rounds: list[dict[str, float]] = field(default_factory=list)
    """Phases of each round; ``canary`` is the learner's own answer, ``proven`` all of the round but that."""

    def of_rounds(self, name: str) -> list[float]:
        """The seconds of one phase, by round; 0 in a round without it."""
        return [phases.get(name, 0.0) for phases in self.rounds]

    @property
    def pause_over_bare(self) -> list[float]:
        return pair_ratios(self.pause, self.bare)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises UserError when something is not installed, ChildFailed when a server did not answer or prove a round."""
    torch.set_num_threads(1)  # as torchrun has its ranks
    systems = [system for system in SYSTEMS if system.kind in options.servers]
    measured: list[SyncMeasurement] = []
    try:
        for mib in options.mib:
            model = directory / f"model-{mib}"
            write_model(model, mib)
            with BenchServers(directory / "logs" / f"{mib}-mib") as servers:
                measured += measure(servers, model, systems, options.repeats)
            shutil.rmtree(model)
    finally:  # also of the sizes before one that failed
        if measured:
            publish(directory, "sync", sync_table(measured))
    return 0


def measure(
    servers: BenchServers, model: Path, systems: Sequence[System], repeats: int
) -> list[SyncMeasurement]:
    """A bare copy and a round of every system in turns, after one of each that is not counted."""
    learner = SyncLearner(model)
    started: dict[tuple[ServerKind, tuple[Path, ...]], BenchServer] = {}
    for system in systems:
        server = (system.kind, system.plugins)
        if server not in started:
            started[server] = servers.start(system.kind, model=model, plugins=system.plugins)
    with ExitStack() as stack:
        measured = [
            stack.enter_context(
                closing(MeasuredSystem(system, started[system.kind, system.plugins], learner))
            )
            for system in systems
        ]
        for each in measured:
            say(f"{each}, {learner.num_bytes / MIB:.0f} MiB")
            each.repeat(counted=False)
        for _, each in in_turns(measured, repeats):
            each.repeat()
        return [each.found for each in measured]


class MeasuredSystem:
    """Sync rounds of one system. Made on the main thread, to which its publisher's process is tied."""

    _versions = itertools.count(1)  # of all systems: two of them may have one server

    def __init__(self, system: System, server: BenchServer, learner: SyncLearner) -> None:
        self._learner = learner
        rollout = RolloutConfig(
            servers=(ServerConfig(base_url=server.base_url, group_port=server.group_port),),
            sync=SyncConfig(transport=system.transport, timeout_s=_TIMEOUT_S),
        )
        self._sync = WaitedUpdates(
            1,
            export=learner.export,
            canary=learner.canary,
            publisher=ProcessPublisher(rollout, torch.device("cpu")),
            file=learner.snapshot,
            run_id="bench",
            sync=rollout.sync,
            bucket_mib=BUCKET_MIB,
        )
        self.found = SyncMeasurement(system=system.name, num_bytes=learner.num_bytes)

    def __str__(self) -> str:
        return self.found.system

    def repeat(self, *, counted: bool = True) -> None:
        bare = self._learner.seconds_to_copy()
        began = time.perf_counter()
        self._sync.begin([0], version=next(self._versions))
        begun = time.perf_counter() - began
        phases = phases_of(self._sync.wait())  # deadline: the push's
        if counted:
            self.found.bare.append(bare)
            self.found.pause.append(begun - phases["canary"])
            self.found.rounds.append(phases)

    def close(self) -> None:
        self._sync.close()


def phases_of(outcome: RoundOutcome) -> dict[str, float]:
    """Raises ChildFailed: its server has not proven the round."""
    report = outcome.reports.get(0)
    if report is None or not report.proven:
        raise ChildFailed(f"a round must be proven to be measured, got {report.error if report else outcome}")
    apart = {"canary": outcome.canary_seconds, "snapshot": outcome.snapshot_seconds}
    return {**report.seconds, **apart, "proven": outcome.seconds - outcome.canary_seconds}


def sync_table(measured: Sequence[SyncMeasurement]) -> ResultTable:

    def median(values: Callable[[SyncMeasurement], Sequence[float]]) -> Callable[[SyncMeasurement], str]:
        return lambda each: f"{np.median(values(each)):.4f}"

    def phase(name: str) -> Callable[[SyncMeasurement], str]:
        return median(lambda each: each.of_rounds(name))

    return ResultTable.of(
        "Sync rounds, median seconds (quartiles of ratios and of the whole)",
        measured,
        {
            "system": lambda each: each.system,
            "MiB": lambda each: f"{each.num_bytes / MIB:.0f}",
            "bare copy": median(lambda each: each.bare),
            "pause": median(lambda each: each.pause),
            f"pause over bare copy, budget {PAUSE_BUDGET}": _judged_pause,
            "canary": phase("canary"),
            **{name: phase(name) for name in _PHASES},
            "snapshot to proven": lambda each: Spread.of(each.of_rounds("proven")).words(3),
        },
    )


def _judged_pause(each: SyncMeasurement) -> str:
    """Of few bytes other things than the copy count: no verdict."""
    spread = Spread.of(each.pause_over_bare)
    is_asked = each.num_bytes > 0.99 * PAUSE_BUDGET_FROM_MIB * MIB
    return f"{spread.words(2)} {verdict(spread.median <= PAUSE_BUDGET) if is_asked else ''}".rstrip()
