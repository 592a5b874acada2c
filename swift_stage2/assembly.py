"""Puts one rank's run together from a configuration: the only place where every part meets.

Checks at start-up what only shows with the real template, tokenizer, model and servers, then hands the
parts to the learner. Called by the trainer; knows no ms-swift.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from swift_stage2.channel_b.attempts import Attempts
from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.preprocessing import ProcessPreprocessor, ThreadPreprocessor
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.reward import TOTAL
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.channel_b.task import Rows, needed_columns
from swift_stage2.checks.channel_b_parts import (
    CheckedParts,
    check_packing,
    check_parts,
    check_preprocessing,
    group_maker,
    make_task,
    merge_lengths,
)
from swift_stage2.checks.checks import refuse_differing_settings
from swift_stage2.checks.packing_isolation import PackedLoss, empty_rollout
from swift_stage2.checks.servers import FoundServers, examine, wait_for_servers
from swift_stage2.collectives import ControlGroup, join_control_group, together
from swift_stage2.config import Fenced, Mode, OnPending, OnPipelineFailure, Stage2Config, StarvationAction
from swift_stage2.config.swift_arguments import require_metric
from swift_stage2.detections.recorded import EvaluationKeeper, evaluations_directory
from swift_stage2.evaluation import PinnedEvaluation, RankEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.learner import ChannelB, Learner
from swift_stage2.records import Sample
from swift_stage2.run import Stage2Run, progress_watch
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.runtime.output import going_on, say_beside_bar
from swift_stage2.runtime.surroundings import surroundings
from swift_stage2.scheduling.evaluation_schedule import EvaluationSchedule
from swift_stage2.scheduling.horizon import Pacer
from swift_stage2.scheduling.round_schedule import RoundSchedule
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import StarvationWatch, TruncationGuard
from swift_stage2.servers.pending_abort import PendingAbort
from swift_stage2.servers.probe import SuspectProbe
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.recorders import rows_to_keep
from swift_stage2.weights.courier import Courier, thread_courier
from swift_stage2.weights.courier_process import process_courier
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import Canary
from swift_stage2.weights.snapshot_memory import SnapshotMemory
from swift_stage2.weights.sync_round import WeightSync
from swift_stage2.weights.transport import WrapTransport


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
    wrap_transport: WrapTransport | None = None
    """Gets every transport that a sync round is about to use; rounds then have their pushes in this process."""
    validation_rows: Rows | None = None
    """For ``stage2_ab.evaluation``."""


def start_run(config: Stage2Config, given: RunInputs) -> Stage2Run:
    """Builds one rank's run; nothing runs in the background yet.

    Raises:
        ConfigError, DatasetError: a setting does not fit the template, the tokenizer, the data or the model.
        UserError: that is so on another rank.
        ServerUnavailable: no server has answered within ``rollout.start_timeout_s``; on every rank.
    """
    control = join_control_group(config.control_timeout_s)
    settings = config.without_secrets()
    refuse_differing_settings(settings, control)
    run_id = str(control.broadcast(uuid.uuid4().hex))
    task = together(control, lambda: make_task(config))
    require_metric(config.swift, task.metrics)
    channel, b_ratio = config.stage2_ab.channel_b, config.stage2_ab.schedule.exact_b_ratio
    usable = together(control, lambda: usable_rows(given.rows, task, channel.rows_without_objects))
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
        queue_limit=channel.prefetch.limit(given.packs_per_step, b_ratio) if config.b_enabled else None,
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
                    config, together(control, look), control, telemetry, given.packs_per_step
                )
                check_packing(parts, given.packed_loss, control)
            servers = wait_for_servers(config, control, telemetry.record_warning)  # which load meanwhile
            build = partial(
                _build_channel_b, config, given, parts, control, telemetry, run_id, servers, failures
            )
            with going_on("train", "starting channel B's processes"):
                channel_b = together(control, build)
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
        seed=given.seed,
        decoding=asdict(config.rollout.decoding) if config.b_enabled else {},
        config=settings,
        surroundings=surroundings(next(given.module.parameters()).device),
        version_window=channel.prefetch.version_window,
        likeness=task.likeness,
    )
    watch = progress_watch(config, telemetry, channel_b)
    return Stage2Run(
        learner, telemetry, control, channel_b, given.logging_steps, record_start, watch, starvation
    )


def _build_channel_b(
    config: Stage2Config,
    given: RunInputs,
    parts: CheckedParts,
    control: ControlGroup,
    telemetry: Telemetry,
    run_id: str,
    servers: FoundServers,
    failures: BackgroundFailures,
) -> ChannelB:
    ours = servers.ours
    prefetch, packing = config.stage2_ab.channel_b.prefetch, config.stage2_ab.channel_b.packing
    rollout, b_ratio = config.rollout, config.stage2_ab.schedule.exact_b_ratio
    base_urls = [server.base_url for server in rollout.servers]
    is_inline = config.stage2_ab.mode is Mode.INLINE
    may_stage = rollout.sync.fenced is Fenced.WHEN_NEEDED and not is_inline
    api_key = rollout.api_key()
    clock, fence = VersionClock(), InferFence(start_closed=True)
    guard = TruncationGuard(config.stage2_ab.channel_b.max_truncated_ratio)
    pacer = Pacer(
        b_ratio=config.stage2_ab.schedule.b_ratio,
        version_window=prefetch.version_window,
        sync_every_steps=prefetch.sync_every_steps,
        target_packs=prefetch.target(given.packs_per_step, b_ratio),
        packs_per_b_step=given.packs_per_step,
    )
    attempts = Attempts(telemetry.log)
    client = RolloutClient(
        base_urls,
        fence=fence,
        decoding=rollout.decoding,
        request_timeout_s=rollout.request_timeout_s,
        run_seed=given.seed,
        rank=control.rank,
        world_size=control.world_size,
        api_key=api_key,
        run_id=run_id,
        canary={"messages": [{"role": "user", "content": "ping"}]},
        max_inflight_per_server=rollout.max_inflight_per_server,
        is_lost=lambda url, version: control.notes.has(_note_of_loss(url, version), otherwise=True),
        events=attempts,
        watch_post=telemetry.pipeline.post,
        chat_models=servers.chat_models,
        columns=needed_columns(config),
    )
    evaluation = _evaluation(config, given, parts, client, control, telemetry)
    memory = SnapshotMemory()
    device = next(given.module.parameters()).device
    courier: Courier  # first, because its process starts meanwhile
    if given.wrap_transport is None and control.rank == 0:
        courier = process_courier(rollout, device, ours=ours, trace=telemetry.trace)
    else:
        courier = thread_courier(
            rollout, device, memory, given.wrap_transport, ours=ours, trace=telemetry.trace
        )
    if isinstance(parts.preprocessor, ProcessPreprocessor):
        parts.preprocessor.await_ready()
        check_preprocessing(
            parts.preprocessor,
            ThreadPreprocessor(parts.encoder, parts.task, packing_length=packing.packing_length),
            [empty_rollout(sample, parts.encoder) for sample in parts.samples],
        )
    queue = ReadyQueue(
        prefetch.limit(given.packs_per_step, b_ratio),
        prefetch.version_window,
        lambda pack, reason: pipeline.on_drop(pack, reason),
    )
    pipeline: Pipeline = Pipeline(
        source=parts.source,
        client=client,
        attempts=attempts,
        make_request=parts.encoder.request,
        preprocessor=parts.preprocessor,
        queue=queue,
        clock=clock,
        pacer=pacer,
        guard=guard,
        events=telemetry.pipeline,
        packing_length=packing.packing_length,
        packing_min_fill_ratio=packing.packing_min_fill_ratio,
        redraw_dropped=prefetch.redraw_dropped,
        max_attempts=prefetch.max_attempts,
        max_resumes=config.max_resumes,
        make_groups=group_maker(config, parts.source, clock),
        ask_evaluation=evaluation.part.ask if evaluation is not None else None,
        take_evaluated=evaluation.part.take if evaluation is not None else None,
    )
    sync = WeightSync(
        control=control,
        export=WeightExport(given.module),
        canary=given.make_canary(parts.encoder, parts.samples[0]),
        courier=courier,
        memory=memory,
        stages=not config.launch.share_devices,  # a server that starts again takes its part of the device anew
        on_pending=rollout.sync.on_pending,
        rolling=rollout.sync.rolling,
        run_id=run_id,
        timeout_s=rollout.sync.timeout_s,
        bucket_mib=rollout.sync.bucket_mib,
        proof=rollout.sync.proof,
        canary_every_rounds=rollout.sync.canary_every_rounds,
        # A server may have to wait for rollouts of another rank before it installs, or for those resumed often enough.
        straggler_s=rollout.sync.straggler_s
        + (rollout.request_timeout_s if rollout.sync.on_pending is not OnPending.ABORT else 0.0),
        span=telemetry.trace.span,
    )
    return ChannelB(
        source=parts.source,
        client=client,
        queue=queue,
        pipeline=pipeline,
        fence=fence,
        clock=clock,
        guard=guard,
        rounds=RoundSchedule(
            len(base_urls),
            prefetch.sync_every_steps,
            backoff_steps=rollout.sync.backoff_steps,
            max_backoff_steps=rollout.sync.max_backoff_steps,
            staging=(index for index, url in enumerate(base_urls) if url in ours and may_stage),
            absent=(index for index, url in enumerate(base_urls) if url in servers.absent),
        ),
        sync=sync,
        probe=SuspectProbe(
            rank=control.rank,
            api_key=api_key,
            find_lost=sync.lost_servers,
            # Told at once: the step's vector carries it as well, but until then other ranks would believe its answers.
            on_lost=lambda server: control.notes.write(
                _note_of_loss(base_urls[server], clock.current), "lost"
            ),
            ours=ours,
            absent=servers.absent,
            examine=partial(examine, config, servers, may_stage=may_stage),
            failures=failures,
        ),
        abort=PendingAbort(
            enabled=rollout.sync.on_pending is not OnPending.WAIT,
            rank=control.rank,
            api_key=api_key,
            run_id=run_id,
            ours=ours,
            failures=failures,
        ),
        run_id=run_id,
        base_urls=base_urls,
        max_inflight_per_server=rollout.max_inflight_per_server,
        min_ready_tokens=prefetch.min_ready_tokens,
        continue_on_failure=config.stage2_ab.channel_b.on_pipeline_failure is OnPipelineFailure.CONTINUE_A,
        evaluation=evaluation,
        final_evaluation_s=config.stage2_ab.evaluation.final_timeout_s,
        answer_fingerprint=parts.task.fingerprint,
        objective=config.stage2_ab.objective,
        longest_fill_s=config.control_timeout_s - rollout.sync.timeout_s if is_inline else None,
    )


def _evaluation(
    config: Stage2Config,
    given: RunInputs,
    parts: CheckedParts,
    client: RolloutClient,
    control: ControlGroup,
    telemetry: Telemetry,
) -> PinnedEvaluation | None:
    """By the section ``stage2_ab.evaluation``; None when it is off."""
    settings, channel = config.stage2_ab.evaluation, config.stage2_ab.channel_b
    if not settings.every_steps:
        return None
    rows = given.validation_rows if given.validation_rows is not None else []
    usable = usable_rows(rows, parts.task, channel.rows_without_objects)
    config.check_validation_set(len(usable))
    part = RankEvaluation(
        rows,
        parts.task,
        num_samples=settings.num_samples,
        rank=control.rank,
        world_size=control.world_size,
        client=client,
        make_request=parts.encoder.request,
        preprocessor=parts.preprocessor,
        decoding=config.rollout.decoding,
        events=telemetry.evaluation,
        usable=usable,
    )
    dialect = channel.target.dialect or str(getattr(parts.task, "default_dialect", ""))
    return PinnedEvaluation(
        EvaluationSchedule(
            every_steps=settings.every_steps,
            max_round_delay_steps=settings.max_round_delay_steps,
            last_step=given.total_steps - 1,
        ),
        part,
        control=control,
        record=telemetry.record_evaluation,
        record_scores=lambda scored: telemetry.record_scores(scored.evaluation, scored.scores, scored.fault),
        keeper=EvaluationKeeper(
            evaluations_directory(Path(given.run_directory)) if config.telemetry.audit else None,
            DIALECTS.get(dialect, OBJECT_LIST),
        ),
    )


def _note_of_loss(base_url: str, version: int) -> str:
    return f"lost: {base_url} at version {version}"
