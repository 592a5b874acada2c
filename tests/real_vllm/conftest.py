"""One stock server for all tests that leave it alive. The shared helpers of other test folders are importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(_TESTS / folder) for folder in ("rollout_server", "rollout_merger", "checks", "real_vllm")
]

from live_server import free_port  # noqa: E402
from stock_server import ServerProcess, start_stock  # noqa: E402

from swift_stage2.demo.scenes import SceneKind, Split, write_dataset  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A stock server takes most of a minute to start."""
    for item in items:
        if "real_vllm" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 62 scenes."""
    return write_dataset(tmp_path_factory.mktemp("data") / "shapes", SceneKind.SHAPES, 62, Split.TRAIN, 3)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The unmodified server; a test may change its weights, not kill it."""
    server = start_stock(tmp_path_factory.mktemp("stock"), free_port())
    try:
        server.wait_until_it_answers()
        yield server
    finally:
        server.end()
