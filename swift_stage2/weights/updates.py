"""Updates of the servers' weights, on rank 0's main thread: brings every server that can take it the newest version.

One rule for all: a server that stands ready, or has proven an older version, gets the newest one as soon as its life
allows it. First weights, a retry, a server that joins late and one that was restarted are that rule. What must agree
with the other ranks leaves by ``facts`` and comes back by ``apply_agreement``; nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from swift_stage2.config import Proof
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.errors import WeightSyncError
from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.servers.health_check import HealthCheck, JoiningServer
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.proof import UpdateSpec
from swift_stage2.weights.publisher import Publisher, PushResult
from swift_stage2.weights.snapshot import describe_fault
from swift_stage2.weights.snapshots import Snapshots, TakenSnapshot

_SHARE_FOR_CALLS = 0.8  # of a push's time: only what hangs has to be given up at the whole of it
_SHARE_FOR_TURN = 0.5  # of what a server has for its install, which then takes as long as the first one's
_LAST_PUSH_S = 10.0  # for one that has not ended when training has


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """Rank 0's part of the step's vector."""

    proven: tuple[int, ...]
    closed: tuple[bool, ...]
    publishing: bool
    has_update: bool
    server_waits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNews:
    """What all ranks are told, as JSON, once there is news."""

    outcome: RoundOutcome | None = None
    """Of a version whose pushes have all ended."""
    joining: tuple[JoiningServer, ...] = ()
    learner_fault: str = ""

    def require_no_fault(self) -> None:
        """Raises WeightSyncError: the learner's weights cannot be pushed."""
        if self.learner_fault:
            raise WeightSyncError(self.learner_fault)

    def to_json(self) -> dict[str, Any]:
        return _NEWS.dump_python(self, mode="json")  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> UpdateNews:
        return _NEWS.validate_python(data)


_NEWS = TypeAdapter(UpdateNews)


@dataclass(slots=True)
class _Newest:
    """The newest version: its snapshot, and how its pushes have gone since all ranks were told."""

    taken: TakenSnapshot
    step: int
    began_s: float = field(default_factory=time.monotonic)
    is_handed_over: bool = False
    is_confirmed: bool = False
    was_told: bool = False
    were_asked: bool = True
    """Whether every server that took it since then was asked meanwhile."""
    reports: dict[int, ServerReport] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.taken.identity.version


