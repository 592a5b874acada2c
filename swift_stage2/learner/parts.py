"""The parts that a learner is made of: this rank's part of channel B, made from the configuration's sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swift_stage2.channel_b.attempts import AttemptOutcomes, Attempts
from swift_stage2.channel_b.groups import Groups, GroupSettings
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.channel_b.task import needed_columns
from swift_stage2.collectives import ControlGroup
from swift_stage2.config import Mode, OnPipelineFailure, Stage2Config
from swift_stage2.evaluation import PinnedEvaluation, pinned_evaluation
from swift_stage2.learner.device_memory import DeviceMemory
from swift_stage2.learner.phases import Phases
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.scheduling.feasibility_gate import RankFacts
from swift_stage2.scheduling.horizon import Pacer
from swift_stage2.scheduling.phase_schedule import PhaseSchedule
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.version_schedule import VersionSchedule
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.health_check import HealthCheck, ServerKind
from swift_stage2.servers.sleeper import Sleeper
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.publisher_process import ProcessPublisher
from swift_stage2.weights.snapshots import Snapshots
from swift_stage2.weights.updates import Updates

if TYPE_CHECKING:
    from swift_stage2.assembly import RunInputs
    from swift_stage2.checks.channel_b_parts import CheckedParts
    from swift_stage2.checks.servers import FoundServers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelB:
    """Everything of this rank that exists only when ``b_ratio`` is above 0."""

    source: SampleSource
    client: RolloutClient
    queue: ReadyQueue
    pipeline: Pipeline
    clock: VersionClock
    guard: TruncationGuard
    schedule: VersionSchedule
    snapshots: Snapshots
    updates: Updates | None
    """Rank 0's."""
    base_urls: list[str]
    """Of the servers, in the order of the configuration."""
    max_inflight_per_server: int
    min_ready_tokens: int
    continue_on_failure: bool
    evaluation: PinnedEvaluation | None = None
    final_evaluation_s: float = 0.0
    """How long the update and the evaluation of the final weights may take; 0: there are none."""
    answer_fingerprint: Sequence[str] = ()
    """The writing of targets: code fence, separators, escapes. A resumed run must have the same."""
    longest_fill_s: float | None = None
    """In mode inline, how long a B step waits for its packs at most. None: they are made beside training."""
    phases: Phases | None = None
    """None: servers never sleep, because they have devices of their own."""

    def with_facts(self, facts: RankFacts, step: int) -> RankFacts:
        """``facts`` with those of channel B, taken at this moment."""
        # In this order: who gives up an abandoned POST makes its server suspect in the same moment.
        busy = self.client.busy()
        suspicions = self.client.take_suspicions()
        facts = replace(
            facts,
            pipeline_failed=self.pipeline.failure is not None,
            truncation_guard=self.guard.paused,
            evaluation_wanted=self.evaluation is not None and self.evaluation.wanted,
            makes_stale=self.pipeline.makes_stale(self.schedule.next_version),
            servers_proven=(0,) * len(self.base_urls),
            servers_suspect=tuple(url in suspicions for url in self.base_urls),
            servers_closed=(False,) * len(self.base_urls),
            servers_busy=tuple(url in busy for url in self.base_urls),
        )
        if self.updates is None:
            return facts
        own = self.updates.facts(step)
        return replace(
            facts,
            update_news=own.has_update,
            publishing=own.publishing,
            server_waits=own.server_waits,
            servers_proven=own.proven,
            servers_closed=own.closed,
        )


