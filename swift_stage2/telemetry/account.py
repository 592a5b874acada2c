"""Turns the logs of all ranks into an account: what became of every sample, and what breaks the rules. Pure.

Each rank's effective history is replayed by itself, event by event; then the ranks are compared. An event that is not
possible where it stands breaks a rule, and the replay goes on. ``docs/design/channel_b.md`` lists the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from swift_stage2.telemetry.event_log import RankEvents, ranks_of, run_of
from swift_stage2.telemetry.events import (
    AnyEvent,
    Checkpoint,
    Damaged,
    Drawn,
    Event,
    Finished,
    Key,
    Matched,
    Packed,
    Place,
    Quarantined,
    Returned,
    SampleEvent,
    Sent,
    Start,
    StreamState,
    Trained,
    Unused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """All ranks' accounts, and what only shows when they are compared."""

    ranks: tuple[RankAccount, ...]
    violations: tuple[Violation, ...]
    doubts: tuple[str, ...] = ()
    """Sentences about what checkpoints tell of the run and its logs do not."""

    @property
    def num_violations(self) -> int:
        return len(self.violations) + sum(len(rank.violations) for rank in self.ranks)

    @property
    def is_provable(self) -> bool:
        """Whether every line of the effective history is an event, as far as anything tells."""
        return not self.doubts and not any(rank.num_damaged for rank in self.ranks)

    @property
    def is_balanced(self) -> bool:
        """Whether it is proven that every sample has one end or is in hand."""
        return self.is_provable and self.num_violations == 0


def account_of(logs: Mapping[int, Sequence[AnyEvent]], doubts: tuple[str, ...] = ()) -> RunAccount:
    """The account of a run from the events of every rank, oldest first; parts of a run follow each other."""
    found, accounts = ranks_of(logs), list[RankAccount]()
    for number, rank in found.items():
        replay = Replay(RankAccount(rank=number))
        for event in rank:
            replay.take(event)
        num_ever_trained = sum(len(event.samples) for event in logs[number] if isinstance(event, Trained))
        accounts.append(replay.finish(rank, num_ever_trained))
    return RunAccount(ranks=tuple(accounts), violations=tuple(_compare(found)), doubts=doubts)


def _compare(ranks: Mapping[int, RankEvents]) -> Iterator[Violation]:
    if not all(rank.history for rank in ranks.values()):
        yield Violation("all ranks tell of a process that they began together")
        return
    ways = {
        number: [
            (run_of(process), start.save_id)
            for process, start in zip(rank.history, rank.of(Start), strict=False)
        ]
        for number, rank in ranks.items()
    }
    first, *others = ways
    for other in others:
        if ways[other] != ways[first]:
            yield Violation(f"all ranks resume the same checkpoints, rank {other} others than rank {first}")
    world_size = start.world_size if (start := ranks[first].start) else 1
    if missing := sorted(set(range(world_size)) - set(ranks)):
        yield Violation(f"every rank has a log, rank {', '.join(map(str, missing))} of {world_size} has none")


class SampleStage(StrEnum):
    TO_BE_REDRAWN = "to be redrawn"
    DRAWN = "drawn"
    SENT = "sent"
    FINISHED = "finished"
    MATCHED = "matched"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken, as a sentence, and by which samples."""

    rule: str
    samples: tuple[Key, ...] = ()


@dataclass(slots=True, kw_only=True)
class RankAccount:
    """One rank's samples: ``taken_over + drawn == trained + quarantined + unused + in_hand``, or a rule is broken."""

    rank: int
    taken_over: int = 0
    """In hand when the first process whose events are here resumed a checkpoint from elsewhere."""
    drawn: int = 0
    """Each sample once, however often it was redrawn."""
    trained: int = 0
    """Events, not distinct samples."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """By reason."""
    unused: Counter[str] = field(default_factory=Counter)
    """By reason: nothing is trained of their rollouts, though nothing is wrong with them."""
    in_hand: dict[str, int] = field(default_factory=dict)
    """By stage."""
    returned: Counter[str] = field(default_factory=Counter)
    """Returns by reason; a sample may return several times."""
    num_resumes: int = 0
    num_void: int = 0
    """Samples that were trained in steps which did not survive; each counts again where it ended then."""
    num_damaged: int = 0
    """Lines that are no event. Above 0 nothing is proven."""
    has_ended: bool = False
    """Whether the last process told its orderly end; one that was killed or still runs did not."""
    violations: tuple[Violation, ...] = ()


@dataclass(slots=True)
class _Life:
    key: Key
    stage: SampleStage
    version: int | None = None
    pack_id: str | None = None


class _Move(NamedTuple):
    """What an event does to a sample: the stages in which it may be, the one that it reaches, and the rule."""

    before: Collection[SampleStage]
    after: SampleStage | None
    """None is the sample's end."""
    rule: str


