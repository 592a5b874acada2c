"""Waits for every rollout server when a run starts or resumes; all ranks together, rank 0 asks."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from swift_stage2.collectives import ControlGroup
from swift_stage2.config import OnPending, Stage2Config
from swift_stage2.errors import ConfigError, ServerFault, ServerUnavailable
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_world_size, is_foreign

_POLL_S = 0.5
_WAIT_SLICE_S = 10.0


def wait_for_servers(
    config: Stage2Config, control: ControlGroup, warn: Callable[[str], None] = lambda message: None
) -> set[str]:
    """Returns once every server answers and can be given weights: the base URLs of those that are ours.

    ``warn`` is told on rank 0 of a server that cannot abort although ``sync.on_pending`` asks for it.

    Raises:
        ConfigError: a server cannot be given weights from here; on every rank.
        ServerUnavailable: one did not answer within ``rollout.start_timeout_s``; on every rank.
    """
    start_timeout_s = config.rollout.start_timeout_s
    end = time.monotonic() + start_timeout_s
    waiting = [server.base_url for server in config.rollout.servers]
    ours: set[str] = set()
    while waiting:
        # In slices, each with a broadcast: no rank waits in one collective for as long as a server may take.
        told = control.broadcast(_look_for(config, waiting[0], end) if control.rank == 0 else None)
        if told["refused"]:
            raise ConfigError(told["refused"])
        if told["missing"]:
            raise ServerUnavailable(
                f"every rollout server must answer within rollout.start_timeout_s={start_timeout_s:g}, "
                f"got no answer: {told['missing']}; start it, or correct rollout.servers"
            )
        if told["answers"]:
            base_url = waiting.pop(0)
            if told["ours"]:
                ours.add(base_url.rstrip("/"))
            wants_abort = control.rank == 0 and config.rollout.sync.on_pending is OnPending.ABORT
            if wants_abort and not told["can_abort"]:
                warn(
                    f"{base_url} cannot abort rollouts, so that a pending round waits for those in flight there; "
                    "rollout.sync.on_pending: abort needs swift-stage2 rollout"
                )
    return ours


def _look_for(config: Stage2Config, base_url: str, end: float) -> dict[str, Any]:
    """One slice of the wait for one server."""
    told: dict[str, Any] = {"answers": False, "ours": False, "can_abort": False, "missing": "", "refused": ""}
    slice_ends = min(end, time.monotonic() + _WAIT_SLICE_S)
    with ServerSession(base_url, config.rollout.api_key()) as session:
        while True:
            deadline = Deadline(max(0.1, slice_ends - time.monotonic()))
            try:
                info = session.info(deadline)
                if info.stock:  # for the whole run, so one odd answer shall not decide it
                    info = session.info(deadline)
                if info.stock:
                    ask_world_size(session, deadline)
            except ServerFault as fault:
                if fault.refuses_key:
                    told["missing"] = str(fault)
                    return told
                if time.monotonic() >= slice_ends:  # until then it may be one odd answer
                    told["missing"] = str(fault) if time.monotonic() >= end else ""
                    told["refused"] = _foreign(base_url, fault) if is_foreign(fault) else ""
                    return told
            else:
                told |= {"answers": True, "ours": not info.stock, "can_abort": info.can_abort}
                if info.stock and not vllm_is_installed():
                    told["refused"] = (
                        f"{base_url} is a stock swift rollout, which takes weights over vLLM's own group: vLLM must be "
                        "installed beside the learner, got none; install it, or serve with swift-stage2 rollout"
                    )
                return told
            time.sleep(_POLL_S)


def _foreign(base_url: str, fault: ServerFault) -> str:
    return (
        f"{base_url} must be a rollout server, got an answer of another program ({str(fault)[:200]}); end what listens "
        "there, or correct rollout.servers"
    )


def vllm_is_installed() -> bool:
    """Whether this process could join a stock server's group."""
    return importlib.util.find_spec("vllm") is not None
