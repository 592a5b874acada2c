"""Ports for what a test starts: no two test processes of this machine are given the same one.

A port that the kernel picks is free when it is asked for, and may be another's when the server that it was drawn for
binds it. These lie outside of the kernel's usual range, in blocks, and a process that draws from a block keeps others
away from it for as long as it lives, by an abstract socket with the block's name (unix(7)).
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from functools import cache

_BLOCKS = range(20_000, 32_000, 200)


def free_port() -> int:
    """A port that nobody is bound to, on any address; another one each time until the block begins again."""
    return next(port for port in _block()[1] if _is_free(port))


@cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    for first in _BLOCKS:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0swift-stage2-tests-ports-{first}")
        except OSError:
            claim.close()
        else:
            return claim, itertools.cycle(range(first, first + _BLOCKS.step))
    raise AssertionError(f"{len(_BLOCKS)} other processes draw ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
