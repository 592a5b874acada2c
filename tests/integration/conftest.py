"""The server and the data of all integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_job import Server, start_server

from swift_stage2.demo.scenes import SceneKind, Split, write_dataset


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = start_server(tmp_path_factory.mktemp("server"))
    yield started
    if started.process.poll() is None:
        started.kill()


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """62 scenes: two ranks with batches of 2 read 16 batches each, the last of them with one sample."""
    return write_dataset(tmp_path_factory.mktemp("data") / "shapes", SceneKind.SHAPES, 62, Split.TRAIN, 3)
