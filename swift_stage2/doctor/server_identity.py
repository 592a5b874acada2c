"""Who really answers on a server's port (ours, a stock ``swift rollout``, something else) and with which model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from swift_stage2.config import RolloutConfig
from swift_stage2.doctor.finding import Outcome, failed, ok, warning
from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.servers import protocol
from swift_stage2.servers.protocol import RefusalReason, ServerInfo
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_world_size, is_foreign

_REFUSED_KEYS = (401, 403)
_LOOK_TIMEOUT_S = 10.0
_LOADING = "state=loading"
_LATE = "Timeout"  # httpx names every passed deadline so
_UNPROVEN = str(RefusalReason.UNPROVEN)
_OTHER_RUN = (
    "end that run, or wait until its round is over, and run the doctor again: runs cannot share a server"
)
_ROUND_OPEN = str(RefusalReason.ROUND_OPEN)


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server is."""

    info: ServerInfo
    model: str | None = None
    """As it names it: a path, or on a stock server the last part of one."""

    @property
    def is_unproven(self) -> bool:
        """Whether it refuses rollouts until a round proves its weights."""
        return self.info.state == _UNPROVEN


def check_identity(session: ServerSession, rollout: RolloutConfig, key: str) -> Outcome[ServerIdentity]:
    """Asks ``/stage2/info/``, and of a stock server what only a rollout server answers."""
    started = time.perf_counter()
    try:
        info = session.info(Deadline(_patience_s(rollout)))
        latency_ms = 1e3 * (time.perf_counter() - started)
        if info.stock:
            return _look_at_stock(session, rollout, key, latency_ms)
        return _describe_ours(ServerIdentity(info, info.model), latency_ms)
    except ServerFault as fault:
        return _explain(fault, rollout, key)


def check_model(
    session: ServerSession, identity: ServerIdentity, rollout: RolloutConfig, expected: str, key: str
) -> Outcome[ServerIdentity]:
    """Whether the server serves the learner's model, by name; a stock one names it in its replies only."""
    model = identity.model
    if model is None:
        try:
            reply = session.post(protocol.INFER, _one_token(), Deadline(rollout.request_timeout_s))
            protocol.parse_infer_reply(reply, 1)
        except ServerFault as fault:
            return _explain(fault, rollout, key)
        except ProtocolError as error:
            return failed(
                f"{session.base_url}{protocol.INFER} answers, but not as swift rollout does: {error}",
                f"start swift-stage2 rollout or swift rollout (ms-swift 4.6) at {key}.base_url",
            )
        model = protocol.parse_served_model(reply)
    known = replace(identity, model=model)
    if model is None:
        return warning(
            "the server does not say which model it serves",
            f"make sure that the server was started with {expected}",
            known,
        )
    if Path(model).name != Path(expected).name:
        return failed(
            f"serves {model}, the learner trains {expected}",
            f"restart the server with the learner's model: --model {expected}; or correct {key}.base_url",
        )
    return ok(f"serves {model}", known)


def busy_with(session: ServerSession, identity: ServerIdentity) -> str:
    """For whom our server works at this moment; empty if for nobody, and always of a stock one, which does not say.

    Raises:
        ServerFault: it does not answer.
    """
    if identity.info.stock:
        return ""
    deadline = Deadline(_LOOK_TIMEOUT_S)
    if session.info(deadline).state == _ROUND_OPEN:
        return "a sync round of another run is open"
    health = session.get(protocol.HEALTH, deadline)
    counts = [health.get(name) for name in ("num_running", "num_waiting")] if isinstance(health, dict) else []
    number = sum(count for count in counts if isinstance(count, int))
    return f"it is making {number} completion(s) for somebody else" if number else ""


def _look_at_stock(
    session: ServerSession, rollout: RolloutConfig, key: str, latency_ms: float
) -> Outcome[ServerIdentity]:
    try:
        size = ask_world_size(session, Deadline(_patience_s(rollout)))
        health = session.get(protocol.HEALTH, Deadline(_LOOK_TIMEOUT_S))
    except ServerFault as fault:
        return (
            _not_a_rollout_server(session, key, str(fault))
            if is_foreign(fault)
            else _explain(fault, rollout, key)
        )
    upstream = health.get("upstream") if isinstance(health, dict) else None  # only a merger names one
    behind = f" at {upstream} behind swift-stage2 merge" if isinstance(upstream, str) else ""
    return ok(
        f"stock swift rollout{behind}, {size} worker(s), answered in {latency_ms:.0f} ms",
        ServerIdentity(ServerInfo(stock=True)),
    )


def _describe_ours(identity: ServerIdentity, latency_ms: float) -> Outcome[ServerIdentity]:
    info = identity.info
    weights = (
        f"version {info.weight_version} of run {info.run_id}" if info.run_id else "those of its checkpoint"
    )
    found = f"swift-stage2 rollout ({info.engine}), {info.state}, weights: {weights}, answered in {latency_ms:.0f} ms"
    if info.state == _ROUND_OPEN:
        return failed(f"{found}: a sync round of another run is open", _OTHER_RUN)
    if identity.is_unproven:
        return warning(
            found, "nothing to write: the next proven sync round, also the doctor's, mends it", identity
        )
    return ok(found, identity)


def _explain(fault: ServerFault, rollout: RolloutConfig, key: str) -> Outcome[ServerIdentity]:
    name = rollout.api_key_env
    if fault.status in _REFUSED_KEYS:
        told = "another key than the server's" if rollout.api_key() else "no key"
        return failed(
            f"the server refuses this caller (status {fault.status}): {name} holds {told}",
            f"export {name}=<the key that the server was started with>",
        )
    if is_foreign(fault):
        return failed(
            str(fault), f"end what listens there, or correct {key}.base_url: it is no rollout server"
        )
    if _LOADING in str(fault):
        return failed(str(fault), "wait until the server has loaded its model, and run the doctor again")
    if _LATE in str(fault):
        return failed(
            str(fault),
            f"write a longer rollout.request_timeout_s than {rollout.request_timeout_s:g}; if the server is silent for "
            "longer than its work takes, read its log and restart it",
        )
    return failed(str(fault), "read the server's log and restart it; then run the doctor again")


def _not_a_rollout_server(session: ServerSession, key: str, said: str) -> Outcome[ServerIdentity]:
    return failed(
        f"{session.base_url} is no rollout server: {said}",
        f"end what listens there, or correct {key}.base_url: it is no rollout server",
    )


def _one_token() -> dict[str, object]:
    config = protocol.request_config(
        max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
    )
    return {"infer_requests": [{"messages": [{"role": "user", "content": "?"}]}], "request_config": config}


def _patience_s(rollout: RolloutConfig) -> float:
    """A stock server answers after the ``/infer/`` that runs, so as long as one may take."""
    return rollout.request_timeout_s
