"""Checks run in order; what rests on a failed one is not run; errors become one line with a fix; how rows are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_stage2.checks.checks import CheckResult, Known, Verdict, failed, left_out, ok, warning
from swift_stage2.checks.examination import Examination
from swift_stage2.config import load_config
from swift_stage2.errors import ConfigError, ServerFault


def raising(error: Exception) -> Any:
    def work() -> CheckResult[None]:
        raise error

    return work


def never() -> CheckResult[None]:
    raise AssertionError("this check must not run")


def test_what_rests_on_a_failed_check_is_not_run_and_names_the_first_cause() -> None:
    exam = Examination()
    first = exam.check("first", lambda: failed("broken", "mend it"))
    second = exam.check("second", never, needs=[first])
    third = exam.check("third", never, needs=[second])
    assert second.verdict is third.verdict is Verdict.NOT_CHECKED
    assert second.found == third.found == "because of: first"
    assert second.counts_as_failed
    assert third.counts_as_failed
    assert exam.num_failed == 1


def test_what_rests_on_a_check_that_was_left_out_does_not_count_as_failed() -> None:
    exam = Examination()
    first = exam.check("first", lambda: left_out("nobody asked"))
    second = exam.check("second", never, needs=[first])
    assert second.verdict is Verdict.NOT_CHECKED
    assert not second.counts_as_failed
    assert exam.num_failed == 0


def test_a_warning_lets_the_next_check_run_on_its_value() -> None:
    exam = Examination()
    first = exam.check("first", lambda: warning("odd", "change it", 3))
    assert exam.check("second", lambda: ok(str(first.result + 1)), needs=[first]).found == "4"


@pytest.mark.parametrize(
    ("error", "found", "fix"),
    [
        (
            ConfigError("a must be b", got="a=1", remedy="write a: b; or c"),
            "a must be b, got a=1",
            "write a: b; or c",
        ),
        (ConfigError("a must be b"), "a must be b", "the usual"),
        (ServerFault("status 500: x; y"), "status 500: x; y", "the usual"),
        (RuntimeError("two\nlines"), "RuntimeError: two lines", "the usual"),
    ],
)
def test_an_error_becomes_a_failed_row_with_its_remedy(error: Exception, found: str, fix: str) -> None:
    finding = Examination().check("x", raising(error), fix="the usual")
    assert (finding.verdict, finding.found, finding.fix) == (Verdict.FAILED, found, fix)


def test_a_secret_is_hidden_wherever_it_turns_up() -> None:
    exam = Examination(secrets=("s3cret", ""))
    finding = exam.check("x", lambda: failed("key s3cret is wrong", "replace s3cret"))
    assert (finding.found, finding.fix) == ("key *** is wrong", "replace ***")


def test_a_check_that_does_not_apply_has_no_row() -> None:
    config = load_config(Path(__file__).parents[2] / "configs" / "minimal.yaml")  # its learner has one host
    exam = Examination()
    exam.show(config, Known(addresses=True))
    assert "addresses of hosts" not in {finding.check for finding in exam.findings}
