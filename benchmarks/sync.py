"""``swift-stage2 bench sync``: what a sync round costs the learner, and how long it takes until it is proven.

Every way to a server in turns, on one machine, with untrained models of a wanted size. The learner's pause stands
beside a bare copy of the same bytes, the phases beside a raw broadcast of them, and with ``--training`` the steps of a
busy loop during a round beside its steps without one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.cores import split_cores, started_on
from benchmarks.estimates import Spread, pair_ratios, verdict
from benchmarks.raw_broadcast import RawSender, RawTransport
from benchmarks.results import ResultTable, in_turns, publish, say
from benchmarks.servers import BenchServer, BenchServers, ServerKind
from benchmarks.sync_learner import BUCKET_MIB, MIB, SyncLearner, write_model
from swift_stage2.collectives import SingleRank
from swift_stage2.config import RolloutConfig, ServerConfig, Transport
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.errors import ChildFailed
from swift_stage2.records import RoundOutcome
from swift_stage2.stock_proof import PLUGIN
from swift_stage2.weights.courier_process import process_courier
from swift_stage2.weights.sync_round import WeightSync

PAUSE_BUDGET = 1.5
PAUSE_BUDGET_FROM_MIB = 100
STEP_BUDGET = 1.03
_CORES_FOR_STEP_BUDGET = 3
_TIMEOUT_S = 240.0
_PHASES = ("begin", "connect", "pack", "push", "turn", "acknowledge", "prove")
_SIDE = 512
_PRODUCTS_PER_STEP = 4  # some ten milliseconds of one core


@dataclass(frozen=True, slots=True)
class System:
    """One way for weights to reach a server."""

    name: str
    kind: ServerKind
    transport: Transport = Transport.AUTO
    plugins: tuple[Path, ...] = ()

    @property
    def is_staged(self) -> bool:
        """Its servers are ours, which keep new weights beside the old ones."""
        return self.kind not in (ServerKind.STOCK, ServerKind.VLLM_SERVE)


SYSTEMS = (
    System("transformers, shared memory", ServerKind.TRANSFORMERS, Transport.SHARED_MEMORY),
    System("transformers, tcp", ServerKind.TRANSFORMERS, Transport.TCP),
    System("vllm, shared memory", ServerKind.VLLM, Transport.SHARED_MEMORY),
    System("stock", ServerKind.STOCK),
    System("stock + plugin", ServerKind.STOCK, plugins=(PLUGIN,)),
    System("vllm serve", ServerKind.VLLM_SERVE),
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
    raw: list[float] = field(default_factory=list)
    """Raw broadcasts of the same bytes, into memory that the receiver keeps."""
    rounds: list[dict[str, float]] = field(default_factory=list)
    """Phases of each round; ``canary`` is the learner's own answer, ``proven`` all of the round but that."""
    steps: list[float] = field(default_factory=list)
    """Ratios: a busy loop's steps beside a round over the same number of steps without one."""

    def of_rounds(self, name: str) -> list[float]:
        """The seconds of one phase, by round; 0 in a round without it."""
        return [phases.get(name, 0.0) for phases in self.rounds]

    @property
    def pause_over_bare(self) -> list[float]:
        return pair_ratios(self.pause, self.bare)

    @property
    def push_over_raw(self) -> list[float]:
        return pair_ratios(self.of_rounds("push"), self.raw)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises UserError when something is not installed, ChildFailed when a server did not answer or prove a round."""
    torch.set_num_threads(1)  # as torchrun has its ranks
    systems = [system for system in SYSTEMS if system.kind in options.servers]
    measured: list[SyncMeasurement] = []
    try:
        for mib in options.mib:
            model = directory / f"model-{mib}"
            write_model(model, mib)
            num_pairs = options.repeats if options.training and mib == max(options.mib) else 0
            with BenchServers(directory / "logs" / f"{mib}-mib") as servers:
                measured += measure(servers, model, systems, options.repeats, num_pairs)
            shutil.rmtree(model)
    finally:  # also of the sizes before one that failed
        facts = [
            asdict(each) | {"pause_over_bare": each.pause_over_bare, "push_over_raw": each.push_over_raw}
            for each in measured
        ]
        notes = step_notes(measured, len(os.sched_getaffinity(0)))
        if measured:
            publish(directory, "sync", facts, sync_table(measured), *notes)
    return 0


def measure(
    servers: BenchServers, model: Path, systems: Sequence[System], repeats: int, num_pairs: int
) -> list[SyncMeasurement]:
    """A bare copy, a raw broadcast and a round of every system in turns, after one of each that is not counted.

    ``num_pairs``: of steps beside a round and without one, of one system after the other.
    """
    learner = SyncLearner(model)
    started: dict[tuple[ServerKind, tuple[Path, ...]], BenchServer] = {}
    for system in systems:
        server = (system.kind, system.plugins)
        if server not in started:
            started[server] = servers.start(system.kind, model=model, plugins=system.plugins)
    senders: dict[RawTransport, RawSender] = {}
    with ExitStack() as stack:
        measured = []
        for system in systems:
            way = RawTransport.OURS if system.is_staged else RawTransport.STOCK
            if way not in senders:  # its peer waits for no server that is being started
                senders[way] = RawSender.to_new_peer(servers, way, learner.buckets)
                stack.callback(senders[way].close)
            server = (system.kind, system.plugins)
            measured.append(MeasuredSystem(system, started[server], learner, senders[way]))
            stack.enter_context(closing(measured[-1]))
        for each in measured:
            say(f"{each}, {learner.num_bytes / MIB:.0f} MiB")
            each.repeat(counted=False)
        for _, each in in_turns(measured, repeats):
            each.repeat()
        for each in measured if num_pairs else ():
            say(f"{each}: steps beside rounds")
            each.found.steps.extend(step_ratios(each.seconds_per_step_beside_round, num_pairs))
        return [each.found for each in measured]


class MeasuredSystem:
    """Sync rounds of one system. Made on the main thread, to which its courier's process is tied."""

    _versions = itertools.count(1)  # of all systems: two of them may have one server

    def __init__(self, system: System, server: BenchServer, learner: SyncLearner, sender: RawSender) -> None:
        self._learner = learner
        self._sender = sender
        self._is_staged = system.is_staged
        rollout = RolloutConfig(
            servers=(ServerConfig(base_url=server.base_url, group_port=server.group_port),),
            sync=SyncConfig(transport=system.transport),
        )
        self._sync = WeightSync(
            control=SingleRank(),
            export=learner.export,
            canary=learner.canary,
            courier=process_courier(rollout, torch.device("cpu")),
            memory=learner.memory,
            run_id="bench",
            timeout_s=_TIMEOUT_S,
            bucket_mib=BUCKET_MIB,
        )
        self.found = SyncMeasurement(system=system.name, num_bytes=learner.num_bytes)

    def __str__(self) -> str:
        return self.found.system

    def repeat(self, *, counted: bool = True) -> None:
        bare, raw = self._learner.seconds_to_copy(), self._sender.seconds_to_send(self._learner.buckets)
        began = time.perf_counter()
        self._begin()
        begun = time.perf_counter() - began
        phases = phases_of(self._sync.hear())
        if counted:
            self.found.bare.append(bare)
            self.found.raw.append(raw)
            self.found.pause.append(begun - phases["canary"])
            self.found.rounds.append(phases)

    def seconds_per_step_beside_round(self, step: Callable[[], object]) -> tuple[float, int]:
        """Of steps from the snapshot to the round's news, which is asked for after each; and their number."""
        self._begin()
        num_steps, began = 0, time.perf_counter()
        while num_steps == 0 or not self._sync.has_news:
            step()
            num_steps += 1
        seconds = time.perf_counter() - began
        phases_of(self._sync.hear())
        return seconds / num_steps, num_steps

    def close(self) -> None:
        self._sync.close()

    def _begin(self) -> None:
        self._sync.begin(next(self._versions), [0], staged=self._is_staged)


