"""Turns the ledgers of all ranks into an account: what became of every sample, and what breaks the rules. Pure.

Each rank's effective history is replayed by itself; then the ranks are compared. ``docs/design/ledger.md`` lists the
rules. Called by ``report`` and by the fault bench.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, pairwise
from typing import Any

from swift_stage2.telemetry.audit import GAP, Record
from swift_stage2.telemetry.ledger import Entry

Process = Sequence[Record]
"""What one process wrote; the first record is its ``start``, unless the ledger begins without one."""


def split_by_process(records: Sequence[Record]) -> list[Process]:
    """The processes of a ledger, oldest first."""
    begins = [index for index, record in enumerate(records) if record["kind"] == Entry.START]
    bounds = [0, *(index for index in begins if index), len(records)]
    return [records[begin:end] for begin, end in pairwise(bounds) if records[begin:end]]


def run_of(process: Process) -> str | None:
    """The id that the run's ranks agreed on; None for a process without a ``start``."""
    return process[0].get("run_id")


def effective_history(processes: Sequence[Process]) -> list[Process]:
    """What counts of each process's records, oldest first: those on the way to where the last process stands.

    Each process's records begin with its ``start``. Without the checkpoint that it names, nothing before counts.
    """
    history: list[Process] = []
    number, end = len(processes) - 1, None
    while number >= 0:
        part = processes[number][:end]
        history.append(part)
        save_id = part[0].get("save_id") if part else None
        found = _find_checkpoint(processes[:number], save_id) if save_id else None
        number, end = found or (-1, None)
    return history[::-1]


def _find_checkpoint(processes: Sequence[Process], save_id: str) -> tuple[int, int] | None:
    """(process, number of its records up to and with the checkpoint)."""
    for number in reversed(range(len(processes))):
        for index, record in enumerate(processes[number]):
            if record["kind"] == Entry.CHECKPOINT and record["save_id"] == save_id:
                return number, index + 1
    return None


_MOST_STEPS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one rank's file in a checkpoint says of its samples."""

    name: str
    step: int
    save_id: str
    state: Mapping[str, Any]


@dataclass(slots=True)
class Witness:
    """What else is known of one rank."""

    packs: set[tuple[int, str]] = field(default_factory=set)
    """(step, pack) that the audit tells of; a step's ledger record is written before its audit record."""
    ended_run: str | None = None
    """The id of the last process, if its audit tells an orderly end, which its ledger tells before."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Those on disk; the ledger's record of one is there before it."""


def doubts_of(
    rank: int, witness: Witness, history: Sequence[Process], ledger: Sequence[Record]
) -> Iterator[str]:
    """What is missing in a rank's ``ledger``, of which ``history`` counts."""
    records = list(chain.from_iterable(history))
    trained = {(record["step"], record["pack_id"]) for record in records if record["kind"] == Entry.TRAINED}
    if missing := sorted(witness.packs - trained):
        steps = sorted({step for step, _ in missing})
        yield (
            f"rank {rank}: the audit tells of {len(witness.packs)} packs of channel B that steps trained, the ledger "
            f"lacks {len(missing)} of them, of {_named(steps)}"
        )
    if history and witness.ended_run is not None and run_of(history[-1]) == witness.ended_run:
        is_numbered = history[-1][0].get("sequence") is not None  # earlier releases told no end
        if is_numbered and history[-1][-1]["kind"] != Entry.END:
            yield f"rank {rank}: the audit tells that the run ended in order, the ledger ends before that"
    yield from _checkpoints(rank, witness.checkpoints, records, ledger)


def _checkpoints(
    rank: int, checkpoints: Sequence[Checkpoint], records: Sequence[Record], ledger: Sequence[Record]
) -> Iterator[str]:
    first_step = min((record["step"] for record in ledger if record["kind"] == Entry.START), default=0)
    counted = {record["save_id"]: record for record in records if record["kind"] == Entry.CHECKPOINT}
    told = {record.get("save_id") for record in ledger if record["kind"] in (Entry.START, Entry.CHECKPOINT)}
    for checkpoint in checkpoints:
        record = counted.get(checkpoint.save_id)
        if record is None and checkpoint.save_id not in told and checkpoint.step > first_step:
            yield f"rank {rank}: {checkpoint.name} is of a save that the ledger does not tell of"
        elif record is not None and record["state"] != checkpoint.state:
            yield f"rank {rank}: {checkpoint.name} holds other samples in hand than the ledger tells"


def _named(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_STEPS_SHOWN]))
    more = len(steps) - _MOST_STEPS_SHOWN
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """All ranks' accounts, and what only shows when they are compared."""

    ranks: tuple[RankAccount, ...]
    violations: tuple[Violation, ...]
    doubts: tuple[str, ...] = ()
    """What others tell of the run and its ledger does not (``ledger_witnesses``), a sentence each."""

    @property
    def num_violations(self) -> int:
        """Broken rules, over all ranks."""
        return len(self.violations) + sum(len(rank.violations) for rank in self.ranks)

    @property
    def is_provable(self) -> bool:
        """Whether every record of the effective history is there, as far as anything tells."""
        return not self.doubts and not any(rank.num_records_lost for rank in self.ranks)

    @property
    def is_balanced(self) -> bool:
        """Whether it is proven that every sample has one end or is in hand."""
        return self.is_provable and self.num_violations == 0


