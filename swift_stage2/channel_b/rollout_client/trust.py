"""Whether one server may be asked for rollouts: proven by a round, suspect, or busy with an abandoned POST.

Invariant: a suspect server stays unproven until ``prove``. Its lane and, after a round, the learner write, so every
change of more than one attribute holds a lock; any thread may read one.

The prompt ids that every answer carries show whose fault a wrong prompt is. A server with another processor or template
differs on every sample, a bad sample differs alone: so a sample is given up only where its server agreed with the
learner on another one. Other pixel limits differ on large images only, so a server with many such samples is told of.
An answer whose prompt is that of another sample in the batch says nothing against its own sample: the server gave one
request's answer to another, and where one went astray, those to equal prompts may have as well.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence

from swift_stage2.errors import PromptMismatch
from swift_stage2.records import Rollout
from swift_stage2.servers.protocol import Completion


class ServerTrust:
    """This rank's knowledge of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incarnation: str | None = None
        self._is_news = False
        self.is_proven = False
        """Whether a round has proven the server's weights and no fault was found since."""
        self.suspicion: str | None = None
        """Why the server is suspect; None if it is not."""
        self.settle_by: float | None = None
        """Moment by which an abandoned POST has to be settled; None if the server is not busy with one."""
        self.has_agreed = False
        """True once its prompt was the learner's for any sample; forgotten when it was not proven meanwhile."""

    def agree(self) -> None:
        """Its prompt for a sample is the learner's."""
        with self._lock:
            self.has_agreed = True

    def prove(self, incarnation: str | None) -> None:
        """A round proved the server. Without an ``incarnation`` the first reply's stamp names it."""
        with self._lock:
            self.has_agreed &= self.is_proven  # one that returns may be another process
            self.is_proven = True
            self.suspicion = None
            self.settle_by = None  # the round's ordered calls came after it
            self._incarnation = incarnation
            self._is_news = False

    def withdraw(self) -> None:
        """A round did not prove the server; nothing is inferred from it."""
        with self._lock:
            self.is_proven = False

    def suspect(self, reason: str) -> None:
        """Nothing is inferred from the server before a later ``prove``; it delays no round."""
        with self._lock:
            self.is_proven = False
            self.suspicion = reason
            self.settle_by = None
            self._is_news = True

    def take_news(self) -> str | None:
        """The suspicion, the first time it is asked for after it arose."""
        with self._lock:
            reason = self.suspicion if self._is_news else None
            self._is_news = False
            return reason

    def objection(self, completions: Sequence[Completion], *, version: int, run_id: str | None) -> str | None:
        """Why these completions cannot be of weights ``version`` of this run; None if nothing says so.

        Only our server stamps its completions, and it stamps all of them in full: what a round proved as ours never
        answers without a stamp. A stock server's are taken as they are.
        """
        with self._lock:
            for completion in completions:
                if self._incarnation is None:
                    self._incarnation = completion.incarnation
                if completion.incarnation != self._incarnation:
                    return (
                        "the server must be the process that the last round proved, got "
                        f"incarnation={completion.incarnation!r} instead of {self._incarnation!r}"
                    )
                must_stamp = self._incarnation is not None
                if completion.weight_version != version and (
                    must_stamp or completion.weight_version is not None
                ):
                    return (
                        "completions must be of the version that the ticket names, got "
                        f"weight_version={completion.weight_version} version={version}"
                    )
                if run_id not in (None, completion.run_id) and (must_stamp or completion.run_id is not None):
                    return f"completions must be of this run's weights, got run_id={completion.run_id!r}"
        return None


PERMUTED = "it gave one request's answer to another, as the prompt ids of its answers show"


def permuting_servers(rollouts: Sequence[Rollout], found: Sequence[object]) -> frozenset[str]:
    """Base URLs among ``rollouts``; ``found[i]`` is what the preprocessor made of ``rollouts[i]``, or its refusal."""
    asked: dict[str, set[tuple[int, ...]]] = {}
    for rollout, each in zip(rollouts, found, strict=True):
        prompt = each.expected if isinstance(each, PromptMismatch) else rollout.prompt_token_ids
        asked.setdefault(rollout.server, set()).add(prompt)
    return frozenset(
        rollout.server
        for rollout, each in zip(rollouts, found, strict=True)
        if isinstance(each, PromptMismatch) and rollout.prompt_token_ids in asked[rollout.server]
    )


MANY_GIVEN_UP = 8


def misreading_servers(
    rollouts: Sequence[Rollout], found: Sequence[object], agreeing: Container[str]
) -> dict[str, str]:
    """Base URL → why the server is suspect; ``found[i]`` is what became of ``rollouts[i]``, or its refusal.

    ``agreeing`` are the servers whose prompt was the learner's for any sample, here or since a round proved them anew.
    """
    mismatches: dict[str, list[PromptMismatch]] = {}
    for rollout, each in zip(rollouts, found, strict=True):
        if isinstance(each, PromptMismatch) and rollout.server not in agreeing:
            mismatches.setdefault(rollout.server, []).append(each)
    return {
        server: f"its prompts differ from the learner's ({len(each)} of {len(each)}, and none agreed before): {each[0]}"
        for server, each in mismatches.items()
    }


def many_mismatches(server: str, mismatch: PromptMismatch) -> str:
    """The warning at the ``MANY_GIVEN_UP``-th sample that was given up because ``server`` was asked another prompt."""
    return (
        f"{server}: its prompts agree with the learner's for some samples and differed for {MANY_GIVEN_UP}, which "
        "were given up; where only large images differ, pixel limits do: compare max_pixels and template of server "
        f"and learner; the last one: {mismatch}"
    )
