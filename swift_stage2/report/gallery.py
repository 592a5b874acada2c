"""Turns matches into pictures to page through: what was seen, said, matched, missed, invented and trained.

Bounded: the newest matches only, one thumbnail per image. It makes data for the page's script, which puts
every text in as text. A path comes from a data set: it is opened as an image of a known raster format and as nothing
else, only if it is a regular file, and only if it is of a bounded size.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from PIL import Image

from swift_stage2.channel_b.image_files import RASTER_FORMATS
from swift_stage2.report.content import Section, Sentence, Tone, number
from swift_stage2.report.matches import EVALUATION, Key, Labelled, LoggedMatch

GALLERY_KEY = "gallery"
DEFAULT_SIZE = 200
MOST_SIDE = 384
"""Pixels of a thumbnail's longer side."""
_MOST_PIXELS = 100_000_000
_QUALITY = 70
_DrawnBox = tuple[str, float, float, float, float, str]


class UnreadableImage(Exception):
    """There is no picture; the message says why."""


class Filter(StrEnum):
    """A property to choose pictures by; several may hold, except the first."""

    ALL_RIGHT = "all right"
    MISSED = "has missed"
    FALSE = "has false"
    NOTHING_FOUND = "nothing found"
    DROPPED = "dropped objects"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One rollout. ``image`` numbers the gallery's thumbnails; None with ``trouble``, which says why there is none."""

    image: int | None
    trouble: str | None
    name: str
    facts: tuple[str, ...]
    fate: str
    space: tuple[int, int]
    boxes: tuple[_DrawnBox, ...]
    """(truth, matched, missed or false; x1, y1, x2, y2; label). Ground truth first, predictions lie on top."""
    outcomes: tuple[str, ...]
    """Values of ``Filter``."""
    rollout: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """Newest first."""

    pictures: tuple[Picture, ...]
    thumbnails: tuple[str, ...]
    """Data URIs."""
    num_matches: int
    """Of which the pictures are the newest."""

    def count(self, chosen: Filter) -> int:
        """Pictures that a filter keeps."""
        return sum(chosen in picture.outcomes for picture in self.pictures)


def gallery_of(
    matches: Sequence[LoggedMatch], fates: Mapping[int, Mapping[Key, str]], size: int = DEFAULT_SIZE
) -> Gallery:
    """The newest ``size`` matches; ``matches`` by time, ``fates`` by rank and draw. Opens their images."""
    thumbnails: list[str] = []
    seen: dict[str | None, tuple[int | None, str | None]] = {None: (None, "the image has no path")}
    pictures = []
    for match in reversed(matches[max(0, len(matches) - size) :]):
        path = match.images[0] if match.images else None
        if path is not None and path not in seen:
            try:
                thumbnails.append(thumbnail(path))
                seen[path] = len(thumbnails) - 1, None
            except UnreadableImage as reason:
                seen[path] = None, str(reason)
        image, trouble = seen[path]
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
    return Gallery(pictures=tuple(pictures), thumbnails=tuple(thumbnails), num_matches=len(matches))


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
    return tuple(name for name, held in holds.items() if held) or (Filter.ALL_RIGHT,)


def thumbnail(path: str) -> str:
    """A data URI of a WebP image of at most ``MOST_SIDE`` pixels a side.

    Raises:
        UnreadableImage: the file is absent, no image, damaged or too large.
    """
    try:
        if not Path(path).is_file():
            raise UnreadableImage("there is no such file here")
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=RASTER_FORMATS) as image:
                return _encode(image)
    except UnreadableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImage("the image has too many pixels") from error
    except Exception as error:  # decoders of damaged files raise anything
        raise UnreadableImage(f"no image that can be read: {type(error).__name__}") from error


def _encode(image: Image.Image) -> str:
    if image.width * image.height > min(_MOST_PIXELS, Image.MAX_IMAGE_PIXELS or _MOST_PIXELS):
        raise UnreadableImage(f"the image has too many pixels: {image.width} × {image.height}")
    image.draft("RGB", (MOST_SIDE, MOST_SIDE))
    small = image.convert("RGB")
    small.thumbnail((MOST_SIDE, MOST_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=_QUALITY, icc_profile=None)  # a profile may be larger than the picture
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


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
    if match.truncated:
        yield "cut off at max_new_tokens"
    if len(match.images) > 1:
        yield f"first of {len(match.images)} images"


def _boxes(
    objects: Sequence[Labelled], alone: frozenset[int], without_partner: str, with_partner: str
) -> Iterator[_DrawnBox]:
    for index, one in enumerate(objects):
        yield (without_partner if index in alone else with_partner, *one.box, one.label)
