"""The reports of all rows as one table in Markdown, and as JSON; nothing in it is written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.faults.accounting import FaultReport
from benchmarks.faults.server import Leftovers
from benchmarks.results import ResultTable

_HEADINGS = (
    "fault",
    "what the learner did",
    "steps from fault to proof (B on ready packs)",
    "A step, s: median before → longest around (median around); rounds in it: longest, s",
    "drawn = trained + quarantined + in hand; rules broken",
    "counters",
    "B again",
    "left",
)
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
_WEIGHTS_ROOT = re.compile(r"(?:/[^\s/]+)+/weights\b")
_SOURCE_LINE = re.compile(r"\[?/\S+\.(?:cc|cpp|h|py):\d+\]? ?")
_LONG_HEX = re.compile(r"'?[0-9a-f]{16,}'?")
_LONGEST_QUOTE = 170
_CAUGHT = {
    "canary": "caught by the canary",
    "checksums": "caught by the checksums, the canary before them had agreed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One row as it ran. Without a ``report`` it is not possible on this server, or broke: ``note`` says which."""

    name: str
    title: str
    note: str = ""
    report: FaultReport | None = None
    exit_status: int | None = None
    left: Leftovers = field(default_factory=Leftovers)
    seconds: float = 0.0

    @property
    def problems(self) -> tuple[str, ...]:
        """Names all that must not be; empty for a row that went as it should."""
        if self.report is None:
            return (self.note,) if self.exit_status is not None or self.seconds else ()
        report, found = self.report, []
        samples = report.samples
        for what, number in (
            ("rules of the ledger broken", len(samples.broken_rules)),
            ("records of the ledger lost", samples.records_lost),
            ("rollouts taken of an unproven server", report.unproven_rollouts),
            ("steps on which ranks disagree", report.num_disagreements),
            ("things left", self.left.num),
        ):
            if number:
                found.append(f"{number} {what}")
        if report.caught_by == "nothing":
            found.append("the spoilt round was proven: nothing caught it")
        if report.b_again_at_step is None:
            found.append("B did not run again")
        if self.exit_status != 0:
            found.append(f"the learner ended with status {self.exit_status}")
        return tuple(found)


def markdown(results: Sequence[RowResult]) -> str:
    return ResultTable("", _HEADINGS, [_cells(result) for result in results]).markdown()


def as_json(results: Sequence[RowResult], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured, without the addresses of this machine."""
    rows = [asdict(result) | {"problems": list(result.problems)} for result in results]
    cleaned: dict[str, Any] = _clean({**facts, "rows": rows})
    return cleaned


def _cells(result: RowResult) -> tuple[str, ...]:
    if result.report is None:
        return (result.title, result.note, *[""] * (len(_HEADINGS) - 2))
    report, left = result.report, result.left
    samples = report.samples
    kept = f"{samples.drawn} = {samples.trained} + {samples.quarantined} + {samples.in_hand}"
    proof = "never" if report.steps_until_proof is None else str(report.steps_until_proof)
    return (
        result.title,
        _what_it_did(report, result.problems),
        f"{proof} ({report.b_steps_meanwhile})",
        _pause(report),
        f"{kept}; {len(samples.broken_rules)}",
        ", ".join(f"{name} {number}" for name, number in report.counters.items() if number) or "–",
        "no" if report.b_again_at_step is None else f"after {report.b_again_at_step} steps",
        ", ".join([*left.processes, *(f"port {port}" for port in left.ports), *left.shared_memory]) or "0",
    )


def _what_it_did(report: FaultReport, problems: Sequence[str]) -> str:
    when = report.noticed_after_steps
    noticed = (
        "noticed nothing" if when is None else f"noticed after {when} steps: {_quote(report.noticed_as)}"
    )
    parts = [noticed]
    parts += [
        f"round failed: {_quote(error)}" for error in report.round_errors[:2] if error != report.noticed_as
    ]
    if report.caught_by in _CAUGHT:
        parts.append(_CAUGHT[report.caught_by])
    parts += report.quarantining_batches
    if report.failed_posts:
        parts.append("POSTs: " + ", ".join(f"{number} {end}" for end, number in report.failed_posts.items()))
    if report.unproven_rollouts:
        parts.append(f"**{report.unproven_rollouts} rollouts taken before a proof**")
    if report.b_skipped:
        parts.append(f"B skipped at {sum(report.b_skipped.values())} steps")
    if report.proofs_passed:
        parts.append(f"proven by {', '.join(report.proofs_passed)}")
    parts += [f"**{problem}**" for problem in problems if "unproven" not in problem]
    return "; ".join(parts)


def _pause(report: FaultReport) -> str:
    pause = report.pause
    times = (pause.median_before_s, pause.longest_around_s, pause.median_around_s)
    before, longest, around = ("–" if value is None else f"{value:.2f}" for value in times)
    rounds = f"{pause.num_rounds}: {pause.longest_round_s:.2f}" if pause.num_rounds else "0"
    return f"{before} → {longest} ({around}); {rounds}; longest wait {max(0.0, pause.longest_wait_s):.2f}"


def _quote(text: str) -> str:
    text = " ".join(_clean_text(text).split())
    if len(text) > _LONGEST_QUOTE:
        text = text[:_LONGEST_QUOTE].rpartition(" ")[0] + " …"
    return f"“{text}”"


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def _clean_text(text: str) -> str:
    text = _WEIGHTS_ROOT.sub("WEIGHTS", _ADDRESS.sub("SERVER", text))
    return _LONG_HEX.sub("…", _SOURCE_LINE.sub("", text))
