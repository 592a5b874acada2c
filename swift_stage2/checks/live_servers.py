"""The checks of ``--live``, server by server: who answers, model, prompts, one dry round, a few rollouts.

Everything is asked through the run's own parts, and only of servers that the checks before have found to be right.
The dry round is a real one with the checkpoint's own weights, on a single rank. Afterwards the server holds them, and
carries this doctor's run id until the first round of a learner replaces it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from swift_stage2 import wire
from swift_stage2.channel_b.rollouts.routes import RouteNow
from swift_stage2.checks.checks import CheckResult, Verdict, failed, left_out, ok, warning
from swift_stage2.checks.coordinates import Questions, examine_answers, prepare_questions
from swift_stage2.checks.preparation import LearnerPreparation, prepare_learner
from swift_stage2.checks.rollouts import (
    Feeding,
    TimedCall,
    check_call,
    check_matching,
    check_prompts,
    check_rate,
    check_settings,
    route_of,
)
from swift_stage2.checks.samples import CheckedRows
from swift_stage2.checks.servers import explain, identify
from swift_stage2.config import Stage2Config
from swift_stage2.errors import FaultKind, ServerFault
from swift_stage2.records import ServerReport
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.sleeper import Sleeper
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.publisher_process import ProcessPublisher
from swift_stage2.weights.waited_updates import WaitedUpdates
from swift_stage2.wire import ASLEEP_STATE, INSTALLING_STATE, RefusalReason, ServerInfo

if TYPE_CHECKING:
    from swift_stage2.checks.doctor import CheckRun

_NUM_PROMPTS = 3
_LOOK_TIMEOUT_S = 10.0
_MIB = 1 << 20
_DOCTOR = "doctor-"  # begins the ids of its runs


@dataclass
class LiveServers:
    """The running servers of one configuration."""

    check_run: CheckRun
    config: Stage2Config
    scratch: Path
    prepared: CheckResult[LearnerPreparation]
    samples: CheckResult[CheckedRows]
    with_round: bool
    calls: list[CheckResult[TimedCall]] = field(default_factory=list)
    _learner: LearnerPreparation = field(init=False)

    @cached_property
    def infos(self) -> list[CheckResult[ServerInfo]]:
        """Who answers, a row for each server."""
        return [
            self.check_run.check(
                f"server {index}",
                partial(check_identity, server.base_url, self.config),
                fix="start it; swift-stage2 launch --check starts what launch.servers names and asks it then",
            )
            for index, server in enumerate(self.config.rollout.servers)
        ]

    def examine(self) -> None:
        """One section of rows for every server."""
        anybody = next((info for info in self.infos if info.passed), self.infos[0])
        self.check_run.begin_section("Learner's weights")
        module = self.check_run.check(
            "model",
            self._load,
            needs=[self.prepared, anybody],
            fix="mend section swift, or free memory for the model",
        )
        sync = self.check_run.check(
            "canary", lambda: self._make_sync(module.result), needs=[module, self.samples]
        )
        for index, session, route in self._servers():
            self._examine_server(index, session, route, sync)
        if sync.passed:
            sync.result.close()  # its process, where no round was run
        found = zip(self.config.rollout.servers, self.infos, strict=True)
        slept = [
            each.base_url
            for each, info in found
            if info.passed and info.result.state == ASLEEP_STATE and not _sleeps_for(info.result)
        ]
        # Again, because a learner may need the memory; a run's own was left alone, and may be awake by now.
        sync_s, key = self.config.rollout.sync.timeout_s, self.config.rollout.api_key()
        for why in filter(None, Sleeper(slept, key, sync_s, [False] * len(slept))()):
            self.check_run.check("sleep", partial(failed, why, "restart the server"))

    def examine_coordinates(self) -> None:
        """Who answers, with which model, and in which numbers; without a round and without the learner's weights."""
        for info, (_, _, route) in zip(self.infos, self._servers(), strict=True):
            self._examine_answers(route, info)

    @cached_property
    def _questions(self) -> Questions:
        return prepare_questions(self.prepared.result, self.config)

    def _examine_answers(self, route: RouteNow, *needs: CheckResult[Any]) -> None:
        examine_answers(self.check_run, self.config, route, lambda: self._questions, [*needs, self.prepared])

    def _servers(self) -> Iterator[tuple[int, ServerSession, RouteNow]]:
        key = self.config.rollout.api_key()
        for index, server in enumerate(self.config.rollout.servers):
            self.check_run.begin_section(f"Server {index}: {server.base_url}")
            with ServerSession(server.base_url, key) as session:
                yield index, session, route_of(session, key)

    def _examine_server(
        self,
        index: int,
        session: ServerSession,
        route: RouteNow,
        sync: CheckResult[WaitedUpdates],
    ) -> None:
        check, samples, config = self.check_run.check, self.samples, self.config
        timeout_s, key = config.rollout.request_timeout_s, f"rollout.servers[{index}]"
        info = self.infos[index]
        # One that is unproven or sleeps answers nothing else before a round.
        is_first = info.passed and info.result.state in (RefusalReason.UNPROVEN, ASLEEP_STATE)
        dry = self._check_round(index, session, info, sync) if is_first else None
        prompt = check(
            "prompts",
            lambda: check_prompts(
                route, samples.result.encoder, samples.result.samples[:_NUM_PROMPTS], timeout_s
            ),
            needs=[info, samples, *filter(None, [dry])],
        )
        if dry is None:
            dry = self._check_round(index, session, info, sync, prompt)
        calls = check(
            "timed rollouts",
            lambda: check_call(route, samples.result.encoder, samples.result.samples, config, key),
            needs=[prompt, *([dry] if self.with_round else ()), samples],
        )
        check(
            "parsed and matched",
            lambda: check_matching(
                calls.result.rollouts, samples.result.encoder, samples.result.task, config
            ),
            needs=[calls],
        )
        self.calls.append(calls)
        # Also where prompts differ, for then this tells why; a round that failed has left no weights to ask.
        spoilt = [dry] if dry.verdict is Verdict.FAILED else []
        self._examine_answers(route, info, *spoilt)

    def _check_round(
        self,
        index: int,
        session: ServerSession,
        info: CheckResult[ServerInfo],
        sync: CheckResult[WaitedUpdates],
        *needs: CheckResult[Any],
    ) -> CheckResult[Any]:
        if not self.with_round:
            return self.check_run.check("dry sync round", lambda: left_out("left out by --no-sync"))
        return self.check_run.check(
            "dry sync round",
            lambda: check_round(sync.result, index, session, info.result),
            needs=[info, sync, *needs],
            fix="restart the server and read its log",
        )

    def examine_feeding(self, step_s: float | None, num_ranks: int) -> None:
        """Whether these servers, as timed, can feed channel B."""
        self.check_run.begin_section("Feeding channel B")
        asked: list[CheckResult[Any]] = [self.samples, *self.calls]
        self.check_run.check("rate", lambda: check_rate(self._feeding(num_ranks), step_s), needs=asked)
        self.check_run.check(
            "settings", lambda: check_settings(self._feeding(num_ranks), step_s), needs=asked
        )

    def _feeding(self, num_ranks: int) -> Feeding:
        config, channel_b = self.config, self.config.stage2_ab.channel_b
        prefetch = channel_b.prefetch
        full = [checked.result for checked in self.calls]
        return Feeding(
            b_ratio=config.stage2_ab.schedule.exact_b_ratio,
            packs_per_b_step=self.prepared.result.gradient_accumulation_steps,
            num_ranks=num_ranks,
            num_servers=len(full),
            max_inflight_per_server=config.rollout.max_inflight_per_server,
            version_window=prefetch.version_window,
            sync_every_steps=prefetch.sync_every_steps,
            samples_per_pack=self.samples.result.lengths.samples_per_pack(channel_b.packing.packing_length),
            batch_s=max(call.seconds for call in full),
            rollouts_per_s=sum(call.rollouts_per_s for call in full),
        )

    def _load(self) -> CheckResult[nn.Module]:
        """The weights, as the learner would load them."""
        self._learner = prepare_learner(self.config.swift, self.scratch, with_weights=True)
        module = self._learner.module()
        manifest = WeightExport(module).manifest()
        dtypes = ", ".join(sorted({spec.dtype for spec in manifest}))
        device = next(module.parameters()).device
        return ok(f"{len(manifest)} tensors to push, {dtypes}, loaded on {device}", module)

    def _make_sync(self, module: nn.Module) -> CheckResult[WaitedUpdates]:
        """The doctor's own run, whose rounds go to one server at a time."""
        rollout, samples = self.config.rollout, self.samples.result
        canary = self._learner.canary(module, samples.encoder, samples.samples[0])
        sync = WaitedUpdates(
            len(rollout.servers),
            export=WeightExport(module),
            canary=canary,
            publisher=ProcessPublisher(rollout, next(module.parameters()).device, disk_keep=0),
            run_id=f"{_DOCTOR}{uuid.uuid4().hex[:12]}",
            sync=rollout.sync,
        )
        return ok("the learner answers a greedy question about a sample", sync)


