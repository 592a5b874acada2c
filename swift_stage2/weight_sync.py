"""Runs one sync round: rank 0 pushes full weights to the servers, proves them, and tells every rank.

The first barrier, that every rank is drained, is the learner's; the second is the broadcast of the
outcome here. A round is a transaction: rank 0 never raises before that broadcast, and only what was
proven counts. The push has daemon threads of its own; the deadline is kept by the main thread.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from swift_stage2 import rollout_protocol as protocol
from swift_stage2.collectives import ControlGroup
from swift_stage2.config import Proof
from swift_stage2.errors import ProtocolError, ServerFault, WeightSyncError, WeightSyncHang
from swift_stage2.server_session import Deadline, ServerSession
from swift_stage2.weight_checksum import checksum_tensor
from swift_stage2.weight_export import WeightExport, buckets, flatten
from swift_stage2.weight_transport import WeightTransport

# Every call of a round ends by this share of its time, so that only a thread that does not return by the
# whole of it is a hang.
_SHARE_FOR_CALLS = 0.8
_SHARE_FOR_PATIENCE = 0.25  # of that, with a server that is still busy
_BUSY_POLL_S = 0.05
_MIB = 1 << 20


class Canary(Protocol):
    """One greedy question whose answer the learner knows."""

    @property
    def request(self) -> dict[str, Any]: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def answer(self) -> None:
        """Computes the learner's own answer under its present weights; same cost on every call."""

    def agrees(self, token_ids: Sequence[int]) -> bool: ...


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """Where one server answers HTTP, and the port its weight group uses."""

    base_url: str
    group_port: int


