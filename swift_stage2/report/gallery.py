"""Turns matches into pictures to page through: what was seen, said, matched, missed, invented and trained.

Bounded: the newest matches only, one thumbnail per image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from swift_stage2.pages.content import Section, Sentence, Tone, number
from swift_stage2.pages.pictures import GALLERY_KEY, DrawnBox, Filter, Gallery, Picture, Thumbnails
from swift_stage2.report.matches import EVALUATION, Key, Labelled, LoggedMatch

DEFAULT_SIZE = 200


def gallery_of(
    matches: Sequence[LoggedMatch], fates: Mapping[int, Mapping[Key, str]], size: int = DEFAULT_SIZE
) -> Gallery:
    """The newest ``size`` matches; ``matches`` by time, ``fates`` by rank and draw. Opens their images."""
    thumbnails, pictures = Thumbnails(), []
    for match in reversed(matches[max(0, len(matches) - size) :]):
        path = match.images[0] if match.images else None
        image, trouble = thumbnails.add(path)
        fate = fates.get(match.rank, {}).get(match.sample, "not trained")
        pictures.append(
            Picture(
                image=image,
                trouble=trouble,
                name=Path(path).name if path else "an image without a path",
                facts=tuple(_facts(match)),
                fate="evaluation, never trained" if match.purpose == EVALUATION else fate,
                space=match.space,
                boxes=(
                    *_boxes(match.truth, match.missed, "missed", "truth"),
                    *_boxes(match.predicted, match.false, "false", "matched"),
                ),
                outcomes=tuple(map(str, filters_of(match))),
                rollout=match.rollout,
                target=match.target,
            )
        )
    return Gallery(pictures=tuple(pictures), thumbnails=thumbnails.uris, num_matches=len(matches))


def gallery_section(gallery: Gallery, num_odd: int) -> Section:
    """How many matches are shown; ``num_odd`` lines were left out. The page adds the pictures."""
    sentences = [
        Sentence(
            f"{number(len(gallery.pictures))} of {number(gallery.num_matches)} matches, the newest first."
            if gallery.num_matches
            else "The run wrote no matches."
        )
    ]
    if num_odd:
        sentences.append(
            Sentence(f"{num_odd} lines of matches/ have another form and are left out.", Tone.WARN)
        )
    return Section(GALLERY_KEY, "Gallery", tuple(sentences))


def filters_of(match: LoggedMatch) -> tuple[Filter, ...]:
    """All that hold; ``NOTHING_FOUND``: there was something and none of it was matched."""
    holds = {
        Filter.MISSED: match.missed,
        Filter.FALSE: match.false,
        Filter.NOTHING_FOUND: match.truth and not match.pairs,
        Filter.DROPPED: sum(match.dropped.values()),
    }
    return tuple(name for name, held in holds.items() if held) or (Filter.ALL_MATCHED,)


def _facts(match: LoggedMatch) -> Iterator[str]:
    epoch, position, row, attempt = match.sample
    again = f", attempt {attempt}" if attempt else ""
    yield (
        f"row {row} of the validation set, rank {match.rank}"
        if match.purpose == EVALUATION
        else f"row {row}, epoch {epoch}, position {position}, rank {match.rank}{again}"
    )
    yield f"weights of version {match.version}"
    yield f"{len(match.pairs)} matched, {len(match.missed)} missed, {len(match.false)} false"
    yield from (f"dropped: {count} × {reason}" for reason, count in match.dropped.items() if count)
    if match.reward:
        yield "reward: " + ", ".join(f"{term} {value:.2f}" for term, value in match.reward.items())
    if match.truncated:
        yield "cut off at max_new_tokens"
    if len(match.images) > 1:
        yield f"first of {len(match.images)} images"


def _boxes(
    objects: Sequence[Labelled], alone: frozenset[int], without_partner: str, with_partner: str
) -> Iterator[DrawnBox]:
    for index, one in enumerate(objects):
        yield (without_partner if index in alone else with_partner, *one.box, one.label)