def phases_of(outcome: RoundOutcome) -> dict[str, float]:
    """Raises ChildFailed: its server has not proven the round."""
    report = outcome.reports.get(0)
    if report is None or not report.proven:
        raise ChildFailed(f"a round must be proven to be measured, got {report.error if report else outcome}")
    apart = {"canary": outcome.canary_seconds, "snapshot": outcome.snapshot_seconds}
    return {**report.seconds, **apart, "proven": outcome.seconds - outcome.canary_seconds}


def step_ratios(
    beside_round: Callable[[Callable[[], object]], tuple[float, int]], num_pairs: int
) -> list[float]:
    """Seconds of a busy loop's step beside a round over those without one, by pair; who goes first alternates.

    The loop has one thread, on the learner's half of the cores; couriers and servers may run on all of them.
    """
    left, right, product = (torch.rand(_SIDE, _SIDE) for _ in range(3))

    def step() -> None:
        for _ in range(_PRODUCTS_PER_STEP):
            torch.mm(left, right, out=product)

    def alone(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        return (time.perf_counter() - began) / num_steps

    ratios = []
    with started_on(split_cores()[0]):
        _, num_steps = beside_round(step)  # warms up, and says how long a block is
        for pair in range(num_pairs):
            without = alone(num_steps) if pair % 2 == 0 else 0.0
            beside, num_steps = beside_round(step)
            ratios.append(beside / (without or alone(num_steps)))
    return ratios


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
            "raw": median(lambda each: each.raw),
        },
    )


def step_notes(measured: Sequence[SyncMeasurement], num_cores: int) -> list[str]:
    """The steps beside rounds by system, judged where courier, server and loop have a core each; none of none."""
    is_asked = num_cores >= _CORES_FOR_STEP_BUDGET
    found = []
    for each in measured:
        if each.steps:
            spread = Spread.of(each.steps)
            judged = verdict(spread.median <= STEP_BUDGET) if is_asked else "not asked, cores are shared"
            found.append(
                f"Steps beside rounds of {each.num_bytes / MIB:.0f} MiB over steps alone, {each.system}, on "
                f"{num_cores} cores: {spread.words(3)}; budget {STEP_BUDGET}: {judged}."
            )
    return found


def _judged_pause(each: SyncMeasurement) -> str:
    """Of few bytes other things than the copy count: no verdict."""
    spread = Spread.of(each.pause_over_bare)
    is_asked = each.num_bytes > 0.99 * PAUSE_BUDGET_FROM_MIB * MIB
    return f"{spread.words(2)} {verdict(spread.median <= PAUSE_BUDGET) if is_asked else ''}".rstrip()
