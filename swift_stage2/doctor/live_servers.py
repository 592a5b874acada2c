"""The checks of ``--live``, server by server: who answers, prompts, parameters, one dry round, a few rollouts.

Everything is asked through the run's own parts (control session, rollout connection, weight sync), and
only of servers that the checks before have found to be what they should be.

The dry round is a real one with the checkpoint's own weights, on a single rank. Afterwards the server holds them, and
carries this doctor's run id until the first round of a learner replaces it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import nn

from swift_stage2.assembly import endpoints_of, transport_for
from swift_stage2.channel_b.rollout_client.connection import ServerConnection
from swift_stage2.collectives import SingleRank
from swift_stage2.config import RolloutConfig, Stage2Config
from swift_stage2.doctor import feeding, rollouts, server_identity
from swift_stage2.doctor.data import Samples, samples_per_pack
from swift_stage2.doctor.examination import Checked, Examination, Outcome, failed, left_out, ok, warning
from swift_stage2.doctor.preparation import LearnerPreparation, prepare_learner
from swift_stage2.doctor.rollouts import TimedCall
from swift_stage2.doctor.server_identity import ServerIdentity, busy_with
from swift_stage2.errors import ServerFault, WeightSyncHang
from swift_stage2.process.ports import is_here
from swift_stage2.records import ServerReport
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.sync_round import Canary, WeightSync

_NUM_PROMPTS = 3
_CONNECT_TIMEOUT_S = 10.0


class LiveServers:
    """The running servers of one configuration."""

    def __init__(
        self,
        exam: Examination,
        config: Stage2Config,
        scratch: Path,
        prepared: Checked[LearnerPreparation],
        samples: Checked[Samples],
        routes: Sequence[Checked[str]],
        *,
        with_round: bool,
    ) -> None:
        self._exam = exam
        self._config = config
        self._scratch = scratch
        self._prepared = prepared
        self._samples = samples
        self._routes = routes
        self._with_round = with_round
        self._calls: list[Checked[tuple[TimedCall, ...]]] = []
        self.hung = False

    def examine(self) -> None:
        """One section of rows for every server."""
        self._exam.begin_section("Learner's weights")
        anybody = next((route for route in self._routes if route.passed), self._routes[0])
        module = self._exam.check(
            "model",
            self._load,
            needs=[self._prepared, anybody],
            fix="mend section swift, or free memory for the model",
        )
        rounds = self._exam.check(
            "canary", lambda: self._make_rounds(module.result), needs=[module, self._samples]
        )
        for index, server in enumerate(self._config.rollout.servers):
            self._exam.begin_section(f"Server {index}: {server.base_url}")
            with ExitStack() as stack:
                key = self._config.rollout.api_key()
                session = stack.enter_context(ServerSession(server.base_url, key))
                connection = ServerConnection(
                    server.base_url, api_key=key, connect_timeout_s=_CONNECT_TIMEOUT_S
                )
                stack.callback(connection.close)
                self._examine_server(index, session, connection, module, rounds)

    def _examine_server(
        self,
        index: int,
        session: ServerSession,
        connection: ServerConnection,
        module: Checked[nn.Module],
        rounds: Checked[DryRounds],
    ) -> None:
        exam, rollout, key = self._exam, self._config.rollout, f"rollout.servers[{index}]"
        route = self._routes[index]
        identity = exam.check(
            "who answers", lambda: server_identity.check_identity(session, rollout, key), needs=[route]
        )
        manifest = exam.check(
            "parameters",
            lambda: server_identity.check_parameters(
                session,
                identity.result.info,
                WeightExport(module.result).manifest(),
                rollout.request_timeout_s,
            ),
            needs=[identity, module],
        )
        dry: Checked[Any] | None = None
        if identity.passed and identity.result.is_unproven:  # it answers nothing else before a round
            dry = self._check_round(index, session, identity, rounds, manifest)
        model = exam.check(
            "model served",
            lambda: server_identity.check_model(
                session, identity.result, rollout, self._expected_model(index), key
            ),
            needs=[identity] if dry is None else [identity, dry],
        )
        exam.check(
            "files",
            lambda: server_identity.check_same_files(
                self._prepared.result.model_directory,
                self._server_directory(index, model.result, route.result),
            ),
            needs=[model, self._prepared],
        )
        prompt = exam.check(
            "prompts",
            lambda: rollouts.check_prompts(
                connection,
                self._samples.result.encoder,
                self._samples.result.samples[:_NUM_PROMPTS],
                rollout.request_timeout_s,
            ),
            needs=[model, self._samples],
        )
        if dry is None:
            dry = self._check_round(index, session, identity, rounds, manifest, prompt)
        self._check_rollouts(connection, key, [prompt] if not self._with_round else [prompt, dry])

    def _check_round(
        self,
        index: int,
        session: ServerSession,
        identity: Checked[ServerIdentity],
        rounds: Checked[DryRounds],
        *needs: Checked[Any],
    ) -> Checked[Any]:
        if not self._with_round:
            return self._exam.check("dry sync round", lambda: left_out("left out by --no-sync"))

        def run() -> Outcome[Any]:
            try:
                return rounds.result.check(index, session, identity.result)
            except WeightSyncHang:
                self.hung = True
                raise

        return self._exam.check(
            "dry sync round", run, needs=[identity, rounds, *needs], fix="restart the server and read its log"
        )

    def _check_rollouts(self, connection: ServerConnection, key: str, needs: Sequence[Checked[Any]]) -> None:
        samples, config = self._samples, self._config
        calls = self._exam.check(
            "timed rollouts",
            lambda: rollouts.check_calls(
                connection, samples.result.encoder, samples.result.samples, config, key
            ),
            needs=[*needs, samples],
        )
        self._exam.check(
            "parsed and matched",
            lambda: rollouts.check_matching(
                calls.result, samples.result.encoder, samples.result.task, config
            ),
            needs=[calls],
        )
        self._calls.append(calls)

    def examine_feeding(self, step_s: float | None, num_ranks: int) -> None:
        """Whether these servers, as timed, can feed channel B."""
        exam = self._exam
        exam.begin_section("Feeding channel B")
        need = exam.check(
            "rollouts needed",
            lambda: feeding.check_need(self._feeding(num_ranks)),
            needs=[self._samples, *self._calls],
        )
        exam.check("rate", lambda: feeding.check_rate(need.result, step_s), needs=[need])
        exam.check("pack age", lambda: feeding.check_age(need.result, step_s), needs=[need])
        exam.check("settings", lambda: feeding.check_settings(need.result, step_s), needs=[need])

    def _feeding(self, num_ranks: int) -> feeding.Feeding:
        config, channel_b = self._config, self._config.stage2_ab.channel_b
        prefetch = channel_b.prefetch
        accumulation = self._prepared.result.gradient_accumulation_steps
        full = [checked.result[-1] for checked in self._calls]
        slowest = max(self._calls, key=lambda checked: checked.result[-1].seconds).result
        return feeding.Feeding(
            b_ratio=config.stage2_ab.schedule.exact_b_ratio,
            packs_per_b_step=accumulation,
            num_ranks=num_ranks,
            num_servers=len(full),
            max_inflight_per_server=config.rollout.max_inflight_per_server,
            version_window=prefetch.version_window,
            sync_every_steps=prefetch.sync_every_steps,
            queue_limit=prefetch.queue_limit,
            prefetch_target_packs=prefetch.prefetch_target_packs,
            samples_per_pack=samples_per_pack(
                self._samples.result.segment_lengths, channel_b.packing.packing_length
            ),
            num_rows=self._samples.result.lengths.num_rows,
            single_s=slowest[0].seconds,
            batch_s=slowest[-1].seconds,
            rollouts_per_s=sum(call.rollouts_per_s for call in full),
        )

    def _load(self) -> Outcome[nn.Module]:
        """The weights, as the learner would load them."""
        learner = prepare_learner(self._config.swift, self._scratch, with_weights=True)
        module = learner.module()
        self._learner = learner
        manifest = WeightExport(module).manifest()
        dtypes = ", ".join(sorted({spec.dtype for spec in manifest}))
        device = next(module.parameters()).device
        return ok(f"{len(manifest)} tensors to push, {dtypes}, loaded on {device}", module)

    def _make_rounds(self, module: nn.Module) -> Outcome[DryRounds]:
        canary = self._learner.canary(module, self._samples.result.encoder, self._samples.result.samples[0])
        canary.answer()
        return ok(
            "the learner answers a greedy question about a sample",
            DryRounds(self._config.rollout, module, canary),
        )

    def _expected_model(self, index: int) -> str:
        started = self._config.launch.servers
        written = (started[index].model if started else None) or self._config.swift.get("model")
        return str(written or self._prepared.result.model_directory)

    def _server_directory(self, index: int, identity: ServerIdentity, address: str) -> Path | None:
        """Where the server on this machine has its model from, if that is known for sure.

        A stock server says only the last part of its path; one that ``launch`` starts has its path in the file.
        """
        started = self._config.launch.servers
        said = self._expected_model(index) if identity.info.stock and started else identity.model
        directory = Path(said).expanduser() if said else None
        known = directory is not None and directory.is_absolute() and is_here(address)
        return directory if known else None


_GIVE_UP_TIMEOUT_S = 5.0
_VERSION = 1  # of this doctor's own run
_MIB = 1 << 20


class DryRounds:
    """The doctor's run: its rounds, one server at a time."""

    def __init__(self, rollout: RolloutConfig, module: nn.Module, canary: Canary) -> None:
        self._rollout = rollout
        self._sync = WeightSync(
            endpoints_of(rollout),
            control=SingleRank(),
            export=WeightExport(module),
            canary=canary,
            make_transport=lambda info: transport_for(info, module, rollout.api_key()),
            run_id=f"doctor-{uuid.uuid4().hex[:12]}",
            timeout_s=rollout.sync.timeout_s,
            bucket_mib=rollout.sync.bucket_mib,
            proof=rollout.sync.proof,
            api_key=rollout.api_key(),
        )

    def check(self, server: int, session: ServerSession, identity: ServerIdentity) -> Outcome[ServerReport]:
        """One round to one server, refused while it works for somebody else.

        Raises:
            WeightSyncError: the learner's weights cannot be exported.
            WeightSyncHang: the push did not return; its thread cannot be ended.
        """
        if busy := busy_with(session, identity):
            return failed(
                f"left alone: {busy}",
                "end that run, or wait until it is over, and run the doctor again; --no-sync leaves the round out",
            )
        try:
            outcome = self._sync.run(_VERSION, [server])
        finally:
            self._sync.close()  # a stock server keeps a communicator until it is told to let it go
        if outcome.failed and not identity.info.stock:
            _give_up(session, outcome.round_id)
        return _describe(outcome.reports[server], identity.info.stock)


