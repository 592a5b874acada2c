"""Checks one ``/infer/`` call before ms-swift sees it: known fields, bounded sizes, nothing named by path.

ms-swift opens what a message names (``<img>PATH</img>``), what structured content names, and what the template's
arguments name (``chat_template_kwargs: {"image": …}`` replaces the picture). None of that may come off a wire.
Shared by the rollout server and the merger, whose stock server behind it has no such check.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.errors import ProtocolError, RequestTooLarge, SampleError
from swift_stage2.runtime.parser import real_number
from swift_stage2.servers.image_opening import decode_base64, open_image
from swift_stage2.servers.infer_wire import Conversation

_MOST_MESSAGES = 256  # of one conversation, as the next two
_MOST_TEXT_CHARS = 1_000_000
_MOST_IMAGES = 64
_MEDIA_TAG = re.compile(r"</?img>|</(?:audio|video)>", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What one call may hold, beside the constants above; the first two are options of the command line."""

    max_body_mib: float = 512
    max_megapixels: float = 50
    """Of all images of one conversation, as their headers say, before any resizing; of a call ten times as many."""
    checks_images: bool = True  # off for a server that knows its requests and opens none of their images

    @property
    def body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """One option per limit, with its default in ``--help``."""
    group = parser.add_argument_group("limits of one call; what is larger is refused before it is decoded")
    for name, what in (
        ("--max-body-mib", "MiB of one body"),
        (
            "--max-megapixels",
            "megapixels of all images of one conversation; a call may have ten times as many",
        ),
    ):
        default = getattr(RequestLimits(), name.strip("-").replace("-", "_"))
        help_ = f"{what}, at most (default %(default)s)"
        group.add_argument(
            name, type=real_number("a number above 0"), default=default, metavar="N", help=help_
        )


def read_limits(options: argparse.Namespace) -> RequestLimits:
    return RequestLimits(max_body_mib=options.max_body_mib, max_megapixels=options.max_megapixels)


def check_conversations(conversations: list[Any], limits: RequestLimits) -> dict[int, SampleError]:
    """Place of every conversation that may not be asked, and why.

    Raises:
        RequestTooLarge: too many of them, or too many pixels in all.
    """
    if len(conversations) > MAX_REQUESTS_PER_POST:
        raise RequestTooLarge(
            f"a call may hold {MAX_REQUESTS_PER_POST} conversations, got num_conversations={len(conversations)}; "
            "send fewer at once"
        )
    faults: dict[int, SampleError] = {}
    num_pixels = 0
    for place, record in enumerate(conversations):
        try:
            num_pixels += _check(record, limits)
        except SampleError as error:
            faults[place] = error
        if num_pixels > (most := 10 * limits.max_megapixels) * 1e6:
            raise RequestTooLarge(
                f"the images of a call may have {most:g} megapixels, got {num_pixels / 1e6:.0f} or more; send fewer "
                "at once, or start the server with a higher --max-megapixels"
            )
    return faults


def _check(record: Any, limits: RequestLimits) -> int:
    """The pixels of all its images, as their headers say."""
    try:
        asked = Conversation.from_json(record)
    except ProtocolError as error:
        raise SampleError(str(error)) from None
    _at_most(len(asked.messages), _MOST_MESSAGES, "messages")
    num_chars = 0
    for text in _texts({key: value for key, value in record.items() if key != "images"}):
        num_chars += len(text)
        _at_most(num_chars, _MOST_TEXT_CHARS, "characters")
        if tag := _MEDIA_TAG.search(text):
            raise SampleError(
                "a text may not name media between tags",
                got=tag.group(),
                remedy="put <image> in it and the image into images",
            )
    images = asked.images or ()
    _at_most(len(images), _MOST_IMAGES, "images")
    if not limits.checks_images:
        return 0
    sizes = [open_image(decode_base64(image)).size for image in images]
    num_pixels = sum(width * height for width, height in sizes)
    remedy = "make it smaller, or start the server with a higher --max-megapixels"
    _at_most(num_pixels / 1e6, limits.max_megapixels, "megapixels", remedy)
    return num_pixels


def _texts(value: Any) -> Iterator[str]:
    """Every text in it, keys included, and what stands in texts that are JSON themselves, as tool calls do."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, str):
            yield item
            if "\\" in item:
                try:
                    waiting.append(json.loads(item))
                except (ValueError, RecursionError):
                    continue  # nor can ms-swift read it as anything but text


def _at_most(number: float, limit: float, what: str, remedy: str = "make it smaller") -> None:
    if number > limit:
        raise SampleError(f"a conversation may hold {limit:,} {what}", got=f"{number:,}", remedy=remedy)
