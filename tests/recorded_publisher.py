"""A publisher whose pushes end when a test says so."""

from __future__ import annotations

import torch

from swift_stage2.errors import WeightSyncError
from swift_stage2.records import ServerReport
from swift_stage2.weights.proof import UpdateSpec
from swift_stage2.weights.publisher import Publisher
from swift_stage2.weights.snapshot import SnapshotFile


class RecordedPublisher(Publisher):
    """Keeps what it was given; every push is proven at once if ``at_once``."""

    def __init__(self, *, at_once: bool = False) -> None:
        super().__init__()
        self.at_once = at_once
        self.running: dict[int, UpdateSpec] = {}
        self.pushed: list[tuple[int, int]] = []
        """Server and version of every push."""
        self.carried: list[dict[str, torch.Tensor]] = []
        self.confirmed: list[int] = []
        self.dropped: list[int] = []
        self.given_up: list[str] = []
        self.lost: set[int] = set()

    def push(self, server: int, spec: UpdateSpec, snapshot: SnapshotFile) -> None:
        assert server not in self.running, "two pushes to one server"
        self.lost.discard(server)
        self.running[server] = spec
        self.pushed.append((server, spec.identity.version))
        self.carried.append({spec.name: snapshot.tensors[spec.name].clone() for spec in spec.manifest})
        if self.at_once:
            self.end(server)

    def end(
        self, server: int, error: str | None = None, *, fault: str | None = None, proof: str = "checksums"
    ) -> None:
        """The push to ``server`` has proven it, unless there is an ``error`` or a ``fault`` of the learner."""
        del self.running[server]
        report = ServerReport(error is None, error, proof if error is None else "", 0, {})
        self._results.append((server, WeightSyncError(fault) if fault else report))

    def give_up(self, error: str) -> None:
        self.given_up.append(error)
        for server in list(self.running):
            self.end(server, error)

    def confirm(self, version: int) -> None:
        self.confirmed.append(version)

    def drop_connection(self, server: int) -> None:
        self.dropped.append(server)

    def lost_servers(self) -> tuple[int, ...]:
        return tuple(sorted(self.lost - self.running.keys()))