def _give_up(session: ServerSession, round_id: str) -> None:
    """Ends a failed round, which our server would hold open against the learner's first one."""
    with suppress(ServerFault):  # the server is gone, or has ended the round itself
        session.post(
            protocol.FINISH_ROUND, {"round_id": round_id, "commit": False}, Deadline(_GIVE_UP_TIMEOUT_S)
        )


def _describe(report: ServerReport, is_stock: bool) -> Outcome[ServerReport]:
    if report.error is not None:
        return failed(report.error, _fix(report.error, is_stock))
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds.items())
    found = (
        f"{report.num_bytes / _MIB:.1f} MiB in {sum(report.seconds.values()):.2f} s ({phases}), proven by "
        f"{report.proof}; the server holds the checkpoint's weights"
    )
    if report.proof == "canary" and not is_stock:
        return warning(found, "write rollout.sync.proof: auto, so that checksums prove the weights", report)
    limit = " (shows only that nothing is grossly wrong: a stock server has no checksums)" if is_stock else ""
    return ok(found + limit, report)


def _fix(error: str, is_stock: bool) -> str:
    known: Sequence[tuple[str, str]] = (
        ("same tensors", "start the server with the learner's model"),
        ("another run", "give every run a server of its own, or wait until the other one is over"),
        (
            "weight group",
            "mend rollout.servers[].group_host, group_bind or group_port, or the network, as told above",
        ),
        ("no checksums", "write rollout.sync.proof: auto"),
        ("other tokens", "start the server with the learner's model, dtype and template, and restart it"),
        ("only a canary", "write rollout.sync.proof: auto"),
        ("canary alone shows nothing", "write rollout.sync.proof: auto"),
    )
    fix = next((remedy for mark, remedy in known if mark in error), "")
    log = "restart the server and read its log" if is_stock else "read the server's log"
    return fix or f"{log}: the round names what it was doing"
