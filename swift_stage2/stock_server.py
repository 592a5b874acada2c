"""Tells a stock ``swift rollout`` from any other program that knows no ``/stage2/`` path and answers 404 as well."""

from __future__ import annotations

from swift_stage2 import rollout_protocol as protocol
from swift_stage2.errors import FaultKind, ServerFault
from swift_stage2.server_session import Deadline, ServerSession

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


def is_foreign(fault: ServerFault) -> bool:
    """Whether something answered that speaks another language: rollout servers answer these calls by JSON."""
    return fault.status in _KNOWS_NO_SUCH_CALL or fault.kind is FaultKind.UNUSABLE
