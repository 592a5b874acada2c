"""Scalars of stage 2 reach whatever logs for the user (``report_to``), and the screen is spared them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_stage2.compat import declare_operators

declare_operators()

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from transformers import (  # noqa: E402
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import TensorBoardCallback  # noqa: E402

from swift_stage2.training.stage2_trainer import Stage2Trainer  # noqa: E402

SCALARS = {"stage2_ab/async/step_kind_b": 1.0, "stage2_ab/match/f1": 0.5}


class Reporter(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)


class Screen(ProgressCallback):
    def on_log(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the screen has a line of its own")


@pytest.mark.parametrize("has_own_board", [False, True])
def test_scalars_reach_report_to_and_tensorboard_once(has_own_board: bool, tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    # Its own choice of a folder follows variables that ms-swift sets for the process.
    writer = SummaryWriter(str(tmp_path))
    state, reporter, board = TrainerState(global_step=3), Reporter(), TensorBoardCallback(writer)
    trainer = SimpleNamespace(
        stage2_config=SimpleNamespace(telemetry=SimpleNamespace(tensorboard=has_own_board)),
        callback_handler=SimpleNamespace(callbacks=[Screen(), reporter, board]),
        args=arguments,
        state=state,
        control=TrainerControl(),
        model=None,
    )
    Stage2Trainer._report(trainer, SCALARS)  # type: ignore[arg-type]
    writer.close()
    assert reporter.logs == [SCALARS]
    read = EventAccumulator(str(tmp_path)).Reload()
    expected = set() if has_own_board else {f"train/{tag}" for tag in SCALARS}
    assert {tag for tag in read.Tags()["scalars"] if "stage2_ab" in tag} == expected
