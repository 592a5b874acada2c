"""Turns one best assignment into the best by the rules: most pairs, then lexicographically smallest.

Every change is the cheapest cycle of the residual graph that brings it about, so that after each the
assignment is again the best one for what has been settled. Potentials keep all reduced costs
non-negative; a search never goes farther than the tolerance that is left. Called by assignment.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

_NONE = -1


class _Path(NamedTuple):
    """A cheapest path, its reduced cost, and the distances of the nodes that were reached."""

    nodes: list[int]
    cost: float
    distances: dict[int, float]


class TieBreaker:
    """Settles one assignment, row by row. Holds its state for one call of ``settle``.

    Nodes are the rows, then the columns, then two hubs: unmatched rows hang on the first, unmatched
    columns on the second. As nothing joins the two, a cycle keeps the number of pairs.

    Args:
        mates: per row its column, or -1; an assignment of largest weight.
        edges: (row, column, weight) of pairs that another solution may have, sorted.
        potentials: per row, column and hub; no arc has a negative reduced cost.
        components: per row, column and hub; a cycle stays within one.
    """

    def __init__(
        self,
        mates: list[int],
        edges: Iterable[tuple[int, int, float]],
        potentials: list[float],
        components: list[int],
        num_columns: int,
    ) -> None:
        self._num_rows = num_rows = len(mates)
        self._row_hub = num_rows + num_columns
        self._column_hub = self._row_hub + 1
        self._potentials = [*potentials, potentials[-1]]
        self._mates = mates + [_NONE] * num_columns  # of rows and columns alike, as nodes
        self._weights: dict[int, dict[int, float]] = defaultdict(dict)
        for row, column, weight in edges:
            self._weights[row][num_rows + column] = weight
        for row, column in enumerate(mates):
            if column != _NONE:
                self._pair(row, num_rows + column)
        hub = components[-1]
        self._loose_rows = {row for row in range(num_rows) if components[row] == hub}
        self._loose_columns = {node for node in range(num_rows, self._row_hub) if components[node] == hub}
        self._settled: set[int] = set()

    def settle(self, tolerance: float) -> list[int]:
        """Per row its column, or -1, in the winning assignment; costs at most ``tolerance`` more."""
        left = self._add_pairs(tolerance)
        for row in range(self._num_rows):
            left = self._settle_row(row, left)
        return [mate - self._num_rows if mate != _NONE else _NONE for mate in self._mates[: self._num_rows]]

    def _add_pairs(self, left: float) -> float:
        """Adds pairs, the cheapest first, while the tolerance allows; returns what is left of it."""
        while True:
            drop = self._potentials[self._row_hub] - self._potentials[self._column_hub]
            path = self._find_path(self._row_hub, self._column_hub, left + drop)
            if path is None:
                return left
            left -= max(0.0, self._apply(path) - drop)

    def _settle_row(self, row: int, left: float) -> float:
        """Gives the row the lowest column that the tolerance allows; returns what is left of it."""
        for column, weight in self._weights[row].items():
            if column == self._mates[row]:
                break  # it already has the lowest that it can have
            first = self._reduced(row, column, -weight)
            if column in self._settled or first > left:
                continue
            path = self._find_path(column, row, left - first)
            if path is not None:
                left -= first + self._apply(path)
                self._pair(row, column)
                break
        self._settled |= {row, self._mates[row]}
        return left

    def _find_path(self, source: int, target: int, limit: float) -> _Path | None:
        """The cheapest path of reduced cost at most ``limit`` (Dijkstra's method), or None."""
        distances = {source: 0.0}
        parents: dict[int, int] = {}
        heap = [(0.0, source)]
        while heap:
            distance, node = heapq.heappop(heap)
            if node == target:
                return _Path(_trace(parents, source, target), distance, distances)
            if distance > distances[node]:
                continue
            for head, cost in self._arcs_from(node):
                reached = distance + self._reduced(node, head, cost)
                if reached <= limit and reached < distances.get(head, float("inf")):
                    distances[head], parents[head] = reached, node
                    heapq.heappush(heap, (reached, head))
        return None

    def _arcs_from(self, node: int) -> Iterator[tuple[int, float]]:
        """The residual arcs that leave a node, without what is settled: (head, cost)."""
        mate = self._mates[node] if node < self._row_hub else _NONE
        if node < self._num_rows:
            for column, weight in self._weights[node].items():
                if column != mate and column not in self._settled:
                    yield column, -weight
            if mate != _NONE and node in self._loose_rows:
                yield self._row_hub, 0.0
        elif node == self._row_hub:
            yield from ((row, 0.0) for row in self._loose_rows - self._settled if self._mates[row] == _NONE)
        elif node == self._column_hub:
            yield from (
                (column, 0.0)
                for column in self._loose_columns - self._settled
                if self._mates[column] != _NONE
            )
        elif mate != _NONE:
            yield mate, self._weights[mate][node]
        elif node in self._loose_columns:
            yield self._column_hub, 0.0

    def _reduced(self, tail: int, head: int, cost: float) -> float:
        return max(0.0, cost + self._potentials[tail] - self._potentials[head])

    def _apply(self, path: _Path) -> float:
        """Changes the assignment along a path, keeps the potentials valid, and returns the path's cost."""
        for node, distance in path.distances.items():
            self._potentials[node] += min(0.0, distance - path.cost)
        steps = [(tail, head) for tail, head in pairwise(path.nodes) if max(tail, head) < self._row_hub]
        for tail, head in steps:
            if head < self._num_rows:
                self._mates[tail] = self._mates[head] = _NONE
        for tail, head in steps:
            if tail < self._num_rows:
                self._pair(tail, head)
        return path.cost

    def _pair(self, row: int, column: int) -> None:
        self._mates[row], self._mates[column] = column, row


def _trace(parents: dict[int, int], source: int, target: int) -> list[int]:
    nodes = [target]
    while nodes[-1] != source:
        nodes.append(parents[nodes[-1]])
    return nodes[::-1]
