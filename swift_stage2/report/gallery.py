"""Turns matches into pictures: what was seen, said, matched, missed, invented and trained. The newest matches only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from swift_stage2.detections.drawing import Drawing, gallery_image
from swift_stage2.pages.content import GALLERY_KEY, Gallery, Picture, Section, Sentence, Tone, number
from swift_stage2.report.matches import EVALUATION, Key, LoggedMatch

DEFAULT_SIZE = 24


def gallery_of(
    matches: Sequence[LoggedMatch], fates: Mapping[int, Mapping[Key, str]], size: int = DEFAULT_SIZE
) -> Gallery:
    """The newest ``size`` matches; ``matches`` by time, ``fates`` by rank and draw. Opens their images."""
    newest = matches[: -size - 1 : -1] if size else ()
    return Gallery(
        pictures=tuple(_picture(match, fates.get(match.rank, {})) for match in newest),
        num_matches=len(matches),
    )


def _picture(match: LoggedMatch, fates: Mapping[Key, str]) -> Picture:
    drawing = Drawing(
        tuple((each.label, each.box) for each in match.truth),
        tuple((each.label, each.box) for each in match.predicted),
        match.pairs,
    )
    likeness = "closeness" if match.is_of_points else "IoU"
    image, trouble = gallery_image(drawing, match.image, match.space, likeness)
    is_evaluation = match.purpose == EVALUATION
    return Picture(
        image=image,
        trouble=trouble,
        name=Path(match.image).name or "an image without a path",
        facts=tuple(_facts(match)),
        fate="evaluation, never trained" if is_evaluation else fates.get(match.sample, "not trained"),
        texts=(("Rollout", match.rollout), ("Corrected answer", match.target)),
    )


def gallery_section(gallery: Gallery, num_odd: int) -> Section:
    """How many matches are shown; ``num_odd`` lines were left out. The page adds the pictures."""
    told = "The run wrote no matches."
    if gallery.num_matches:
        told = f"{number(len(gallery.pictures))} of {number(gallery.num_matches)} matches, the newest first."
    sentences = [Sentence(told)]
    if num_odd:
        sentences.append(
            Sentence(f"{num_odd} lines of matches/ have another form and are left out.", Tone.WARN)
        )
    return Section(GALLERY_KEY, "Gallery", tuple(sentences))


def _facts(match: LoggedMatch) -> Iterator[str]:
    epoch, position, row, attempt = match.sample
    again = f", attempt {attempt}" if attempt else ""
    yield (
        f"row {row} of the validation set, rank {match.rank}"
        if match.purpose == EVALUATION
        else f"row {row}, epoch {epoch}, position {position}, rank {match.rank}{again}"
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
