"""A rollout server that does not answer is told of before the model is loaded, by one rank, and decides nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from real_model import STAGE1

from swift_stage2 import load_config
from swift_stage2.checks import swift_parsing
from swift_stage2.errors import ConfigError
from swift_stage2.training import sft

TrainUntilLoad = Callable[[int, float, str], list[str]]


class _AboutToLoad(ConfigError):
    pass


@pytest.fixture
def train_until_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> TrainUntilLoad:
    """The warnings of ``train`` before it reads ms-swift's arguments, as this rank of a job."""

    def load(arguments: object) -> None:
        raise _AboutToLoad("enough")

    def run(port: int, b_ratio: float, rank: str) -> list[str]:
        file = tmp_path / "run.yaml"
        file.write_text(
            f"swift: {{model: {STAGE1}, output_dir: out}}\nstage2_ab: {{schedule: {{b_ratio: {b_ratio}}}}}\n"
            f"rollout: {{start_timeout_s: 33, servers: [{{base_url: 'http://127.0.0.1:{port}'}}]}}\n"
        )
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(swift_parsing, "parse_swift_arguments", load)
        caplog.clear()
        with pytest.raises(_AboutToLoad):
            sft.train(load_config(file))
        return [record.getMessage() for record in caplog.records if record.name == sft.logger.name]

    return run


def test_rank_0_tells_of_a_server_that_does_not_answer_and_goes_on(train_until_load: TrainUntilLoad) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]  # bound and not listening: nobody else takes it
        (told,) = train_until_load(port, 0.25, "0")
        assert f"rollout server http://127.0.0.1:{port} does not answer yet (" in told
        assert "up to 33 seconds (rollout.start_timeout_s)" in told
        assert "start the server there, with a --host that this machine reaches" in told
        assert train_until_load(port, 0.25, "1") == []
        assert train_until_load(port, 0, "0") == []
        unused.listen()
        assert train_until_load(port, 0.25, "0") == []
