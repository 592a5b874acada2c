"""Decides on rank 0 whether a server that somebody names to a run may join it: its addresses, its kind, its tensors.

Asked as at a start, by whoever brings it weights later, with the run's own key. Called by the learner's thread for
requests.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from swift_stage2.config import ServerConfig, Stage2Config, Transport
from swift_stage2.config.launch import LaunchConfig
from swift_stage2.errors import ConfigError, ServerFault, ServerUnavailable
from swift_stage2.learner.server_requests import AddedServer, ServerRequests
from swift_stage2.preflight.servers import look_for, refuse_far_servers, refuse_lone_addresses
from swift_stage2.process.background import BackgroundFailures
from swift_stage2.process.route import is_loopback
from swift_stage2.run_directory.server_board import in_arguments
from swift_stage2.servers.protocol import TensorSpec
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.tensors import agreed_manifest

_PATIENCE_S = 5.0  # one odd answer is none
_LOOK_S = 1.0  # for each server of the run


def requests_of(
    config: Stage2Config,
    run_directory: str,
    rank: int,
    manifest: Sequence[TensorSpec],
    failures: BackgroundFailures,
) -> ServerRequests:
    """A rank's, for a run whose rounds carry the tensors of ``manifest``."""
    return ServerRequests(Path(run_directory), partial(admit, config, manifest), rank=rank, failures=failures)


def admit(
    config: Stage2Config,
    manifest: Sequence[TensorSpec],
    server: ServerConfig,
    others: Collection[ServerConfig] = (),
) -> AddedServer:
    """Asks ``server``, which wants to join those of ``config`` and ``others``.

    Raises:
        ConfigError: it is one of them already, shares a port with one, cannot be given weights from here, or is on a
            host that the run's key is not meant for.
        ServerUnavailable: it does not answer, or not with this run's key.
        ServerFault: it holds other tensors.
    """
    servers = {each.base_url: each for each in (*config.rollout.servers, *others)}
    if server.base_url in servers:
        raise ConfigError(
            f"a server is added once, got URL={server.base_url}, which is in the run; swift-stage2 servers list "
            "tells how it stands"
        )
    try:
        rollout = replace(config.rollout, servers=(*servers.values(), server))
        wider = replace(config, rollout=rollout, launch=LaunchConfig(learner=config.launch.learner))
        refuse_lone_addresses(wider)
        if rollout.sync.transport is Transport.SHARED_MEMORY:
            refuse_far_servers(wider)
    except ConfigError as error:
        raise ConfigError(in_arguments(str(error), len(servers))) from error
    hosts = {each.host for each in config.rollout.servers}
    if rollout.api_key() is not None and server.host not in hosts and not is_loopback(server.host):
        raise ConfigError(
            f"the run's key goes to hosts that its configuration names, {', '.join(sorted(hosts))}, and to this "
            f"machine, got URL={server.base_url}; add a server there, or name this one in "
            "rollout.servers and resume the run"
        )
    told = look_for(config, server.base_url, time.monotonic() + _PATIENCE_S)
    if told["refused"]:
        raise ConfigError(told["refused"])
    if not told["answers"]:
        raise ServerUnavailable(
            f"a server must answer rank 0 before it is added, got no answer: {told['missing']}; start it, or correct "
            "the URL"
        )
    if told["ours"]:
        _refuse_another_name(server.base_url, told["incarnation"], servers, rollout.api_key())
        with ServerSession(server.base_url, rollout.api_key(), must_be_ours=True) as session:
            agreed_manifest(manifest, session.info(Deadline(_PATIENCE_S)).manifest)
    return AddedServer(address=server, is_ours=told["ours"], chat_model=told["chat_model"])


def _refuse_another_name(base_url: str, incarnation: str, others: Iterable[str], api_key: str | None) -> None:
    """Two pushes of a round to one process end each other, so that neither name is ever proven again."""
    for other in others:
        with suppress(ServerFault), ServerSession(other, api_key) as session:
            if session.info(Deadline(_LOOK_S)).incarnation == incarnation:
                raise ConfigError(
                    f"a server is added once, got URL={base_url}, which is {other} by another name and in the run; "
                    "swift-stage2 servers list tells how it stands"
                )
