"""Evaluation at one version: this rank's part, and the schedule that all ranks share, which adds the parts up.

``RankEvaluation.ask`` and ``take`` belong to the pipeline's thread; every answer that is counted is of the version that
the evaluation began with, and nothing of it enters the stream that trains. ``PinnedEvaluation`` is the
learner's, on the main thread at every step: it begins, ends and collects at the same step on every rank, because every
decision comes from agreed facts.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import Preprocessor, ScoredRollout
from swift_stage2.channel_b.rollouts import RequestSettings, RolloutClient
from swift_stage2.channel_b.sample_source import read_sample, usable_rows
from swift_stage2.channel_b.task import Rows, Task
from swift_stage2.collectives import ControlGroup
from swift_stage2.columns import COLUMNS, LOG_PROBS
from swift_stage2.config import DecodingConfig, Stage2Config
from swift_stage2.data.prediction import as_line
from swift_stage2.data.recorded import EvaluationKeeper, Scored, evaluations_directory, recorded_row
from swift_stage2.errors import SampleError
from swift_stage2.records import (
    BatchOutcome,
    EvaluationCounts,
    Rollout,
    Sample,
    SampleKey,
)
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd, EvaluationSchedule
from swift_stage2.scheduling.feasibility_gate import GateOutcome
from swift_stage2.telemetry.events import Evaluation
from swift_stage2.telemetry.facade import Telemetry

MAX_ASKS = 3
# No epoch of training comes to it, so that seeds and places of the two streams cannot meet.
_EPOCH = 2**31 - 1


@dataclass(slots=True)
class _Progress:
    """One evaluation on this rank. Samples are numbers in this rank's share."""

    settings: RequestSettings
    waiting: deque[int]
    counts: EvaluationCounts
    lines: list[str] = field(default_factory=list)
    """Of a file of predictions, as answers come."""
    num_asks: Counter[int] = field(default_factory=Counter)
    num_out: int = 0  # asked, and not in ``waiting`` meanwhile
    may_ask: bool = True


