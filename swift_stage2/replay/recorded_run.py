"""The steps that a run took (plan, packs, completions, losses), joined from record and ledger, and a replay's verdict.

Only the last process that every rank began, and of it only the steps that every rank ended. Read by ``command``
and by every rank of a replay, which all come to the same result.
"""

from __future__ import annotations

import json
import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_stage2.columns import read_back
from swift_stage2.errors import UserError
from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry, RecordEntry, ledger_path, record_path
from swift_stage2.telemetry.reading import Process, read_audit, read_ledger, run_of, split_by_process
from swift_stage2.telemetry.record_forms import RECORD_FORMS, has_form
from swift_stage2.whole_file import read_regular

_VERDICT_FILE = "verdict.json"


@dataclass(frozen=True, slots=True)
class RecordedPack:
    """One pack that a step trained; ``completions`` in the order of its segments, without rows and prompts."""

    pack_id: str
    num_tokens: int
    completions: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of one rank. ``losses`` are of its micro_steps, as ``float.hex``; None if not every rank ended it."""

    step: int
    channel: Channel
    version: int
    packs: tuple[RecordedPack, ...]
    losses: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The last process of a recorded run. ``steps`` by rank, alike in number and channel on all ranks.

    The step behind ``last_step``, if there is one, was planned by every rank and not ended by every rank.
    """

    directory: Path
    run_id: str
    world_size: int
    first_step: int
    last_step: int
    save_id: str | None
    """Of the checkpoint that the process resumed."""
    config: Mapping[str, Any]
    surroundings: Mapping[str, Any]
    steps: Mapping[int, tuple[RecordedStep, ...]]

    @property
    def unfinished_step(self) -> int | None:
        """The step behind ``last_step``, if it is asked for and there is one."""
        return self.steps[0][-1].step if self.steps[0][-1].losses is None else None

    def verdict(self, num_compared: int, difference: str | None) -> ReplayVerdict:
        """Of a replay that found ``num_compared`` steps bit-equal, and then ``difference``."""
        return ReplayVerdict(
            first_step=self.first_step,
            last_step=self.last_step,
            num_b_steps=sum(step.channel is Channel.B and step.losses is not None for step in self.steps[0]),
            num_compared=num_compared,
            unfinished_step=self.unfinished_step,
            difference=difference,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayVerdict:
    """How a replay ended: ``num_compared`` steps from ``first_step`` on had the recorded losses on every rank."""

    first_step: int
    last_step: int
    num_b_steps: int
    """Of channel B, among the steps that every rank ended."""
    num_compared: int
    unfinished_step: int | None
    """Taken as well, with nothing to compare it to."""
    difference: str | None

    @property
    def is_equal(self) -> bool:
        """Whether every recorded step was taken and had the recorded losses."""
        return self.difference is None and self.num_compared == self.last_step - self.first_step + 1

    @property
    def sentence(self) -> str:
        if self.difference is not None:
            return f"differs: {self.difference}; steps before it, all bit-equal: {self.num_compared}"
        if not self.is_equal:
            return (
                f"not finished: steps from step {self.first_step} on, all bit-equal: {self.num_compared}; the record "
                f"goes to step {self.last_step}"
            )
        step = self.unfinished_step
        more = "" if step is None else f"; step {step}, which the run did not end, ended here"
        return (
            f"equal: every loss of steps {self.first_step} to {self.last_step}, {self.num_b_steps} of them on channel "
            f"B, is bit-equal on every rank{more}"
        )

    def write(self, output: Path) -> None:
        """Leaves it in ``output`` for who started the ranks."""
        (output / _VERDICT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_verdict(output: Path) -> ReplayVerdict | None:
    """The verdict that rank 0 left; None if it ended before it could."""
    path = output / _VERDICT_FILE
    return ReplayVerdict(**json.loads(read_regular(path))) if path.is_file() else None


def read_run(run_dir: Path, *, unfinished: bool = False) -> RecordedRun:
    """The run in ``run_dir``; with ``unfinished`` also the step that was planned and not ended.

    Raises:
        UserError: no record, a rank's is missing or damaged, no step was ended, or record and ledger disagree.
    """
    records, ledgers = _last_process(run_dir)
    start = records[0][0]
    joins = {rank: _Join(rank, records[rank], ledgers[rank]) for rank in records}
    last = _last_whole_step(run_dir, start["step"], joins)
    planned = unfinished and all(last + 1 in join.plans for join in joins.values())
    steps = {rank: join.steps(start["step"], last, with_next=planned) for rank, join in joins.items()}
    for rank, of_rank in steps.items():
        for mine, first in zip(of_rank, steps[0], strict=True):
            if mine.channel is not first.channel:
                raise UserError(
                    f"every step has one channel on all ranks, got step {mine.step}: {first.channel} on rank 0, "
                    f"{mine.channel} on rank {rank}; the record was changed"
                )
    return RecordedRun(
        directory=run_dir,
        run_id=start["run_id"],
        world_size=start["world_size"],
        first_step=start["step"],
        last_step=last,
        save_id=ledgers[0][0].get("save_id") if ledgers[0] else None,
        config=start["config"],
        surroundings=start["surroundings"],
        steps=steps,
    )


def _last_process(run_dir: Path) -> tuple[dict[int, Process], dict[int, Process]]:
    """Record and ledger by rank of the last process that every rank began. Without channel B the ledger is empty."""
    if not record_path(run_dir, 0).is_file():
        raise UserError(
            f"a replay needs {record_path(run_dir, 0)}, got no such file; name the run directory (swift.output_dir and "
            "in it the folder vN-DATE) of a run with telemetry.record: true"
        )
    processes = {0: _processes(_read_record(record_path(run_dir, 0)))}
    if not processes[0]:
        raise UserError(
            f"{record_path(run_dir, 0)} tells of no process that began; the run ended before its start, or the file is "
            "damaged: bring it here as the run wrote it"
        )
    world_size = list(processes[0].values())[-1][0]["world_size"]
    for rank in range(1, world_size):
        path = record_path(run_dir, rank)
        if not path.is_file():
            raise UserError(
                f"a replay needs the record of all {world_size} ranks, got none of rank {rank}; bring {path} here"
            )
        processes[rank] = _processes(_read_record(path))
    common = [run_id for run_id in processes[0] if all(run_id in of_rank for of_rank in processes.values())]
    if not common:
        raise UserError(
            f"the records in {run_dir} tell of no process that every rank began; bring the files of all ranks here as "
            "the run wrote them"
        )
    run_id = common[-1]
    paths = {rank: ledger_path(run_dir, rank) for rank in processes}
    ledgers = {
        rank: _processes(_read_file(read_ledger, path)).get(run_id, ()) if path.is_file() else ()
        for rank, path in paths.items()
    }
    return {rank: of_rank[run_id] for rank, of_rank in processes.items()}, ledgers


def _read_file(read: Callable[[Path], list[Record]], path: Path) -> list[Record]:
    try:
        return read(path)
    except OSError as error:
        raise UserError(f"a replay reads the record, got {path}: {error}; make it readable") from error


def _read_record(path: Path) -> list[Record]:
    """Without the lines that are no whole record, which a kill leaves."""
    records = _read_file(read_audit, path)
    for record in records:
        if record["kind"] not in RECORD_FORMS or not has_form(record, RECORD_FORMS):
            raise UserError(
                f"{path} is damaged: a line of kind {reprlib.repr(record['kind'])} is none that a record has; bring "
                "the file here as the run wrote it"
            )
    return records


def _processes(records: Sequence[Record]) -> dict[str, Process]:
    return {
        run_id: process
        for process in split_by_process(records)
        if process[0]["kind"] == Entry.START and (run_id := run_of(process)) is not None
    }


def _last_whole_step(run_dir: Path, first: int, joins: Mapping[int, _Join]) -> int:
    ended = set.intersection(*(set(join.plans) & set(join.losses) for join in joins.values()))
    last = first - 1
    while last + 1 in ended:
        last += 1
    # A rank may be one step ahead of another, never two: every step is agreed on.
    for rank, join in joins.items():
        if max(join.losses, default=last) > last + 1:
            raise UserError(
                f"the record of {run_dir} is damaged: a line of step {last + 1} is lost, though rank {rank} tells of "
                "later steps (a full disk leaves such holes)"
            )
    if last < first:
        raise UserError(
            f"the last process of {run_dir} ended before its first step did; there is nothing to replay"
        )
    return last


class _Join:
    """One rank's record and ledger, by what they tell of."""

    def __init__(self, rank: int, record: Process, ledger: Process) -> None:
        self._rank = rank
        self.plans = {line["step"]: line for line in record if line["kind"] == RecordEntry.STEP}
        self.losses = {line["step"]: line["losses"] for line in record if line["kind"] == RecordEntry.LOSSES}
        self._completions = {
            tuple(line["sample"]): line for line in record if line["kind"] == RecordEntry.COMPLETION
        }
        self._advantages = {
            tuple(sample): tuple(advantages)
            for line in record
            if line["kind"] == RecordEntry.ADVANTAGES
            for sample, advantages in zip(line["samples"], line["advantages"], strict=True)
        }
        self._packed = {line["pack_id"]: line for line in ledger if line["kind"] == Entry.PACKED}
        self._trained: dict[int, list[str]] = defaultdict(list)
        for line in ledger:
            if line["kind"] == Entry.TRAINED:
                self._trained[line["step"]].append(line["pack_id"])

    def steps(self, first: int, last: int, *, with_next: bool) -> tuple[RecordedStep, ...]:
        whole = tuple(self._step(step, tuple(self.losses[step])) for step in range(first, last + 1))
        return (*whole, self._step(last + 1, None)) if with_next else whole

    def _step(self, step: int, losses: tuple[str, ...] | None) -> RecordedStep:
        channel, pack_ids = Channel(self.plans[step]["channel"]), self._trained.get(step, [])
        if (channel is Channel.B) != bool(pack_ids):
            raise UserError(
                f"record and ledger of rank {self._rank} disagree about step {step}: channel {channel} and "
                f"{len(pack_ids)} packs of channel B; one of them was changed or is not of this run"
            )
        return RecordedStep(
            step=step,
            channel=channel,
            version=self.plans[step]["version"],
            packs=tuple(self._pack(step, pack_id) for pack_id in pack_ids),
            losses=losses,
        )

    def _pack(self, step: int, pack_id: str) -> RecordedPack:
        packed = self._packed.get(pack_id)
        if packed is None:
            raise UserError(
                f"the ledger of rank {self._rank} tells nothing of pack {pack_id}, which step {step} trained; it was "
                "changed or is damaged"
            )
        completions = tuple(self._completion(step, sample) for sample in packed["samples"])
        return RecordedPack(pack_id, packed["num_tokens"], completions)

    def _completion(self, step: int, sample: Sequence[int]) -> Rollout:
        line = self._completions.get(tuple(sample))
        if line is None:
            raise UserError(
                f"the record of rank {self._rank} lacks what a server said to sample {':'.join(map(str, sample))}, "
                f"which step {step} trained; a full disk leaves such holes"
            )
        return Rollout(
            sample=Sample(SampleKey(*sample), {}),
            text=line["text"],
            token_ids=tuple(line["token_ids"]),
            prompt_token_ids=(),
            truncated=line["truncated"],
            seed=0,
            server="the record",
            spans=tuple(VersionSpan(*span) for span in line["spans"]),
            advantages=self._advantages.get(tuple(sample)),
            **read_back(line),
        )
