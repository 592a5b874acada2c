"""Whether and when a server is started again."""

from __future__ import annotations

import pytest

from swift_stage2.config import RestartConfig, RestartPolicy
from swift_stage2.launch.restarts import RestartBudget


def test_nothing_is_restarted_unless_that_is_wanted() -> None:
    assert RestartBudget(RestartConfig()).next_delay_s(137) is None


def test_an_orderly_end_is_no_failure() -> None:
    budget = RestartBudget(RestartConfig(policy=RestartPolicy.ON_FAILURE))
    assert budget.next_delay_s(0) is None
    assert budget.num_restarts == 0


@pytest.mark.parametrize("status", [1, 2, 137])
def test_restarts_are_bounded_and_their_delay_doubles(status: int) -> None:
    budget = RestartBudget(RestartConfig(policy=RestartPolicy.ON_FAILURE, max_restarts=3, backoff_s=2.0))
    assert [budget.next_delay_s(status) for _ in range(5)] == [2.0, 4.0, 8.0, None, None]
    assert budget.describe() == "restart 3 of 3"
