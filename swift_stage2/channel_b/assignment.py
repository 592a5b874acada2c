"""Turns feasible candidate pairs and their gains into the one assignment that the rules single out.

Largest total gain; totals within 1e-9 count as equal, and then most pairs win, then the
lexicographically smallest. Isolated pairs need no solver; the rest costs one scipy assignment and a
certificate of which pairs are beyond doubt; only the others are searched. Called by matching.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

TOLERANCE = 1e-9
# Per pair: lets scipy settle most ties in favour of more pairs, which spares the search for them. Far above
# rounding, far below the tolerance.
_PAIR_BONUS = 4e-12
_ROUNDING = 1e-12
_NONE = -1  # the mate of what is unmatched


@dataclass(frozen=True, slots=True)
class Candidates:
    """Feasible pairs, sorted: ``rows[k]`` may take ``columns[k]``, which gains ``gains[k] >= 0``."""

    rows: Integers
    columns: Integers
    gains: Floats

    def where(self, chosen: Bools) -> Candidates:
        return Candidates(self.rows[chosen], self.columns[chosen], self.gains[chosen])


def assign(candidates: Candidates) -> list[tuple[int, int]]:
    """The winning pairs (row, column), sorted by row.

    Method: scipy's shortest augmenting paths, then linear-programming duals of that solution. Any other
    solution within the tolerance differs from it by cycles of the residual graph, none of them dearer
    than the tolerance, and these stay inside strongly connected components of the nearly tight arcs.
    """
    alone = np.bincount(candidates.rows)[candidates.rows] == 1
    alone &= np.bincount(candidates.columns)[candidates.columns] == 1
    isolated = candidates.where(alone)
    pairs = list(zip(isolated.rows.tolist(), isolated.columns.tolist(), strict=True))
    if not alone.all():
        pairs += _assign_contested(candidates.where(~alone))
    return sorted(pairs)


def _assign_contested(candidates: Candidates) -> list[tuple[int, int]]:
    row_ids, rows = np.unique(candidates.rows, return_inverse=True)
    column_ids, columns = np.unique(candidates.columns, return_inverse=True)
    weights = candidates.gains + _PAIR_BONUS
    matrix = np.zeros((len(row_ids), len(column_ids)))
    matrix[rows, columns] = weights
    mates = _solve(matrix)
    arcs = _residual_arcs(rows, columns, weights, mates, matrix.shape)
    potentials = _find_potentials(arcs)
    components = _find_components(arcs, potentials)
    if np.bincount(components).max() > 1:
        open_edges = components[rows] == components[columns + len(row_ids)]
        edges = [edge[open_edges].tolist() for edge in (rows, columns, weights)]
        breaker = TieBreaker(
            mates.tolist(),
            zip(*edges, strict=True),
            potentials.tolist(),
            components.tolist(),
            len(column_ids),
        )
        mates = np.array(breaker.settle(TOLERANCE + _ROUNDING))
    return [
        (int(row_ids[row]), int(column_ids[column]))
        for row, column in enumerate(mates.tolist())
        if column >= 0
    ]


def _solve(weights: Floats) -> Integers:
    """The column of every row in an assignment of largest weight, -1 for none; weight 0 is no pair."""
    mates = np.full(weights.shape[0], -1, dtype=np.int64)
    rows, columns = linear_sum_assignment(weights, maximize=True)
    paired = weights[rows, columns] > 0
    mates[rows[paired]] = columns[paired]
    return mates


@dataclass(frozen=True, slots=True)
class _Arcs:
    """Arcs of the residual graph, sorted by head. The first ``num_rows`` lead to the rows, one to each."""

    tails: Integers
    heads: Integers
    costs: Floats
    num_rows: int
    num_nodes: int


def _residual_arcs(
    rows: Integers, columns: Integers, weights: Floats, mates: Integers, shape: tuple[int, int]
) -> _Arcs:
    """Every change that an assignment allows, as arcs between rows, columns (numbered after them) and a hub.

    Taking a pair is an arc row → column that costs minus its weight, giving one up the arc back. The hub
    stands for being unmatched: matched rows and unmatched columns lead to it, the others come from it.
    """
    num_rows, num_columns = shape
    hub = num_rows + num_columns
    is_free = np.ones(hub, dtype=np.bool_)
    is_free[:num_rows] = mates < 0
    is_free[num_rows + mates[mates >= 0]] = False
    leads_to_hub = is_free ^ (np.arange(hub) < num_rows)
    to_hub, from_hub = np.flatnonzero(leads_to_hub), np.flatnonzero(~leads_to_hub)
    is_pair = mates[rows] == columns
    column_nodes = columns + num_rows
    tails = np.concatenate([np.where(is_pair, column_nodes, rows), to_hub, np.full(len(from_hub), hub)])
    heads = np.concatenate([np.where(is_pair, rows, column_nodes), np.full(len(to_hub), hub), from_hub])
    costs = np.concatenate([np.where(is_pair, weights, -weights), np.zeros(hub)])
    order = np.argsort(heads, kind="stable")
    return _Arcs(tails[order], heads[order], costs[order], num_rows, hub + 1)


def _find_potentials(arcs: _Arcs) -> Floats:
    """Potentials that leave no arc a negative reduced cost, beyond rounding (Bellman and Ford's method)."""
    num_rows = arcs.num_rows
    potentials = np.zeros(arcs.num_nodes)
    rows, row_tails, row_costs = potentials[:num_rows], arcs.tails[:num_rows], arcs.costs[:num_rows]
    tails, costs = arcs.tails[num_rows:], arcs.costs[num_rows:]
    others, starts = np.unique(arcs.heads[num_rows:], return_index=True)
    for _ in range(arcs.num_nodes):
        reached = np.minimum.reduceat(potentials[tails] + costs, starts)
        improved = reached < potentials[others] - _ROUNDING
        if not improved.any():
            break
        potentials[others[improved]] = reached[improved]
        np.minimum(rows, potentials[row_tails] + row_costs, out=rows)  # in the same sweep: half as many
    return potentials


def _find_components(arcs: _Arcs, potentials: Floats) -> Integers:
    """Per node, the strongly connected component of the arcs that a solution within the tolerance may use."""
    reduced = arcs.costs + potentials[arcs.tails] - potentials[arcs.heads]
    tight = reduced <= TOLERANCE + _ROUNDING
    shape = (arcs.num_nodes, arcs.num_nodes)
    graph = coo_array((np.ones(int(tight.sum())), (arcs.tails[tight], arcs.heads[tight])), shape=shape)
    _, components = connected_components(graph.tocsr(), connection="strong")
    return np.asarray(components, dtype=np.int64)


class _Path(NamedTuple):
    """A cheapest path, its reduced cost, and the distances of the nodes that were reached."""

    nodes: list[int]
    cost: float
    distances: dict[int, float]


class TieBreaker:
    """Turns one best assignment into the best by the rules, row by row. Holds its state for one call of ``settle``.

    Every change is the cheapest cycle of the residual graph that brings it about, so that after each the assignment is
    again the best one for what has been settled. Potentials keep all reduced costs non-negative; a search never goes
    farther than the tolerance that is left.

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
