"""Asks a stock ``swift rollout`` what only it answers, and compares its tensor names with the learner's.

Any other program that knows no ``/stage2/`` path answers 404 as well. vLLM fuses tensors and nests modules in another
order; it loads by the names of checkpoints, and transformers may give a module another name while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.servers import protocol
from swift_stage2.servers.call import ReplyT
from swift_stage2.servers.session import Deadline, ServerSession, reset_cache

_MOST_WORKERS = 2**16
_TURNS_OPTIONS = ("enable_multi_turn", "use_gym_env")


def ask_world_size(session: ServerSession, deadline: Deadline) -> int:
    """The workers of a stock server: a call that no other program answers in this form.

    Raises:
        ServerFault: no answer, or not such a one; its ``is_foreign`` tells which.
    """
    return session.read(protocol.WORLD_SIZE, _world_size, session.get(protocol.WORLD_SIZE, deadline))


def _world_size(reply: Any) -> int:
    size = reply.get("world_size") if isinstance(reply, dict) else None
    if type(size) is not int or not 1 <= size <= _MOST_WORKERS:
        raise ProtocolError(f"the reply is not one of a rollout server: {str(reply)[:80]!r}")
    return size


def ask_state_keys(session: ServerSession, deadline: Deadline) -> tuple[str, ...] | None:
    """Names of the parameters that the first engine's workers hold; none where they failed, which ms-swift swallows.

    None of an older ms-swift, which has no such route.

    Raises:
        ServerFault: no answer, or not such a one.
    """
    return _ask_if_known(session, protocol.STATE_KEYS, _state_keys, deadline)


def _state_keys(reply: Any) -> tuple[str, ...]:
    keys = reply.get("keys") if isinstance(reply, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ProtocolError(f"expected names of parameters, got {str(reply)[:80]!r}")
    return tuple(keys)


def ask_sums_incarnation(session: ServerSession, deadline: Deadline) -> str | None:
    """The process that answers, if the stock server runs with our plugin and so can show its weights; else None.

    Raises:
        ServerFault: no answer, or not such a one.
    """
    return _ask_if_known(session, protocol.WEIGHT_SUMS, protocol.parse_incarnation, deadline)


def ask_turns_option(session: ServerSession, deadline: Deadline) -> str:
    """The option by which ms-swift's server answers in several turns; empty where it answers in one.

    Raises:
        ServerFault: no answer.
    """
    try:
        told = session.post(protocol.ENGINE_TYPE, {}, deadline)
    except ServerFault as fault:
        if fault.knows_no_such_call:
            return ""
        raise
    return next((name for name in _TURNS_OPTIONS if isinstance(told, dict) and told.get(name)), "")


def _ask_if_known(
    session: ServerSession, path: str, parse: Callable[[Any], ReplyT], deadline: Deadline
) -> ReplyT | None:
    try:
        reply = session.get(path, deadline)
    except ServerFault as fault:
        if fault.knows_no_such_call:
            return None
        raise
    return session.read(path, parse, reply)


def require_workers(session: ServerSession, deadline: Deadline) -> None:
    """Whether every engine of a stock server, and the first one's workers if they can be asked, do as they are asked.

    Most other calls are answered from the server's arguments, whatever became of its engines.

    Raises:
        ServerFault: they do not.
    """
    if (
        not reset_cache(session, protocol.RESET_PREFIX_CACHE, deadline)
        or ask_state_keys(session, deadline) == ()
    ):
        raise ServerFault(f"{session.base_url}: its engines or their workers have failed")


# The learner's name -> vLLM's, where several tensors become one.
_FUSINGS = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
# Hugging Face and vLLM nest the same modules in other orders of these.
_WRAPPERS = ("model.", "language_model.")


def vllm_name(name: str) -> str:
    """Where vLLM keeps a tensor of the learner, without the wrapping modules in front."""
    for pattern, fused in _FUSINGS:
        name = pattern.sub(fused, name)
    return _unwrapped(name)


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name
