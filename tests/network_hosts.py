"""Several hosts on this machine: network namespaces around one switch, with names, hostnames and address of their own.

As root only; tests that use it are marked ``namespaces``. The file system stays this machine's, and so do processes,
unless they are asked for apart. However the context ends, namespaces, interfaces, files and the processes inside them
are gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERFACE = "eth0"
"""Of every host."""

_NAMES = Path("/etc/netns")  # what lies here is bound over /etc inside of a namespace: see ip-netns(8)
_COMMAND_S = 60.0
_END_S = 60.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace. ``name`` leads to ``address`` on every host; ``second_address`` is on another subnet."""

    name: str
    address: str
    second_address: str
    namespace: str
    switch: str
    """The namespace of the switch that it is connected to."""
    port: str
    """The switch's end of its cable."""
    own_processes: bool = False

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """The command that runs ``words`` on this host."""
        apart = ["--pid", "--fork", "--kill-child", "--mount-proc"] if self.own_processes else []
        named = ["unshare", "--uts", *apart, "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *named, *map(str, words)]

    def processes(self) -> list[psutil.Process]:
        """Processes that run there."""
        return _processes(self.namespace)

    @contextlib.contextmanager
    def slow(self, kbit_per_s: int) -> Iterator[None]:
        """What other hosts send to it arrives at this rate meanwhile."""
        of_port = ("dev", self.port, "root")
        limit = ("tbf", "rate", f"{kbit_per_s}kbit", "burst", "32kbit", "latency", "400ms")
        _run("tc", "-n", self.switch, "qdisc", "add", *of_port, *limit)
        yield
        _run("tc", "-n", self.switch, "qdisc", "del", *of_port)

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Its cable is pulled meanwhile: nobody is told, packets are lost."""
        _ip("-n", self.switch, "link", "set", self.port, "down")
        yield
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def received_bytes(self, port: int) -> int:
        """By its connections to this port of its own that stand now."""
        sockets = ("state", "established", "sport", "=", f":{port}")
        told = _run("ip", "netns", "exec", self.namespace, "ss", "-Htin", *sockets)
        return sum(map(int, re.findall(r"bytes_received:(\d+)", told)))


@contextlib.contextmanager
def network_hosts(
    *names: str, own_name_is_loopback: bool = False, own_processes: Sequence[str] = ()
) -> Iterator[tuple[Host, ...]]:
    """Hosts of these names in one network, 10.77.0.0/24, and in a second one, 10.78.0.0/24.

    ``own_name_is_loopback``: a host takes its own name for 127.0.1.1, as a fresh Debian does. The /proc of those
    in ``own_processes`` shows no process of another host.
    """
    mark = f"stage2-{os.getpid()}-{next(_numbers)}"
    switch = f"{mark}-switch"
    hosts = [
        Host(
            name,
            f"10.77.0.{index}",
            f"10.78.0.{index}",
            f"{mark}-{name}",
            switch,
            f"port{index}",
            own_processes=name in own_processes,
        )
        for index, name in enumerate(names, start=1)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "up", "type", "bridge")
        for host in hosts:
            _ip("netns", "add", host.namespace)
            peer = ("peer", INTERFACE, "netns", host.namespace)
            _ip("-n", switch, "link", "add", host.port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", host.port, "master", "bridge0", "up")
            for address in (host.address, host.second_address):
                _ip("-n", host.namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", interface, "up")
            _write_names(host, hosts, own_name_is_loopback=own_name_is_loopback)
        yield tuple(hosts)
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            _remove(namespace)
        with contextlib.suppress(OSError):
            _NAMES.rmdir()  # unless others keep something there


def _write_names(host: Host, hosts: Sequence[Host], *, own_name_is_loopback: bool) -> None:
    lines = ["127.0.0.1 localhost"]
    for other in hosts:
        is_loopback = own_name_is_loopback and other is host
        lines.append(f"{'127.0.1.1' if is_loopback else other.address} {other.name}")
    folder = _NAMES / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _remove(namespace: str) -> None:
    """Ends what runs there, all of it started by the test, and takes the namespace away."""
    alive = _processes(namespace)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_S)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=_COMMAND_S, check=False)
    shutil.rmtree(_NAMES / namespace, ignore_errors=True)


def _processes(namespace: str) -> list[psutil.Process]:
    found = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    processes = []
    for pid in found.stdout.split():
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(pid)))
    return processes


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
