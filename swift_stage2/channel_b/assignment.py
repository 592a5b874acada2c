"""Turns feasible candidate pairs and their gains into the one assignment that the rules single out.

Largest total gain; totals within 1e-9 count as equal, and then most pairs win, then the
lexicographically smallest. Isolated pairs need no solver; the rest costs one scipy assignment and a
certificate of which pairs are beyond doubt; only the others are searched. Called by matching.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from swift_stage2.channel_b.tie_break import TieBreaker

Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

TOLERANCE = 1e-9
# Per pair: lets scipy settle most ties in favour of more pairs, which spares the search for them. Far above
# rounding, far below the tolerance.
_PAIR_BONUS = 4e-12
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Candidates:
    """Feasible pairs, sorted: ``rows[k]`` may take ``columns[k]``, which gains ``gains[k] >= 0``."""

    rows: Integers
    columns: Integers
    gains: Floats

    def where(self, chosen: Bools) -> Candidates:
        """The chosen pairs only."""
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
    """What may change about an assignment, as arcs between rows, columns (numbered after them) and a hub.

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