@dataclass(eq=False)
class Updates:
    """All servers of a run; ``facts``, ``apply_agreement``, ``begin`` and ``collect_update`` on one thread."""

    lives: Sequence[ServerLife]
    _: KW_ONLY
    snapshots: Snapshots
    publisher: Publisher
    health: HealthCheck
    sync: SyncConfig
    straggler_s: float
    """Seconds that running pushes may still take once another version is due."""
    sync_every_steps: int
    on_lost: Callable[[int, int], object] = lambda server, version: None
    """Told of a server whose process has gone, and of the version that it had proven, as soon as that shows."""

    def __post_init__(self) -> None:
        # Servers that have answered a canary, and that checksums have proven since.
        self._wired: set[int] = set()
        self._newest: _Newest | None = None
        self._ends: dict[int, tuple[float, str]] = {}  # of running pushes: moment and limit
        self._joining: list[JoiningServer] = []
        self._drained: frozenset[int] = frozenset()  # by the last agreement
        self._fault = ""
        self._rests = False
        self._step = 0
        self.snapshots.on_copied = self._push_if_copied

    @property
    def canary_due(self) -> bool:
        """Whether the learner has to answer the canary under the next version's weights."""
        takers = [server for server, life in enumerate(self.lives) if life.state is not LifeState.AWAY]
        return self._needs_canary(*takers)

    def start(self) -> None:
        """Starts the health check."""
        self.health.start()

    def begin(self, taken: TakenSnapshot, step: int) -> None:
        """``taken`` is the newest version, of the weights at the start of ``step``. No push runs."""
        self._step, self._rests = step, False
        self._newest = _Newest(taken, step)
        self._fault = taken.fault
        self._push_where_possible()

    def facts(self, step: int) -> UpdateFacts:
        """Takes in what has come of pushes and health checks, and says what all ranks must agree on."""
        self._step = step
        for server, result in self.publisher.take_results():
            self._take_result(server, result)
        self._give_up_late()
        for server in self.health.take_answering():
            self.lives[server].answered()
        # Last: a server is told as joining before it is answering.
        for joining in self.health.take_joining():
            self.lives[joining.server].stages = joining.kind.is_ours
            self._joining.append(joining)
        for server in self.publisher.lost_servers():
            if version := self.lives[server].version:
                self.on_lost(server, version)
                self._fail(server)
        self._watch_away()
        for life in self.lives if self._rests else ():
            life.sleep()
        self._push_where_possible()  # here, where the other ranks learn at once that the snapshot is in use
        return UpdateFacts(
            proven=tuple(life.version for life in self.lives),
            closed=tuple(life.is_closed for life in self.lives),
            publishing=self._is_publishing,
            has_update=bool(self._joining or self._fault) or self._has_outcome,
            server_waits=any(
                life.state is LifeState.READY and life.wants(0, step) and not self._serves(server)
                for server, life in enumerate(self.lives)
            ),
        )

    def apply_agreement(self, asked: Sequence[int], suspect: Iterable[int], drained: Collection[int]) -> None:
        """Takes what all ranks have agreed on: versions that are asked, who is suspect, where nothing is in flight."""
        for server in suspect:
            self._fail(server)
        newest = self._newest
        if newest is not None and not newest.is_confirmed and newest.number in asked:
            newest.is_confirmed = True
            self.publisher.confirm(newest.number)
        self._drained = frozenset(drained)
        self._push_where_possible()  # to who is drained: the other ranks know as much
        self._watch_away()

    def rest(self) -> None:
        """Until the next ``begin`` nothing is pushed, and who is proven is asked nothing: servers are to sleep."""
        self._rests = True
        self.hurry("after servers were to sleep")

    def rested(self, failed: Iterable[int]) -> None:
        """All servers sleep but those that have ``failed`` to: they are as good as lost."""
        for server in failed:
            self._fail(server)

    def hurry(self, since: str) -> None:
        """Pushes that run have ``straggler_s`` from now on; ``since`` says after what."""
        end = time.monotonic() + self.straggler_s
        limit = f"{self.straggler_s:g} s {since}"
        self._ends = {server: min(each, (end, limit)) for server, each in self._ends.items()}

    def collect_update(self) -> UpdateNews:
        """What all ranks are to be told; told once."""
        newest = self._newest
        outcome = self._take_outcome(newest) if newest is not None and self._has_outcome else None
        joining, self._joining = tuple(self._joining), []
        return UpdateNews(outcome=outcome, joining=joining, learner_fault=self._fault)

    def close(self) -> None:
        """Ends pushes that run, after some time for them, and closes what is kept."""
        self.health.stop()
        end = min((moment for moment, _ in self._ends.values()), default=0.0)
        self.publisher.wait(min(end - time.monotonic(), _LAST_PUSH_S))
        self.publisher.close()

    @property
    def _is_publishing(self) -> bool:
        newest = self._newest
        is_copying = newest is not None and not newest.is_handed_over and not newest.taken.fault
        return is_copying or bool(self._ends)  # also by a push that does not count any more

    @property
    def _has_outcome(self) -> bool:
        return self._newest is not None and bool(self._newest.reports) and not self._is_publishing

    def _take_outcome(self, newest: _Newest) -> RoundOutcome:
        taken, now = newest.taken, time.monotonic()
        first = not newest.was_told
        outcome = RoundOutcome(
            version=newest.number,
            reports=dict(sorted(newest.reports.items())),
            staged=newest.were_asked,
            is_catch_up=not first,
            seconds=now - newest.began_s,
            canary_seconds=taken.canary_seconds if first else 0.0,
            snapshot_seconds=taken.seconds if first else 0.0,
        )
        newest.reports, newest.was_told, newest.were_asked = {}, True, True
        return outcome

    def _serves(self, server: int) -> bool:
        """Whether the version that is kept would do for this server: it is young, and shows all that must be shown."""
        newest = self._newest
        if newest is None or newest.taken.fault or self._step - newest.step >= self.sync_every_steps:
            return False
        return newest.taken.canary is not None or not self._needs_canary(server)

    def _needs_canary(self, *servers: int) -> bool:
        proof = self.sync.proof
        return proof is Proof.CANARY or (proof is Proof.AUTO and not self._wired.issuperset(servers))

    def _push_where_possible(self) -> None:
        newest = self._newest
        if newest is None or newest.taken.fault or self._rests:
            return
        may_push = self._hand_over(newest)
        for server, life in enumerate(self.lives):
            is_drained = life.state is LifeState.DRAINING and server in self._drained
            wants = server not in self._ends and life.wants(newest.number, self._step)
            if wants and life.state is LifeState.READY:
                wants = self._serves(server)
            if wants and not life.stages:
                life.drain()
            elif may_push and (wants or is_drained):
                self._push(server, life, newest)

    def _push_if_copied(self) -> None:
        """Between two agreements: only while all ranks know the snapshot to be in use, by its copy."""
        if self._newest is not None and not self._newest.is_handed_over:
            self._push_where_possible()

    def _hand_over(self, newest: _Newest) -> bool:
        """Whether the copies into the snapshot are done, so that it may be pushed."""
        if not newest.is_handed_over and self.snapshots.is_copied:
            try:
                self.snapshots.wait_copied()
                newest.is_handed_over = True
            except RuntimeError as error:
                self._fault = describe_fault("the copy of the weights", error)
        return newest.is_handed_over

    def _push(self, server: int, life: ServerLife, newest: _Newest) -> None:
        if not self._ends and newest.was_told:
            newest.began_s = time.monotonic()
        life.push()
        newest.were_asked &= life.state is LifeState.UPDATING
        sync = self.sync
        least_s = min(self.straggler_s, sync.timeout_s * _SHARE_FOR_CALLS)
        spec = UpdateSpec(
            identity=newest.taken.identity,
            manifest=self.snapshots.export.manifest(),
            canary=newest.taken.canary,
            proof=sync.proof,
            deadline=Deadline(sync.timeout_s * _SHARE_FOR_CALLS),
            turn_s=least_s * _SHARE_FOR_TURN if sync.rolling and life.state is LifeState.UPDATING else 0.0,
        )
        self._ends[server] = time.monotonic() + sync.timeout_s, f"{sync.timeout_s:g} s"
        assert newest.taken.file is not None
        try:
            self.publisher.push(server, spec, newest.taken.file)
        except Exception as error:  # rank 0 must reach the next agreement
            self._take_result(server, ServerReport.failed(describe_fault("the push", error)))

    def _take_result(self, server: int, result: PushResult) -> None:
        self._ends.pop(server, None)
        life, newest = self.lives[server], self._newest
        assert newest is not None
        if isinstance(result, WeightSyncError):
            self._fault = self._fault or str(result)
            result = ServerReport.failed("the learner's weights cannot be pushed")
        if not life.is_pushing:
            return  # it was suspected meanwhile: the newest word counts
        newest.reports[server] = result
        if not result.proven:
            self._fail(server)
            return
        life.proved(newest.number)
        if "checksums" not in result.proof:
            self._wired.discard(server)
        elif newest.taken.canary is not None:
            self._wired.add(server)

    def _fail(self, server: int) -> None:
        if self.lives[server].failed(self._step):
            self._wired.discard(server)
            self.publisher.drop_connection(server)

    def _give_up_late(self) -> None:
        now = time.monotonic()
        if any(now > moment for moment, _ in self._ends.values()):
            # Also those that began with it, a moment later.
            late = {server: limit for server, (moment, limit) in self._ends.items() if now > moment - 1.0}
            self.publisher.give_up("a push to another server was late, and all that ran were ended with it")
            for server, result in self.publisher.take_results():
                if server in late and not (isinstance(result, ServerReport) and result.proven):
                    error = f"the server did not take and prove the weights within {late[server]}"
                    result = ServerReport.failed(error)
                self._take_result(server, result)

    def _watch_away(self) -> None:
        self.health.watch([server for server, life in enumerate(self.lives) if life.state is LifeState.AWAY])