_IN_WORK = tuple(stage for stage in SampleStage if stage is not SampleStage.TO_BE_REDRAWN)
_MOVES: dict[type[Event], _Move] = {
    Sent: _Move(
        (SampleStage.DRAWN, SampleStage.SENT), SampleStage.SENT, "a sample is sent once it was drawn"
    ),
    Finished: _Move((SampleStage.SENT,), SampleStage.FINISHED, "a sample is finished once it was sent"),
    Matched: _Move((SampleStage.FINISHED,), SampleStage.MATCHED, "a sample is matched once it was answered"),
    Packed: _Move((SampleStage.MATCHED,), SampleStage.PACKED, "a sample is packed once it was matched"),
    Returned: _Move(_IN_WORK, SampleStage.TO_BE_REDRAWN, "a sample returns once it was drawn"),
    Trained: _Move((SampleStage.PACKED,), None, "a sample is trained in the pack that it was packed into"),
    Quarantined: _Move(tuple(SampleStage), None, "a sample may be given up at any stage"),
    Unused: _Move((SampleStage.MATCHED, SampleStage.PACKED), None, "a sample is unused once it was matched"),
}
_KEEPS_ROW = "a sample keeps its row, and its attempt until it returns"


@dataclass(slots=True)
class Replay:
    """One rank's stream, made again from its events."""

    account: RankAccount
    _broken: dict[str, list[Key]] = field(default_factory=dict)
    _lives: dict[Place, _Life] = field(default_factory=dict)
    _ends: dict[Place, str] = field(default_factory=dict)  # kinds
    _rows: Counter[int] = field(default_factory=Counter)  # of the present epoch, drawn so far
    _num_generations: int = 1
    _cursor: Place | None = None  # of the next new sample
    _shard: int = 0
    _window: int = 0
    _first_step: int = 0  # before which no step can train any more
    _last_trained: int = -1
    _saved: StreamState | None = None  # of the checkpoint just replayed

    def take(self, event: AnyEvent) -> None:
        match event:
            case Damaged():
                self.account.num_damaged += 1
            case Start():
                self._start(event)
            case Checkpoint(state=StreamState() as state):
                self._checkpoint(event, state)
            case _ if isinstance(event, SampleEvent):
                self._take_samples(event)

    def finish(self, told: RankEvents, num_ever_trained: int) -> RankAccount:
        found, in_hand = self.account, len(self._lives)
        quarantined, unused = found.quarantined.total(), found.unused.total()
        if found.taken_over + found.drawn != found.trained + quarantined + unused + in_hand:
            self._break(
                f"drawn = trained + quarantined + unused + in hand, got {found.taken_over} taken over + "
                f"{found.drawn} drawn, {found.trained} trained + {quarantined} quarantined + {unused} unused + "
                f"{in_hand} in hand",
                (),
            )
        stages = Counter(life.stage for life in self._lives.values())
        found.in_hand = {stage.value: stages[stage] for stage in SampleStage if stages[stage]}
        found.num_resumes, found.has_ended = max(0, len(told.history) - 1), told.has_ended
        found.num_void = num_ever_trained - found.trained
        found.violations = tuple(Violation(rule, tuple(samples)) for rule, samples in self._broken.items())
        return found

    def _start(self, event: Start) -> None:
        if event.state is None:
            return
        if self._cursor is None:
            self._open(event.state, is_resumed=event.save_id is not None)
        elif event.state != self._saved:
            rule = "a resumed process begins with the very state of its checkpoint"
            self._break(rule, event.state.outstanding)
        self._window, self._first_step, self._saved = event.version_window, event.step, None
        for life in self._lives.values():  # whatever the process before had of them is gone
            life.stage, life.version, life.pack_id = SampleStage.TO_BE_REDRAWN, None, None

    def _open(self, state: StreamState, *, is_resumed: bool) -> None:
        keys = state.outstanding
        self._cursor = (state.epoch, state.position)
        self._num_generations = state.num_generations
        self._shard = len(range(self.account.rank, state.num_rows, state.world_size)) * self._num_generations
        self._lives = {key[:2]: _Life(key, SampleStage.TO_BE_REDRAWN) for key in keys}
        self.account.taken_over = len(keys)
        if not is_resumed and (keys or self._cursor != (0, 0)):
            self._break("a run that resumes nothing begins at its stream's first sample", keys)

    def _checkpoint(self, event: Checkpoint, state: StreamState) -> None:
        told, in_hand = state.outstanding, [life.key for life in self._lives.values()]
        if sorted(told) != sorted(in_hand):
            self._break("a checkpoint holds exactly the samples in hand", sorted(set(told) ^ set(in_hand)))
        if (state.epoch, state.position) != self._cursor:
            self._break("a checkpoint's cursor stands behind the last new sample", ())
        if event.step <= self._last_trained:
            self._break("a checkpoint before a step is taken before that step trains", ())
        self._first_step, self._saved = event.step, state

    def _take_samples(self, event: SampleEvent) -> None:
        if self._cursor is None:
            self._break("a process's first record tells that it starts", ())
            self._cursor = (0, 0)
        for key in event.samples:
            life = self._lives.get(key[:2])
            if isinstance(event, Drawn):
                self._draw(key, life)
                continue
            self._tally(event)
            if life is None:
                self._miss(event, key)
            else:
                self._move(event, key, life)
        if isinstance(event, Trained):
            if event.step < self._first_step:
                self._break("steps that train only grow", event.samples)
            self._first_step = self._last_trained = max(self._first_step, event.step)

    def _tally(self, event: SampleEvent) -> None:
        match event:
            case Trained():
                self.account.trained += 1
            case Quarantined():
                self.account.quarantined[event.reason] += 1
            case Unused():
                self.account.unused[event.reason] += 1
            case Returned():
                self.account.returned[event.reason] += 1

    def _move(self, event: SampleEvent, key: Key, life: _Life) -> None:
        before, after, rule = _MOVES[type(event)]
        if isinstance(event, Finished) and event.end != "answered":
            after = SampleStage.DRAWN
        if life.stage not in before or (isinstance(event, Trained) and life.pack_id != event.pack_id):
            self._break(rule, [key])
        if isinstance(event, Returned):
            if key[:3] != life.key[:3] or not 0 <= key[3] - life.key[3] <= 1:
                self._break("a sample keeps its row, and a return adds at most one attempt", [key])
            life = self._lives[key[:2]] = _Life(key, SampleStage.TO_BE_REDRAWN)
        elif life.key != key:
            self._break(_KEEPS_ROW, [key])
        if after is None:
            self._ends[key[:2]] = event.kind
            del self._lives[key[:2]]
        else:
            life.stage = after
        match event:
            case Packed():
                life.pack_id = event.pack_id
            case Matched():
                life.version = event.version
                if any(version < event.version for version, _, _ in event.spans):
                    self._break("a rollout is as old as its oldest token", [key])
            case Trained() if life.version is not None and life.version < event.version - self._window:
                self._break("nothing is trained that is older than the version window", [key])

    def _draw(self, key: Key, life: _Life | None) -> None:
        place = key[:2]
        if life is not None:
            if life.stage is not SampleStage.TO_BE_REDRAWN:
                self._break("a sample is redrawn once it had returned", [life.key])
            life.stage = SampleStage.DRAWN
            if life.key != key:
                self._break(_KEEPS_ROW, [key])
            return
        if place in self._ends:
            self._break("a sample that has ended is not drawn again", [key])
            return
        self.account.drawn += 1
        self._lives[place] = _Life(key, SampleStage.DRAWN)
        waiting = [other.key for other in self._lives.values() if other.stage is SampleStage.TO_BE_REDRAWN]
        if waiting:
            self._break("samples that returned are drawn before any new one", waiting)
        self._advance(key)

    def _advance(self, key: Key) -> None:
        assert self._cursor is not None
        epoch, position = self._cursor
        if position == self._shard:
            epoch, position = epoch + 1, 0
            self._rows.clear()
        if key[:2] != (epoch, position):
            self._break("every position of an epoch's shard is drawn once, in order", [key])
        self._rows[key[2]] += 1
        if self._rows[key[2]] > self._num_generations:
            self._break("no row is drawn at more positions of an epoch than it has", [key])
        self._cursor = (key[0], key[1] + 1)

    def _miss(self, event: SampleEvent, key: Key) -> None:
        """An event of a sample that is not in hand."""
        end = self._ends.get(key[:2])
        if event.kind == end == "trained":
            self._break("no sample is trained twice", [key])
        elif end is not None:
            self._break(f"a sample that was {end} is not {event.kind} after it", [key])
        else:
            self._break(f"a sample is drawn before it is {event.kind}", [key])

    def _break(self, rule: str, samples: Sequence[Key]) -> None:
        self._broken.setdefault(rule, []).extend(samples)
