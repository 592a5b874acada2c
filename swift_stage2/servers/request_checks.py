"""Checks one ``/infer/`` call before ms-swift sees it: known fields, bounded sizes, nothing named by path.

ms-swift opens what a message names (``<img>PATH</img>``), what structured content names, and what the template's
arguments name (``chat_template_kwargs: {"image": …}`` replaces the picture). None of that may come off a wire.
Shared by the rollout server and the merger, whose stock server behind it has no such check.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.errors import ProtocolError, RequestTooLarge, SampleError
from swift_stage2.servers.image_opening import decode_base64, open_image
from swift_stage2.servers.infer_wire import Conversation

_MEDIA_TAG = re.compile(r"</?img>|</(?:audio|video)>", re.IGNORECASE)


def _limit(default: float, what: str) -> float:
    value: float = field(default=default, metadata={"what": what})
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Limits of one call; each is an option of the command line."""

    max_body_mib: float = _limit(512, "MiB of one body")
    max_conversations: float = _limit(MAX_REQUESTS_PER_POST, "conversations of one call")
    max_messages: float = _limit(256, "messages of one conversation")
    max_text_chars: float = _limit(1_000_000, "characters of one conversation, images apart")
    max_images: float = _limit(64, "images of one conversation")
    max_megapixels: float = _limit(
        50, "megapixels of all images of one conversation, as their headers say, before any resizing"
    )
    max_call_megapixels: float = _limit(512, "megapixels of all images of one call")

    checks_images: bool = (
        True  # no option: for a server that knows its requests and opens none of their images
    )
    takes_prefix: bool = False  # no option: whether the server goes on behind the first ids of an answer

    @property
    def body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)

    @property
    def call_pixels(self) -> int:
        return int(self.max_call_megapixels * 1e6)


_OPTIONS = [limit for limit in fields(RequestLimits) if limit.metadata]


def add_limits(parser: argparse.ArgumentParser) -> None:
    """One option per limit, with its default in ``--help``."""
    group = parser.add_argument_group("limits of one call; what is larger is refused before it is decoded")
    for limit in _OPTIONS:
        group.add_argument(
            f"--{limit.name.replace('_', '-')}",
            type=number_above_zero,
            default=limit.default,
            metavar="N",
            help=f"{limit.metadata['what']}, at most (default %(default)s)",
        )


def read_limits(options: argparse.Namespace) -> RequestLimits:
    return RequestLimits(**{limit.name: getattr(options, limit.name) for limit in _OPTIONS})


def check_conversations(conversations: list[Any], limits: RequestLimits) -> dict[int, SampleError]:
    """Place of every conversation that may not be asked, and why.

    Raises:
        RequestTooLarge: too many of them, or too many pixels in all.
    """
    if len(conversations) > limits.max_conversations:
        raise RequestTooLarge(
            f"a call may hold {limits.max_conversations} conversations, got num_conversations={len(conversations)}; "
            "send fewer at once, or start the server with a higher --max-conversations"
        )
    faults: dict[int, SampleError] = {}
    num_pixels = 0
    for place, record in enumerate(conversations):
        try:
            num_pixels += _check(record, limits)
        except SampleError as error:
            faults[place] = error
        if num_pixels > limits.call_pixels:
            raise RequestTooLarge(
                f"the images of a call may have {limits.max_call_megapixels:g} megapixels, got "
                f"{num_pixels / 1e6:.0f} or more; send fewer at once, or start the server with a higher "
                "--max-call-megapixels"
            )
    return faults


def _check(record: Any, limits: RequestLimits) -> int:
    """The pixels of all its images, as their headers say."""
    try:
        asked = Conversation.from_json(record)
    except ProtocolError as error:
        raise SampleError(str(error)) from None
    if asked.prefix_token_ids and not limits.takes_prefix:
        raise SampleError("this server begins every answer itself", remedy="leave prefix_token_ids out")
    _at_most("max_messages", len(asked.messages), limits.max_messages, "messages")
    num_chars = 0
    for text in _texts({key: value for key, value in record.items() if key != "images"}):
        num_chars += len(text)
        _at_most("max_text_chars", num_chars, limits.max_text_chars, "characters")
        if tag := _MEDIA_TAG.search(text):
            raise SampleError(
                "a text may not name media between tags",
                got=tag.group(),
                remedy="put <image> in it and the image into images",
            )
    images = asked.images or ()
    _at_most("max_images", len(images), limits.max_images, "images")
    if not limits.checks_images:
        return 0
    sizes = [open_image(decode_base64(image)).size for image in images]
    num_pixels = sum(width * height for width, height in sizes)
    _at_most("max_megapixels", num_pixels / 1e6, limits.max_megapixels, "megapixels")
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


def _at_most(option: str, number: float, limit: float, what: str) -> None:
    if number > limit:
        raise SampleError(
            f"a conversation may hold {limit:,} {what}",
            got=f"{number:,}",
            remedy=f"make it smaller, or start the server with a higher --{option.replace('_', '-')}",
        )


def number_above_zero(text: str) -> float:
    """For ``type`` of an option that is finite and positive."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text[:40]!r}")
    return int(number) if number.is_integer() else number
