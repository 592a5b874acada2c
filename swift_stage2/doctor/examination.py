"""Runs checks one after the other and keeps what they found. A check never ends the examination.

What rests on a check that failed is not run: its row says which one, and counts as failed with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from swift_stage2.config import Stage2Config
from swift_stage2.doctor.finding import Finding, Outcome, Verdict, failed, left_out, ok, warning
from swift_stage2.errors import SampleError, Stage2Error, UserError
from swift_stage2.preflight.checks import Check, Known, due_checks

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")
_HIDDEN = "***"
_MOST_NOTES = 10


@dataclass(frozen=True, slots=True)
class Checked(Generic[ValueT]):
    """A check that is over. ``result`` may be asked for by checks that name it in ``needs``."""

    finding: Finding
    value: ValueT | None = None

    @property
    def passed(self) -> bool:
        """Whether what builds on it can run: ok, or no worse than a warning."""
        return self.finding.verdict in (Verdict.OK, Verdict.WARNING)

    @property
    def result(self) -> ValueT:
        """What the check handed on. Raises ValueError when it did not pass."""
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
        self._causes: dict[int, str] = {}  # id of a finding that was not checked -> the check behind it

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
        held = next((need.finding for need in needs if not need.passed), None)
        if held is not None:
            return self._skip(name, held)
        self._on_begin(name)
        return self._keep(name, self._outcome(work, fix))

    def show(
        self, config: Stage2Config, known: Known, *, needs: Sequence[Checked[Any]] = ()
    ) -> dict[str, Checked[None]]:
        """A row for each check of ``preflight.checks`` whose needs are ``known``, by its name."""
        return {
            check.name: self.check(check.name, partial(_outcome_of, check, config, known), needs=needs)
            for check in due_checks(known)
        }

    @property
    def num_failed(self) -> int:
        """Rows that failed, those that could not be checked because of another left out."""
        return sum(finding.verdict is Verdict.FAILED for finding in self.findings)

    def _outcome(self, work: Callable[[], Outcome[ValueT]], fix: str) -> Outcome[ValueT]:
        try:
            return work()
        except (UserError, SampleError) as error:  # rule, got name=value; remedy
            found, remedy = _cut_remedy(str(error))
            return failed(found, remedy or fix)
        except Stage2Error as error:
            return failed(str(error), fix)
        except Exception as error:  # top of a check: whatever a library raises is a finding
            logger.debug("a check ended with an unexpected error", exc_info=True)
            return failed(f"{type(error).__name__}: {error}", fix or "mend what this error names")

    def _skip(self, name: str, held: Finding) -> Checked[ValueT]:
        cause = self._causes.get(id(held)) or self._name_of(held)
        why = f"because of: {cause}" if held.counts_as_failed else f"as {cause} was not"
        finding = self._append(name, Verdict.NOT_CHECKED, why, "", held.counts_as_failed)
        self._causes[id(finding)] = cause
        return Checked(finding)

    def _name_of(self, finding: Finding) -> str:
        """Its check, with its section where that is another one than the present."""
        elsewhere = finding.section != self._section
        return f"{finding.check} ({finding.section})" if elsewhere else finding.check

    def _keep(self, name: str, outcome: Outcome[ValueT]) -> Checked[ValueT]:
        is_failed = outcome.verdict is Verdict.FAILED
        finding = self._append(name, outcome.verdict, outcome.found, outcome.fix, is_failed)
        return Checked(finding, outcome.value)

    def _append(self, name: str, verdict: Verdict, found: str, fix: str, counts_as_failed: bool) -> Finding:
        finding = Finding(
            self._section, name, verdict, self._clean(found), self._clean(fix), counts_as_failed
        )
        self.findings.append(finding)
        return finding

    def _clean(self, text: str) -> str:
        """One line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return " ".join(text.split())


def _outcome_of(check: Check, config: Stage2Config, known: Known) -> Outcome[None]:
    try:
        found = check.find(config, known)
    except UserError as error:
        notes = getattr(error, "__notes__", [])
        raise type(error)(" | ".join([*notes[:_MOST_NOTES], str(error)])) from error
    if found is None:
        return left_out("does not apply to this configuration")
    if found.advice:
        return warning(f"{found.text}; {' | '.join(found.advice)}", found.remedy)
    return ok(found.text)


def _cut_remedy(message: str) -> tuple[str, str]:
    """What an error found and its remedy: cut at the last semicolon that no bracket holds."""
    depth = 0
    for place in range(len(message) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(message[place], 0)
        if depth == 0 and message.startswith("; ", place):
            return message[:place], message[place + 2 :]
    return message, ""
