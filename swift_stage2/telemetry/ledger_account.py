"""Turns the ledgers of all ranks into an account: what became of every sample, and what breaks the rules. Pure.

Each rank's effective history is replayed by itself, record by record; then the ranks are compared. A record that is not
possible where it stands breaks a rule, and the replay goes on. ``docs/design/channel_b.md`` lists the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from swift_stage2.telemetry.audit import GAP, Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.reading import Numbering, Process, effective_histories


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """All ranks' accounts, and what only shows when they are compared."""

    ranks: tuple[RankAccount, ...]
    violations: tuple[Violation, ...]
    doubts: tuple[str, ...] = ()
    """Sentences about what others tell of the run and its ledger does not."""

    @property
    def num_violations(self) -> int:
        return len(self.violations) + sum(len(rank.violations) for rank in self.ranks)

    @property
    def is_provable(self) -> bool:
        """Whether every record of the effective history is there, as far as anything tells."""
        return not self.doubts and not any(rank.num_records_lost for rank in self.ranks)

    @property
    def is_balanced(self) -> bool:
        """Whether it is proven that every sample has one end or is in hand."""
        return self.is_provable and self.num_violations == 0


def account_of(ledgers: Mapping[int, Sequence[Record]], doubts: tuple[str, ...] = ()) -> RunAccount:
    """The account of a run from the records of every rank, oldest first; parts of a run follow each other."""
    histories = effective_histories(ledgers)
    ranks = tuple(
        _replay(rank, history, sum(len(r["samples"]) for r in ledgers[rank] if r["kind"] == Entry.TRAINED))
        for rank, history in histories.items()
    )
    return RunAccount(ranks=ranks, violations=tuple(_compare(histories)), doubts=doubts)


def _replay(rank: int, history: Sequence[Process], num_ever_trained: int) -> RankAccount:
    records = [record for process in history for record in process]
    while records and records[-1]["kind"] == Entry.TORN:
        records.pop()  # a process was killed while it wrote this, or is writing it now
    replay = Replay(rank)
    for record in records:
        replay.take(record)
    return replay.account(
        num_resumes=max(0, len(history) - 1), num_void=num_ever_trained - replay.num_trained
    )


def _compare(histories: Mapping[int, Sequence[Process]]) -> Iterator[Violation]:
    if not all(histories.values()):
        yield Violation("all ranks tell of a process that they began together")
        return
    (first, way), *others = (
        (rank, [(process[0].get("run_id"), process[0].get("save_id")) for process in history])
        for rank, history in histories.items()
    )
    for rank, other in others:
        if other != way:
            yield Violation(f"all ranks resume the same checkpoints, rank {rank} others than rank {first}")
    world_size = histories[first][-1][0].get("world_size") or 1
    if missing := sorted(set(range(world_size)) - set(histories)):
        yield Violation(
            f"every rank has a ledger, rank {', '.join(map(str, missing))} of {world_size} has none"
        )


Key = tuple[int, int, int, int]
"""Epoch, position in the rank's shard, row of the data set, attempt."""
Place = tuple[int, int]
"""Epoch and position: what names a sample of a rank's stream for good."""


class SampleStage(StrEnum):
    TO_BE_REDRAWN = "to be redrawn"
    DRAWN = "drawn"
    SENT = "sent"
    FINISHED = "finished"
    PARTIAL = "partial"
    MATCHED = "matched"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken, as a sentence, and by which samples."""

    rule: str
    samples: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """One rank's samples: ``taken_over + drawn == trained + quarantined + unused + in_hand``, or a rule is broken."""

    rank: int
    taken_over: int
    """In hand when the first process whose records are here resumed a checkpoint from elsewhere."""
    drawn: int
    """Each sample once, however often it was redrawn."""
    trained: int
    quarantined: Mapping[str, int]
    """By reason."""
    unused: Mapping[str, int]
    """By reason: nothing is trained of their rollouts, though nothing is wrong with them."""
    in_hand: Mapping[str, int]
    """By stage."""
    returned: Mapping[str, int]
    """Returns by reason; a sample may return several times."""
    num_cut: int
    """How often a rollout was aborted, to be resumed."""
    num_resumes: int
    num_void: int
    """Samples that were trained in steps which did not survive; each counts again where it ended then."""
    num_records_lost: int
    """Records that a full disk did not take, that cannot be read or that are missing. Above 0 nothing is proven."""
    has_ended: bool
    """Whether the last process told its orderly end; one that was killed, still runs or is of old did not."""
    violations: tuple[Violation, ...]


@dataclass(slots=True)
class _Life:
    key: Key
    stage: SampleStage
    version: int | None = None
    pack_id: str | None = None