@dataclass(eq=False, repr=False)
class RankEvaluation:
    """This rank's fixed samples, asked greedily: what is still to ask, what came back, and its counts.

    Of the first ``num_samples`` of ``rows`` that are ``usable``, rank r's are r, r + ``world_size``, …
    At most one evaluation runs, from ``begin`` to ``end``.
    """

    rows: Rows
    task: Task
    num_samples: int
    rank: int
    world_size: int
    client: RolloutClient
    make_request: Callable[[Sample], dict[str, Any]]
    preprocessor: Preprocessor
    decoding: DecodingConfig
    usable: Sequence[int] | None = None

    def __post_init__(self) -> None:
        chosen = (range(len(self.rows)) if self.usable is None else self.usable)[: self.num_samples]
        indices = chosen[self.rank :: self.world_size]
        self._keys = [SampleKey(_EPOCH, position, index) for position, index in enumerate(indices)]
        self._columns = tuple(
            COLUMNS[name] for name in self.task.columns
        )  # it corrects no answer without them
        self._nothing = EvaluationCounts(metrics=dict.fromkeys(self.task.metrics, (0.0, 0.0)))
        self._lock = threading.Lock()
        self._progress: _Progress | None = None
        self._ended: Sequence[str] = ()

    @property
    def lines(self) -> str:
        """Of the evaluation that ended last: a ``RecordedRow`` for each answer that is counted, and each failure."""
        return "\n".join(self._ended)

    @property
    def is_finished(self) -> bool:
        """Whether this rank has nothing left to ask or to wait for."""
        with self._lock:
            progress = self._progress
            return progress is None or not (progress.waiting or progress.num_out)

    def begin(self, version: int) -> None:
        """From now on ``ask`` has something to ask, under ``version`` only."""
        waiting = deque(range(len(self._keys)))
        counts = replace(self._nothing, num_wanted=len(waiting))
        greedy = replace(self.decoding, temperature=0.0)
        settings = RequestSettings(greedy, columns=self._columns, wished=(LOG_PROBS,), only_version=version)
        with self._lock:
            self._progress = _Progress(settings, waiting, counts)

    def ask_no_more(self) -> None:
        """Samples that are asked at the moment still count; no other is asked before the next ``begin``."""
        with self._lock:
            if self._progress is not None:
                self._progress.may_ask = False
                self._progress.waiting.clear()

    def end(self) -> EvaluationCounts:
        """The counts until now. An answer that comes later is of no evaluation."""
        with self._lock:
            progress, self._progress = self._progress, None
        if progress is None:
            return self._nothing
        self._ended = progress.lines
        return progress.counts

    def ask(self, max_prompts: int) -> int:
        """Asks for at most so many, if something is to be asked; how many that are."""
        with self._lock:
            progress = self._progress
            if progress is None or not progress.waiting:
                return 0
            numbers = [progress.waiting.popleft() for _ in range(min(max_prompts, len(progress.waiting)))]
            progress.num_out += len(numbers)
        samples, requests, failed = self._read(numbers)
        if failed:
            self._take(progress, list(failed), {}, failed, was_asked=False)
        if samples:
            self.client.submit(samples, requests, progress.settings)
        return len(samples)

    def take(self, outcome: BatchOutcome) -> None:
        """Takes the outcome of some that were asked."""
        with self._lock:
            progress = self._progress
        if progress is None or outcome.settings is not progress.settings:
            return  # of one that has ended
        failed = {sample.key.position: reason for sample, reason in outcome.quarantined}
        numbers = [rollout.sample.key.position for rollout in outcome.rollouts]
        numbers += [sample.key.position for sample in outcome.returned]
        found: dict[int, tuple[Rollout, ScoredRollout]] = {}
        asked_for = [
            rollout
            for rollout in outcome.rollouts
            if {span.version for span in rollout.spans} == {progress.settings.only_version}
        ]
        self._score(asked_for, found, failed)
        self._take(
            progress,
            [*numbers, *failed.keys() - set(numbers)],
            found,
            failed,
            was_asked=outcome.num_posts > 0,
        )

    def _read(self, numbers: Sequence[int]) -> tuple[list[Sample], list[dict[str, Any]], dict[int, str]]:
        samples, requests, failed = [], [], {}
        for number in numbers:
            try:
                sample = read_sample(self.rows, self.task, self._keys[number])
                requests.append(self.make_request(sample))
                samples.append(sample)
            except SampleError as error:
                failed[number] = str(error)
        return samples, requests, failed

    def _score(
        self,
        rollouts: Sequence[Rollout],
        found: dict[int, tuple[Rollout, ScoredRollout]],
        failed: dict[int, str],
    ) -> None:
        if not rollouts:
            return
        for rollout, scored in zip(rollouts, self.preprocessor.score(rollouts), strict=True):
            number = rollout.sample.key.position
            if isinstance(scored, ScoredRollout):
                found[number] = rollout, scored
            else:
                failed[number] = str(scored)

    def _take(
        self,
        progress: _Progress,
        numbers: Sequence[int],
        found: dict[int, tuple[Rollout, ScoredRollout]],
        failed: dict[int, str],
        *,
        was_asked: bool,
    ) -> None:
        """Counts some, unless their evaluation has ended meanwhile."""
        for number in numbers:
            if number not in found and number not in failed:
                progress.num_asks[number] += was_asked
                if progress.num_asks[number] == MAX_ASKS:
                    failed[number] = f"no answer to {MAX_ASKS} requests"
        lines = [self._line(number, found.get(number), failed.get(number)) for number in (*found, *failed)]
        with self._lock:
            if progress is not self._progress:
                return
            progress.num_out -= len(numbers)
            progress.lines += lines
            for number in numbers:
                if number in found:
                    progress.counts = progress.counts.with_answer(found[number][1].target)
                elif number not in failed and progress.may_ask:
                    progress.waiting.append(number)  # behind what was not asked yet
            num_failed = progress.counts.num_failed + len(failed)
            progress.counts = replace(progress.counts, num_failed=num_failed)

    def _line(self, number: int, answer: tuple[Rollout, ScoredRollout] | None, failure: str | None) -> str:
        index = self._keys[number].index
        row = self.rows[index]
        try:
            truth = answer[0].sample.truth if answer else self.task.read_truth(row)
        except SampleError:
            truth = None
        return as_line(recorded_row(index, row, truth, answer, failure))


