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
from swift_stage2.errors import RequestTooLarge, SampleError
from swift_stage2.servers.image_opening import decode_base64, open_image
from swift_stage2.servers.protocol import PREFIX

CONVERSATION_KEYS = frozenset({"messages", "images", "tools", "objects", "chat_template_kwargs"})
# Fields of ms-swift's RolloutInferRequest that do not change what is generated, or that must be empty here.
_IGNORED_KEYS = frozenset({"data_dict", "uuid", "add_eos"})
_EMPTY_KEYS = frozenset({"audios", "videos"})
_MESSAGE_KEYS = frozenset({"role", "content", "name", "loss", "loss_scale", "tool_calls", "tool_call_id"})
# All others reach a media loader or a chat template as arguments, under any name.
_TEMPLATE_KEYS: Mapping[str, type] = {
    "enable_thinking": bool,
    "preserve_thinking": bool,
    "response_prefix": str,
}
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
    if not isinstance(record, Mapping):
        raise SampleError("a request must be an object", got=type(record).__name__)
    known = CONVERSATION_KEYS | _IGNORED_KEYS | _EMPTY_KEYS
    _refuse_unknown(record, known | {PREFIX} if limits.takes_prefix else known, "a request")
    for key in _EMPTY_KEYS:
        if record.get(key):
            raise SampleError("this server takes text and images only", got=key)
    _check_messages(record.get("messages"), limits)
    _check_template_arguments(record.get("chat_template_kwargs"))
    num_chars = 0
    for text in _texts({key: record.get(key) for key in CONVERSATION_KEYS - {"images"}}):
        num_chars += len(text)
        _at_most("max_text_chars", num_chars, limits.max_text_chars, "characters")
        _check_text(text)
    images = record.get("images") or []
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise SampleError("images must be a list of base64 text")
    _at_most("max_images", len(images), limits.max_images, "images")
    if not limits.checks_images:
        return 0
    sizes = [open_image(decode_base64(image)).size for image in images]
    num_pixels = sum(width * height for width, height in sizes)
    _at_most("max_megapixels", num_pixels / 1e6, limits.max_megapixels, "megapixels")
    return num_pixels


def _check_messages(messages: Any, limits: RequestLimits) -> None:
    if not isinstance(messages, list) or not messages:
        raise SampleError("messages must be a list of at least one message")
    _at_most("max_messages", len(messages), limits.max_messages, "messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise SampleError("a message must be an object with a role")
        _refuse_unknown(message, _MESSAGE_KEYS, "a message")
        # Structured content could name files and addresses; media travels in `images` only.
        if not isinstance(message.get("content"), str):
            raise SampleError(
                "a message's content must be text", remedy="put <image> in it and the image into images"
            )


def _check_template_arguments(arguments: Any) -> None:
    given = {} if arguments is None else arguments
    if not isinstance(given, Mapping):
        raise SampleError("chat_template_kwargs must be an object", got=type(given).__name__)
    _refuse_unknown(given, _TEMPLATE_KEYS.keys(), "chat_template_kwargs")
    for key, value in given.items():
        if value is not None and not isinstance(value, _TEMPLATE_KEYS[key]):
            kind = _TEMPLATE_KEYS[key].__name__
            raise SampleError(f"chat_template_kwargs takes {key} as {kind}", got=type(value).__name__)


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


def _check_text(text: str) -> None:
    if tag := _MEDIA_TAG.search(text):
        raise SampleError(
            "a text may not name media between tags",
            got=tag.group(),
            remedy="put <image> in it and the image into images",
        )


def _refuse_unknown(record: Mapping[Any, Any], known: frozenset[str] | Any, what: str) -> None:
    if unknown := sorted(record.keys() - known):
        raise SampleError(
            f"{what} knows no field {unknown[0][:80]!r}", remedy=f"it takes {', '.join(sorted(known))}"
        )


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
