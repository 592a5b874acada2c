"""A rank's knowledge of one server: whether it may be asked for rollouts, and which versions it answers with.

A server is proven, suspect, or busy with abandoned POSTs. Invariant: a suspect server stays unproven until ``prove``.
Its places and the learner write, so every change of more than one attribute holds a lock; any thread may read one.

A server that is asked while new weights come answers with the version before, *ahead* with the new one, or with tokens
of both, and its stamp tells which. So a POST may be answered with whatever the server served since the POST left, and a
rollout that is ahead counts once this server has proven it. An ``InFlightRequest`` keeps what that is.

The prompt ids that every answer carries show whose fault a wrong prompt is. A server with another processor or template
differs on every sample, a bad sample differs alone: so a sample is given up only where its server agreed with the
learner on another one. Other pixel limits differ on large images only, so a server with many such samples is told of.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.errors import PromptMismatch
from swift_stage2.records import Rollout, VersionSpan
from swift_stage2.servers.infer_wire import Completion


@dataclass(eq=False, slots=True)
class InFlightRequest:
    """One POST that is out, or abandoned: its server may still be computing it."""

    may_answer: set[int]
    """Versions that the server had proven when it left, or may have taken since."""
    is_wanted: bool = True
    """False once its server was withdrawn or suspected; a later proof does not bring it back."""


class PlaceLimit:
    """The requests that a server gets at once, in a POST each or together: one more per full set answered, half when
    it had no room or time."""

    def __init__(self) -> None:
        self._limit = math.inf
        self._cut_s = -math.inf

    def within(self, most: int) -> int:
        """The limit now, between 1 and ``most``."""
        return max(1, int(min(most, self._limit)))

    def observe(
        self, end: PostEnd, *, began_s: float, ended_s: float, most: int, num_requests: int = 1
    ) -> None:
        """One POST ended. One that left before the last cut says nothing new of the server."""
        if end is PostEnd.ANSWERED:
            self._limit += num_requests / self.within(most)
        elif end in (PostEnd.BUSY, PostEnd.TIMED_OUT) and began_s >= self._cut_s:
            self._limit = self.within(most) / 2
            self._cut_s = ended_s


class ServerState:
    def __init__(self, *, stamps: bool) -> None:
        """``stamps``: the server's answers say which weights made them."""
        self.stamps = stamps
        self._lock = threading.Lock()
        self._version = 0
        self._ahead: int | None = None  # may be answered with before the learner has heard its proof
        self._out: set[InFlightRequest] = set()
        self._abandoned: set[InFlightRequest] = set()
        self._proven_versions: set[int] = set()
        self._is_reported = True
        self.is_proven = False
        """Whether the server has proven a version, and no fault was found since."""
        self.suspicion: str | None = None
        """Why the server is suspect; None if it is not."""
        self.has_agreed = False
        """True once its prompt was the learner's for any sample; forgotten when it was not proven meanwhile."""

    @property
    def is_settling(self) -> bool:
        """True while the server may still compute a request that this rank has abandoned."""
        return bool(self._abandoned)

    @property
    def streams(self) -> bool:
        """True if the client asks the server request by request, not in batches.

        One that stamps is: its engine takes requests one by one. But as long as none of its prompts was the learner's,
        several go together, so that a prompt that differs is not taken for the server's fault alone.
        """
        return self.stamps and self.has_agreed

    def agree(self) -> None:
        """A prompt of the server was the learner's."""
        with self._lock:
            self.has_agreed = True

    def expect(self, version: int) -> None:
        """The next version, which may answer as soon as the server has installed it."""
        with self._lock:
            if version != self._ahead:
                self._ahead = version
                for post in self._out:
                    post.may_answer.add(version)

    def prove(self, version: int) -> None:
        """All ranks agree that the server has proven ``version``, and suspect it no more.

        A suspicion that this rank has not reported is newer, and lasts.
        """
        with self._lock:
            if not self._is_reported:
                return
            self.suspicion = None
            self._version = version
            self._proven_versions.add(version)
            if not self.is_proven:
                self.has_agreed = False  # one that returns may be another process
                self.is_proven = True

    def confirms(self, version: int) -> bool | None:
        """True if the server has proven it; False if it never will; None while it may."""
        with self._lock:
            if version in self._proven_versions:
                return True
            return None if version == self._ahead else False

    def stop_requests(self) -> None:
        """All ranks agree that nothing is asked of the server."""
        with self._lock:
            self._stop_asking()

    def mark_suspect(self, reason: str) -> None:
        """Nothing is asked of the server before all ranks have heard of this and it is proven anew.

        What POSTs that are out bring is not believed.
        """
        with self._lock:
            self._stop_asking()
            self.suspicion, self._is_reported = reason, False
            self._out.clear()

    def take_suspicion(self) -> bool:
        """True if the server became suspect since the last call, which all ranks are now told."""
        with self._lock:
            is_new, self._is_reported = not self._is_reported, True
            return is_new

    def _stop_asking(self) -> None:
        self.is_proven = False
        self._abandoned.clear()
        for post in self._out:
            post.is_wanted = False

    def begin_post(self) -> InFlightRequest | None:
        """A POST is about to leave; None if the server must not be asked."""
        with self._lock:
            if not self.is_proven:
                return None
            post = InFlightRequest({self._version} | ({self._ahead} if self._ahead is not None else set()))
            self._out.add(post)
            return post

    def end_post(self, post: InFlightRequest, *, is_abandoned: bool = False) -> bool:
        """It is out no more; False if the server has become suspect meanwhile, which ends all that is known of it.

        ``is_abandoned``: its answer is not waited for, and the server may still be computing it.
        """
        with self._lock:
            if post not in self._out:
                return False
            self._out.remove(post)
            if is_abandoned:
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

    def spans_of(
        self, post: InFlightRequest, completions: Sequence[Completion], *, version: int, run_id: str | None
    ) -> tuple[tuple[VersionSpan, ...], ...] | str:
        """The versions that made each of a POST's answers, or why these cannot be of this run.

        A server that stamps does so always. Another one's are taken as they are, of the ticket's ``version``.
        """
        found = list[tuple[VersionSpan, ...]]()
        with self._lock:
            expected = set(post.may_answer)
        for completion in completions:
            num_tokens = len(completion.token_ids)
            told = completion.spans or ((completion.weight_version, num_tokens),)
            if not self.stamps:
                if (completion.run_id, told) != (None, ((None, num_tokens),)):
                    return "the server must be of the kind that it was, got answers that name their weights"
                told = ((version, num_tokens),)
            elif run_id not in (None, completion.run_id) or not expected.issuperset(each for each, _ in told):
                return (
                    "answers must be of weights that the server has proven in this run or takes now, got "
                    f"weight_version={' or '.join(str(each) for each, _ in told)} run_id={completion.run_id!r} "
                    f"instead of {' or '.join(map(str, sorted(expected)))}"
                )
            told = tuple(each for each in told if each[1]) or told[-1:]
            ends = list(accumulate((each for _, each in told), initial=0))
            if ends[-1] != num_tokens:
                return f"an answer's spans must cover its {num_tokens} tokens, got {ends[-1]}"
            found.append(
                tuple(
                    VersionSpan(each or 0, start, end)
                    for (each, _), start, end in zip(told, ends[:-1], ends[1:], strict=True)
                )
            )
        return tuple(found)


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
    return {
        server: f"its prompts differ from the learner's ({len(each)} of {len(each)}, and none agreed before): {each[0]}"
        for server, each in mismatches.items()
    }
