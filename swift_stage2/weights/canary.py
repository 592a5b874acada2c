"""The learner's own greedy answer to the canary, and when a server's answer is the same one.

In half precision two ways to compute the same model round differently (merged or unmerged LoRA, ZeRO-3's own
linear layer, another engine), so that tokens of nearly equal probability change places. Pure; used by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# A token at least this close to the learner's first choice counts as tied with it. Logits of 16 to 32 have
# steps of an eighth in bfloat16, and a difference of two logits may be off by a few of them.
HALF_PRECISION_TIE_NATS = 0.5


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """Greedy tokens without the end of turn, and by position the likeliest tokens' log-probabilities, by text."""

    token_ids: tuple[int, ...] = ()
    likely: tuple[Mapping[str, float], ...] = ()
    tie_nats: float = 0.0  # 0: every token must be the same

    def agrees(self, token_ids: Sequence[int], text_of: Callable[[int], str], end: str) -> bool:
        """Whether ``token_ids``, without the end of turn, is this answer up to its first near tie.

        What follows a tie cannot be compared, because it was said after another prefix. ``end`` is the text
        of the token that ends a turn.
        """
        theirs = tuple(token_ids)
        if theirs == self.token_ids:
            return True
        shorter = min(len(theirs), len(self.token_ids))
        at = next((n for n in range(shorter) if theirs[n] != self.token_ids[n]), shorter)
        if self.tie_nats == 0 or at >= len(self.likely):
            return False
        likely = self.likely[at]
        chosen = likely.get(text_of(theirs[at]) if at < len(theirs) else end)
        return chosen is not None and max(likely.values()) - chosen <= self.tie_nats
