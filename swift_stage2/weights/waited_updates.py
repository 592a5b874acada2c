"""Updates that are waited for, of one process without a learner: for checks and benches."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from swift_stage2.collectives import SingleRank
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.records import RoundOutcome
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
        self._lives = [ServerLife(1, 1, state=LifeState.AWAY) for _ in range(num_servers)]
        settings: dict[str, Any] = {"timeout_s": sync.timeout_s, "bucket_mib": sync.bucket_mib}
        self.snapshots = Snapshots(
            control=SingleRank(), export=export, canary=canary, run_id=run_id, **settings | snapshots
        )
        self.updates = Updates(
            self._lives,
            snapshots=self.snapshots,
            publisher=publisher,
            health=HealthCheck(base_urls=(), api_key=None),
            sync=sync,
            straggler_s=sync.timeout_s,
            sync_every_steps=1,
        )

    def run(self, targets: Collection[int], *, version: int | None = None) -> RoundOutcome:
        """The next version for ``targets``, by number; returns when every push has ended, in its time.

        ``version``: greater than those before; by default by one.

        Raises:
            WeightSyncError: the learner's weights cannot be pushed.
        """
        self.version = self.version + 1 if version is None else version
        for server in targets:
            self._lives[server].answered()
        taken = self.snapshots.take(self.version, canary_due=self.updates.canary_due)
        assert taken is not None
        self.updates.begin(taken, self.version)
        while True:  # bounded by the pushes' deadlines
            facts = self.updates.facts(self.version)
            if facts.has_news:
                news = self.updates.take_news()
                news.require_no_fault()
                assert news.outcome is not None
                return news.outcome
            self.updates.take_in(facts.proven, suspect=(), drained=range(len(self._lives)))
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Ends what runs and frees what is kept. May be called again."""
        self.updates.close()
        self.snapshots.close()
