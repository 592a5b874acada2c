"""Runs checks one after the other and keeps a row of each, which the doctor prints. A check never ends the examination.

A check that rests on a failed one is not run: its row says which one, and counts as failed with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from swift_stage2.checks.checks import Check, Known, due_checks
from swift_stage2.config import Stage2Config
from swift_stage2.config.rules import Inequality
from swift_stage2.errors import Stage2Error, UserError

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")
_HIDDEN = "***"
_DOES_NOT_APPLY = "does not apply to this configuration"


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """The row of one check. ``fix`` is one line, and there whenever the verdict is a warning or failed."""

    section: str
    check: str
    verdict: Verdict
    found: str
    fix: str = ""
    counts_as_failed: bool = False
    """Failed, or not checked because of something that failed."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[ValueT]):
    """A check hands this back; ``value`` is for the checks that build on it."""

    verdict: Verdict
    found: str
    fix: str = ""
    value: ValueT | None = None


def ok(found: str, value: ValueT | None = None) -> Outcome[ValueT]:
    """Nothing to do."""
    return Outcome(Verdict.OK, found, value=value)


def warning(found: str, fix: str, value: ValueT | None = None) -> Outcome[ValueT]:
    """It works, but wastes or risks something."""
    return Outcome(Verdict.WARNING, found, fix, value)


def failed(found: str, fix: str) -> Outcome[Any]:
    """Training would not start, or not do what was asked."""
    return Outcome(Verdict.FAILED, found, fix)


def left_out(why: str) -> Outcome[Any]:
    """Nothing failed, but there is no way or no wish to look."""
    return Outcome(Verdict.NOT_CHECKED, why)


@dataclass(frozen=True, slots=True)
class Checked(Generic[ValueT]):
    """A check that is over. ``result`` may be asked for by checks that name it in ``needs``."""

    finding: Finding
    value: ValueT | None = None
    cause: Finding | None = None
    """The finding for which this check was not run."""

    @property
    def passed(self) -> bool:
        """Whether a check that needs this one can run: ok, or no worse than a warning."""
        return self.finding.verdict in (Verdict.OK, Verdict.WARNING)

    @property
    def result(self) -> ValueT:
        """The value for later checks. Raises ValueError when the check did not pass."""
        if self.value is None:
            raise ValueError(f"{self.finding.check} handed nothing on; name it in needs")
        return self.value


