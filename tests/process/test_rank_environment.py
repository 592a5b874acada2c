"""One rank of several with all that says so, or none of it."""

from __future__ import annotations

import pytest

from swift_stage2.errors import UserError
from swift_stage2.process.rank_environment import check_gloo_address, check_rank_environment

WHOLE = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("environment", [{}, WHOLE, {"MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}])
def test_all_of_it_or_none_is_accepted(environment: dict[str, str]) -> None:
    check_rank_environment(environment)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_missing_beside_the_others_is_named(name: str) -> None:
    rest = {other: value for other, value in WHOLE.items() if other != name}
    with pytest.raises(UserError, match=rf"without {name} in the environment; start ranks with torchrun"):
        check_rank_environment(rest)


def test_a_rank_beyond_the_others_is_refused() -> None:
    """The others would wait for it, and it for them."""
    with pytest.raises(UserError, match=r"must be below WORLD_SIZE, got RANK=2 WORLD_SIZE=2"):
        check_rank_environment(WHOLE | {"RANK": "2"})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["abc", "-1", ""])
def test_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(
        UserError, match=rf"{name} in the environment must be a whole number, got {name}='{value}'"
    ):
        check_rank_environment(WHOLE | {name: value})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        WHOLE,
        WHOLE | {"LOCAL_WORLD_SIZE": "1"},  # two torchruns on this machine
        WHOLE | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},
        WHOLE | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"},
    ],
)
def test_gloo_needs_an_interface_on_several_hosts_only(environment: dict[str, str]) -> None:
    """What happens there is shown on hosts of their own: ``test_several_hosts``."""
    check_gloo_address(environment)
