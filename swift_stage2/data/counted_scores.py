"""Precision, recall and F1 of the parts of a set of predictions, and their intervals over images drawn again. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

RATIOS = ("precision", "recall", "f1")
_DRAWS_AT_ONCE = 50
Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]
Kind = tuple[Iterable[str], Numbers, Numbers]
"""One way to divide objects: names of its parts, and the number of the part of each predicted and each true object."""


class Counts(NamedTuple):
    """Objects, and pairs that are matched."""

    predicted: int
    true: int
    matched: int


class Bounds(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


class CountedScores:
    """Objects and pairs by image and part, a part being ``eval`` (all) or KIND/NAME."""

    def __init__(
        self, images: tuple[Numbers, Numbers], num_images: int, kinds: Mapping[str, Kind], **found: Numbers
    ) -> None:
        """``images`` of the predicted and the true objects; ``found`` by measure: the true objects that are in a pair.

        A pair counts where its true object does. The first measure's ratios have their plain names, of any other they
        end in its own: ``f1_inside``.
        """
        self.parts: list[str] = []
        self._num_images = num_images
        said, there = [], []
        for kind, (names, of_said, of_there) in kinds.items():
            said.append(len(self.parts) + of_said)
            there.append(len(self.parts) + of_there)
            self.parts += [f"{kind}/{name}".removesuffix("/") for name in names]
        columns = {suffix: np.stack(there)[:, numbers] for suffix, numbers in found.items()}
        self._columns = next(iter(columns.values()))
        self._sides = self._tally(images[0], np.stack(said)), self._tally(images[1], np.stack(there))
        self._matched = {
            f"_{measure}" if number else "": self._tally(images[1][found[measure]], columns[measure])
            for number, measure in enumerate(found)
        }

    def _tally(self, images: Numbers, columns: Numbers) -> csr_array:
        """Counts objects: shape (num_images, num_parts). ``columns``, (num_kinds, num_objects), are their parts."""
        places = np.tile(images, len(columns)), columns.ravel()
        shape = self._num_images, len(self.parts)
        return csr_array((np.ones(columns.size, dtype=np.int64), places), shape=shape)

    def sums(self, values: Sequence[float]) -> list[float]:
        """By part, of one value for each pair of the first measure."""
        # Not ``np.add.at``: NumPy 2.3 reads past the end of values that it has to broadcast.
        weights = np.tile(values, len(self._columns))
        sums: Reals = np.bincount(self._columns.ravel(), weights, len(self.parts)).astype(np.float64)
        return list(map(float, sums))

    def totals(self) -> list[Counts]:
        """By part, of the first measure."""
        tallies = [each.sum(axis=0) for each in (*self._sides, self._matched[""])]
        return [Counts(*each) for each in np.stack(tallies, axis=1).tolist()]

    def counts(self, kind: str) -> dict[str, Counts]:
        """By part of one kind (class, objects, aspect)."""
        found = zip(self.parts, self.totals(), strict=True)
        return {part.removeprefix(f"{kind}/"): total for part, total in found if part.startswith(f"{kind}/")}

    def intervals(self, num_draws: int, minus: CountedScores | None = None) -> dict[str, Bounds]:
        """Of precision, recall and F1 of every part, by the bootstrap over images: drawn again, as many as there are.

        With ``minus``: of the differences from another set's, image by image, on the same draws; the draws are always
        the same. hotcoco's own comparison keeps an image that was drawn twice once, which makes its intervals a quarter
        too narrow.
        """
        generator, num_images = np.random.default_rng(0), self._num_images
        drawn: defaultdict[str, list[Reals]] = defaultdict(list)
        for first in range(0, num_draws, _DRAWS_AT_ONCE):
            size = min(_DRAWS_AT_ONCE, num_draws - first)
            weights = generator.multinomial(num_images, np.full(num_images, 1 / num_images), size).T
            others = minus.weighted(weights) if minus else {}
            for name, values in self.weighted(weights).items():
                if minus is None or name in others:
                    drawn[name].append(values - others.get(name, 0.0))
        known = {
            name: (all_of := np.concatenate(parts))[np.isfinite(all_of)] for name, parts in drawn.items()
        }
        return {
            name: Bounds(*np.quantile(values, (0.025, 0.975)).tolist())
            for name, values in known.items()
            if len(values)
        }

    def weighted(self, weights: Numbers) -> dict[str, Reals]:
        """The ratios of images as often as a column of ``weights`` says, an entry per column; NaN of nothing."""
        predicted, true = (each.T @ weights for each in self._sides)
        values: dict[str, Reals] = {}
        for suffix, tally in self._matched.items():
            matched = tally.T @ weights
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = matched / predicted, matched / true, 2 * matched / (predicted + true)
            by_name = zip(RATIOS, ratios, strict=True)
            values |= {
                f"{part}/{name}{suffix}": of[n] for name, of in by_name for n, part in enumerate(self.parts)
            }
        return values
