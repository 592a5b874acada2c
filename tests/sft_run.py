"""ms-swift's own supervised pipeline on the tiny model, in this process, up to the trainer.

``SwiftSft.main`` ends in training; here it ends before, so that a test can take the trainer and train, or
compare one step of plain ms-swift with one of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from real_model import STAGE1
from swift.pipelines import SwiftSft
from swift.trainers import TrainerFactory

from swift_stage2.checks.swift_parsing import LearnerArguments
from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.demo.tiny_template import TINY_VL
from swift_stage2.training.stage2_trainer import Stage2Trainer


def channel_a_alone() -> Stage2Config:
    """The smallest configuration: ``Stage2Trainer`` trains as ms-swift does."""
    return bind(Stage2Config, {"stage2_ab": {"schedule": {"b_ratio": 0}}})


class _Built(Exception):
    pass


def build_trainer(
    rows_file: Path | None,
    output: Path,
    *,
    trainer: type | None = None,
    given: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """The trainer as ``SwiftSft.main`` makes it, of class ``trainer``, whose constructor is also given ``given``."""
    options = {
        "model": STAGE1,
        "model_type": TINY_VL,
        "template": TINY_VL,
        **({} if rows_file is None else {"dataset": rows_file}),
        "output_dir": output,
        "add_version": False,
        "check_model": False,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "use_cpu": True,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "split_dataset_ratio": 0,
        "load_from_cache_file": False,
        "seed": 7,
        "report_to": "none",
        **arguments,
    }
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    built: list[Any] = []

    class Stopped(SwiftSft):  # type: ignore[misc]
        args_class = LearnerArguments

        def _get_trainer_kwargs(self) -> dict[str, Any]:
            return {**super()._get_trainer_kwargs(), **(given or {})}

        def train(self, trainer: Any) -> Any:
            built.append(trainer)
            raise _Built

    before = TrainerFactory.TRAINER_MAPPING["causal_lm"]
    threads = torch.get_num_threads()
    try:
        if trainer is not None:
            TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{trainer.__module__}.{trainer.__name__}"
        Stopped(argv).main()
    except _Built:
        pass
    finally:
        TrainerFactory.TRAINER_MAPPING["causal_lm"] = before
        torch.set_num_threads(threads)
    (found,) = built
    return found


def our_trainer(
    rows_file: Path | None, output: Path, config: Stage2Config | None = None, **arguments: Any
) -> Any:
    """``Stage2Trainer`` under a configuration, by default that of channel A alone."""
    given = {"stage2": config or channel_a_alone()}
    return build_trainer(rows_file, output, trainer=Stage2Trainer, given=given, **arguments)
