"""Reads event files back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class EventFiles:
    """Everything that TensorBoard would show of a directory."""

    def __init__(self, directory: Path) -> None:
        self._events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
        self._events.Reload()

    @property
    def tags(self) -> set[str]:
        return set(self._events.Tags()["scalars"])

    def series(self, tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in self._events.Scalars(tag)]
