"""What one rank does around its training: holds its run directory, begins where it may."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack
from dataclasses import replace

from swift_stage2.config import Stage2Config
from swift_stage2.launch.plan import EXIT_STATUS_FILE
from swift_stage2.preflight.model import check_hub_ids
from swift_stage2.process.agent_watch import AgentWatch
from swift_stage2.run_directory.claim import starting_point, written_directory
from swift_stage2.run_directory.lock import hold_run_directory


def train_rank(config: Stage2Config, agent: AgentWatch, *, resume: bool) -> int:
    """Trains to the end; returns the exit status. ``resume``: from the last whole checkpoint in the run directory.

    ``agent``, entered, is given the run's grace.

    Raises:
        UserError: another run goes on in the run directory, an earlier one would be written over, or the model is on
            a hub that may not be asked.
    """
    check_hub_ids(config.swift)
    rank = os.environ.get("RANK", "0")
    agent.grace_s = config.launch.learner.shutdown_timeout_s
    with ExitStack() as held:
        if (run_dir := written_directory(config.swift)) is not None:
            held.enter_context(hold_run_directory(run_dir, f"rank {rank}", os.environ))
        start = starting_point(config, resume=resume)
        if rank == "0" and EXIT_STATUS_FILE not in os.environ:  # else the launcher has said it
            for note in start.notes:
                print(f"swift-stage2 train: {note}", file=sys.stderr, flush=True)
        if start.checkpoint is not None:
            resumed = {**config.swift, "resume_from_checkpoint": str(start.checkpoint)}
            config = replace(config, swift=resumed)
        sft = importlib.import_module("swift_stage2.training.sft")  # loads torch
        return int(sft.train(config))
