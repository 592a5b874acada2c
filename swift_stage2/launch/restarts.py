"""Whether and when a server that ended is started again. Pure."""

from __future__ import annotations

from swift_stage2.config import RestartConfig, RestartPolicy


class RestartBudget:
    """One server's restarts in one run."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self.num_restarts = 0

    def next_delay_s(self, status: int) -> float | None:
        """Seconds to wait before the next start of a server that ended with ``status``; None: leave it ended."""
        config = self._config
        if config.policy is RestartPolicy.NEVER or status == 0 or self.num_restarts >= config.max_restarts:
            return None
        delay_s = config.backoff_s * 2.0**self.num_restarts
        self.num_restarts += 1
        return delay_s

    def describe(self) -> str:
        """For people: which restart this is."""
        return f"restart {self.num_restarts} of {self._config.max_restarts}"
