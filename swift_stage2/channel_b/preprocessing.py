"""From rollouts to packs: parse, match, correct, encode, collate; here, or in a process beside the rank.

``make_target``, ``make_segment`` and ``make_pack`` are functions of nothing but what they are given: a replay calls
them with recorded rollouts, and the same packs come out. Pipeline and evaluation ask a ``Preprocessor``, from one
thread: ``ThreadPreprocessor`` works on it, ``ProcessPreprocessor`` asks ``preprocessing_worker`` over a socket, so that
Python does not hold the learner's interpreter lock. There segments stay, and a pack's tensors come in shared memory.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding, require_same_prompt
from swift_stage2.channel_b.preprocessing_worker import Reply, Setup, read_batch
from swift_stage2.channel_b.reward import TOTAL
from swift_stage2.channel_b.task import Task, correct_by
from swift_stage2.columns import ADVANTAGES, BEHAVIOUR, COLUMNS, stand_ins
from swift_stage2.config.swift_arguments import PLUGIN_PREFIX
from swift_stage2.errors import ConfigError, MatchingError, PreprocessorLost, SampleError
from swift_stage2.records import MatchQuality, Pack, Rollout, Segment, Target
from swift_stage2.runtime.worker import describe_end, start_worker
from swift_stage2.telemetry.timing import Trace, untraced

logger = logging.getLogger(__name__)

# It imports ms-swift, for which a cold network file system takes minutes, and a message is seldom more than a second's
# work. Its death is seen at once; this is for one that neither works nor dies.
_ANSWER_S = 300
_END_S = 10.0
_TRACK = "preprocessing"

Refusal = SampleError | MatchingError
_FoundT = TypeVar("_FoundT")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rollout that can be packed."""

    segment: Segment
    target: Target
    space: tuple[int, int] | None
    """Width and height of what boxes are written in."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A rollout matched to its ground truth, and no more."""

    target: Target
    space: tuple[int, int] | None
    target_reward: float | None = None
    """The reward of the corrected answer; None unless ``compare`` was called ``with_target``."""


def make_target(rollout: Rollout, prompt: PromptEncoding, encoder: Encoder, task: Task) -> Target:
    """One rollout corrected.

    Raises:
        SampleError, MatchingError: the sample cannot be used.
        TaskError: as ``correct_by`` does.
    """
    return correct_by(task, rollout, task.to_space(rollout.sample.truth, prompt.convert), encoder.tokenise)


def make_segment(
    rollout: Rollout, prompt: PromptEncoding, encoder: Encoder, task: Task
) -> tuple[Segment, Target]:
    """One rollout parsed, matched, corrected and encoded; and its corrected answer.

    The segment carries that answer, or, of a rollout with advantages, its tokens as they were sampled; the corrected
    answer beside them where it has an advantage, too, and a pack holds both. Tokens whose advantage is 0 are left out
    where something is left.

    Raises:
        SampleError, MatchingError: the sample cannot be used.
    """
    target = make_target(rollout, prompt, encoder, task)
    sequences: list[tuple[Target, float | None]] = [(target, task.closing_weight)]
    if rollout.advantages is not None:
        of_tokens, *of_target = rollout.advantages
        closed = _closed(target, encoder.closing_token_ids, task.closing_weight)
        sequences = [(_with_advantage(closed, advantage), None) for advantage in of_target]
        if of_tokens or not sequences:
            sequences.insert(0, (as_sampled(rollout, of_tokens, target.quality), None))
    return encoder.encode_segment(rollout, prompt, sequences), target


def as_sampled(rollout: Rollout, advantage: float, quality: MatchQuality) -> Target:
    """A rollout's own tokens as a target."""
    assert rollout.log_probs is not None
    num_tokens = len(rollout.token_ids)
    return Target(
        text=rollout.text,
        token_ids=rollout.token_ids,
        weights=(1.0,) * num_tokens,
        quality=quality,
        columns={ADVANTAGES.name: (advantage,) * num_tokens, BEHAVIOUR.name: rollout.log_probs},
    )


def _closed(target: Target, closing_ids: tuple[int, ...], weight: float) -> Target:
    """With the end of turn among its tokens, so that whatever holds for them holds for it."""
    more = len(closing_ids)
    return replace(
        target,
        token_ids=target.token_ids + closing_ids,
        weights=target.weights + (weight,) * more,
        columns={
            name: tuple(COLUMNS[name].beside(values, 0, more)) for name, values in target.columns.items()
        },
    )


def _with_advantage(target: Target, advantage: float) -> Target:
    return replace(target, columns={**target.columns, ADVANTAGES.name: (advantage,) * len(target.token_ids)})