def account_of(
    ledgers: Mapping[int, Sequence[Record]], witnesses: Mapping[int, Witness] | None = None
) -> RunAccount:
    """The account of a run from the records of every rank, oldest first; parts of a run follow each other.

    ``witnesses`` by rank: what else tells of what its ledger must hold.
    """
    histories = effective_histories(ledgers)
    doubts = (
        doubt
        for rank, witness in sorted((witnesses or {}).items())
        for doubt in doubts_of(rank, witness, histories.get(rank, []), ledgers.get(rank, []))
    )
    ranks = tuple(
        _replay(rank, history, sum(len(r["samples"]) for r in ledgers[rank] if r["kind"] == Entry.TRAINED))
        for rank, history in histories.items()
    )
    return RunAccount(ranks=ranks, violations=tuple(_compare(histories)), doubts=tuple(doubts))


def effective_histories(ledgers: Mapping[int, Sequence[Record]]) -> dict[int, list[Process]]:
    """By rank, what counts of each process's records, oldest first."""
    processes = {rank: split_by_process(records) for rank, records in sorted(ledgers.items())}
    # A process that some rank never began cannot have trained, for every step is agreed on by all.
    common = set.intersection(*({run_of(process) for process in every} for every in processes.values()))
    return {
        rank: effective_history([process for process in every if run_of(process) in common])
        for rank, every in processes.items()
    }


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
    world_size = histories[first][-1][0].get("world_size", 1)
    if missing := sorted(set(range(world_size)) - set(histories)):
        yield Violation(
            f"every rank has a ledger, rank {', '.join(map(str, missing))} of {world_size} has none"
        )


Key = tuple[int, int, int, int]
"""Epoch, position in the rank's shard, row of the data set, attempt."""
Place = tuple[int, int]
"""Epoch and position: what names a sample of a rank's stream for good."""


class SampleStage(StrEnum):
    """Where a sample in hand is."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """One rank's samples. ``taken_over + drawn == trained + quarantined + in_hand``, or a violation says so."""

    rank: int
    taken_over: int
    """In hand when the first process whose records are here resumed a checkpoint from elsewhere."""
    drawn: int
    """Each sample once, however often it was redrawn."""
    trained: int
    quarantined: Mapping[str, int]
    """By reason."""
    in_hand: Mapping[str, int]
    """By stage."""
    returned: Mapping[str, int]
    """Returns by reason; a sample may return several times."""
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
    """A sample in hand."""

    key: Key
    stage: SampleStage
    version: int | None = None
    pack_id: str | None = None


