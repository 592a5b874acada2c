"""The checks of ``--live``, server by server: who answers, prompts, parameters, one dry round, a few rollouts.

Everything is asked through the run's own parts (control session, rollout connection, weight sync), and
only of servers that the checks before have found to be what they should be.

The dry round is a real one with the checkpoint's own weights, on a single rank. Afterwards the server holds them, and
carries this doctor's run id until the first round of a learner replaces it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from swift_stage2.channel_b.rollout_client.connection import ServerConnection
from swift_stage2.collectives import SingleRank
from swift_stage2.config import Fenced, Mode, Stage2Config
from swift_stage2.doctor import feeding
from swift_stage2.doctor.coordinates import Questions, examine_answers, prepare_questions
from swift_stage2.doctor.data import Samples, samples_per_pack
from swift_stage2.doctor.examination import (
    Checked,
    Examination,
    Outcome,
    Verdict,
    failed,
    left_out,
    ok,
    warning,
)
from swift_stage2.doctor.log_prob_gap import ServerSide, examine_gap
from swift_stage2.doctor.preparation import LearnerPreparation, prepare_learner
from swift_stage2.doctor.rollouts import (
    TimedCall,
    check_calls,
    check_matching,
    check_prompts,
    connection_by_route,
)
from swift_stage2.doctor.server_identity import (
    busy_with,
    check_identity,
    check_model,
    check_parameters,
    check_same_files,
    is_unproven,
)
from swift_stage2.records import ServerReport
from swift_stage2.runtime.memory import available_memory_bytes
from swift_stage2.runtime.ports import is_here
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.protocol import ServerInfo
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.courier_process import process_courier
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import GIVE_UP_TIMEOUT_S, give_up
from swift_stage2.weights.snapshot import snapshot_bytes
from swift_stage2.weights.sync_round import WeightSync

_NUM_PROMPTS = 3


@dataclass
class LiveServers:
    """The running servers of one configuration."""

    exam: Examination
    config: Stage2Config
    scratch: Path
    prepared: Checked[LearnerPreparation]
    samples: Checked[Samples]
    routes: Sequence[Checked[str]]
    with_round: bool
    calls: list[Checked[tuple[TimedCall, ...]]] = field(default_factory=list)
    infos: list[Checked[ServerInfo]] = field(default_factory=list)
    _learner: LearnerPreparation = field(init=False)

    def examine(self) -> None:
        """One section of rows for every server."""
        self.exam.begin_section("Learner's weights")
        anybody = next((route for route in self.routes if route.passed), self.routes[0])
        module = self.exam.check(
            "model",
            self._load,
            needs=[self.prepared, anybody],
            fix="mend section swift, or free memory for the model",
        )
        sync = self.exam.check("canary", lambda: self._make_sync(module.result), needs=[module, self.samples])
        for index, session, connection in self._servers():
            self._examine_server(index, session, connection, module, sync)
        if sync.passed:
            sync.result.close()  # its process, where no round was run

    def examine_coordinates(self) -> None:
        """Who answers, with which files, and in which numbers; without a round and without the learner's weights."""
        for index, session, connection in self._servers():
            info = self._check_identity(index, session)
            model = self._check_model(index, session, info)
            self._examine_answers(index, connection, [model])

    @cached_property
    def _questions(self) -> Questions:
        return prepare_questions(self.prepared.result, self.config)

    def _examine_answers(
        self, index: int, connection: ServerConnection, needs: Sequence[Checked[Any]]
    ) -> None:
        examine_answers(
            self.exam, self.config, index, connection, lambda: self._questions, [*needs, self.prepared]
        )

    def _servers(self) -> Iterator[tuple[int, ServerSession, ServerConnection]]:
        key = self.config.rollout.api_key()
        for index, server in enumerate(self.config.rollout.servers):
            self.exam.begin_section(f"Server {index}: {server.base_url}")
            with (
                ServerSession(server.base_url, key) as session,
                closing(connection_by_route(session, key)) as connection,
            ):
                yield index, session, connection

    def _check_identity(self, index: int, session: ServerSession) -> Checked[ServerInfo]:
        key = f"rollout.servers[{index}]"
        return self.exam.check(
            "who answers",
            lambda: check_identity(session, self.config.rollout, key),
            needs=[self.routes[index]],
        )

    def _check_model(
        self, index: int, session: ServerSession, info: Checked[ServerInfo], *needs: Checked[Any]
    ) -> Checked[ServerInfo]:
        rollout, expected = self.config.rollout, self._expected_model
        model = self.exam.check(
            "model served",
            lambda: check_model(session, info.result, rollout, expected(index), f"rollout.servers[{index}]"),
            needs=[info, *needs],
        )
        self.exam.check(
            "files",
            lambda: check_same_files(
                self.prepared.result.model_directory,
                self._server_directory(index, model.result, self.routes[index].result),
            ),
            needs=[model, self.prepared],
        )
        return model

    def _examine_server(
        self,
        index: int,
        session: ServerSession,
        connection: ServerConnection,
        module: Checked[nn.Module],
        sync: Checked[WeightSync],
    ) -> None:
        check, samples = self.exam.check, self.samples
        rollout, key = self.config.rollout, f"rollout.servers[{index}]"
        info = self._check_identity(index, session)
        manifest = check(
            "parameters",
            lambda: check_parameters(
                session, info.result, WeightExport(module.result).manifest(), rollout.request_timeout_s
            ),
            needs=[info, module],
        )
        # One that is unproven answers nothing else before a round.
        is_first = info.passed and is_unproven(info.result)
        dry = self._check_round(index, session, info, sync, manifest) if is_first else None
        model = self._check_model(index, session, info, *filter(None, [dry]))
        prompt = check(
            "prompts",
            lambda: check_prompts(
                connection,
                samples.result.encoder,
                samples.result.samples[:_NUM_PROMPTS],
                rollout.request_timeout_s,
            ),
            needs=[model, samples],
        )
        if dry is None:
            dry = self._check_round(index, session, info, sync, manifest, prompt)
        calls = check(
            "timed rollouts",
            lambda: check_calls(connection, samples.result.encoder, samples.result.samples, self.config, key),
            needs=[prompt, *([dry] if self.with_round else ()), samples],
        )
        check(
            "parsed and matched",
            lambda: check_matching(calls.result, samples.result.encoder, samples.result.task, self.config),
            needs=[calls],
        )
        examine_gap(
            self.exam,
            self.config,
            lambda: ServerSide.of(index, info.result, dry.value),
            (calls, samples, module),
            lambda: self._learner,
        )
        self.calls.append(calls)
        self.infos.append(info)
        # Also where prompts differ, for then this tells why; a round that failed has left no weights to ask.
        spoilt = [dry] if dry.finding.verdict is Verdict.FAILED else []
        self._examine_answers(index, connection, [model, *spoilt])

    def _check_round(
        self,
        index: int,
        session: ServerSession,
        info: Checked[ServerInfo],
        sync: Checked[WeightSync],
        *needs: Checked[Any],
    ) -> Checked[Any]:
        if not self.with_round:
            return self.exam.check("dry sync round", lambda: left_out("left out by --no-sync"))

        return self.exam.check(
            "dry sync round",
            lambda: check_round(sync.result, index, session, info.result),
            needs=[info, sync, *needs],
            fix="restart the server and read its log",
        )

    def examine_feeding(self, step_s: float | None, num_ranks: int) -> None:
        """Whether these servers, as timed, can feed channel B."""
        exam = self.exam
        exam.begin_section("Feeding channel B")
        need = exam.check(
            "rollouts needed",
            lambda: feeding.check_need(self._feeding(num_ranks)),
            needs=[self.samples, *self.calls],
        )
        exam.check("rate", lambda: feeding.check_rate(need.result, step_s), needs=[need])
        exam.check("pack age", lambda: feeding.check_age(need.result, step_s), needs=[need])
        exam.check("settings", lambda: feeding.check_settings(need.result, step_s), needs=[need])

    def _feeding(self, num_ranks: int) -> feeding.Feeding:
        config, channel_b = self.config, self.config.stage2_ab.channel_b
        prefetch = channel_b.prefetch
        accumulation = self.prepared.result.gradient_accumulation_steps
        b_ratio = config.stage2_ab.schedule.exact_b_ratio
        full = [checked.result[-1] for checked in self.calls]
        slowest = max(self.calls, key=lambda checked: checked.result[-1].seconds).result
        return feeding.Feeding(
            b_ratio=b_ratio,
            packs_per_b_step=accumulation,
            num_ranks=num_ranks,
            num_servers=len(full),
            max_inflight_per_server=config.rollout.max_inflight_per_server,
            version_window=prefetch.version_window,
            sync_every_steps=prefetch.sync_every_steps,
            queue_limit=prefetch.limit(accumulation, b_ratio),
            prefetch_target_packs=prefetch.target(accumulation, b_ratio),
            samples_per_pack=samples_per_pack(
                self.samples.result.segment_lengths, channel_b.packing.packing_length
            ),
            num_rows=self.samples.result.lengths.num_rows,
            single_s=slowest[0].seconds,
            batch_s=slowest[-1].seconds,
            rollouts_per_s=sum(call.rollouts_per_s for call in full),
            rounds_are_staged=config.rollout.sync.fenced is not Fenced.ALWAYS
            and config.stage2_ab.mode is Mode.ASYNC
            and all(info.result.staging for info in self.infos),
        )

    def _load(self) -> Outcome[nn.Module]:
        """The weights, as the learner would load them."""
        learner = prepare_learner(self.config.swift, self.scratch, with_weights=True)
        module = learner.module()
        self._learner = learner
        manifest = WeightExport(module).manifest()
        dtypes = ", ".join(sorted({spec.dtype for spec in manifest}))
        device = next(module.parameters()).device
        size, room = snapshot_bytes(manifest), available_memory_bytes()
        if size > room:
            return failed(
                f"rank 0 keeps a copy of the weights in main memory: {size / 1e9:.1f} of {room / 1e9:.1f} GB available",
                "give the machine or container of rank 0 more main memory",
            )
        return ok(
            f"{len(manifest)} tensors to push, {dtypes}, loaded on {device}; rank 0 keeps a copy of "
            f"{size / 1e9:.2g} GB in main memory",
            module,
        )

    def _make_sync(self, module: nn.Module) -> Outcome[WeightSync]:
        """The doctor's own run, whose rounds go to one server at a time."""
        rollout, samples = self.config.rollout, self.samples.result
        canary = self._learner.canary(module, samples.encoder, samples.samples[0])
        canary.answer()
        courier = process_courier(rollout, next(module.parameters()).device, disk_keep=0)
        sync = WeightSync(
            control=SingleRank(),
            export=WeightExport(module),
            canary=canary,
            courier=courier,
            run_id=f"doctor-{uuid.uuid4().hex[:12]}",
            timeout_s=rollout.sync.timeout_s,
            bucket_mib=rollout.sync.bucket_mib,
            proof=rollout.sync.proof,
        )
        return ok("the learner answers a greedy question about a sample", sync)

    def _expected_model(self, index: int) -> str:
        started = self.config.launch.servers
        written = (started[index].model if started else None) or self.config.swift.get("model")
        return str(written or self.prepared.result.model_directory)

    def _server_directory(self, index: int, info: ServerInfo, address: str) -> Path | None:
        """Where the server on this machine has its model from, if that is known for sure.

        A stock server says only the last part of its path; one that ``launch`` starts has its path in the file.
        """
        started = self.config.launch.servers
        said = self._expected_model(index) if info.stock and started else info.model
        directory = Path(said).expanduser() if said else None
        known = directory is not None and directory.is_absolute() and is_here(address)
        return directory if known else None


