"""Turns matches into pictures to page through: what was seen, said, matched, missed, invented and trained.

Bounded: the newest matches only, one thumbnail per image.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from pathlib import Path

from swift_stage2.channel_b.reward import TOTAL
from swift_stage2.pages.content import Section, Sentence, Tone, number
from swift_stage2.pages.pictures import GALLERY_KEY, Gallery, Picture, Thumbnails, drawn_boxes, filters_of
from swift_stage2.report.matches import EVALUATION, Key, LoggedMatch

DEFAULT_SIZE = 200
_OF_GROUPS = ("Rollout", "Corrected answer")
"""Titles where rollouts are compared: the second need not be trained."""
_Group = tuple[int, int, int]
"""Rollouts of one row that are compared: rank, epoch, number within the rank's shard of the epoch."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which rollouts are compared: ``num_generations`` of one row stand at positions one after another."""

    num_generations: int = 1
    advantages: Mapping[int, Mapping[Key, Sequence[float]]] = field(default_factory=dict)
    """By rank and draw, where they were recorded."""

    def order(self, matches: Sequence[LoggedMatch]) -> Iterator[tuple[LoggedMatch, str | None]]:
        """The newest of ``matches``, which are by time, first, each with its group's heading.

        A group stands where its newest rollout does, its best one first. Evaluations have no group.
        """
        members: dict[_Group, list[LoggedMatch]] = defaultdict(list)
        for match in matches:
            if (group := self._group_of(match)) is not None:
                members[group].append(match)
        for match in reversed(matches):
            if (group := self._group_of(match)) is None:
                yield match, None
            elif of_group := members.pop(group, None):
                of_group.sort(key=lambda each: (-each.reward.get(TOTAL, -math.inf), each.sample))
                yield from ((each, _heading(group, of_group)) for each in of_group)

    def fact(self, match: LoggedMatch) -> Iterator[str]:
        """Its advantages in words, if they are known."""
        own, *of_target = self.advantages.get(match.rank, {}).get(match.sample, (None,))
        if own is not None and self._group_of(match) is not None:
            yield f"advantage {own:.2f}" + "".join(f", its corrected answer {each:.2f}" for each in of_target)

    def _group_of(self, match: LoggedMatch) -> _Group | None:
        if self.num_generations == 1 or match.purpose == EVALUATION:
            return None
        epoch, position, _, _ = match.sample
        return match.rank, epoch, position // self.num_generations


def _heading(group: _Group, members: Sequence[LoggedMatch]) -> str:
    rank, epoch, number = group
    name = f"Group {number}, epoch {epoch}, rank {rank}, row {members[0].row}"
    rewards = [match.reward[TOTAL] for match in members if TOTAL in match.reward]
    told = ", ".join(f"{reward:.2f}" for reward in rewards)
    return f"{name}: rewards {told}, mean {sum(rewards) / len(rewards):.2f}" if rewards else name


def gallery_of(
    matches: Sequence[LoggedMatch],
    fates: Mapping[int, Mapping[Key, str]],
    size: int = DEFAULT_SIZE,
    grouping: Grouping | None = None,
) -> Gallery:
    """The newest ``size`` matches; ``matches`` by time, ``fates`` by rank and draw. Opens their images."""
    thumbnails, pictures, grouping = Thumbnails(), [], grouping or Grouping()
    for match, heading in islice(grouping.order(matches), size):
        path = match.image
        image, trouble = thumbnails.add(path or None)
        fate = fates.get(match.rank, {}).get(match.sample, "not trained")
        pictures.append(
            Picture(
                image=image,
                trouble=trouble,
                name=Path(path).name or "an image without a path",
                facts=(*_facts(match), *grouping.fact(match)),
                fate="evaluation, never trained" if match.purpose == EVALUATION else fate,
                space=match.space,
                boxes=(
                    *drawn_boxes(map(astuple, match.truth), match.missed, "missed", "truth"),
                    *drawn_boxes(map(astuple, match.predicted), match.false, "false", "matched"),
                ),
                outcomes=filters_of(len(match.truth), match.missed, match.false, sum(match.dropped.values())),
                rollout=match.rollout,
                target=match.target,
                group=heading,
            )
        )
    gallery = Gallery(pictures=tuple(pictures), thumbnails=thumbnails.uris, num_matches=len(matches))
    return gallery if grouping.num_generations == 1 else replace(gallery, texts=_OF_GROUPS)


def gallery_section(gallery: Gallery, num_odd: int) -> Section:
    """How many matches are shown; ``num_odd`` lines were left out. The page adds the pictures."""
    sentences = [
        Sentence(
            f"{number(len(gallery.pictures))} of {number(gallery.num_matches)} matches, the newest first."
            if gallery.num_matches
            else "The run wrote no matches."
        )
    ]
    if any(picture.group for picture in gallery.pictures):
        sentences.append(
            Sentence("Rollouts that are compared stand together, the one of the highest reward first.")
        )
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
    yield f"weights of version {match.version}"
    yield f"{len(match.pairs)} matched, {len(match.missed)} missed, {len(match.false)} false"
    yield from (f"dropped: {count} × {reason}" for reason, count in match.dropped.items() if count)
    if match.reward:
        yield "reward: " + ", ".join(f"{term} {value:.2f}" for term, value in match.reward.items())
    if match.truncated:
        yield "cut off at max_new_tokens"
    if len(match.images) > 1:
        yield f"first of {len(match.images)} images"