class Examination:
    """The rows of one run of the doctor, in order. ``secrets`` are replaced wherever they turn up."""

    def __init__(
        self, *, secrets: Sequence[str] = (), on_begin: Callable[[str], None] = lambda check: None
    ) -> None:
        self.findings: list[Finding] = []
        self._secrets = tuple(secret for secret in secrets if secret)
        self._on_begin = on_begin
        self._section = ""

    def begin_section(self, title: str) -> None:
        """The rows from here on belong together."""
        self._section = title

    def check(
        self,
        name: str,
        work: Callable[[], Outcome[ValueT]],
        *,
        needs: Sequence[Checked[Any]] = (),
        fix: str = "",
    ) -> Checked[ValueT]:
        """Runs one check unless one that it needs has not passed.

        ``fix`` is the remedy for an error that carries none of its own.
        """
        held = next((need for need in needs if not need.passed), None)
        cause = None
        if held is None:
            self._on_begin(name)
            outcome = self._outcome(work, fix)
        else:
            cause = held.cause or held.finding
            elsewhere = f" ({cause.section})" if cause.section != self._section else ""
            named = f"{cause.check}{elsewhere}"
            outcome = left_out(
                f"because of: {named}" if held.finding.counts_as_failed else f"as {named} was not"
            )
        finding = Finding(
            self._section,
            name,
            outcome.verdict,
            self._clean(outcome.found),
            self._clean(outcome.fix),
            counts_as_failed=held.finding.counts_as_failed if held else outcome.verdict is Verdict.FAILED,
        )
        self.findings.append(finding)
        return Checked(finding, outcome.value, cause)

    def show(
        self, config: Stage2Config, known: Known, *, needs: Sequence[Checked[Any]] = ()
    ) -> dict[str, Checked[None]]:
        """A row for each check of ``preflight.checks`` whose needs are ``known``, by its name.

        A check that does not apply to the configuration has no row.
        """
        shown = {}
        for check in due_checks(known):
            checked = self.check(check.name, partial(_outcome_of, check, config, known), needs=needs)
            if checked.finding.found == _DOES_NOT_APPLY:
                self.findings.remove(checked.finding)
            else:
                shown[check.name] = checked
        return shown

    @property
    def num_failed(self) -> int:
        """Rows that failed, those that could not be checked because of another left out."""
        return sum(finding.verdict is Verdict.FAILED for finding in self.findings)

    def _outcome(self, work: Callable[[], Outcome[ValueT]], fix: str) -> Outcome[ValueT]:
        try:
            return work()
        except UserError as error:
            return failed(error.found, error.remedy or fix)
        except Stage2Error as error:
            return failed(str(error), fix)
        except Exception as error:  # top of a check: whatever a library raises is a finding
            logger.debug("a check ended with an unexpected error", exc_info=True)
            return failed(f"{type(error).__name__}: {error}", fix or "mend what this error names")

    def _clean(self, text: str) -> str:
        """One line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return " ".join(text.split())


def show_rules(exam: Examination, rules: Iterable[Inequality]) -> None:
    """A row for each that does not hold, and one for all that do."""
    rules = list(rules)
    for rule in rules:
        if not rule.holds:
            show = warning if rule.is_advice else failed
            exam.check(rule.name, partial(show, rule.error.found, rule.remedy))
    held = [f"{rule.name}: {rule.numbers}" for rule in rules if rule.holds]
    exam.check("rules between numbers", lambda: ok("; ".join(held)))


def _outcome_of(check: Check, config: Stage2Config, known: Known) -> Outcome[None]:
    found = check.find(config, known)
    if found is None:
        return left_out(_DOES_NOT_APPLY)
    if found.advice:
        return warning(f"{found.text}; {' | '.join(found.advice)}", found.remedy)
    return ok(found.text)


_STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.NOT_CHECKED: "dim",
}
_CHECK_COLUMNS = 20
_FIX_INDENT = 4


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """A section per heading, one row per check with its fix below, and a line that counts the verdicts."""
    parts: list[RenderableType] = []
    look: dict[str, Any] = {"show_header": False, "expand": True, "box": SIMPLE}
    look |= {"show_edge": False, "pad_edge": False}
    for section, rows in groupby(findings, key=lambda finding: finding.section):
        parts.append(Text(section, style="bold italic"))
        for finding in rows:
            table = Table(**look)  # one for each, so that a fix has the whole width for its long keys
            table.add_column(width=_CHECK_COLUMNS, overflow="fold")
            table.add_column(width=len(Verdict.WARNING))
            table.add_column(ratio=1, overflow="fold")
            style, is_shown = _STYLES[finding.verdict], finding.verdict is not Verdict.NOT_CHECKED
            found = Text(finding.found) if is_shown else Text(f"not checked: {finding.found}", style=style)
            table.add_row(finding.check, Text(str(finding.verdict) if is_shown else "-", style=style), found)
            parts.append(table)
            if finding.fix:
                parts.append(Padding(Text(f"fix: {finding.fix}", style=style), (0, 0, 0, _FIX_INDENT)))
        parts.append(Text())
    return Group(*parts, summary_line(findings))


def summary_line(findings: Sequence[Finding]) -> Text:
    """``12 ok, 1 warning, 2 failed, 3 not checked``."""
    counts = Counter(finding.verdict for finding in findings)
    parts = [
        Text(f"{counts[verdict]} {verdict}", style=_STYLES[verdict]) for verdict in Verdict if counts[verdict]
    ]
    return Text(", ").join(parts)
