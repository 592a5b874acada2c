"""Turns matches into pictures to page through: what was seen, said, matched, missed, invented and trained.

Bounded: the newest matches only, one thumbnail per image. What comes out is data for the page's script, which puts
every text in as text.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from PIL import Image

from swift_stage2.report.content import Section, Sentence, Tone, number
from swift_stage2.report.matches import EVALUATION, Key, Labelled, Match
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry

DEFAULT_SIZE = 200


class Outcome(StrEnum):
    """What a picture can be filtered by; several may hold, except the first."""

    ALL_RIGHT = "all right"
    MISSED = "has missed"
    FALSE = "has false"
    NOTHING_FOUND = "nothing found"
    DROPPED = "dropped objects"


class Part(StrEnum):
    """What a box is; each is drawn in a colour and a line style of its own."""

    TRUTH = "truth"
    MATCHED = "matched"
    MISSED = "missed"
    FALSE = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One rollout. ``image`` numbers the gallery's thumbnails; None with ``trouble``, which says why there is none."""

    image: int | None
    trouble: str | None
    name: str
    facts: tuple[str, ...]
    fate: str
    space: tuple[int, int]
    boxes: tuple[tuple[str, float, float, float, float, str], ...]
    """(part, x1, y1, x2, y2, label)."""
    outcomes: tuple[str, ...]
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

    def count(self, outcome: Outcome) -> int:
        """Pictures with it."""
        return sum(outcome in picture.outcomes for picture in self.pictures)


def outcomes_of(match: Match) -> tuple[Outcome, ...]:
    """All that hold; ``NOTHING_FOUND``: there was something and none of it was matched."""
    found = [
        *([Outcome.MISSED] if match.missed else []),
        *([Outcome.FALSE] if match.false else []),
        *([Outcome.NOTHING_FOUND] if match.truth and not match.pairs else []),
        *([Outcome.DROPPED] if sum(match.dropped.values()) else []),
    ]
    return tuple(found) or (Outcome.ALL_RIGHT,)


def gallery_of(
    matches: Sequence[Match], fates: Mapping[int, Mapping[Key, str]], size: int = DEFAULT_SIZE
) -> Gallery:
    """The newest ``size`` matches; ``matches`` by time, ``fates`` by rank and draw. Opens their images."""
    thumbnails: list[str] = []
    seen: dict[str, tuple[int | None, str | None]] = {}
    pictures = []
    for match in reversed(matches[max(0, len(matches) - size) :]):
        path = match.images[0] if match.images else None
        if path is None:
            found: tuple[int | None, str | None] = (None, "the image has no path")
        elif path not in seen:
            found = seen[path] = _load(path, thumbnails)
        else:
            found = seen[path]
        pictures.append(_picture(match, path, found, fates.get(match.rank, {})))
    return Gallery(pictures=tuple(pictures), thumbnails=tuple(thumbnails), num_matches=len(matches))


def _load(path: str, thumbnails: list[str]) -> tuple[int | None, str | None]:
    try:
        thumbnails.append(thumbnail(path))
    except UnreadableImage as reason:
        return None, str(reason)
    return len(thumbnails) - 1, None


def _picture(
    match: Match, path: str | None, found: tuple[int | None, str | None], fates: Mapping[Key, str]
) -> Picture:
    image, trouble = found
    facts = [
        _where(match),
        f"weights of version {match.version}",
        f"{len(match.pairs)} matched, {len(match.missed)} missed, {len(match.false)} false",
    ]
    facts += [f"dropped: {count} × {reason}" for reason, count in match.dropped.items() if count]
    facts += ["cut off at max_new_tokens"] if match.truncated else []
    facts += [f"first of {len(match.images)} images"] if len(match.images) > 1 else []
    is_evaluation = match.purpose == EVALUATION
    return Picture(
        image=image,
        trouble=trouble,
        name=Path(path).name if path else "an image without a path",
        facts=tuple(facts),
        fate="evaluation, never trained" if is_evaluation else fates.get(match.sample, "not trained"),
        space=match.space,
        boxes=tuple(_boxes(match)),
        outcomes=tuple(str(outcome) for outcome in outcomes_of(match)),
        rollout=match.rollout,
        target=match.target,
    )


def _where(match: Match) -> str:
    epoch, position, row, attempt = match.sample
    if match.purpose == EVALUATION:
        return f"row {row} of the validation set, rank {match.rank}"
    again = f", attempt {attempt}" if attempt else ""
    return f"row {row}, epoch {epoch}, position {position}, rank {match.rank}{again}"


def _boxes(match: Match) -> list[tuple[str, float, float, float, float, str]]:
    """Ground truth first, so that predictions lie on top."""
    parts = [
        (Part.MISSED if number in match.missed else Part.TRUTH, one) for number, one in enumerate(match.truth)
    ]
    parts += [
        (Part.FALSE if number in match.false else Part.MATCHED, one)
        for number, one in enumerate(match.predicted)
    ]
    return [_drawn(part, one) for part, one in parts]


def _drawn(part: Part, one: Labelled) -> tuple[str, float, float, float, float, str]:
    return (str(part), *one.box, one.label)


MOST_SIDE = 384
"""Pixels of the longer side."""
_MOST_PIXELS = 100_000_000
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # none that runs another program
_QUALITY = 70


class UnreadableImage(Exception):
    """There is no picture; the message says why."""


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
            with Image.open(path, formats=_FORMATS) as image:
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


def fates_of(records: Iterable[Record]) -> dict[Key, str]:
    """By draw of one rank's effective history; a draw that is still in hand is absent."""
    fates: dict[Key, str] = {}
    drawn: dict[
        tuple[int, int], Key
    ] = {}  # a return names the attempt that comes next, not the one that ended
    for record in records:
        fate = _fate(record)
        for sample in record.get("samples", ()):
            place, key = (sample[0], sample[1]), (sample[0], sample[1], sample[2], sample[3])
            if record["kind"] == Entry.DRAWN:
                drawn[place] = key
            elif fate:
                fates[drawn.pop(place, key)] = fate
    return fates


def _fate(record: Record) -> str | None:
    match record["kind"]:
        case Entry.TRAINED:
            return f"trained at step {record['step']}"
        case Entry.QUARANTINED:
            return f"given up: {record['reason']}"
        case Entry.RETURNED:
            return f"not trained, asked again: {record['reason']}"
    return None


GALLERY_KEY = "gallery"


def gallery_section(gallery: Gallery, matches: Sequence[Match], num_odd: int) -> Section:
    sentences = [
        Sentence(
            f"{number(len(gallery.pictures))} of {number(len(matches))} matches, the newest first."
            if matches
            else "The run wrote no matches."
        )
    ]
    if num_odd:
        sentences.append(
            Sentence(f"{num_odd} lines of matches/ have another form and are left out.", Tone.WARN)
        )
    return Section(GALLERY_KEY, "Gallery", tuple(sentences))