_MOVES: dict[str, tuple[tuple[SampleStage, ...], SampleStage, str]] = {
    Entry.READ: ((SampleStage.DRAWN,), SampleStage.DRAWN, "read once it was drawn"),
    Entry.SENT: (
        (SampleStage.DRAWN, SampleStage.SENT, SampleStage.PARTIAL),
        SampleStage.SENT,
        "sent once it was drawn",
    ),
    Entry.FINISHED: ((SampleStage.SENT,), SampleStage.FINISHED, "finished once it was sent"),
    Entry.CUT: ((SampleStage.FINISHED,), SampleStage.PARTIAL, "cut once it was answered"),
    Entry.MATCHED: ((SampleStage.FINISHED,), SampleStage.MATCHED, "matched once it was answered"),
    Entry.PACKED: ((SampleStage.MATCHED,), SampleStage.PACKED, "packed once it was matched"),
}
"""By kind of record: the stages in which a sample may be, the one that it reaches, and the rule."""
_GIVEN_UP = (Entry.QUARANTINED, Entry.UNUSED)
_UNUSED_AFTER = (SampleStage.MATCHED, SampleStage.PACKED)


@dataclass(slots=True)
class Replay:
    """One rank's stream, made again from its records. ``num_trained`` counts records, not distinct samples."""

    rank: int
    num_trained: int = 0
    _num_cut: int = 0
    _taken_over: int = 0
    _num_drawn: int = 0
    _num_lost: int = 0  # as gaps and torn lines tell
    _numbering: Numbering = field(default_factory=Numbering)  # tells of missing ones, much of it the same
    _has_ended: bool = False
    _given_up: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in _GIVEN_UP}
    )
    _returned: Counter[str] = field(default_factory=Counter)
    _broken: dict[str, list[Key]] = field(default_factory=dict)
    _lives: dict[Place, _Life] = field(default_factory=dict)
    _ends: dict[Place, Entry] = field(default_factory=dict)
    _rows: Counter[int] = field(default_factory=Counter)  # of the present epoch, drawn so far
    _num_generations: int = 1
    _cursor: Place | None = None  # of the next new sample
    _shard: int = 0
    _window: int = 0
    _first_step: int = 0  # before which no step can train any more
    _last_trained: int = -1
    _saved: Mapping[str, Any] | None = None  # the state of the checkpoint just replayed

    def take(self, record: Record) -> None:
        self._has_ended = record["kind"] == Entry.END
        self._numbering.take(record)
        match record["kind"]:
            case Entry.TORN:
                self._num_lost += 1
            case kind if kind == GAP:
                self._num_lost += int(record["records_lost"])
            case Entry.START:
                self._start(record)
            case Entry.CHECKPOINT:
                self._checkpoint(record)
            case kind if kind != Entry.END:
                self._take_samples(record)

    def _take_samples(self, record: Record) -> None:
        if self._cursor is None:
            self._break("a process's first record tells that it starts", ())
            self._cursor = (0, 0)
        for sample in record["samples"]:
            self._take_sample(record, ledger_key(sample))
        if record["kind"] == Entry.TRAINED:
            self._train_step(record)

    def account(self, *, num_resumes: int, num_void: int) -> RankAccount:
        num_quarantined, num_unused = (reasons.total() for reasons in self._given_up.values())
        num_in_hand, num_ended = len(self._lives), self.num_trained + num_quarantined + num_unused
        in_hand = Counter(life.stage for life in self._lives.values())
        if self._taken_over + self._num_drawn != num_ended + num_in_hand:
            self._break(
                f"drawn = trained + quarantined + unused + in hand, got {self._taken_over} taken over + "
                f"{self._num_drawn} drawn, {self.num_trained} trained + {num_quarantined} quarantined + "
                f"{num_unused} unused + {num_in_hand} in hand",
                (),
            )
        return RankAccount(
            rank=self.rank,
            taken_over=self._taken_over,
            drawn=self._num_drawn,
            trained=self.num_trained,
            quarantined=dict(sorted(self._given_up[Entry.QUARANTINED].items())),
            unused=dict(sorted(self._given_up[Entry.UNUSED].items())),
            in_hand={stage.value: in_hand[stage] for stage in SampleStage if in_hand[stage]},
            returned=dict(sorted(self._returned.items())),
            num_cut=self._num_cut,
            num_resumes=num_resumes,
            num_void=num_void,
            num_records_lost=max(self._num_lost, self._numbering.num_missing),
            has_ended=self._has_ended,
            violations=tuple(Violation(rule, tuple(samples)) for rule, samples in self._broken.items()),
        )

    def _start(self, record: Record) -> None:
        state = record["state"]
        if self._cursor is None:
            self._open(state, is_resumed=record["save_id"] is not None)
        elif state != self._saved:
            self._break("a resumed process begins with the very state of its checkpoint", _keys_of(state))
        self._window, self._first_step, self._saved = record["version_window"], record["step"], None
        for life in self._lives.values():  # whatever the process before had of them is gone
            life.stage, life.version, life.pack_id = SampleStage.TO_BE_REDRAWN, None, None

    def _open(self, state: Mapping[str, Any], *, is_resumed: bool) -> None:
        keys = _keys_of(state)
        self._cursor = (state["epoch"], state["position"])
        self._num_generations = state.get("num_generations") or 1
        self._shard = len(range(self.rank, state["num_rows"], state["world_size"])) * self._num_generations
        self._lives = {key[:2]: _Life(key, SampleStage.TO_BE_REDRAWN) for key in keys}
        self._taken_over = len(keys)
        if not is_resumed and (keys or self._cursor != (0, 0)):
            self._break("a run that resumes nothing begins at its stream's first sample", keys)

    def _checkpoint(self, record: Record) -> None:
        state, step = record["state"], record["step"]
        told, in_hand = _keys_of(state), [life.key for life in self._lives.values()]
        if sorted(told) != sorted(in_hand):
            self._break("a checkpoint holds exactly the samples in hand", sorted(set(told) ^ set(in_hand)))
        if (state["epoch"], state["position"]) != self._cursor:
            self._break("a checkpoint's cursor stands behind the last new sample", ())
        if step <= self._last_trained:
            self._break("a checkpoint before a step is taken before that step trains", ())
        self._first_step, self._saved = step, state

    def _train_step(self, record: Record) -> None:
        step = record["step"]
        if step < self._first_step:
            self._break("steps that train only grow", [ledger_key(sample) for sample in record["samples"]])
        self._first_step = self._last_trained = max(self._first_step, step)

    def _take_sample(self, record: Record, key: Key) -> None:
        life = self._lives.get(key[:2])
        if record["kind"] == Entry.DRAWN:
            self._draw(key, life)
            return
        if life is None:
            self._miss(record, key)
            return
        if life.key != key and record["kind"] != Entry.RETURNED:
            self._break("a sample keeps its row, and its attempt until it returns", [key])
        match record["kind"]:
            case Entry.FINISHED if record["end"] != "answered":
                self._move(life, (SampleStage.SENT,), SampleStage.DRAWN, "finished once it was sent")
            case kind if kind in _MOVES:
                self._move(life, *_MOVES[kind])
            case Entry.RETURNED:
                self._return(record, key, life)
            case Entry.TRAINED:
                self._train(record, key, life)
            case Entry.QUARANTINED | Entry.UNUSED as kind:
                if kind == Entry.UNUSED:
                    self._move(life, _UNUSED_AFTER, life.stage, "unused once it was matched")
                self._given_up[kind][record["reason"]] += 1
                self._end(key, Entry(kind))
        self._num_cut += record["kind"] == Entry.CUT
        if record["kind"] == Entry.MATCHED:
            life.version = record["version"]
            if any(version < life.version for version, _, _ in record.get("spans") or ()):
                self._break("a rollout is as old as its oldest token", [key])
        elif record["kind"] == Entry.PACKED:
            life.pack_id = record["pack_id"]

    def _draw(self, key: Key, life: _Life | None) -> None:
        place = key[:2]
        if life is not None:
            self._move(life, (SampleStage.TO_BE_REDRAWN,), SampleStage.DRAWN, "redrawn once it had returned")
            if life.key != key:
                self._break("a sample keeps its row, and its attempt until it returns", [key])
            return
        if place in self._ends:
            self._break("a sample that has ended is not drawn again", [key])
            return
        self._num_drawn += 1
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

    def _return(self, record: Record, key: Key, life: _Life) -> None:
        if life.stage is SampleStage.TO_BE_REDRAWN:
            self._break("a sample returns once it was drawn", [key])
        if key[:3] != life.key[:3] or not 0 <= key[3] - life.key[3] <= 1:
            self._break("a sample keeps its row, and a return adds at most one attempt", [key])
        self._returned[record["reason"]] += 1
        self._lives[key[:2]] = _Life(key, SampleStage.TO_BE_REDRAWN)

    def _train(self, record: Record, key: Key, life: _Life) -> None:
        self.num_trained += 1
        if life.stage is not SampleStage.PACKED or life.pack_id != record["pack_id"]:
            self._break("a sample is trained in the pack that it was packed into", [key])
        if life.version is not None and life.version < record["version"] - self._window:
            self._break("nothing is trained that is older than the version window", [key])
        self._end(key, Entry.TRAINED)

    def _end(self, key: Key, how: Entry) -> None:
        self._ends[key[:2]] = how
        del self._lives[key[:2]]

    def _miss(self, record: Record, key: Key) -> None:
        """A record of a sample that is not in hand."""
        end = self._ends.get(key[:2])
        if record["kind"] == Entry.TRAINED:
            self.num_trained += 1
        elif record["kind"] in _GIVEN_UP:
            self._given_up[record["kind"]][record["reason"]] += 1
        if record["kind"] == end == Entry.TRAINED:
            self._break("no sample is trained twice", [key])
        elif end is not None:
            self._break(f"a sample that was {end} is not {record['kind']} after it", [key])
        else:
            self._break(f"a sample is drawn before it is {record['kind']}", [key])

    def _move(self, life: _Life, before: Sequence[SampleStage], after: SampleStage, rule: str) -> None:
        if life.stage not in before:
            self._break(f"a sample is {rule}", [life.key])
        life.stage = after

    def _break(self, rule: str, samples: Sequence[Key]) -> None:
        self._broken.setdefault(rule, []).extend(samples)


def _keys_of(state: Mapping[str, Any]) -> list[Key]:
    return [ledger_key(entry) for entry in state["outstanding"]]


def ledger_key(sample: Sequence[int]) -> Key:
    """A sample as a record names it."""
    return (sample[0], sample[1], sample[2], sample[3])