@dataclass(slots=True)
class Replay:
    """One rank's stream, made again from its records. ``num_trained`` counts records, not distinct samples."""

    rank: int
    num_trained: int = 0
    _taken_over: int = 0
    _num_drawn: int = 0
    _num_lost: int = 0  # as gaps and torn lines tell
    _num_missing: int = 0  # as the numbers of the others tell; much of it the same
    _next_sequence: int = 0
    _has_ended: bool = False
    _quarantined: Counter[str] = field(default_factory=Counter)
    _returned: Counter[str] = field(default_factory=Counter)
    _broken: dict[str, list[Key]] = field(default_factory=dict)
    _lives: dict[Place, _Life] = field(default_factory=dict)
    _ends: dict[Place, Entry] = field(default_factory=dict)
    _rows: set[int] = field(default_factory=set)  # of the present epoch, drawn so far
    _cursor: Place | None = None  # of the next new sample
    _shard: int = 0
    _window: int = 0
    _first_step: int = 0  # before which no step can train any more
    _last_trained: int = -1
    _saved: Mapping[str, Any] | None = None  # the state of the checkpoint just replayed

    def take(self, record: Record) -> None:
        """Replays one record."""
        self._has_ended = record["kind"] == Entry.END
        self._find_missing(record)
        match record["kind"]:
            case Entry.TORN:
                self._num_lost += 1
                return
            case kind if kind == GAP:
                self._num_lost += int(record["records_lost"])
                return
            case Entry.START:
                self._start(record)
                return
            case Entry.CHECKPOINT:
                self._checkpoint(record)
                return
            case Entry.END:
                return
        if self._cursor is None:
            self._break("a process's first record tells that it starts", ())
            self._cursor = (0, 0)
        for sample in record["samples"]:
            self._take_sample(record, _key(sample))
        if record["kind"] == Entry.TRAINED:
            self._train_step(record)

    def account(self, *, num_resumes: int, num_void: int) -> RankAccount:
        """What the records came to."""
        num_quarantined, num_in_hand = self._quarantined.total(), len(self._lives)
        if self._taken_over + self._num_drawn != self.num_trained + num_quarantined + num_in_hand:
            self._break(
                f"drawn = trained + quarantined + in hand, got {self._taken_over} taken over + "
                f"{self._num_drawn} drawn, {self.num_trained} trained + {num_quarantined} quarantined + "
                f"{num_in_hand} in hand",
                (),
            )
        return RankAccount(
            rank=self.rank,
            taken_over=self._taken_over,
            drawn=self._num_drawn,
            trained=self.num_trained,
            quarantined=dict(sorted(self._quarantined.items())),
            in_hand={
                stage.value: count
                for stage in SampleStage
                if (count := sum(life.stage is stage for life in self._lives.values()))
            },
            returned=dict(sorted(self._returned.items())),
            num_resumes=num_resumes,
            num_void=num_void,
            num_records_lost=max(self._num_lost, self._num_missing),
            has_ended=self._has_ended,
            violations=tuple(Violation(rule, tuple(samples)) for rule, samples in self._broken.items()),
        )

    def _find_missing(self, record: Record) -> None:
        """Each process numbers its records from 0; those of earlier releases have no number."""
        sequence = record.get("sequence")
        if sequence is None:
            return
        expected = 0 if record["kind"] == Entry.START else self._next_sequence
        self._num_missing += max(0, sequence - expected)
        self._next_sequence = max(expected, sequence + 1)

    def _start(self, record: Record) -> None:
        state = record["state"]
        if self._cursor is None:
            self._open(state, is_resumed=record["save_id"] is not None)
        elif state != self._saved:
            self._break(
                "a resumed process begins with the very state of its checkpoint", self._keys_of(state)
            )
        self._window, self._first_step, self._saved = record["version_window"], record["step"], None
        for life in self._lives.values():  # whatever the process before had of them is gone
            life.stage, life.version, life.pack_id = SampleStage.TO_BE_REDRAWN, None, None

    def _open(self, state: Mapping[str, Any], *, is_resumed: bool) -> None:
        keys = self._keys_of(state)
        self._cursor = (state["epoch"], state["position"])
        self._shard = len(range(self.rank, state["num_rows"], state["world_size"]))
        self._lives = {key[:2]: _Life(key, SampleStage.TO_BE_REDRAWN) for key in keys}
        self._taken_over = len(keys)
        if not is_resumed and (keys or self._cursor != (0, 0)):
            self._break("a run that resumes nothing begins at its stream's first sample", keys)

    def _checkpoint(self, record: Record) -> None:
        state, step = record["state"], record["step"]
        if sorted(self._keys_of(state)) != sorted(life.key for life in self._lives.values()):
            wrong = set(self._keys_of(state)) ^ {life.key for life in self._lives.values()}
            self._break("a checkpoint holds exactly the samples in hand", sorted(wrong))
        if (state["epoch"], state["position"]) != self._cursor:
            self._break("a checkpoint's cursor stands behind the last new sample", ())
        if step <= self._last_trained:
            self._break("a checkpoint before a step is taken before that step trains", ())
        self._first_step, self._saved = step, state

    def _train_step(self, record: Record) -> None:
        step = record["step"]
        if step < self._first_step:
            self._break("steps that train only grow", [_key(sample) for sample in record["samples"]])
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
            case Entry.READ:
                self._move(life, (SampleStage.DRAWN,), SampleStage.DRAWN, "read once it was drawn")
            case Entry.SENT:
                self._move(
                    life, (SampleStage.DRAWN, SampleStage.SENT), SampleStage.SENT, "sent once it was drawn"
                )
            case Entry.FINISHED:
                after = SampleStage.FINISHED if record["end"] == "answered" else SampleStage.DRAWN
                self._move(life, (SampleStage.SENT,), after, "finished once it was sent")
            case Entry.MATCHED:
                self._move(life, (SampleStage.FINISHED,), SampleStage.MATCHED, "matched once it was answered")
                life.version = record["version"]
            case Entry.PACKED:
                self._move(life, (SampleStage.MATCHED,), SampleStage.PACKED, "packed once it was matched")
                life.pack_id = record["pack_id"]
            case Entry.RETURNED:
                self._return(record, key, life)
            case Entry.TRAINED:
                self._train(record, key, life)
            case Entry.QUARANTINED:
                self._quarantined[record["reason"]] += 1
                self._end(key, Entry.QUARANTINED)

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
        if key[2] in self._rows:
            self._break("no row is drawn at two positions of an epoch", [key])
        self._rows.add(key[2])
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
        elif record["kind"] == Entry.QUARANTINED:
            self._quarantined[record["reason"]] += 1
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

    @staticmethod
    def _keys_of(state: Mapping[str, Any]) -> list[Key]:
        return [_key(entry) for entry in state["outstanding"]]


def _key(sample: Sequence[int]) -> Key:
    return (sample[0], sample[1], sample[2], sample[3])