def check_identity(base_url: str, config: Stage2Config) -> CheckResult[ServerInfo]:
    """The probe of a start, in words; one that takes connections and answers nothing is told soon.

    Another model than the learner's shows in the prompts and in the dry round.
    """
    most_s, started = config.rollout.request_timeout_s, time.perf_counter()
    with ServerSession(base_url, config.rollout.api_key()) as session:
        try:
            try:
                session.get(wire.HEALTH, Deadline(min(_LOOK_TIMEOUT_S, most_s)))
            except ServerFault as fault:  # any other is told better by what is asked below
                if fault.kind is FaultKind.LATE:
                    raise
            # A stock server answers after the /infer/ that runs, so as long as one may take.
            info = identify(session, config, Deadline(most_s))
        except ServerFault as fault:
            raise explain(fault, session, config) from fault
    answered = f"answered in {1e3 * (time.perf_counter() - started):.0f} ms"
    if info.stock:
        kind = f"vllm serve, asked for {info.chat_model}" if info.chat_model else "stock swift rollout"
        found = f"{kind}, {answered}"
    else:
        weights = (
            f"version {info.weight_version} of run {info.run_id}"
            if info.run_id
            else "those of its checkpoint"
        )
        found = f"swift-stage2 rollout ({info.engine}), {info.state}, weights: {weights}, {answered}"
    if info.state == INSTALLING_STATE:
        return failed(
            f"{found}: another run has it install weights",
            "end that run, or wait until the install is over, and run the doctor again: runs cannot share a server",
        )
    if config.alternates and not info.sleeps:
        return warning(
            f"{found}: it does not sleep, so it keeps its memory while the learner trains",
            "start it with swift-stage2 rollout --sleep-level 2, or write stage2_ab.mode: async",
            info,
        )
    if info.state == RefusalReason.UNPROVEN:
        return warning(
            found, "nothing to write: the next proven sync round, also the doctor's, mends it", info
        )
    return ok(found, info)


