"""Holds one rank's counters and gauges; any thread may move them, and a name that is not declared raises.

``summable_vector`` has the table's order on every rank, so one all-reduce adds all counters up. Gauges have
no value until they are set. Counters continue after a resume; gauges do not.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence

from swift_stage2.telemetry.metrics import METRICS, Kind, Merge, Metric


class Counters:
    """Named numbers, declared up front. Safe for any number of threads."""

    def __init__(self, metrics: Sequence[Metric] = METRICS) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        if len(self._metrics) != len(metrics):
            raise ValueError(f"every metric is declared once, got {len(metrics) - len(self._metrics)} twice")
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {m.name: 0 for m in metrics if m.kind is Kind.COUNTER}
        self._gauges: dict[str, float | None] = {m.name: None for m in metrics if m.kind is Kind.GAUGE}
        self._names = tuple(m.name for m in metrics if m.kind is Kind.COUNTER and m.merge is Merge.SUM)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the counters that ranks add up, in the order of ``summable_vector``."""
        return self._names

    def add(self, name: str, amount: float = 1) -> None:
        """Grow a counter.

        Raises:
            ValueError: ``name`` is no declared counter, or ``amount`` is negative or not a number.
        """
        if not amount >= 0:
            raise ValueError(f"a counter only grows, got name={name!r} amount={amount}")
        self._check(name, Kind.COUNTER)
        with self._lock:
            self._counts[name] += amount

    def set(self, name: str, value: float | None) -> None:
        """Set a gauge; None takes its value away.

        Raises:
            ValueError: ``name`` is no declared gauge.
        """
        self._check(name, Kind.GAUGE)
        with self._lock:
            self._gauges[name] = value

    def raise_to(self, name: str, value: float) -> None:
        """Set a gauge to ``value`` unless it is higher already.

        Raises:
            ValueError: ``name`` is no declared gauge.
        """
        self._check(name, Kind.GAUGE)
        with self._lock:
            before = self._gauges[name]
            self._gauges[name] = value if before is None else max(before, value)

    def value(self, name: str) -> float | None:
        """One number as it is now; None for a gauge that was never set.

        Raises:
            ValueError: ``name`` is not declared.
        """
        kind = self._metrics[name].kind if name in self._metrics else None
        self._check(name, kind)
        with self._lock:
            return self._counts[name] if kind is Kind.COUNTER else self._gauges[name]

    def snapshot(self) -> dict[str, float]:
        """Every number at one moment, in the table's order; gauges that were never set are left out."""
        with self._lock:
            counts, gauges = dict(self._counts), dict(self._gauges)
        return counts | {name: value for name, value in gauges.items() if value is not None}

    def summable_vector(self) -> tuple[float, ...]:
        """The counters named by ``names``, at one moment."""
        with self._lock:
            return tuple(float(self._counts[name]) for name in self._names)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: the counters."""
        with self._lock:
            return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint. Counters it does not know start at zero; others it names are ignored."""
        with self._lock:
            for name in self._counts:
                self._counts[name] = state.get(name, 0)

    def _check(self, name: str, kind: Kind | None) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            nearest = difflib.get_close_matches(name, self._metrics, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "declare it in telemetry/metrics.py"
            raise ValueError(f"a metric must be declared, got name={name!r}; {hint}")
        if metric.kind is not kind:
            verb = "add to" if metric.kind is Kind.COUNTER else "set"
            raise ValueError(f"{name!r} is a {metric.kind}; {verb} it instead")
