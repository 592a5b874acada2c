"""Turns matches into pictures: what was seen, said, matched, missed, invented and trained. The newest matches only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.detections.drawing import Drawing, gallery_image
from swift_stage2.pages.content import (
    GALLERY_KEY,
    Gallery,
    Picture,
    Section,
    Sentence,
    number,
)
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Key, Match


@dataclass(frozen=True, slots=True)
class RankMatch:
    """One rollout against its ground truth, on one rank."""

    rank: int
    match: Match

    @property
    def is_of_points(self) -> bool:
        """Whether any object is a point; a task has objects of one kind."""
        return any(len(box) == 2 for _, box in (*self.match.truth, *self.match.predicted))


def matches_of(ranks: Iterable[RankEvents]) -> list[RankMatch]:
    """The matches of all ranks by time.

    A draw that a resumed process repeated counts once, as it was answered last. Evaluations repeat their keys, so a key
    counts once for every version.
    """
    found: dict[tuple[int, str, Key, int], RankMatch] = {}
    for rank in ranks:
        for match in rank.of(Match):
            found[rank.rank, match.purpose, match.sample, match.version] = RankMatch(rank.rank, match)
    return sorted(found.values(), key=lambda each: each.match.time)


DEFAULT_SIZE = 24
_MOST_CHARACTERS = 20_000  # of a text that is shown


def gallery_of(matches: Sequence[RankMatch], size: int = DEFAULT_SIZE) -> Gallery:
    """The newest ``size`` of the ``matches``, which are by time. Opens their images."""
    newest = matches[: -size - 1 : -1] if size else ()
    return Gallery(
        pictures=tuple(map(_picture, newest)),
        num_matches=len(matches),
    )


def _picture(logged: RankMatch) -> Picture:
    match = logged.match
    drawing = Drawing(
        match.truth,
        match.predicted,
        match.pairs,
    )
    path = (match.images[0] if match.images else None) or ""
    likeness = "closeness" if logged.is_of_points else "IoU"
    image, trouble = gallery_image(drawing, path, match.space, likeness)
    return Picture(
        image=image,
        trouble=trouble,
        name=Path(path).name or "an image without a path",
        facts=tuple(_facts(logged.rank, match)),
        fate="evaluation, never trained" if match.purpose == "evaluation" else "training",
        texts=(("Rollout", _shortened(match.rollout)), ("Corrected answer", _shortened(match.target))),
    )


def _shortened(text: str) -> str:
    more = len(text) - _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]} … and {more} characters more" if more > 0 else text


def gallery_section(gallery: Gallery) -> Section:
    """How many matches are shown. The page adds the pictures."""
    told = "The run wrote no matches."
    if gallery.num_matches:
        told = f"{number(len(gallery.pictures))} of {number(gallery.num_matches)} matches, the newest first."
    return Section(GALLERY_KEY, "Gallery", (Sentence(told),))


def _facts(rank: int, match: Match) -> Iterator[str]:
    epoch, position, row, attempt = match.sample
    again = f", attempt {attempt}" if attempt else ""
    yield (
        f"row {row} of the validation set, rank {rank}"
        if match.purpose == "evaluation"
        else f"row {row}, epoch {epoch}, position {position}, rank {rank}{again}"
    )
    num_pairs = len(match.pairs)
    yield (
        f"weights of version {match.version}; {num_pairs} matched, {len(match.truth) - num_pairs} missed, "
        f"{len(match.predicted) - num_pairs} false"
    )
    yield from (f"dropped: {count} × {reason}" for reason, count in match.dropped.items() if count)
    if match.reward:
        yield "reward: " + ", ".join(f"{term} {value:.2f}" for term, value in match.reward.items())
    if match.truncated:
        yield "cut off at max_new_tokens"
    if len(match.images) > 1:
        yield f"first of {len(match.images)} images"
