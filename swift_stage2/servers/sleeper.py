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
            (url, BackgroundCall(partial(self._put_to_sleep, url, ends), name=f"sleep of {url}"))
            for url, ends in self._servers
        ]
        deadline = Deadline(self._timeout_s + _END_S + _MARGIN_S)
        return [
            call.result_within(0.0) if call.ended_within(deadline.remaining_s()) else f"{url}: no end in time"
            for url, call in calls
        ]

    def _put_to_sleep(self, base_url: str, ends: bool) -> str | None:
        request = wire.SleepRequest(_SHARE_OF_SERVER * self._timeout_s)
        state = partial(wire.member, key="state", kind=wire.Text)
        try:
            with ServerSession(base_url, self._api_key) as session:
                reply = session.post(wire.SLEEP, request.to_json(), Deadline(self._timeout_s))
                if (found := session.read(wire.SLEEP, state, reply)) == wire.ASLEEP_STATE:
                    return None
                refusal = f"{base_url} must sleep, got state={shown(found)}"
        except ServerFault as fault:
            refusal = str(fault)
        return f"{refusal}; {end_listener(base_url, _END_S)}" if ends else refusal


def end_listener(base_url: str, timeout_s: float) -> str:
    """SIGKILL, which ends a stopped process as well, to this user's process that listens there, and to all below it.

    Returns what was done, in words, once they have ended and are reaped, or the time is over.
    """
    end, told = time.monotonic() + timeout_s, "no server of this user listens there"
    while (found := _listeners(base_url)) and (left_s := end - time.monotonic()) > 0:
        tree = list(found)
        for top in found:
            with suppress(psutil.NoSuchProcess):
                tree += top.children(recursive=True)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(tree, timeout=left_s)
        pids = ", ".join(str(process.pid) for process in found)
        told = f"SIGKILL has not ended process {pids}" if left else f"process {pids} was ended"
    return told


def _listeners(base_url: str) -> set[psutil.Process]:
    """Rollout servers of ours and of this user that listen at the address on this machine."""
    url, found = urlsplit(base_url), set()
    if url.hostname is not None and is_here(url.hostname):
        addresses = {*ANY_ADDRESS, *(told[4][0] for told in resolve(url.hostname))}
        for each in psutil.net_connections(kind="tcp"):
            is_there = each.status == psutil.CONN_LISTEN and each.laddr.port == url.port
            if is_there and each.laddr.ip in addresses and each.pid not in (None, os.getpid()):
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(each.pid)
                    words = process.cmdline()  # of a port that another program has by now, nothing is ended
                    is_meant = "rollout" in words and any("swift_stage2" in word for word in words)
                    found |= {process} if is_meant and process.uids().real == os.getuid() else set()
    return found
