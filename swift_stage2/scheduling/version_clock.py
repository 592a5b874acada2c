"""The rank's idea of the current weight version, and the one rule that says what is fresh.

The version only grows, with every committed sync round, on every rank in the same step; one that failed leaves a
gap.
"""

from __future__ import annotations

from collections.abc import Iterable

from swift_stage2.errors import StaleSample


def is_fresh(version: int, *, current: int, window: int) -> bool:
    """Say whether ``version`` may still be trained on; versions ahead of ``current`` may.

    A caller can hold an older idea of ``current`` than the thread that made the pack: what it made is
    not stale for that.
    """
    return version >= current - window


def require_fresh(versions: Iterable[tuple[object, int]], *, current: int, window: int) -> None:
    """The last look at what a step is about to train: (sample, its oldest version) of every sample, not of packs.

    The ready queue drops packs by the version of their oldest segment, so that this never finds anything.

    Raises:
        StaleSample: one is not fresh; the message names it.
    """
    for sample, version in versions:
        if not is_fresh(version, current=current, window=window):
            raise StaleSample(
                "a step trains samples of its version window only, got "
                f"sample={sample} version={version} current={current} version_window={window}; this is a bug, "
                "report it with the run directory"
            )


class VersionClock:
    """A counter of weight versions. The main thread advances it; any thread reads ``current``."""

    def __init__(self, current: int = 0) -> None:
        self.current = current

    def advance(self, version: int | None = None) -> int:
        """Move to ``version``, by default the next one, and return it; called on every rank after its proof.

        Raises ValueError: the version is not greater than the current one.
        """
        version = self.current + 1 if version is None else version
        if version <= self.current:
            raise ValueError(f"a version only grows, got version={version} current={self.current}")
        self.current = version
        return version
