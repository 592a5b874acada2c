"""Tells once that telemetry cannot be written. A full disk must neither stop training nor fill its log."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)


class StorageWarning:
    """Shared by everything that writes for one rank: the first failure is told, later ones are not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False

    def report(self, path: object, error: OSError) -> None:
        """Log ``error`` if it is the first one."""
        with self._lock:
            if self._told:
                return
            self._told = True
        logger.warning(
            "telemetry cannot be written to %s: %s; training goes on, records are lost until there is room again",
            path,
            error,
        )