def make_pack(pack_id: str, segments: Sequence[Segment], encoder: Encoder, capacity_tokens: int) -> Pack:
    """Segments as one batch, in the order given."""
    return Pack(
        pack_id=pack_id,
        version=min(segment.version for segment in segments),
        batch=encoder.collate(segments),
        keys=tuple(segment.key for segment in segments),
        num_tokens=sum(segment.num_tokens for segment in segments),
        num_supervised_tokens=sum(segment.num_supervised_tokens for segment in segments),
        capacity_tokens=capacity_tokens,
        quality=tuple(segment.quality for segment in segments),
        versions=tuple(segment.version for segment in segments),
    )


class Preprocessor(Protocol):
    """Turns rollouts into segments and segments into packs."""

    def prepare(self, rollouts: Sequence[Rollout]) -> Iterator[Prepared | Refusal]:
        """Each rollout as a segment, in their order. Segments wait here until ``pack`` or ``forget``."""

    def judge(self, rollouts: Sequence[Rollout]) -> Iterator[Judged | Refusal]:
        """Each rollout against its ground truth, in their order; nothing is kept."""

    def compare(self, rollouts: Sequence[Rollout], *, with_target: bool) -> Iterator[Judged | Refusal]:
        """As ``judge``, of rollouts that are going to be trained as they were sampled, by their rewards.

        ``with_target``: the reward of each corrected answer as well.
        """

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack:
        """Prepared segments as one batch, in the order given."""

    def forget(self, segments: Sequence[Segment]) -> None:
        """These will not be packed."""
        return

    def interrupt(self) -> None:
        """Whatever is asked now, or later, need not be answered; from any thread."""
        return

    def close(self) -> None:
        """Gives everything back; nobody asks any more. May be called again."""
        return


class ThreadPreprocessor(Preprocessor):
    """Works when it is asked, on the thread that asks, within milliseconds. Each segment carries its own encoding."""

    def __init__(self, encoder: Encoder, task: Task, *, packing_length: int) -> None:
        self._encoder = encoder
        self._task = task
        self._packing_length = packing_length
        self._last_prompt: tuple[int, PromptEncoding] | None = None

    def prepare(self, rollouts: Sequence[Rollout]) -> Iterator[Prepared | Refusal]:
        return _each(rollouts, self._prepare)

    def judge(self, rollouts: Sequence[Rollout]) -> Iterator[Judged | Refusal]:
        return _each(rollouts, lambda each: self._judge(each, self._encoder.encode_prompt(each.sample)))

    def compare(self, rollouts: Sequence[Rollout], *, with_target: bool) -> Iterator[Judged | Refusal]:
        return _each(rollouts, partial(self._compare, with_target=with_target))

    def _prepare(self, rollout: Rollout) -> Prepared:
        started = time.monotonic()
        prompt = self._prompt_of(rollout)
        segment, target = make_segment(rollout, prompt, self._encoder, self._task)
        return Prepared(segment, target, prompt.space, time.monotonic() - started)

    def _compare(self, rollout: Rollout, *, with_target: bool) -> Judged:
        self._encoder.require_trainable(rollout)
        prompt = self._prompt_of(rollout)
        judged = self._judge(rollout, prompt)
        if not with_target:
            return judged
        target = judged.target
        answer = replace(rollout, text=target.text, token_ids=target.token_ids, truncated=False)
        said = replace(answer, **stand_ins(len(target.token_ids)))
        right = make_target(said, prompt, self._encoder, self._task)
        return replace(judged, target_reward=right.quality.reward[TOTAL])

    def _judge(self, rollout: Rollout, prompt: PromptEncoding) -> Judged:
        require_same_prompt(rollout, prompt)
        return Judged(make_target(rollout, prompt, self._encoder, self._task), prompt.space)

    def _prompt_of(self, rollout: Rollout) -> PromptEncoding:
        """The last one is kept: rollouts of one row of the training data come one after another.

        The number of a row is enough: a prompt depends on nothing else, and of no other data than the training rows is
        anything asked here (``judge`` is for those).
        """
        row = rollout.sample.key.index
        if self._last_prompt is None or self._last_prompt[0] != row:
            self._last_prompt = row, self._encoder.encode_prompt(rollout.sample)
        return self._last_prompt[1]

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack:
        return make_pack(pack_id, segments, self._encoder, self._packing_length)


