"""Updates of servers of which nobody else asks anything: a dry run of ``doctor --live``, and tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from swift_stage2.collectives import SingleRank
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.servers.health_check import HealthCheck
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import Canary
from swift_stage2.weights.publisher import Publisher
from swift_stage2.weights.snapshots import Snapshots
from swift_stage2.weights.updates import Updates

_LOOK_S = 0.005


class WaitedUpdates:
    """Brings servers, of which nobody else asks anything, the weights of the moment."""

    def __init__(
        self,
        num_servers: int,
        *,
        export: WeightExport,
        canary: Canary,
        publisher: Publisher,
        run_id: str,
        sync: SyncConfig,
        **snapshots: Any,
    ) -> None:
        """``snapshots``: further settings of ``Snapshots``."""
        self.version = 0
        self.lives = [ServerLife(1, 1, state=LifeState.AWAY) for _ in range(num_servers)]
        alone: dict[str, Any] = {
            "control": SingleRank(),
            "timeout_s": sync.timeout_s,
            "bucket_mib": sync.bucket_mib,
        }
        self.snapshots = Snapshots(export=export, canary=canary, run_id=run_id, **(alone | snapshots))
        self.updates = Updates(
            self.lives,
            snapshots=self.snapshots,
            publisher=publisher,
            health=HealthCheck(base_urls=(), api_key=None),
            sync=sync,
            straggler_s=sync.timeout_s,
            sync_every_steps=1,
        )

    def run(self, targets: Sequence[int], *, version: int | None = None) -> RoundOutcome:
        """The next version for ``targets``, by number; returns when every push has ended, in its time.

        ``version``: greater than those before; by default by one.

        Raises:
            WeightSyncError: the learner's weights cannot be pushed.
        """
        self.begin(targets, version=version)
        return self.wait()  # deadline: the pushes' own

    def begin(self, targets: Sequence[int], *, version: int | None = None) -> None:
        """The first part of ``run``: takes the snapshot."""
        self.updates.facts(self.version)  # what was lost since then shall not be lost in between
        self.version = self.version + 1 if version is None else version
        self._targets = targets
        for server in targets:
            self.lives[server].answered()
        if taken := self.snapshots.take(self.version, canary_due=self.updates.canary_due):
            self.updates.begin(taken, self.version)

    def wait(self) -> RoundOutcome:
        """The second part. Raises as ``run`` does."""
        while (outcome := self.look()) is None:  # bounded by the pushes' deadlines
            time.sleep(_LOOK_S)
        return outcome

    def look(self) -> RoundOutcome | None:
        """How it has ended, once it has. Raises as ``run`` does."""
        facts = self.updates.facts(self.version)
        self.updates.apply_agreement(facts.proven, suspect=(), drained=range(len(self.lives)))
        if facts.has_update:
            news = self.updates.collect_update()
            news.require_no_fault()
            return news.outcome
        if not facts.publishing and not any(facts.closed):
            lost = ServerReport.failed("the server was lost before anything was pushed to it")
            return RoundOutcome(self.version, dict.fromkeys(self._targets, lost))
        return None

    def close(self) -> None:
        """Ends what runs and frees what is kept. May be called again."""
        self.updates.close()
        self.snapshots.close()
