"""Runs ms-swift's supervised pipeline with our trainer, from a configuration to an exit status.

Loads ms-swift only when it runs, after torchvision was given what a machine without its library lacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from swift_stage2.checks.checks import CheckStage, run_checks
from swift_stage2.collectives import leave_job
from swift_stage2.compat import (
    declare_operators,
    keep_buffers_exact,
    start_communication,
)
from swift_stage2.config import Stage2Config, StarvationAction
from swift_stage2.errors import ChannelBStarved, StorageFull, WeightSyncHang
from swift_stage2.run import Stage2Run
from swift_stage2.runtime.background import EXIT_HANG
from swift_stage2.runtime.checkpoints import is_storage_failure
from swift_stage2.runtime.output import going_on, say
from swift_stage2.telemetry.summary import share_of_b

if TYPE_CHECKING:
    from swift_stage2.training.stage2_trainer import Stage2Trainer


def train(
    config: Stage2Config,
    *,
    start_run: Callable[..., Stage2Run] | None = None,
    checks_rows: bool = True,
) -> int:
    """Trains; returns the exit status.

    ``start_run`` puts this rank's run together in the place of ``assembly.start_run``; without ``checks_rows``
    the data set has been checked.

    Raises:
        UserError: a mistake in configuration, data or servers, on every rank.
        ChannelBStarved: the run has trained to its end, without the channel B that it wanted.
        Stage2Error: anything else that ends the run, on every rank.
    """
    declare_operators()  # before ms-swift imports torchvision
    # Before datasets is imported, which else tells a counter in the network of every file that it reads.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    with going_on("train", "loading ms-swift"):
        from swift_stage2.checks.channel_b_parts import make_task
        from swift_stage2.checks.swift_parsing import parse_swift_arguments
        from swift_stage2.training.stage2_trainer import Stage2Sft, register_trainer

    # Both dialects are plain JSON; ms-swift's default would write boxes between special tokens.
    os.environ.setdefault("QWENVL_BBOX_FORMAT", "new")
    found = torch.accelerator.current_accelerator(check_available=True)
    known = CheckStage(
        files=True,
        rows=checks_rows,
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        devices=(found.type if found else None, torch.cuda.device_count()),
    )
    with going_on("train", "checking the data set"):
        run_checks(config, known)
    start_communication(config.swift)
    register_trainer()  # a plugin may name one that it derives from ours
    try:
        arguments = parse_swift_arguments(config.swift_arguments())
        # Plugins are there now; a name that none of them registers need not wait for the model.
        make_task(config)
        if config.b_enabled:
            keep_buffers_exact()
        with going_on("train", "loading the model"):
            pipeline = Stage2Sft(arguments, config, start_run)
        pipeline.main()
    except Exception as error:  # raised again unless a hang is behind it
        if _hang_behind(error) is not None:
            return EXIT_HANG
        if isinstance(error, OSError) and is_storage_failure(error):
            raise StorageFull(
                "a run needs a disk that takes what it writes", got=str(error), remedy="make room"
            ) from error
        raise
    starved = _why_starved(config, pipeline.trainer)
    if starved and pipeline.trainer.stage2 is not None:
        # Rank 0 may still be at ms-swift's last files.
        pipeline.trainer.stage2.run_on_all_ranks(lambda: None)
    leave_job()
    # One rank of each host says so: torchrun would end it for another's failure, but waits for it.
    if starved and os.environ.get("LOCAL_RANK", "0") == "0":
        raise ChannelBStarved(starved)
    return 0


def _why_starved(config: Stage2Config, trainer: Stage2Trainer) -> str:
    """Why the run, trained to its end, ends with a status of its own, or empty; on all ranks the same decision.

    Rank 0 tells then and else how much of channel B ran, as its last words.
    """
    run = trainer.stage2
    if run is None:
        return ""
    lost, unused = run.starvation.lost if run.starvation is not None else "", run.telemetry.unused_b
    fails = bool(lost) or config.stage2_ab.starvation.action is StarvationAction.FAIL
    if fails and not trainer.stop_agreed and (lost or unused):
        return unused or lost
    told = f"warning: {unused}" if unused else share_of_b(run.telemetry.counters.state_dict())
    if told and trainer.args.process_index == 0:
        say(f"swift-stage2 train: {told}", is_error=True)
    return ""


def _hang_behind(error: BaseException | None) -> WeightSyncHang | None:
    """The hang that ended training; ms-swift's own clean-up may have failed after it and hidden it."""
    while error is not None and not isinstance(error, WeightSyncHang):
        error = error.__cause__ or error.__context__
    return error
