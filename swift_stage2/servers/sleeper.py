"""Has servers give their memory back, and ends the process of one that does not: either way it is free afterwards.

A server sleeps once it says so; for every other, whatever it says, the process that listens on its port is ended, which
no server is trusted to name. Called by rank 0 between rollouts and steps on one set of devices, and by the doctor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from reprlib import repr as shown
from urllib.parse import urlsplit

import psutil

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.runtime.background import BackgroundCall
from swift_stage2.runtime.network import ANY_ADDRESS, is_here, resolve
from swift_stage2.servers.session import Deadline, ServerSession

_SHARE_OF_SERVER = 0.9  # so that one that gives up still says why
_END_S = 10.0  # for killed processes; what they held is free then
_MARGIN_S = 10.0


class Sleeper:
    """All servers of a run, which are put to sleep together."""

    def __init__(
        self, base_urls: Sequence[str], api_key: str | None, timeout_s: float, ends: Sequence[bool]
    ) -> None:
        """``ends``: by server, whether its process is on this machine and is ended if it does not sleep in time."""
        self._servers = tuple(zip(base_urls, ends, strict=True))
        self._api_key = api_key
        self._timeout_s = timeout_s

    def __call__(self) -> list[str | None]:
        """Asks all at once; by server None if it sleeps now, else why it does not, and what was ended, in one line.

        Returns within ``timeout_s``, and some seconds more where a process is ended.
        """
        calls = [
            BackgroundCall(partial(self._put_to_sleep, url, ends), name=f"sleep of {url}")
            for url, ends in self._servers
        ]
        deadline = Deadline(self._timeout_s + _END_S + _MARGIN_S)
        return [
            call.result_within(0.0) if call.ended_within(deadline.remaining_s()) else f"{url}: no end in time"
            for call, (url, _) in zip(calls, self._servers, strict=True)
        ]

    def _put_to_sleep(self, base_url: str, ends: bool) -> str | None:
        refusal = self._ask(base_url)
        if refusal is None or not ends:
            return refusal
        try:
            return f"{refusal}; {end_listener(base_url, _END_S)}"
        except (psutil.Error, OSError) as error:
            return f"{refusal}; its process was not found: {error}"

    def _ask(self, base_url: str) -> str | None:
        """Why the server does not sleep."""
        request = wire.SleepRequest(_SHARE_OF_SERVER * self._timeout_s)
        try:
            with ServerSession(base_url, self._api_key) as session:
                reply = session.post(wire.SLEEP, request.to_json(), Deadline(self._timeout_s))
                state = session.read(wire.SLEEP, wire.SleepAnswer.from_json, reply).state
        except ServerFault as fault:
            return str(fault)
        return None if state == wire.ASLEEP_STATE else f"{base_url} must sleep, got state={shown(state)}"


def end_listener(base_url: str, timeout_s: float) -> str:
    """SIGKILL, which a stopped process hears as well, to this user's process that listens there, and to all below it.

    Returns what was done, in words, once they have ended and are reaped, or the time is over.
    """
    end, told = time.monotonic() + timeout_s, ""
    while (found := _listeners(base_url)) and (left_s := end - time.monotonic()) > 0:
        tree = dict.fromkeys(each for top in found for each in (top, *_children(top)))
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(tree, timeout=left_s)
        pids = ", ".join(str(process.pid) for process in found)
        told = f"process {pids} was ended" if not left else f"SIGKILL has not ended process {pids}"
    return told or "no process of this user listens there"


def _listeners(base_url: str) -> list[psutil.Process]:
    """Processes of this user, but for this one, that listen at the address on this machine."""
    url = urlsplit(base_url)
    found: dict[int, psutil.Process] = {}
    if url.hostname is None or not is_here(url.hostname):
        return []
    addresses = {*ANY_ADDRESS, *(told[4][0] for told in resolve(url.hostname))}
    for each in psutil.net_connections(kind="tcp"):
        is_meant = each.status == psutil.CONN_LISTEN and each.laddr.port == url.port
        if is_meant and each.laddr.ip in addresses and each.pid not in (None, os.getpid()):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.pid)
                if process.uids().real == os.getuid():
                    found[process.pid] = process
    return list(found.values())


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(process.children(recursive=True))
    return []
