"""Puts one rank's run together from a configuration and the trainer's own objects.

Checks at start-up what only shows with the real template, tokenizer, model and servers, then hands the
parts to the learner. Called by the trainer; knows no ms-swift.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.channel_b.task import TOTAL, Rows
from swift_stage2.checks.channel_b_parts import (
    check_packing,
    check_parts,
    check_preprocessing,
    make_task,
    merge_lengths,
    wait_for_servers,
)
from swift_stage2.checks.checks import refuse_differing_settings
from swift_stage2.checks.packing_isolation import PackedLoss
from swift_stage2.checks.servers import examine
from swift_stage2.collectives import join_control_group, run_on_all_ranks
from swift_stage2.compat import surroundings
from swift_stage2.config import Stage2Config, StarvationAction
from swift_stage2.config.swift_arguments import require_metric
from swift_stage2.learner import Learner
from swift_stage2.learner.parts import make_channel_b
from swift_stage2.records import Sample
from swift_stage2.run import Stage2Run
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.runtime.output import going_on, say_beside_bar
from swift_stage2.scheduling.watches import StarvationWatch
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.recorders import rows_to_keep
from swift_stage2.weights.proof import Canary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The trainer's own objects that a run is built from, beside the configuration."""

    rows: Rows
    template: Any
    module: nn.Module
    run_directory: str
    seed: int
    total_steps: int
    first_step: int
    make_canary: Callable[[Encoder, Sample], Canary]
    packed_loss: PackedLoss
    packs_per_step: int
    logging_steps: int
    validation_rows: Rows | None = None
    """For ``stage2_ab.evaluation``."""
    optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
    """Which the trainer makes after a run is begun."""


def start_run(config: Stage2Config, given: RunInputs) -> Stage2Run:
    """Builds one rank's run; nothing runs in the background yet.

    Raises:
        ConfigError, DatasetError: a setting does not fit the template, the tokenizer, the data or the model.
        UserError: that is so on another rank.
        ServerUnavailable: no server has answered within ``rollout.start_timeout_s``; on every rank.
    """
    control = join_control_group(config.control_timeout_s)
    settings = config.without_secrets()
    refuse_differing_settings({**settings, "number of rows": len(given.rows)}, control)
    run_id = str(control.broadcast(uuid.uuid4().hex))
    task = run_on_all_ranks(control, lambda: make_task(config))
    require_metric(config.swift, task.metrics)
    channel = config.stage2_ab.channel_b
    usable = run_on_all_ranks(control, lambda: usable_rows(given.rows, task, channel.rows_without_objects))
    kept = rows_to_keep(len(usable), config.telemetry.gallery_rows, given.seed)
    telemetry = Telemetry(
        Path(given.run_directory),
        control.rank,
        control.world_size,
        tensorboard=config.telemetry.tensorboard,
        events=config.telemetry.audit,
        trace=config.telemetry.trace,
        records=config.telemetry.record,
        kept_rows=frozenset(usable[number] for number in kept),
        say=partial(say_beside_bar, "train") if control.rank == 0 else None,
        total_steps=given.total_steps,
        queue_limit=config.queue_limit(given.packs_per_step) if config.b_enabled else None,
        reward_terms=(*task.reward_terms, TOTAL),
    )
    channel_b, failures = None, BackgroundFailures()
    with ExitStack() as on_failure:
        on_failure.callback(telemetry.close)
        if config.b_enabled:
            # `check_packing` stays outside: it runs the model, and under ZeRO-3 all ranks must do that or none.
            look = partial(
                check_parts,
                config,
                task,
                given.rows,
                usable,
                given.template,
                given.seed,
                control,
                telemetry,
                on_failure,
            )
            with going_on("train", "checking rows, template and packing"):
                parts = merge_lengths(
                    config, run_on_all_ranks(control, look), control, telemetry, given.packs_per_step
                )
                check_packing(parts, given.packed_loss, control)
            servers = wait_for_servers(config, control, telemetry.record_warning)  # which load meanwhile
            late = partial(examine, config, servers)
            build = partial(
                make_channel_b, config, given, parts, control, telemetry, run_id, servers, late, failures
            )
            with going_on("train", "starting channel B's processes"):
                channel_b = run_on_all_ranks(control, build)
                run_on_all_ranks(control, partial(check_preprocessing, parts))
        on_failure.pop_all()
    action = config.stage2_ab.starvation.action
    watched = channel_b is not None and action is not StarvationAction.OFF
    starvation = StarvationWatch(config.stage2_ab.starvation.grace_steps) if watched else None
    learner = Learner(
        b_ratio=config.stage2_ab.schedule.b_ratio,
        control=control,
        events=telemetry,
        starvation=starvation,
        fail_when_starved=action is StarvationAction.FAIL,
        channel_b=channel_b,
        failures=failures,
    )
    record_start = partial(
        telemetry.record_start,
        run_id=run_id,
        step=given.first_step,
        config=settings,
        surroundings=surroundings(next(given.module.parameters()).device),
        version_window=channel.prefetch.version_window,
        similarity=task.similarity,
    )
    return Stage2Run(learner, telemetry, control, channel_b, given.logging_steps, record_start, starvation)
