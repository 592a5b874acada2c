"""Tells a stock ``swift rollout`` from any other program that knows no ``/stage2/`` path and answers 404 as well."""

from __future__ import annotations

from swift_stage2.errors import FaultKind, ProtocolError, ServerFault
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession

_MOST_WORKERS = 2**16
_KNOWS_NO_SUCH_CALL = (404, 405, 501)


def ask_world_size(session: ServerSession, deadline: Deadline) -> int:
    """The workers of a stock server: a call that no other program answers in this form.

    Raises:
        ServerFault: no answer, or not such a one; ``is_foreign`` tells which.
    """
    reply = session.get(protocol.WORLD_SIZE, deadline)
    size = reply.get("world_size") if isinstance(reply, dict) else None
    if type(size) is not int or not 1 <= size <= _MOST_WORKERS:
        raise ServerFault(
            f"{session.base_url}{protocol.WORLD_SIZE}: the reply is not one of a rollout server: {str(reply)[:80]!r}",
            kind=FaultKind.UNUSABLE,
        )
    return size


def ask_state_keys(session: ServerSession, deadline: Deadline) -> tuple[str, ...] | None:
    """Names of the parameters that the first engine's workers hold; none where they failed, which ms-swift swallows.

    None of an older ms-swift, which has no such route.

    Raises:
        ServerFault: no answer, or not such a one.
    """
    try:
        reply = session.get(protocol.STATE_KEYS, deadline)
    except ServerFault as fault:
        if fault.status in _KNOWS_NO_SUCH_CALL:
            return None
        raise
    keys = reply.get("keys") if isinstance(reply, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ServerFault(
            f"{session.base_url}{protocol.STATE_KEYS}: expected names of parameters, got {str(reply)[:80]!r}",
            kind=FaultKind.UNUSABLE,
        )
    return tuple(keys)


def require_workers(session: ServerSession, deadline: Deadline) -> None:
    """Whether every engine of a stock server, and the first one's workers if they can be asked, do as they are asked.

    Most other calls are answered from the server's arguments, whatever became of its engines.

    Raises:
        ServerFault: they do not.
    """
    reply = session.post(protocol.RESET_PREFIX_CACHE, {}, deadline)
    try:
        succeeded = protocol.parse_cache_reset(reply)
    except ProtocolError as error:
        raise ServerFault(f"{session.base_url}{protocol.RESET_PREFIX_CACHE}: {error}") from error
    if not succeeded or ask_state_keys(session, deadline) == ():
        raise ServerFault(f"{session.base_url}: its engines or their workers have failed")


def is_foreign(fault: ServerFault) -> bool:
    """Whether something answered that speaks another language: rollout servers answer these calls by JSON."""
    return fault.status in _KNOWS_NO_SUCH_CALL or fault.kind is FaultKind.UNUSABLE
