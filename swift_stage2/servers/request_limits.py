"""How much one ``/infer/`` call may ask of a server of ours, and the options that say so.

Shared by the rollout server and the merger. Everything here is checked before an image is decoded or a text tokenised.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST


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
    max_megapixels: float = _limit(50, "megapixels of one image, as its header says, before any resizing")
    max_call_megapixels: float = _limit(4096, "megapixels of all images of one call")

    checks_images: bool = (
        True  # no option: for a server that knows its requests and opens none of their images
    )

    @property
    def body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)

    @property
    def image_pixels(self) -> int:
        return int(self.max_megapixels * 1e6)

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
            type=_above_zero,
            default=limit.default,
            metavar="N",
            help=f"{limit.metadata['what']}, at most (default %(default)s)",
        )


def read_limits(options: argparse.Namespace) -> RequestLimits:
    """What the command line asked for."""
    return RequestLimits(**{limit.name: getattr(options, limit.name) for limit in _OPTIONS})


def _above_zero(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or number <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return int(number) if number.is_integer() else number