_VERSION = 1  # of this doctor's own run
_MIB = 1 << 20


def check_round(
    sync: WeightSync, server: int, session: ServerSession, info: ServerInfo
) -> Outcome[ServerReport]:
    """One round to one server, refused while it works for somebody else.

    Raises:
        WeightSyncError: the learner's weights cannot be exported.
    """
    if busy := busy_with(session, info):
        return failed(
            f"left alone: {busy}",
            "end that run, or wait until it is over, and run the doctor again; --no-sync leaves the round out",
        )
    try:
        outcome = sync.run(_VERSION, [server])
    finally:
        sync.close()  # a stock server keeps a communicator until it is told to let it go
    if outcome.failed and not info.stock:  # else it would hold the round open against the learner's first one
        give_up(session, outcome.round_id, Deadline(GIVE_UP_TIMEOUT_S))
    return _describe(outcome.reports[server], info.stock)


def _describe(report: ServerReport, is_stock: bool) -> Outcome[ServerReport]:
    if report.error is not None:
        return failed(report.error, _fix(report.error, is_stock))
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds.items())
    found = (
        f"{report.num_bytes / _MIB:.1f} MiB over {report.transport} in {sum(report.seconds.values()):.2f} s "
        f"({phases}), proven by {report.proof}; the server holds the checkpoint's weights"
    )
    if report.proof == "canary" and not is_stock:
        return warning(found, "write rollout.sync.proof: auto, so that checksums prove the weights", report)
    limit = (
        " (shows only that nothing is grossly wrong: plain vLLM, or stock without the plugin, has no checksums)"
        if report.proof == "canary"
        else ""
    )
    return ok(found + limit, report)


def _fix(error: str, is_stock: bool) -> str:
    known: Sequence[tuple[str, str]] = (
        ("same tensors", "start the server with the learner's model"),
        ("another run", "give every run a server of its own, or wait until the other one is over"),
        (
            "weight group",
            "mend rollout.servers[].group_host, group_bind or group_port, or the network, as told above",
        ),
        ("must map the learner's memory", "write rollout.sync.transport: auto"),
        (
            "does not hold this round",
            "give the server's --weights-root the directory of rollout.sync.disk_directory",
        ),
        ("--weights-root", "start the server with it, or write rollout.sync.transport: auto"),
        ("disk_directory must", "mend the directory as told above, or write rollout.sync.transport: auto"),
        ("not configured", f"start it with {vllm_serve.TRANSFER_OPTION}"),
        ("no checksums", "write rollout.sync.proof: auto"),
        ("other tokens", "start the server with the learner's model, dtype and template, and restart it"),
        ("only a canary", "write rollout.sync.proof: auto"),
        ("canary alone shows nothing", "write rollout.sync.proof: auto"),
    )
    fix = next((remedy for mark, remedy in known if mark in error), "")
    log = "restart the server and read its log" if is_stock else "read the server's log"
    return fix or f"{log}: the round names what it was doing"