class ProcessPreprocessor(Preprocessor):
    """Has its work done elsewhere. The process starts here and is ready after ``await_ready``.

    All that asks it raises ``PreprocessorLost`` when it failed, ended or does not answer.
    """

    def __init__(self, encoder: Encoder, task: Task, *, packing_length: int, trace: Trace) -> None:
        """Raises:
        ConfigError: the template or the task cannot be sent to another process.
        PreprocessorLost: the process ended at once.
        """
        parts = _pickled((encoder.with_span(untraced), task.with_span(untraced), packing_length))
        self._trace = trace
        self._told = "load the template"
        self._process, self._socket = start_worker(
            "swift_stage2.channel_b.preprocessing_worker", {"CUDA_VISIBLE_DEVICES": ""}
        )
        self._socket.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _ANSWER_S, 0))
        # Of the same socket: descriptors come through it, and it is shut down while another thread reads here.
        self._connection = Connection(os.dup(self._socket.fileno()))
        try:
            self._send(Setup(tuple(sys.path), _plugins(), parts, trace.enabled))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self) -> None:
        """Waits until the process has loaded the template.

        Raises:
            PreprocessorLost: it could not, or ended.
        """
        self._receive()

    def prepare(self, rollouts: Sequence[Rollout]) -> Iterator[Prepared | Refusal]:
        yield from self._ask(f"prepare rollouts of {_rows(rollouts)}", "prepare", tuple(rollouts))

    def judge(self, rollouts: Sequence[Rollout]) -> Iterator[Judged | Refusal]:
        yield from self._ask(f"judge rollouts of {_rows(rollouts)}", "judge", tuple(rollouts))

    def compare(self, rollouts: Sequence[Rollout], *, with_target: bool) -> Iterator[Judged | Refusal]:
        told = f"compare rollouts of {_rows(rollouts)}"
        yield from self._ask(told, "compare", tuple(rollouts), with_target)

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack:
        keys = tuple(segment.key for segment in segments)
        pack, outline = self._ask(f"pack {len(keys)} segments", "pack", pack_id, keys)
        try:
            _, (descriptor,), _, _ = socket.recv_fds(self._socket, 1, 1)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        whole: Pack = replace(pack, batch=read_batch(outline, descriptor))
        return whole

    def forget(self, segments: Sequence[Segment]) -> None:
        self._told = f"forget {len(segments)} segments"
        self._send(("forget", tuple(segment.key for segment in segments)))

    def interrupt(self) -> None:
        self._process.kill()  # it holds nothing that could be lost
        # Also wakes who waits for it where it does not die at once, or where somebody else holds its end.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._process.kill()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "the preprocessing process pid=%d was killed and has not ended in %g s", self.pid, _END_S
            )
        finally:
            self._connection.close()
            self._socket.close()

    def _ask(self, told: str, *message: Any) -> Any:
        self._told = told
        self._send(message)
        return self._receive()

    def _send(self, message: Any) -> None:
        pickled = _pickled(message)
        try:
            self._connection.send_bytes(pickled)
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self) -> Any:
        try:
            reply: Reply = self._connection.recv()  # deadline: SO_RCVTIMEO
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        for name, start_ns, end_ns in reply.intervals:
            self._trace.record(name, start_ns, end_ns, _TRACK)
        if reply.failure is not None:
            summary, trace = reply.failure
            logger.error("the preprocessing process could not %s: %s", self._told, trace)
            raise PreprocessorLost(
                f"the preprocessing process must be able to {self._told}, got {summary} (its traceback is "
                "in the log); if it is well with stage2_ab.channel_b.preprocessing: thread, something that the learner "
                "loads does not reach it: make that importable by name"
            )
        return reply.found

    def _lost(self, error: BaseException) -> PreprocessorLost:
        return PreprocessorLost(
            f"the preprocessing process must live as long as its rank, but pid={self.pid} {self._why(error)} (it was "
            f"to {self._told}; {type(error).__name__}: {error})"
        )

    def _why(self, error: BaseException) -> str:
        if isinstance(error, BlockingIOError):
            return (
                f"did not answer within {_ANSWER_S} s; the machine or its file system is too slow for it: write "
                "stage2_ab.channel_b.preprocessing: thread"
            )
        try:
            status = self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            return "lives on but cannot be talked to; the log may say more"
        if status == -signal.SIGKILL:
            return (
                "was killed by SIGKILL, mostly for lack of main memory; give the machine more, lower "
                "prefetch.queue_limit, or write stage2_ab.channel_b.preprocessing: thread"
            )
        return f"{describe_end(status)}; its own message stands above"


def _each(rollouts: Sequence[Rollout], work: Callable[[Rollout], _FoundT]) -> Iterator[_FoundT | Refusal]:
    for rollout in rollouts:
        try:
            yield work(rollout)
        except (SampleError, MatchingError) as refusal:
            yield refusal


def _rows(rollouts: Sequence[Rollout]) -> str:
    """Which rows of the data set they answer: one of them may be what the process dies of."""
    return f"data set rows {', '.join(str(rollout.sample.key.index) for rollout in rollouts)}"


def _pickled(message: Any) -> bytes:
    try:
        return pickle.dumps(message)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            "what goes to the preprocessing process must be picklable",
            got=f"{type(error).__name__}: {error}",
            remedy="write stage2_ab.channel_b.preprocessing: thread, or define the classes of rows and template in a "
            "module, not in __main__ or a function",
        ) from error


def _plugins() -> dict[str, str]:
    """Files that ms-swift has imported as ``external_plugins``, by the names that it gives them."""
    loaded = list(sys.modules.items())  # at once: other threads import
    plugins = {name: module for name, module in loaded if name.startswith(PLUGIN_PREFIX)}
    return {name: file for name, module in plugins.items() if (file := getattr(module, "__file__", None))}