def make_channel_b(
    config: Stage2Config,
    given: RunInputs,
    parts: CheckedParts,
    control: ControlGroup,
    telemetry: Telemetry,
    run_id: str,
    servers: FoundServers,
    examine: Callable[[str], ServerKind | None],
    failures: BackgroundFailures,
) -> ChannelB:
    """This rank's part, of which nothing runs yet. ``examine`` says who a server is that comes late."""
    channel = config.stage2_ab.channel_b
    prefetch, sync = channel.prefetch, config.rollout.sync
    rollout, b_ratio = config.rollout, config.stage2_ab.schedule.exact_b_ratio
    base_urls = [server.base_url for server in rollout.servers]
    is_inline = config.stage2_ab.mode is Mode.INLINE
    phases = _make_phases(config, given, control) if config.alternates else None
    api_key = rollout.api_key()
    clock = VersionClock()
    guard = TruncationGuard(channel.max_truncated_ratio)
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
        decoding=rollout.decoding,
        request_timeout_s=rollout.request_timeout_s,
        run_seed=given.seed,
        rank=control.rank,
        world_size=control.world_size,
        api_key=api_key,
        run_id=run_id,
        max_inflight_per_server=rollout.max_inflight_per_server,
        is_lost=lambda url, version: control.notes.has(_note_of_loss(url, version), otherwise=True),
        observer=attempts,
        watch_post=telemetry.pipeline.post,
        kinds=servers.kinds,
        columns=needed_columns(config),
    )
    evaluation = pinned_evaluation(
        config,
        given.validation_rows if given.validation_rows is not None else [],
        parts.task,
        parts.encoder,
        preprocessor=parts.preprocessor,
        client=client,
        control=control,
        telemetry=telemetry,
        run_directory=Path(given.run_directory),
        total_steps=given.total_steps,
    )
    snapshots = Snapshots(
        control=control,
        export=WeightExport(given.module),
        canary=given.make_canary(parts.encoder, parts.samples[0]),
        run_id=run_id,
        timeout_s=sync.timeout_s,
        bucket_mib=sync.bucket_mib,
        stages=not config.launch.share_devices,  # a server that starts again takes its part of the device anew
        span=telemetry.trace.span,
    )
    queue = ReadyQueue(
        config.queue_limit(given.packs_per_step),
        prefetch.version_window,
        lambda pack, reason: pipeline.on_drop(pack, reason),
    )
    ends = AttemptOutcomes(
        parts.source,
        telemetry.pipeline,
        redraw_dropped=prefetch.redraw_dropped,
        max_attempts=prefetch.max_attempts,
    )
    groups = None
    if config.stage2_ab.uses_rewards:
        compared = GroupSettings(config.stage2_ab.objective, channel.grpo)
        groups = Groups(ends, compared, parts.source, clock, prefetch.version_window)
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
        ends=ends,
        packing=channel.packing,
        groups=groups,
        ask_evaluation=evaluation.part.ask if evaluation is not None else None,
        take_evaluated=evaluation.part.take if evaluation is not None else None,
    )
    return ChannelB(
        source=parts.source,
        client=client,
        queue=queue,
        pipeline=pipeline,
        clock=clock,
        guard=guard,
        schedule=phases.schedule if phases is not None else VersionSchedule(prefetch.sync_every_steps),
        snapshots=snapshots,
        updates=_make_updates(config, given, control, telemetry, servers, examine, failures, snapshots)
        if control.rank == 0
        else None,
        base_urls=base_urls,
        max_inflight_per_server=rollout.max_inflight_per_server,
        min_ready_tokens=prefetch.min_ready_tokens,
        continue_on_failure=channel.on_pipeline_failure is OnPipelineFailure.CONTINUE_A,
        evaluation=evaluation,
        final_evaluation_s=config.stage2_ab.evaluation.final_timeout_s,
        answer_fingerprint=parts.task.fingerprint,
        longest_fill_s=config.control_timeout_s - sync.timeout_s if is_inline else None,
        phases=phases,
    )


def _make_phases(config: Stage2Config, given: RunInputs, control: ControlGroup) -> Phases:
    servers, ab = config.rollout.servers, config.stage2_ab
    sleeper = Sleeper(
        [server.base_url for server in servers],
        api_key=config.rollout.api_key(),
        timeout_s=config.rollout.sync.timeout_s,
        ends=[bool(config.launch.servers)] * len(servers),
    )
    return Phases(
        schedule=PhaseSchedule(
            1, b_ratio=ab.schedule.b_ratio, phase_steps=ab.phase_steps, num_steps=given.total_steps
        ),
        packs_per_step=given.packs_per_step,
        memory=DeviceMemory(given.optimizer, offloads=config.launch.offload_optimizer),
        put_to_sleep=sleeper if control.rank == 0 else lambda: (),
    )


def _make_updates(
    config: Stage2Config,
    given: RunInputs,
    control: ControlGroup,
    telemetry: Telemetry,
    servers: FoundServers,
    examine: Callable[[str], ServerKind | None],
    failures: BackgroundFailures,
    snapshots: Snapshots,
) -> Updates:
    rollout, sync = config.rollout, config.rollout.sync
    base_urls = [server.base_url for server in rollout.servers]
    ours = {url for url, kind in servers.kinds.items() if kind.is_ours}
    device = next(given.module.parameters()).device

    def tell_of_loss(server: int, version: int) -> None:
        """At once: the step's vector carries it as well, but until then other ranks would believe its answers."""
        with suppress(RuntimeError):  # torchrun, which keeps the notes, has gone
            control.notes.write(_note_of_loss(base_urls[server], version), "lost")

    return Updates(
        [
            ServerLife(
                sync.backoff_steps,
                sync.max_backoff_steps,
                stages=url in ours,
                state=LifeState.AWAY if url in servers.absent else LifeState.READY,
            )
            for url in base_urls
        ],
        snapshots=snapshots,
        publisher=ProcessPublisher(rollout, device, ours=ours, trace=telemetry.trace),
        health=HealthCheck(
            base_urls=base_urls,
            api_key=rollout.api_key(),
            ours=ours,
            absent=[server for server, url in enumerate(base_urls) if url in servers.absent],
            examine=examine,
            failures=failures,
        ),
        sync=sync,
        # One whose vLLM cannot change weights under requests waits for those of all ranks before it installs.
        straggler_s=sync.straggler_s + rollout.request_timeout_s,
        sync_every_steps=1 if config.alternates else config.stage2_ab.channel_b.prefetch.sync_every_steps,
        on_lost=tell_of_loss,
    )


def _note_of_loss(base_url: str, version: int) -> str:
    return f"lost: {base_url} at version {version}"
