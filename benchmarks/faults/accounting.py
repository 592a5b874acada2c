"""The event logs of a run in which something was broken, turned into what the tables say: pure.

Times are Unix seconds, as the events have them. Steps and rounds are rank 0's, because all ranks decide alike (a
difference is counted); samples are every rank's own, and the account judges them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from swift_stage2.telemetry.account import RunAccount
from swift_stage2.telemetry.events import Event

Record = dict[str, Any]
"""An event as its line has it."""


class Taken(Event):
    """The plugin of the bench's jobs writes it of rollouts, by version, as they go on to be trained."""

    kind: Literal["taken"] = "taken"
    version: int
    num_rollouts: int


@dataclass(slots=True)
class Moments:
    """When the bench did what; None: it did not."""

    fault: float
    healed: float | None = None
    """From here on nothing stands in the way of a proof."""
    restarted: float | None = None
    """From here on what answers at the server's address has weights that no round has proven."""


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
class FaultReport:
    noticed_as: str
    """By the first record that no rank would have written without the fault."""
    steps_until_proof: int | None
    """From the fault to the first round that proved a server after it was healed; None when there was none."""
    steps_until_b: int | None
    """From the fault to the first B step after the proof."""
    longest_wait_s: float
    """In one step of channel A from the fault to the proof, rounds apart, beyond the median before."""
    unproven_rollouts: int
    """Taken from a restarted server before a round proved it, or made by weights of a round that proved nobody."""

    @property
    def problems(self) -> list[str]:
        found = ["B did not run again"] if self.steps_until_b is None else []
        if self.unproven_rollouts:
            found.append(f"{self.unproven_rollouts} rollouts taken of an unproven server")
        return found


def report(records: Sequence[Sequence[Record]], moments: Moments) -> FaultReport:
    """``records[rank]`` is one rank's log, up to the next fault."""
    steps, fault = of_kind(records[0], "step"), moments.fault
    since = fault if moments.healed is None else moments.healed
    proof = next((each for each in records[0] if is_proof(each) and each["time"] >= since), None)
    end = proof["time"] if proof else float("inf")
    noticed = first_notice(records, fault)
    b_again = next((step for step in steps if step["time"] >= end and step["channel"] == "B"), None)
    return FaultReport(
        noticed_as=_words(noticed) if noticed else "nothing",
        steps_until_proof=_step_at(steps, end) - _step_at(steps, fault) if proof else None,
        steps_until_b=b_again["step"] - _step_at(steps, fault) if b_again else None,
        longest_wait_s=longest_wait(gaps(steps), fault, end),
        unproven_rollouts=_num_unproven(records, moments, end),
    )


def gaps(steps: Sequence[Record]) -> list[Gap]:
    """One gap lies between two step records; the later one tells how the main thread spent it."""
    return [
        Gap(
            step=step["step"],
            channel=step["channel"],
            start=step["time"],
            seconds=following["time"] - step["time"],
            waiting_s=following["activity_ns"].get("waiting", 0) / 1e9,
            syncing_s=following["activity_ns"].get("syncing", 0) / 1e9,
        )
        for step, following in pairwise(steps)
    ]


def longest_wait(every: Sequence[Gap], fault: float, end: float) -> float:
    """Seconds that the main thread waited longest in a step of channel A from ``fault`` on, beyond the usual."""
    of_a = [gap for gap in every if gap.channel == "A"]
    usual = [gap.waiting_s for gap in of_a if gap.start + gap.seconds <= fault]
    around = [gap.waiting_s for gap in of_a if gap.start + gap.seconds > fault and gap.start < end]
    return max(around, default=0.0) - (statistics.median(usual) if usual else 0.0)


def first_notice(records: Sequence[Sequence[Record]], fault: float) -> Record | None:
    found = [
        record
        for part in records
        for record in part
        if record["time"] >= fault
        and (
            record["kind"] in ("warning", "quarantined")
            or (record["kind"] == "round" and (not record["committed"] or _errors([record])))
            or (record["kind"] == "failures" and _failures(record))
        )
    ]
    return min(found, key=lambda record: float(record["time"]), default=None)


def is_proof(record: Record) -> bool:
    """True for the record of a round or of a catch-up that proved at least one server."""
    return record["kind"] in ("round", "catch_up") and any(
        server["proven"] for server in record["servers"].values()
    )


def num_disagreements(records: Sequence[Sequence[Record]]) -> int:
    """Steps of rank 0 that some other rank trained otherwise, or not. ``records[rank]`` is one rank's whole log."""
    plans = [
        {step["step"]: (step["channel"], step["version"]) for step in of_kind(part, "step")}
        for part in records
    ]
    return sum(any(plan.get(step) != what for plan in plans[1:]) for step, what in plans[0].items())


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def account_sentence(account: RunAccount) -> str:
    """Samples of all ranks by the end that the logs prove, and every rule that is broken."""
    ranks = account.ranks
    drawn, trained = sum(rank.drawn for rank in ranks), sum(rank.trained for rank in ranks)
    quarantined = sum(sum(rank.quarantined.values()) for rank in ranks)
    in_hand = sum(sum(rank.in_hand.values()) for rank in ranks)
    broken = [each.rule for part in (account.violations, *(r.violations for r in ranks)) for each in part]
    lost = sum(rank.num_damaged for rank in ranks)
    faults = "; ".join([*broken, *([f"{lost} lines damaged"] if lost else [])]) or "balanced"
    return f"{drawn} drawn = {trained} trained + {quarantined} quarantined + {in_hand} in hand; {faults}"


def _num_unproven(records: Sequence[Sequence[Record]], moments: Moments, end: float) -> int:
    """The last round of a run may have no record."""
    rounds = of_kind(records[0], "round")
    committed = {each["version"]: each["committed"] for each in rounds}
    last = max((each["time"] for each in rounds), default=0.0)
    taken = [
        record for part in records for record in of_kind(part, "taken") if record["time"] >= moments.fault
    ]
    of_failed: int = sum(
        each["num_rollouts"] for each in taken if not committed.get(each["version"], each["time"] > last)
    )
    begin = float("inf") if moments.restarted is None else moments.restarted
    early: int = sum(each["num_rollouts"] for each in taken if begin <= each["time"] < end)
    return of_failed + early


def _words(record: Record) -> str:
    match record["kind"]:
        case "warning" | "quarantined":
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


def _step_at(steps: Sequence[Record], moment: float) -> int:
    """The step that was being trained at ``moment``; -1 before the first."""
    return max((int(step["step"]) for step in steps if step["time"] <= moment), default=-1)
