"""A rank's knowledge of one server: whether it may be asked for rollouts, and which weights it answers with.

A server is proven by a round, suspect, or busy with abandoned POSTs. Invariant: a suspect server stays unproven until
``prove``. Its places and the learner write, so every change of more than one attribute holds a lock; any thread may
read one.

In a staged round nobody drains: a server answers with the weights of the round before, or *ahead* with those in
transfer, and its stamp tells which. So a POST may be answered with whatever the server served since the POST left, and
a rollout that is ahead counts once its round has proven this server. An ``InFlightRequest`` keeps what that is.

The prompt ids that every answer carries show whose fault a wrong prompt is. A server with another processor or template
differs on every sample, a bad sample differs alone: so a sample is given up only where its server agreed with the
learner on another one. Other pixel limits differ on large images only, so a server with many such samples is told of.
An answer whose prompt is that of another sample in the batch says nothing against its own sample: the server gave one
request's answer to another, and where one went astray, those to equal prompts may have as well.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass

from swift_stage2.errors import PromptMismatch
from swift_stage2.records import Rollout
from swift_stage2.servers.infer_wire import Completion


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a server holds. Of one that does not stamp its completions, the ticket tells their version."""

    version: int
    stamps: bool
    heard_step: int = 0  # of the proof: a catch-up may prove what a server was proven with before


@dataclass(eq=False, slots=True)
class InFlightRequest:
    """One POST that is out, or abandoned: its server may still be computing it."""

    may_answer: list[ServedWeights]
    """Served there when it left, or come since."""
    settle_by: float | None = None
    """Moment by which it has to be settled, once it is abandoned."""
    is_wanted: bool = True
    """False once its server was withdrawn or suspected; a later proof does not bring it back."""