@dataclass(frozen=True, slots=True)
class ServerReport:
    """How one server fared in one round. ``seconds`` by phase: begin, connect, push, acknowledge, prove."""

    proven: bool
    error: str | None
    proof: str  # "checksums+canary", "checksums" or "canary"
    num_bytes: int
    seconds: dict[str, float]
    incarnation: str | None = None


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What every rank learns of a round."""

    round_id: str
    version: int
    reports: dict[int, ServerReport] = field(default_factory=dict)
    learner_fault: str | None = None
    hung: str | None = None
    seconds: float = 0.0
    canary_seconds: float = 0.0

    @property
    def proven(self) -> tuple[int, ...]:
        return tuple(server for server, report in self.reports.items() if report.proven)

    @property
    def failed(self) -> tuple[int, ...]:
        return tuple(server for server, report in self.reports.items() if not report.proven)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RoundOutcome:
        reports = {int(server): ServerReport(**report) for server, report in data["reports"].items()}
        return cls(**{**data, "reports": reports})


class WeightSync:
    """Sync rounds of one run. ``run`` is called on every rank's main thread, at the same step."""

    def __init__(
        self,
        endpoints: Sequence[ServerEndpoint],
        *,
        control: ControlGroup,
        export: WeightExport,
        canary: Canary,
        make_transport: Callable[[protocol.ServerInfo], WeightTransport],
        run_id: str,
        timeout_s: float,
        bucket_mib: int,
        proof: Proof = Proof.AUTO,
        api_key: str | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._control = control
        self._export = export
        self._canary = canary
        self._make_transport = make_transport
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_mib * _MIB
        self._proof = proof
        self._api_key = api_key
        self._transports: dict[int, WeightTransport] = {}
        self._distrusted: set[int] = set()

    def run(self, version: int, targets: Sequence[int]) -> RoundOutcome:
        """One round that brings ``targets`` to ``version``; returns the same outcome on every rank.

        Raises:
            WeightSyncError: the learner's weights cannot be exported; on every rank.
            WeightSyncHang: a push did not return by ``sync.timeout_s``; on every rank.
        """
        mine = self._run_rank_zero(version, targets) if self._control.rank == 0 else None
        outcome = RoundOutcome.from_json(self._control.broadcast(mine.to_json() if mine else None))
        if outcome.hung:
            raise WeightSyncHang(outcome.hung)
        if outcome.learner_fault:
            raise WeightSyncError(outcome.learner_fault)
        return outcome

    def distrust(self, servers: Iterable[int]) -> None:
        """What connects to these servers is not used again: they may come back as other processes."""
        self._distrusted.update(servers)

    def close(self) -> None:
        """Closes what the transports still hold."""
        for transport in self._transports.values():
            _close_quietly(transport)
        self._transports.clear()

    def _run_rank_zero(self, version: int, targets: Sequence[int]) -> RoundOutcome:
        started = time.perf_counter()
        round_id = uuid.uuid4().hex
        try:
            self._canary.answer()
        except Exception as error:  # rank 0 must reach the broadcast whatever happens
            return RoundOutcome(round_id, version, learner_fault=_describe("the learner's canary", error))
        canary_seconds = time.perf_counter() - started
        pushes = [_Push(self, server, round_id, version) for server in targets]
        try:
            for push in pushes:
                push.start()
        except RuntimeError as error:  # the process may start no more threads
            return RoundOutcome(round_id, version, learner_fault=_describe("the start of a push", error))
        end = time.monotonic() + self._timeout_s
        hung = [push for push in pushes if not push.finished.wait(max(0.0, end - time.monotonic()))]
        if hung:
            for push in hung:
                self._transports.pop(
                    push.server, None
                )  # its thread is inside: to close it could hang as well
            names = ", ".join(push.name for push in hung)
            return RoundOutcome(round_id, version, hung=f"{names} did not return within {self._timeout_s} s")
        fault = next((push.learner_fault for push in pushes if push.learner_fault), None)
        reports = {push.server: push.report for push in pushes if push.report is not None}
        return RoundOutcome(
            round_id, version, reports, fault, None, time.perf_counter() - started, canary_seconds
        )


class _Push(threading.Thread):
    """One server's part of one round, on a daemon thread: a transfer that hangs cannot be joined."""

    def __init__(self, sync: WeightSync, server: int, round_id: str, version: int) -> None:
        self._sync = sync
        self.server = server
        self._endpoint = sync._endpoints[server]
        super().__init__(name=f"push to {self._endpoint.base_url}", daemon=True)
        self._round_id = round_id
        self._version = version
        self._deadline = Deadline(sync._timeout_s * _SHARE_FOR_CALLS)
        self._seconds: dict[str, float] = {}
        self._num_bytes = 0
        self._proof = "canary"
        self._incarnation: str | None = None
        self.report: ServerReport | None = None
        self.learner_fault: str | None = None
        self.finished = threading.Event()

    def run(self) -> None:
        try:
            with ServerSession(self._endpoint.base_url, self._sync._api_key) as session:
                self._transfer(session)
            self.report = self._make_report(None)
        except ServerFault as error:
            self._drop_transport()
            self.report = self._make_report(str(error))
        except Exception as error:  # top of a thread: anything else is the learner's own fault
            self._drop_transport()
            self.learner_fault = _describe("the export of the learner's weights", error)
        finally:
            self.finished.set()

    def _transfer(self, session: ServerSession) -> None:
        deadline, export = self._deadline, self._sync._export
        if self.server in self._sync._distrusted:
            self._drop_transport()
            self._sync._distrusted.discard(self.server)
        with self._phase("begin"):
            info = session.info(deadline)
            self._incarnation = info.incarnation
            own_manifest = export.manifest()
            dtypes = {spec.name: spec.dtype for spec in info.manifest}
            if not info.stock:
                manifest = _agreed_manifest(own_manifest, info.manifest)
                self._begin(session, manifest)
            else:  # ordered: it answers once nothing runs any more that a lost caller has asked
                self._reset_cache(session, protocol.RESET_PREFIX_CACHE)
        with self._phase("connect"):
            transport = self._sync._transports.setdefault(self.server, self._sync._make_transport(info))
            transport.open(session, self._endpoint.group_port, deadline)
        with self._phase("push"):
            sent = self._send_buckets(session, transport, dtypes)
        with self._phase("acknowledge"):
            session.post(protocol.PROCESS_WEIGHTS, {}, deadline)
            for path in (protocol.RESET_PREFIX_CACHE, protocol.RESET_ENCODER_CACHE, protocol.RESET_MM_CACHE):
                self._reset_cache(session, path)
            if not info.stock:
                self._drop_transport()
        with self._phase("prove"):
            self._prove(session, info, sent, same_dtypes=info.stock or own_manifest == info.manifest)

    def _prove(
        self,
        session: ServerSession,
        info: protocol.ServerInfo,
        sent: dict[str, str],
        *,
        same_dtypes: bool,
    ) -> None:
        wanted = self._sync._proof
        if info.stock and wanted is Proof.CHECKSUM:
            raise ServerFault(
                f"{session.base_url} is a stock server and has no checksums; set sync.proof: auto"
            )
        shown = []
        if wanted is not Proof.CHECKSUM:
            self._ask_canary(session, must_agree=same_dtypes)
            shown += ["canary"] if same_dtypes else []
        if not info.stock:
            body = session.post(protocol.FINISH_ROUND, {"round_id": self._round_id}, self._deadline)
            if wanted is not Proof.CANARY:
                self._check_proof(body, sent, info)
                shown.insert(0, "checksums")
        if not shown:
            raise ServerFault(
                f"{session.base_url} holds other dtypes than the learner, so that a canary alone shows nothing; "
                "set sync.proof: auto"
            )
        self._proof = "+".join(shown)

    def _begin(self, session: ServerSession, manifest: tuple[protocol.TensorSpec, ...]) -> None:
        """Opens the round; a server that still ends what an abandoned caller asked is asked again."""
        timeout_s = self._deadline.remaining_s()
        request = protocol.RoundRequest(
            self._round_id, self._sync._run_id, self._version, manifest, timeout_s
        )
        patience = Deadline(timeout_s * _SHARE_FOR_PATIENCE)
        while True:
            try:
                session.post(protocol.BEGIN_ROUND, request.to_json(), self._deadline)
                return
            except ServerFault as fault:
                if fault.reason != protocol.RefusalReason.BUSY or patience.expired:
                    raise
            time.sleep(_BUSY_POLL_S)

    def _send_buckets(
        self, session: ServerSession, transport: WeightTransport, dtypes: dict[str, str]
    ) -> dict[str, str]:
        sent: dict[str, str] = {}
        for bucket in buckets(self._sync._export.tensors(dtypes), self._sync._bucket_bytes):
            sent.update({name: checksum_tensor(tensor) for name, tensor in bucket})
            flat, metadata = flatten(bucket)
            session.post(protocol.UPDATE_FLATTENED_PARAMS, {"metadatas": metadata}, self._deadline)
            transport.send(flat, self._deadline)
            self._num_bytes += flat.numel()
        return sent

    def _reset_cache(self, session: ServerSession, path: str) -> None:
        try:
            succeeded = protocol.parse_cache_reset(session.post(path, {}, self._deadline))
        except ProtocolError as error:
            raise ServerFault(f"{session.base_url}{path}: {error}") from error
        if not succeeded:
            raise ServerFault(f"{session.base_url}{path} reports status: False; earlier commands failed")

    def _ask_canary(self, session: ServerSession, *, must_agree: bool) -> None:
        canary = self._sync._canary
        body = {"infer_requests": [canary.request], "request_config": canary.config}
        reply = session.post(protocol.INFER, body, self._deadline, round_id=self._round_id)
        try:
            (completion,) = protocol.parse_infer_reply(reply, 1)
        except ProtocolError as error:
            raise ServerFault(f"{session.base_url}{protocol.INFER}: {error}") from error
        if must_agree and not canary.agrees(completion.token_ids):
            raise ServerFault(f"{session.base_url} answers the canary with other tokens than the learner")

    def _check_proof(self, body: Any, sent: dict[str, str], info: protocol.ServerInfo) -> None:
        try:
            proof = protocol.RoundProof.from_json(body)
        except ProtocolError as error:
            raise ServerFault(f"{self._endpoint.base_url}{protocol.FINISH_ROUND}: {error}") from error
        problems = [
            *_differences("arrived", sent, proof.arrived),
            *(_differences("resident", sent, proof.resident) if proof.resident else []),
            *(f"not loaded: {name}" for name in sent if name not in set(proof.loaded)),
        ]
        if proof.round_id != self._round_id or proof.weight_version != self._version:
            problems.append(f"proof of another round, version {proof.weight_version}")
        if proof.incarnation != info.incarnation:
            problems.append("the server was restarted during the round")
        if problems:
            shown = "; ".join(problems[:3])
            raise ServerFault(f"{self._endpoint.base_url} does not hold the weights it was sent: {shown}")

    def _phase(self, name: str) -> _Phase:
        return _Phase(self._seconds, name)

    def _drop_transport(self) -> None:
        transport = self._sync._transports.pop(self.server, None)
        if transport is not None:
            _close_quietly(transport)

    def _make_report(self, error: str | None) -> ServerReport:
        return ServerReport(
            proven=error is None,
            error=error,
            proof=self._proof,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            incarnation=self._incarnation,
        )


class _Phase:
    """Adds the seconds spent inside it to one entry of a dictionary."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = time.perf_counter() - self._started


def _agreed_manifest(
    own: Sequence[protocol.TensorSpec], theirs: Sequence[protocol.TensorSpec]
) -> tuple[protocol.TensorSpec, ...]:
    """The learner's names and shapes with the server's dtypes, or a fault that names the differences."""
    shapes = {spec.name: spec.shape for spec in own}
    wanted = {spec.name: spec.shape for spec in theirs}
    differences = [
        f"{name}: learner {shapes.get(name)} server {wanted.get(name)}"
        for name in sorted(shapes.keys() | wanted.keys())
        if shapes.get(name) != wanted.get(name)
    ]
    if differences:
        shown = "; ".join(differences[:3])
        raise ServerFault(
            f"server and learner must hold the same tensors, got num_differences={len(differences)} ({shown}); "
            "start the server with the learner's model"
        )
    dtypes = {spec.name: spec.dtype for spec in theirs}
    return tuple(protocol.TensorSpec(spec.name, spec.shape, dtypes[spec.name]) for spec in own)


def _differences(what: str, sent: dict[str, str], got: Any) -> list[str]:
    names = [name for name in sorted(sent.keys() | got.keys()) if sent.get(name) != got.get(name)]
    return [f"{what} checksum of {names[0]} differs ({len(names)} in all)"] if names else []


def _close_quietly(transport: WeightTransport) -> None:
    try:
        transport.close()
    except (ServerFault, RuntimeError):
        return  # the peer is gone; there is nothing left to close


def _describe(what: str, error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, WeightSyncError) else f"{what} failed: {type(error).__name__}: {text}"