@dataclass(eq=False, repr=False)
class PinnedEvaluation:
    """One rank's evaluations, as the learner drives them."""

    schedule: EvaluationSchedule
    part: RankEvaluation
    control: ControlGroup
    record: Callable[[Evaluation], None]
    record_scores: Callable[[Scored], None] | None = None
    keeper: EvaluationKeeper | None = None
    """Gets all ranks' rows on rank 0; all ranks have one, or none."""
    ended: list[Evaluation] = field(default_factory=list)
    """In this process."""

    @property
    def wanted(self) -> bool:
        """Whether this rank is not finished with what runs: its fact in the step's vector."""
        return self.schedule.running is not None and not self.part.is_finished

    def holds_round(self, step: int) -> bool:
        """True if the evaluation holds the round that is due or in transfer. When its time is over it stops asking."""
        held = self.schedule.holds_round(step)
        self._ask_no_more_if_cut()
        return held

    def observe(
        self, step: int, outcome: GateOutcome, *, version: int, has_server: bool, pending: bool
    ) -> None:
        """Ends what has to end at ``step``, or begins what is due. ``pending``: a round is, or is in transfer."""
        if self.keeper is not None:
            self._tell(self.keeper.finished())
        self.schedule.observe_version(version)
        self._ask_no_more_if_cut()
        reason = self.schedule.reason_to_end(
            step,
            wanted=outcome.evaluation_wanted,
            has_server=has_server,
            pipeline_failed=outcome.pipeline_failed,
            stop_requested=outcome.stop_requested,
        )
        if reason is not None:
            self._end(step, reason)
        # After an end comes the round that was held back, if any, before the next begins.
        may_begin = (
            reason is None
            and has_server
            and not (pending or outcome.pipeline_failed or outcome.stop_requested)
        )
        if (begun := self.schedule.begin_if_due(step, version, may_begin=may_begin)) is not None:
            self.part.begin(begun.version)

    def close(self) -> None:
        """Tells the scores that are still to come. May be called again."""
        if self.keeper is not None:
            self._tell(self.keeper.close())

    def _tell(self, scored: Iterator[Scored]) -> None:
        for each in scored:
            if self.record_scores is not None:
                self.record_scores(each)

    def _ask_no_more_if_cut(self) -> None:
        if self.schedule.is_cut:
            self.part.ask_no_more()

    def _end(self, step: int, reason: EvaluationEnd) -> None:
        mine = self.part.end()
        counts = EvaluationCounts.of_ranks(self.control.gather(mine.to_json()))
        end = EvaluationEnd.COMPLETE if counts.is_whole else reason
        # The run that resumes asks an evaluation again that a stop has ended.
        ended = self.schedule.end(again=end is EvaluationEnd.TRAINING_ENDS)
        if self.keeper is not None:
            parts = self.control.gather(self.part.lines)
            if self.control.rank == 0:
                self.keeper.take(ended, parts)
        self.ended.append(Evaluation.of(ended, step=step, end=end, counts=counts, ratios=counts.ratios))
        self.record(self.ended[-1])


def pinned_evaluation(
    config: Stage2Config,
    rows: Rows,
    task: Task,
    encoder: Encoder,
    *,
    preprocessor: Preprocessor,
    client: RolloutClient,
    control: ControlGroup,
    telemetry: Telemetry,
    run_directory: Path,
    total_steps: int,
) -> PinnedEvaluation | None:
    """One rank's, by the section ``stage2_ab.evaluation``; None when it is off.

    Raises:
        ConfigError: there are no rows to evaluate.
    """
    settings, channel = config.stage2_ab.evaluation, config.stage2_ab.channel_b
    if not settings.every_steps:
        return None
    usable = usable_rows(rows, task, channel.rows_without_objects)
    config.check_validation_set(len(usable))
    part = RankEvaluation(
        rows,
        task,
        num_samples=settings.num_samples,
        rank=control.rank,
        world_size=control.world_size,
        client=client,
        make_request=encoder.request,
        preprocessor=preprocessor,
        decoding=config.rollout.decoding,
        usable=usable,
    )
    dialect = channel.target.dialect or str(getattr(task, "default_dialect", ""))
    directory = evaluations_directory(run_directory) if config.telemetry.audit else None
    return PinnedEvaluation(
        EvaluationSchedule(
            every_steps=settings.every_steps,
            max_round_delay_steps=settings.max_round_delay_steps,
            last_step=total_steps - 1,
        ),
        part,
        control=control,
        record=telemetry.record_evaluation,
        record_scores=lambda scored: telemetry.record_scores(scored.evaluation, scored.scores, scored.fault),
        keeper=EvaluationKeeper(directory, DIALECTS.get(dialect, OBJECT_LIST)),
    )
