"""Draws and ends each row of a merged batch on its own: own seed, own length limit, own abort.

Two plug-ins for Hugging Face's ``generate`` in greedy mode. A row's draws depend on its seed alone, so rows
of different callers share a batch without sharing randomness. Used by the transformers engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from transformers import LogitsProcessor, StoppingCriteria


def draw_uniforms(seeds: Sequence[int | None], num_steps: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers in [0, 1), shape (rows, num_steps), float64; row i depends on ``seeds[i]`` only.

    Drawn on the CPU, so that a seed means the same on every device.
    """
    rows = []
    for seed in seeds:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        rows.append(torch.rand(num_steps, dtype=torch.float64, generator=generator))
    return torch.stack(rows).to(device)


class RowSampler(LogitsProcessor):
    """Warps scores and leaves one token per row the largest: the drawn one, or the best when greedy.

    Inverse transform sampling over the cumulative probabilities. With ``uniforms`` None the choice is greedy.
    """

    def __init__(
        self, warpers: Sequence[LogitsProcessor], uniforms: torch.Tensor | None, *, with_log_probs: bool
    ) -> None:
        self._warpers = tuple(warpers)
        self._uniforms = uniforms
        self._with_log_probs = with_log_probs
        self._log_probs: list[torch.Tensor] = []
        self._step = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for warp in self._warpers:
            scores = warp(input_ids, scores)
        chosen = self._choose(scores)
        if self._with_log_probs:
            self._log_probs.append(torch.log_softmax(scores.float(), -1).gather(1, chosen))
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)  # type: ignore[return-value]

    def log_probs(self) -> list[list[float]] | None:
        """Per row, the log-probability of every token chosen so far under the warped distribution."""
        return torch.cat(self._log_probs, dim=1).tolist() if self._log_probs else None

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if self._uniforms is None:
            return scores.argmax(-1, keepdim=True)
        cumulative = torch.softmax(scores.double(), -1).cumsum(-1)
        threshold = self._uniforms[:, self._step : self._step + 1] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[-1] - 1)


class RowEnd(IntEnum):
    """Why a row ended; the names are the wire's finish reasons."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3


class RowLedger(StoppingCriteria):
    """Ends rows and remembers where: a stop token counts before the limit, the limit before an abort.

    ``lengths`` counts the tokens of a row including its stop token, so that a padding token that was really
    sampled is never mistaken for padding.
    """

    def __init__(
        self,
        *,
        prompt_length: int,
        limits: Sequence[int],
        stop_token_ids: Sequence[int],
        stop_words: StoppingCriteria | None,
        aborted: Callable[[], Sequence[bool]],
        device: torch.device,
    ) -> None:
        self._prompt_length = prompt_length
        self._limits = torch.tensor(limits, device=device)
        self._stop_token_ids = torch.tensor(stop_token_ids, dtype=torch.long, device=device)
        self._stop_words = stop_words
        self._aborted = aborted
        self._ends = torch.full((len(limits),), RowEnd.RUNNING, device=device)
        self._lengths = torch.zeros(len(limits), dtype=torch.long, device=device)

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object
    ) -> torch.BoolTensor:
        length = input_ids.shape[1] - self._prompt_length
        running = self._ends == RowEnd.RUNNING
        stopped = torch.isin(input_ids[:, -1], self._stop_token_ids)
        if self._stop_words is not None:
            stopped |= self._stop_words(input_ids, scores)
        aborted = torch.tensor(self._aborted(), device=stopped.device)
        end = torch.where(aborted, RowEnd.ABORT, RowEnd.RUNNING)
        end = torch.where(self._limits <= length, RowEnd.LENGTH, end)
        end = torch.where(stopped, RowEnd.STOP, end)
        self._ends = torch.where(running, end, self._ends)
        self._lengths = torch.where(running, length, self._lengths)
        return self._ends != RowEnd.RUNNING  # type: ignore[return-value]

    def ends(self) -> list[tuple[int, RowEnd]]:
        """Length in tokens and reason of every row."""
        return [
            (length, RowEnd(end))
            for length, end in zip(self._lengths.tolist(), self._ends.tolist(), strict=True)
        ]
