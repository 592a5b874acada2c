"""The audits and ledgers of a run in which a fault was injected, turned into what the table says: pure.

Times are Unix seconds, as the audit has them. Steps and rounds are rank 0's, because all ranks decide alike (a
difference is counted); samples are every rank's own, and the ledger's account judges them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger_account import RankAccount, RunAccount, Violation

TAKEN = "taken"
"""Kind of the record that the plugin of the bench's jobs writes of rollouts, by round, as they go on to be trained."""
_NUM_WARMUP_STEPS = 3
_NANOSECONDS = 1e9
COUNTERS = (
    "sync_rounds_committed",
    "sync_rounds_failed",
    "rollouts_failed",
    "samples_returned",
    "samples_quarantined",
    "packs_dropped_stale",
    "segments_dropped_stale",
)
_SAME_ON_ALL_RANKS = ("sync_rounds_committed", "sync_rounds_failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When the bench did what. ``healed`` is None where nothing needs healing; ``restarted`` where nothing was."""

    fault: float
    healed: float | None = None
    restarted: float | None = None
    """From here on another process answers at the server's address, with weights that this run did not send."""
    spoilt_round: float | None = None
    """When the round was recorded whose weights were spoilt."""
    asked_unproven: int = 0
    """Rollouts that a proxy saw asked of a server that the rounds meanwhile did not prove."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCount:
    """Counts samples by the end that the ledgers prove."""

    drawn: int = 0
    trained: int = 0
    quarantined: int = 0
    in_hand: int = 0
    broken_rules: tuple[str, ...] = ()
    records_lost: int = 0

    @classmethod
    def of(cls, ranks: Sequence[RankAccount], violations: Sequence[Violation] = ()) -> SampleCount:
        """Of these ranks; ``violations`` are those that show when they are compared."""
        return cls(
            drawn=sum(rank.drawn for rank in ranks),
            trained=sum(rank.trained for rank in ranks),
            quarantined=sum(sum(rank.quarantined.values()) for rank in ranks),
            in_hand=sum(sum(rank.in_hand.values()) for rank in ranks),
            broken_rules=tuple(
                broken.rule for part in (violations, *(rank.violations for rank in ranks)) for broken in part
            ),
            records_lost=sum(rank.num_records_lost for rank in ranks),
        )

    @property
    def lost(self) -> int:
        """Drawn, but neither trained nor quarantined nor in hand."""
        return self.drawn - self.trained - self.quarantined - self.in_hand

    @property
    def sentence(self) -> str:
        ends = f"{self.trained} trained + {self.quarantined} quarantined + {self.in_hand} in hand"
        return f"{self.drawn} drawn = {ends}"


@dataclass(frozen=True, slots=True)
class Gap:
    """From one step record to the next: step ``step``'s training, and what precedes the next step's plan."""

    step: int
    channel: str
    start: float
    seconds: float
    waiting_s: float
    """Main thread neither computing nor in a round: data, agreement, the other rank."""
    syncing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Channel-A steps before the fault, and from the fault until B may run again."""

    num_before: int
    num_around: int
    median_before_s: float | None
    longest_around_s: float | None
    """The longest step without a round in it; None where every step had one, or there was none."""
    median_around_s: float | None
    longest_wait_s: float
    """The longest time in one step in which the main thread did not compute, rounds apart, beyond the median before."""
    num_rounds: int
    longest_round_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    noticed_after_steps: int | None
    """0: in the step in which it happened."""
    noticed_as: str
    round_errors: tuple[str, ...]
    """Of rounds that failed after the fault, each once."""
    proofs_passed: tuple[str, ...]
    """Kinds of proof that servers passed after the fault, in rounds or as they caught up."""
    steps_until_proof: int | None
    """Steps from the fault to the first committed round after it was healed; None when there was none."""
    steps_run_meanwhile: int
    b_steps_meanwhile: int
    """B steps on packs that were ready when it happened, or made since from a proven server."""
    b_skipped: Mapping[str, int]
    pause: Pause
    samples: SampleCount
    unproven_rollouts: int
    """Accepted from a restarted server before a round proved it, made by weights of a round that proved nobody, or
    asked of the one server that did not prove."""
    counters: Mapping[str, int]
    warnings: tuple[str, ...]
    caught_by: str | None = None
    """The spoilt round was refused by "canary", "checksums" (the canary, asked before, had agreed), or "nothing"."""
    quarantined: tuple[str, ...] = ()
    quarantining_batches: tuple[str, ...] = ()
    """The fate of the rest of the batch in which a sample was quarantined."""
    failed_posts: Mapping[str, int] = field(default_factory=dict)
    b_again_at_step: int | None = None
    """Steps from the fault to the first B step after the proof."""
    num_disagreements: int = 0


def report(records: Sequence[Sequence[Record]], samples: RunAccount, moments: Moments) -> FaultReport:
    """``records[rank]`` is one rank's audit; ``samples`` what the ledgers of all ranks come to."""
    first = records[0]
    steps, rounds = of_kind(first, "step"), of_kind(first, "round")
    proof = _proof_after(first, moments)
    end = proof["time"] if proof else float("inf")
    noticed = first_notice(records, moments.fault)
    later = [record for record in rounds if record["time"] >= moments.fault]
    step_of_fault = _step_at(steps, moments.fault)
    meanwhile = [step for step in steps if moments.fault <= step["time"] < end]
    b_again = next((step for step in steps if step["time"] >= end and step["channel"] == "B"), None)
    everything = [record for part in records for record in part]
    return FaultReport(
        noticed_after_steps=_step_at(steps, noticed["time"]) - step_of_fault if noticed else None,
        noticed_as=_words(noticed) if noticed else "",
        round_errors=_each_once(_errors(later)),
        proofs_passed=_each_once(
            _proofs(record for record in first if is_proof(record) and record["time"] >= moments.fault)
        ),
        steps_until_proof=_step_at(steps, end) - step_of_fault if proof else None,
        steps_run_meanwhile=len(meanwhile),
        b_steps_meanwhile=sum(step["channel"] == "B" for step in meanwhile),
        b_skipped=dict(Counter(step["skip_reason"] for step in meanwhile if step["skip_reason"])),
        pause=pause(gaps(steps), later, moments.fault, end),
        samples=SampleCount.of(samples.ranks, samples.violations),
        unproven_rollouts=moments.asked_unproven
        + num_taken_of_failed_rounds(records, moments.fault)
        + sum(
            taken["num_rollouts"]  # not of batches, which are told together, and later than they came
            for taken in of_kind(everything, TAKEN)
            if moments.restarted is not None and moments.restarted <= taken["time"] < end
        ),
        counters=_counters(records),
        warnings=_each_once(
            record["message"] for record in of_kind(first, "warning") if record["time"] >= moments.fault
        ),
        quarantined=tuple(record["message"] for record in of_kind(everything, "quarantine")),
        quarantining_batches=tuple(
            f"batch of {batch['num_rollouts'] + batch['num_returned'] + batch['num_quarantined']}: "
            f"{batch['num_quarantined']} quarantined, {batch['num_rollouts']} answered, "
            f"{batch['num_returned']} returned, {batch['num_posts']} POSTs"
            for batch in of_kind(everything, "batch")
            if batch["num_quarantined"]
        ),
        failed_posts=dict(
            Counter(
                str(failure["end"])
                for record in of_kind(everything, "batch")
                if record["time"] >= moments.fault
                for failure in _failures(record)
            )
        ),
        b_again_at_step=b_again["step"] - step_of_fault if b_again else None,
        num_disagreements=num_disagreements(records),
        caught_by=_caught_by(rounds, moments.spoilt_round),
    )


def gaps(steps: Sequence[Record]) -> list[Gap]:
    """One gap lies between two step records; the later one tells how the main thread spent it."""
    return [
        Gap(
            step=step["step"],
            channel=step["channel"],
            start=step["time"],
            seconds=following["time"] - step["time"],
            waiting_s=following["activity_ns"].get("waiting", 0) / _NANOSECONDS,
            syncing_s=following["activity_ns"].get("syncing", 0) / _NANOSECONDS,
        )
        for step, following in pairwise(steps)
    ]


def pause(every: Sequence[Gap], rounds: Sequence[Record], fault: float, end: float) -> Pause:
    """``rounds`` are those since the fault; ``end`` is when B may run again."""
    a_gaps = [gap for gap in every[_NUM_WARMUP_STEPS:] if gap.channel == "A"]
    before = [gap for gap in a_gaps if gap.start + gap.seconds <= fault and gap.syncing_s == 0]
    around = [gap for gap in a_gaps if gap.start + gap.seconds > fault and gap.start < end]
    quiet = [gap for gap in around if gap.syncing_s == 0]
    usual_wait_s = statistics.median(gap.waiting_s for gap in before) if before else 0.0
    of_now = [record for record in rounds if record["time"] <= end]
    return Pause(
        num_before=len(before),
        num_around=len(around),
        median_before_s=statistics.median(gap.seconds for gap in before) if before else None,
        longest_around_s=max((gap.seconds for gap in quiet), default=None),
        median_around_s=statistics.median(gap.seconds for gap in quiet) if quiet else None,
        longest_wait_s=max((gap.waiting_s - usual_wait_s for gap in around), default=0.0),
        num_rounds=len(of_now),
        longest_round_s=max((record["seconds"] for record in of_now), default=0.0),
    )


def first_notice(records: Sequence[Sequence[Record]], fault: float) -> Record | None:
    """The first record that no rank would have written without the fault."""
    found = [
        record
        for part in records
        for record in part
        if record["time"] >= fault
        and (
            record["kind"] in ("warning", "quarantine")
            or (record["kind"] == "round" and (not record["committed"] or _errors([record])))
            or (record["kind"] == "batch" and _failures(record))
        )
    ]
    return min(found, key=lambda record: float(record["time"]), default=None)


def is_proof(record: Record) -> bool:
    """True for the record of a round or of a catch-up that proved at least one server."""
    return record["kind"] in ("round", "catch_up") and any(_proofs([record]))


def _proof_after(records: Sequence[Record], moments: Moments) -> Record | None:
    since = moments.fault if moments.healed is None else moments.healed
    return next((record for record in records if is_proof(record) and record["time"] >= since), None)


def _caught_by(rounds: Sequence[Record], spoilt_round: float | None) -> str | None:
    spoilt = [record for record in rounds if record["time"] == spoilt_round]
    if not spoilt:
        return None
    errors = _errors(spoilt)
    if not errors:
        return "nothing"
    return next((name for name in ("canary", "checksums") if name.rstrip("s") in errors[0]), errors[0])


def _words(record: Record) -> str:
    match record["kind"]:
        case "warning" | "quarantine":
            return str(record["message"])
        case "round":
            return next(iter(_errors([record])), "a round failed")
    first = _failures(record)[0]
    return f"{first['end']}: {first['reason']}"


def _failures(batch: Record) -> list[Record]:
    """Of its POSTs, those that a stop did not end."""
    return [failure for failure in batch["failures"] if failure["end"] != "stopped"]


def _errors(rounds: Iterable[Record]) -> list[str]:
    return [
        str(server["error"]) for record in rounds for server in record["servers"].values() if server["error"]
    ]


def _proofs(rounds: Iterable[Record]) -> list[str]:
    return [
        str(server["proof"]) for record in rounds for server in record["servers"].values() if server["proven"]
    ]


def _step_at(steps: Sequence[Record], moment: float) -> int:
    """The step that was being trained at ``moment``; -1 before the first."""
    return max((int(step["step"]) for step in steps if step["time"] <= moment), default=-1)


def _counters(records: Sequence[Sequence[Record]]) -> dict[str, int]:
    last = [metrics[-1]["numbers"] for part in records if (metrics := of_kind(part, "metrics"))]
    return {
        name: int(sum(numbers.get(name, 0) for numbers in (last[:1] if name in _SAME_ON_ALL_RANKS else last)))
        for name in COUNTERS
    }


def num_disagreements(records: Sequence[Sequence[Record]]) -> int:
    """Steps of rank 0 that some other rank trained otherwise, or not. ``records[rank]`` is one rank's whole audit."""
    plans = [
        {step["step"]: (step["channel"], step["version"]) for step in of_kind(part, "step")}
        for part in records
    ]
    return sum(any(plan.get(step) != what for plan in plans[1:]) for step, what in plans[0].items())


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def num_taken_of_failed_rounds(records: Sequence[Sequence[Record]], since: float) -> int:
    """Rollouts of all ranks that went on to be trained, and whose stamp names no round that proved a server.

    The last round of a run may have no record. Stock servers do not stamp: theirs have no name at all.
    """
    rounds = of_kind(records[0], "round")
    committed = {each["round_id"]: each["committed"] for each in rounds}
    last = max((each["time"] for each in rounds), default=0.0)
    return sum(
        taken["num_rollouts"]
        for part in records
        for taken in of_kind(part, TAKEN)
        if taken["time"] >= since
        and taken["round_id"] is not None
        and not committed.get(taken["round_id"], taken["time"] > last)
    )


def _each_once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
