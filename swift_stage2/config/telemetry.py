"""Section ``telemetry``: what a run writes down of itself."""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.config import rules
from swift_stage2.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    tensorboard: bool = True
    """Metrics as TensorBoard tags, through ms-swift's own logging steps."""
    audit: bool = True
    """Per-rank events as JSON lines in the run directory."""
    trace: bool = False
    """Spans of every stage as a trace file; for finding out where time goes."""
    gallery_rows: int = 256
    """Rows of the data set, chosen by the seed, whose matches are kept whole for the report's gallery and its match
    drift; 0 keeps none."""
    record: bool = False
    """Completions, plans and losses as JSON lines in the run directory, so that ``replay`` can run it again."""
    log_probs: bool = False
    """Log-probabilities of the sampled tokens, asked of every server and recorded with the completions."""

    def __post_init__(self) -> None:
        rules.at_least(self, 0, "gallery_rows", remedy="0 keeps none")
        if self.record and not self.audit:
            raise ConfigError(
                "record needs the event log that audit keeps, got record=true audit=false; write telemetry.audit: true"
            )
        if self.log_probs and not self.record:
            raise ConfigError(
                "log_probs needs record: true, got log_probs=true record=false; write telemetry.record: true"
            )
