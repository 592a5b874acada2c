"""Seeds of POSTs: no two that one run sends are alike.

Engines give a POST's i-th request ``seed + i``. Each rank owns one interval of the 31-bit seeds, whole POSTs included,
so that two ranks can never sample with a common seed. Where a merger joins POSTs, the joint one takes its first part's
seed and has room for 4096 requests behind it: the others' own go unused, and no two requests get one.
"""

from __future__ import annotations

import hashlib
import math
import threading
from functools import lru_cache

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.records import SampleKey

_LARGEST_SEED = 2**31 - 1
_TURNS_PER_POSITION = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


def request_seed(
    *, run_seed: int, rank: int, world_size: int, epoch: int, position: int, attempt: int, draw: int
) -> int:
    """Seed for the POST that is led by the sample at (``epoch``, ``position``) of ``rank``'s stream.

    ``attempt`` counts the sample's rollouts, ``draw`` the POSTs that it led within this attempt. The seed and the
    4095 that follow it lie in 1..2**31-1 and in no other rank's interval, whatever the other arguments are. Within a
    rank and epoch, positions and the first 15 (attempt, draw) pairs map to seeds one to one, until
    16 × position exceeds the interval (1.3e8 positions / ``world_size``).

    Raises:
        ValueError: a rank outside the world, a negative count, or a world too large for 31 bits.
    """
    if not 0 <= rank < world_size or min(epoch, position, attempt, draw) < 0:
        raise ValueError(
            f"a seed needs 0 <= rank < world_size and counts of at least 0, got rank={rank} world_size={world_size} "
            f"epoch={epoch} position={position} attempt={attempt} draw={draw}"
        )
    interval, num_starts, stride = _layout(world_size)
    block, turn = divmod(_pair(attempt, draw), _TURNS_PER_POSITION)
    serial = _offset(run_seed, epoch, block) + position * _TURNS_PER_POSITION + turn
    return 1 + rank * interval + serial * stride % num_starts


class SeedLedger:
    """Counts the POSTs that each unresolved sample has led, so that none of them repeats a seed."""

    def __init__(self, *, run_seed: int, rank: int, world_size: int) -> None:
        _layout(world_size)
        self._run_seed = run_seed
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._draws: dict[tuple[int, int, int], int] = {}

    def next_seed(self, key: SampleKey) -> int:
        """A seed that no earlier POST led by this sample has had."""
        place = (key.epoch, key.position, key.attempt)
        with self._lock:
            draw = self._draws.get(place, 0)
            self._draws[place] = draw + 1
        return request_seed(
            run_seed=self._run_seed,
            rank=self._rank,
            world_size=self._world_size,
            epoch=key.epoch,
            position=key.position,
            attempt=key.attempt,
            draw=draw,
        )

    def forget(self, key: SampleKey) -> None:
        """Ends the count of a sample that has its rollout or is quarantined."""
        with self._lock:
            self._draws.pop((key.epoch, key.position, key.attempt), None)


@lru_cache(maxsize=8)
def _layout(world_size: int) -> tuple[int, int, int]:
    """(seeds per rank, first seeds among them that leave room for a whole POST, stride between two serials)."""
    interval = _LARGEST_SEED // world_size if world_size > 0 else 0
    num_starts = interval - MAX_REQUESTS_PER_POST + 1
    if num_starts < _TURNS_PER_POSITION:
        raise ValueError(
            f"every rank needs room for one POST of {MAX_REQUESTS_PER_POST} requests in 31 bits, got "
            f"world_size={world_size}"
        )
    # Coprime to num_starts, so serials map to starts one to one; near the golden ratio, so that
    # neighbours in the stream land far apart and their POSTs do not overlap.
    stride = int(num_starts * _GOLDEN)
    while math.gcd(stride, num_starts) != 1:
        stride += 1
    return interval, num_starts, stride


def _pair(attempt: int, draw: int) -> int:
    """Cantor's pairing: one integer per (attempt, draw), small ones for small pairs."""
    diagonal = attempt + draw
    return diagonal * (diagonal + 1) // 2 + draw


@lru_cache(maxsize=64)
def _offset(run_seed: int, epoch: int, block: int) -> int:
    digest = hashlib.blake2b(f"{run_seed}:{epoch}:{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