def busy_with(session: ServerSession, info: ServerInfo) -> str:
    """For whom our server works at this moment; empty if for nobody, and always of a stock one, which does not say.

    Raises:
        ServerFault: it does not answer.
    """
    if info.stock:
        return ""
    if run_id := _sleeps_for(info):
        return f"it sleeps beside run {run_id}, or has since that one ended"
    health = session.get(wire.HEALTH, Deadline(_LOOK_TIMEOUT_S))
    counts = [health.get(name) for name in ("num_running", "num_waiting")] if isinstance(health, dict) else []
    number = sum(count for count in counts if isinstance(count, int))
    return f"it is making {number} completion(s) for somebody else" if number else ""


def _sleeps_for(info: ServerInfo) -> str:
    """The run beside which it was found asleep; empty where there is none."""
    run_id = info.run_id or ""
    return run_id if info.state == ASLEEP_STATE and not run_id.startswith(_DOCTOR) else ""


def check_round(
    sync: WaitedUpdates, server: int, session: ServerSession, info: ServerInfo
) -> CheckResult[ServerReport]:
    """One round to one server, refused while it works for somebody else.

    Raises:
        WeightSyncError: the learner's weights cannot be exported.
    """
    if busy := busy_with(session, info):
        return failed(
            f"left alone: {busy}",
            "end that run, or wait until it is over, restart a server that it left asleep, and run the doctor again; "
            "--no-sync leaves the round out",
        )
    try:
        outcome = sync.run([server])
    finally:
        sync.close()  # a stock server keeps a communicator until it is told to let it go
    report = outcome.reports[server]
    if report.error is not None:
        return failed(
            report.error, "mend what this names, or read the server's log; then run the doctor again"
        )
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds.items())
    by = report.proof
    if report.proof == "canary":
        by += " (shows only that nothing is grossly wrong: plain vLLM, or stock without the plugin, has no checksums)"
    return ok(
        f"{report.num_bytes / _MIB:.1f} MiB over {report.transport} in {sum(report.seconds.values()):.2f} s "
        f"({phases}), proven by {by}; the server holds the checkpoint's weights",
        report,
    )
