"""Runs checks one after the other and keeps a row of each, which the doctor prints. A check never ends the examination.

A check that rests on a failed one is not run: its row says which one, and counts as failed with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from swift_stage2.checks.checks import (
    Check,
    CheckResult,
    Known,
    ValueT,
    Verdict,
    due_checks,
    failed,
    left_out,
    ok,
)
from swift_stage2.config import Stage2Config
from swift_stage2.errors import Stage2Error, UserError

logger = logging.getLogger(__name__)

_HIDDEN = "***"


class Examination:
    """The rows of one run of the doctor, in order. ``secrets`` are replaced wherever they turn up."""

    def __init__(
        self, *, secrets: Sequence[str] = (), on_begin: Callable[[str], None] = lambda check: None
    ) -> None:
        self.findings: list[CheckResult[Any]] = []
        self._secrets = tuple(secret for secret in secrets if secret)
        self._on_begin = on_begin
        self._section = ""

    def begin_section(self, title: str) -> None:
        """The rows from here on belong together."""
        self._section = title

    def check(
        self,
        name: str,
        work: Callable[[], CheckResult[ValueT]],
        *,
        needs: Sequence[CheckResult[Any]] = (),
        fix: str = "",
    ) -> CheckResult[ValueT]:
        """Runs one check unless one that it needs has not passed.

        ``fix`` is the remedy for an error that carries none of its own.
        """
        held = next((need for need in needs if not need.passed), None)
        if held is None:
            self._on_begin(name)
            result = self._result(work, fix)
        elif held.verdict is Verdict.NOT_CHECKED:
            result = left_out(held.found)
        else:
            elsewhere = f" ({held.section})" if held.section != self._section else ""
            result = left_out(f"because of: {held.check}{elsewhere}")
        result = replace(
            result,
            section=self._section,
            check=name,
            found=self._clean(result.found),
            fix=self._clean(result.fix),
            counts_as_failed=held.counts_as_failed if held else result.verdict is Verdict.FAILED,
        )
        self.findings.append(result)
        return result

    def show(
        self, config: Stage2Config, known: Known, *, needs: Sequence[CheckResult[Any]] = ()
    ) -> dict[str, CheckResult[None]]:
        """The results of the checks whose needs are ``known``, by name. Those with nothing to say share a row."""
        shown, silent = {}, []
        for check in due_checks(known):
            result = self.check(check.name, partial(_look, check, config, known), needs=needs)
            shown[check.name] = result
            if result.verdict is Verdict.OK and not result.found:
                self.findings.pop()
                silent.append(check.name)
        if silent:
            self.check("checked as well", lambda: ok(", ".join(silent)))
        return shown

    @property
    def num_failed(self) -> int:
        """Rows that failed, those that could not be checked because of another left out."""
        return sum(finding.verdict is Verdict.FAILED for finding in self.findings)

    def _result(self, work: Callable[[], CheckResult[ValueT]], fix: str) -> CheckResult[ValueT]:
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


def _look(check: Check, config: Stage2Config, known: Known) -> CheckResult[None]:
    return check.find(config, known) or ok("")


_STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.NOT_CHECKED: "dim",
}
_CHECK_COLUMNS = 20
_FIX_INDENT = 4


def findings_table(findings: Sequence[CheckResult[Any]]) -> RenderableType:
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
    counts = Counter(finding.verdict for finding in findings)
    counted = [Text(f"{counts[each]} {each}", style=_STYLES[each]) for each in Verdict if counts[each]]
    return Group(*parts, Text(", ").join(counted))
