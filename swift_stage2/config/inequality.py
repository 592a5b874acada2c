"""One rule between numbers of the configuration: what is compared, with the numbers put in, and the remedy.

Stated once. A section refuses what does not hold by ``require``; ``swift-stage2 doctor`` shows all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inequality:
    """A rule as evaluated on one configuration."""

    name: str
    """Two or three words, one of its own for each rule."""
    statement: str
    """The rule in the names of the keys: ``prefetch_target_packs <= queue_limit``."""
    numbers: str
    """The same with the numbers: ``4 <= 8``."""
    holds: bool
    refusal: str
    """What is wrong when it does not hold, with ``got name=value``."""
    remedy: str
    """What to write instead, in one line."""
    is_advice: bool = False
    """Such a setting wastes something; it is warned about, not refused."""

    def require(self) -> None:
        """Raises ConfigError unless the rule holds."""
        if not self.holds:
            raise ConfigError(self.message)

    @property
    def message(self) -> str:
        """Rule, what was got, and remedy in one line."""
        return f"{self.refusal}; {self.remedy}"
