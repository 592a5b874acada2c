"""Asks a stock ``swift rollout`` what only it answers, and compares its tensor names with the learner's.

Any other program that knows no ``/stage2/`` path answers 404 as well. vLLM fuses tensors and nests modules in another
order; it loads by the names of checkpoints, and transformers may give a module another name while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline, ReplyT, ServerSession, reset_cache
from swift_stage2.wire import OPEN, Int, Many, Message, Sums, Text, member

_MOST_WORKERS = 2**16
TURNS_OPTION, GYM_OPTION = "enable_multi_turn", "use_gym_env"


def ask_world_size(session: ServerSession, deadline: Deadline) -> int:
    """The workers of a stock server: a call that no other program answers in this form.

    Raises:
        ServerFault: no answer, or not such a one; its ``is_foreign`` tells which.
    """
    size: Callable[[Any], int] = partial(
        member, key="world_size", kind=Annotated[Int, Field(ge=1, le=_MOST_WORKERS)]
    )
    return session.read(wire.WORLD_SIZE, size, session.get(wire.WORLD_SIZE, deadline))


def ask_state_keys(session: ServerSession, deadline: Deadline) -> tuple[str, ...] | None:
    """Names of the parameters that the first engine's workers hold; none where they failed, which ms-swift swallows.

    None of an older ms-swift, which has no such route.

    Raises:
        ServerFault: no answer, or not such a one.
    """
    return _ask_if_known(session, wire.STATE_KEYS, partial(member, key="keys", kind=Many[Text]), deadline)


def ask_sums_incarnation(session: ServerSession, deadline: Deadline) -> str | None:
    """The process that answers, if the stock server runs with our plugin and so can show its weights; else None.

    Raises:
        ServerFault: no answer, or not such a one.
    """
    return _ask_if_known(session, wire.WEIGHT_SUMS, wire.parse_incarnation, deadline)


def ask_turns_options(session: ServerSession, deadline: Deadline) -> tuple[str, ...]:
    """The options by which ms-swift's server answers in several turns; none where it answers in one.

    Raises:
        ServerFault: no answer.
    """
    try:
        told = session.post(wire.ENGINE_TYPE, {}, deadline)
    except ServerFault as fault:
        if fault.knows_no_such_call:
            return ()
        raise
    options = (GYM_OPTION, TURNS_OPTION)
    return tuple(name for name in options if isinstance(told, dict) and told.get(name))


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
    if not reset_cache(session, wire.RESET_PREFIX_CACHE, deadline) or ask_state_keys(session, deadline) == ():
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


# --- with the plugin that shows checksums -----------------------------------------------------
@dataclass(frozen=True, slots=True, config=OPEN)
class WeightSums(Message):
    """Answer of a stock server with our plugin about the last push: all its workers, in all its engines, agree on it.

    ``resident`` lacks tensors of which no whole copy into the model was seen. ``left_out`` are the model's parameters
    that nothing was copied into.
    """

    incarnation: Text
    arrived: Sums
    resident: Sums
    left_out: Many[Text]
    errors: Many[Text]  # of its workers; ms-swift itself only logs them

    def problems(self, sent: Mapping[str, str]) -> list[str]:
        """Why the server does not hold the weights whose checksums are ``sent``; empty if it does."""
        if problems := [*self.errors, *sum_differences("arrived", sent, self.arrived)]:
            return problems
        if problems := sum_differences(
            "resident", {name: sent[name] for name in self.resident}, self.resident
        ):
            return problems
        if untraced := sorted(sent.keys() - self.resident.keys()):
            return [
                f"{_first_of(untraced)} arrived and was not seen whole in the model: it was dropped, or this model's "
                "loader leaves no trace"
            ]
        if self.left_out:
            return [f"nothing was loaded into the server's parameter {_first_of(self.left_out)}"]
        return []


def sum_differences(what: str, sent: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    """One line that names the first tensor whose checksum is not as sent; none if all are."""
    names = [name for name in sorted(sent.keys() | got.keys()) if sent.get(name) != got.get(name)]
    return [f"{what} checksum of {names[0]} differs ({len(names)} in all)"] if names else []


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} ({len(names)} in all)"