class ServerState:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: ServedWeights | None = None
        self._ahead: ServedWeights | None = None  # of a staged round that is in transfer
        self._out: set[InFlightRequest] = set()
        self._abandoned: set[InFlightRequest] = set()
        self._proven_versions: set[int] = set()  # all of them, some dozen bytes each
        self.is_proven = False
        """Whether a round has proven the server's weights and no fault was found since."""
        self.suspicion: str | None = None
        """Why the server is suspect; None if it is not."""
        self.has_agreed = False
        """True once its prompt was the learner's for any sample; forgotten when it was not proven meanwhile."""

    @property
    def settle_by(self) -> float | None:
        """Moment by which all abandoned POSTs have to be settled; None if the server is busy with none."""
        with self._lock:
            return max((post.settle_by or 0.0 for post in self._abandoned), default=None)

    @property
    def streams(self) -> bool:
        """True if the client asks the server request by request, not in batches.

        Ours is, which stamps: its engine takes requests one by one. But as long as none of its prompts was the
        learner's, several go together, so that a prompt that differs is not taken for the server's fault alone.
        """
        return self.stamps and self.has_agreed

    @property
    def stamps(self) -> bool:
        """True if the server says of every completion whose weights made it."""
        served = self._served
        return served is not None and served.stamps

    def agree(self) -> None:
        """Its prompt for a sample is the learner's."""
        with self._lock:
            self.has_agreed = True

    def expect(self, version: int) -> None:
        """Of the next round, should it be staged: it may answer as soon as the server has installed it."""
        with self._lock:
            self._ahead = ServedWeights(version, self.stamps)
            for post in self._out:
                post.may_answer.append(self._ahead)

    def clear_suspicion(self) -> None:
        """A staged round or catch-up of the server, which is not asked, begins: a later suspicion is newer than it."""
        with self._lock:
            self.suspicion = None

    def prove(self, served: ServedWeights, *, drained: bool) -> None:
        """A round proved that the server holds ``served``.

        Unless all was ``drained`` before, a suspicion may be newer than the proof and lasts, as does an abandoned POST;
        and only a new proof brings a server back.
        """
        with self._lock:
            returns = drained or served != self._served
            self._served = served
            self._proven_versions.add(served.version)
            if self._ahead is not None and self._ahead.version == served.version:
                self._ahead = None
            if drained:
                self.suspicion = None
                self._abandoned.clear()  # the round's ordered calls came after them
            if returns and self.suspicion is None:
                self.has_agreed &= self.is_proven  # one that returns may be another process
                self.is_proven = True

    def confirms(self, version: int) -> bool | None:
        """True if a round has proven it here, or the server does not stamp; False if none will; None until then."""
        with self._lock:
            if version in self._proven_versions or not self.stamps:
                return True
            return None if self._ahead is not None and self._ahead.version == version else False

    def stop_requests(self) -> None:
        """A round did not prove the server; nothing is inferred from it, and it delays no round."""
        with self._lock:
            self._stop_asking()

    def mark_suspect(self, reason: str) -> None:
        """Nothing is inferred from the server before a later ``prove``, and it delays no round.

        What POSTs that are out bring is not believed.
        """
        with self._lock:
            self._stop_asking()
            self.suspicion = reason
            self._out.clear()

    def _stop_asking(self) -> None:
        self.is_proven = False
        self._abandoned.clear()
        for post in self._out:
            post.is_wanted = False

    def version_under(self, version: int) -> int:
        """The version that the server answers with under a ticket of ``version``, as far as a round has proven it."""
        served = self._served
        return served.version if served is not None and served.stamps else version

    def begin_post(self) -> InFlightRequest | None:
        """A POST is about to leave; None if the server must not be asked."""
        with self._lock:
            if not self.is_proven:
                return None
            post = InFlightRequest(
                [weights for weights in (self._served, self._ahead) if weights is not None]
            )
            self._out.add(post)
            return post

    def end_post(self, post: InFlightRequest, *, settle_by: float | None = None) -> bool:
        """It is out no more; False if the server has become suspect meanwhile, which ends all that is known of it.

        With ``settle_by`` its answer is not waited for, and the server may still be computing it.
        """
        with self._lock:
            if post not in self._out:
                return False
            self._out.remove(post)
            if settle_by is not None:
                post.settle_by = settle_by
                self._abandoned.add(post)
            return True

    def abandoned(self) -> frozenset[InFlightRequest]:
        """Those that are not settled. All of them left before this."""
        with self._lock:
            return frozenset(self._abandoned)

    def settle(self, posts: Container[InFlightRequest]) -> None:
        """An ordered call that came after ``posts`` was answered, so that they are over."""
        with self._lock:
            self._abandoned = {post for post in self._abandoned if post not in posts}

    def weights_of(
        self, post: InFlightRequest, completions: Sequence[Completion], *, version: int, run_id: str | None
    ) -> tuple[ServedWeights, ...] | str:
        """The weights that made each of a POST's answers, or why these cannot be of this run.

        A server that stamps does so in full: what a round proved answers without this run's stamp only when it was
        started again. Another server's are taken as they are, of the ticket's ``version``.
        """
        found = []
        with self._lock:
            for completion in completions:
                weights = self._weights_of(post, completion, version, run_id)
                if isinstance(weights, str):
                    return weights
                found.append(weights)
        return tuple(found)

    def _weights_of(
        self, post: InFlightRequest, completion: Completion, version: int, run_id: str | None
    ) -> ServedWeights | str:
        if not self.stamps:
            if completion.run_id is not None:
                return (
                    f"a server that a round proved as stock must not stamp, got run_id={completion.run_id!r}"
                )
            return ServedWeights(version, stamps=False)
        if run_id not in (None, completion.run_id):
            return (
                "completions must be of this run's weights, else the server was started again, got "
                f"run_id={completion.run_id!r}"
            )
        for weights in post.may_answer:
            if completion.weight_version == weights.version:
                return weights
        return (
            "completions must be of weights that a round has proven here or brings, got "
            f"weight_version={completion.weight_version} instead of "
            + " or ".join(str(weights.version) for weights in post.may_answer)
        )


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


def servers_at_fault(
    rollouts: Sequence[Rollout], found: Sequence[object], agreeing: Container[str]
) -> dict[str, str]:
    """Base URL → why the server is suspect, by the prompts of its answers.

    ``found[i]`` is what became of ``rollouts[i]``, or its refusal. ``agreeing`` are the servers whose prompt was the
    learner's for any sample, here or since a round proved them anew.
    """
    mismatches: dict[str, list[PromptMismatch]] = {}
    for rollout, each in zip(rollouts, found, strict=True):
        if isinstance(each, PromptMismatch) and rollout.server not in agreeing:
            mismatches.setdefault(rollout.server, []).append(each)
    misreading = {
        server: f"its prompts differ from the learner's ({len(each)} of {len(each)}, and none agreed before): {each[0]}"
        for server, each in mismatches.items()
    }
    return misreading | dict.fromkeys(permuting_servers(rollouts, found), PERMUTED)
