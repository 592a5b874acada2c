"""Stands in the learner's place: gives every step its recorded plan and packs, and compares its losses.

Packs are made on the main thread from the recorded completions, through the encoder, task and packing of the
run; nothing runs in the background. The ranks tell each other at every step whether a loss differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_pack, make_segment
from swift_stage2.channel_b.sample_source import read_sample
from swift_stage2.channel_b.task import Rows, Task
from swift_stage2.collectives import ControlGroup, together
from swift_stage2.errors import MatchingError, ReplayDiffers, SampleError, UserError
from swift_stage2.learner import StepDecision
from swift_stage2.records import Pack, Rollout, Segment, StepRecord
from swift_stage2.replay.recorded_run import RecordedPack, RecordedStep
from swift_stage2.scheduling.step_plan import Channel, StepPlan
from swift_stage2.telemetry.facade import Telemetry


@dataclass(frozen=True, slots=True)
class PackMaker:
    """Recorded completions into the packs that a step trained."""

    rows: Rows
    encoder: Encoder
    task: Task
    packing_length: int

    def make(self, recorded: RecordedPack) -> Pack:
        """The pack again.

        Raises:
            UserError: a sample cannot be used as it was, or the pack has another length.
        """
        segments = [self._segment(completion) for completion in recorded.completions]
        pack = make_pack(recorded.pack_id, segments, self.encoder, self.packing_length)
        if pack.num_tokens != recorded.num_tokens:
            raise UserError(
                f"pack {pack.pack_id} must have the recorded num_tokens={recorded.num_tokens}, got {pack.num_tokens}; "
                "give the replay the run's data set, images, model and environment"
            )
        return pack

    def _segment(self, completion: Rollout) -> Segment:
        key = completion.sample.key
        if key.index >= len(self.rows):
            raise UserError(
                f"the data set must be the run's, got num_rows={len(self.rows)}, the record names row {key.index}; "
                "give the replay the same files"
            )
        try:
            sample = read_sample(self.rows, self.task, key)
            prompt = self.encoder.encode_prompt(sample)
            # That the server saw the same prompt was checked in the run.
            rollout = replace(completion, sample=sample, prompt_token_ids=prompt.token_ids)
            return make_segment(rollout, prompt, self.encoder, self.task)[0]
        except (SampleError, MatchingError) as error:
            raise UserError(
                f"row {key.index} could be trained in the run and cannot now: {error}; give the replay the same files"
            ) from error


class ReplayedLearner:
    """One rank's recorded decisions. ``num_compared`` steps have had the recorded losses so far."""

    def __init__(
        self,
        steps: Sequence[RecordedStep],
        *,
        maker: PackMaker | None,
        control: ControlGroup,
        events: Telemetry,
    ) -> None:
        """``maker`` is None for a run without channel B."""
        self._steps = {step.step: step for step in steps}
        self._last = steps[-1].step
        self._maker = maker
        self._control = control
        self._events = events
        self._stop_requested = False
        self.num_compared = 0

    def start(self) -> None:
        """There is nothing to start."""

    def request_stop(self) -> None:
        """Ends this replay at the next step that all ranks agree on; safe in a signal handler."""
        self._stop_requested = True

    def begin_step(self, step: int, num_packs: int) -> StepDecision:
        """The recorded plan of ``step``, with its packs.

        Raises:
            UserError: its packs cannot be made again; on every rank.
        """
        started = time.perf_counter()
        recorded = self._steps[step]
        packs = together(self._control, lambda: self._make(recorded, num_packs))
        plan = StepPlan(recorded.channel)
        self._events.record_step(
            StepRecord(
                step=step,
                plan=plan,
                version=recorded.version,
                version_lag=max((recorded.version - pack.version for pack in packs), default=None),
                queue_depth=0,
                infer_in_flight=0,
                round_pending=False,
                packs=packs,
                plan_seconds=time.perf_counter() - started,
            )
        )
        (stop,) = self._control.reduce_max([self._stop_requested])
        return StepDecision(plan, packs, stop > 0 or step == self._last)

    def end_step(self, step: int, losses: Sequence[str]) -> None:
        """Compares; all ranks together.

        Raises:
            ReplayDiffers: some rank's loss is not the recorded one, on every rank.
        """
        recorded = self._steps[step]
        if recorded.losses is None:
            return  # the run did not end it
        difference = _first_difference(recorded.losses, losses)
        (differs,) = self._control.reduce_max([difference is not None])
        if differs:
            told = enumerate(self._control.gather(difference or ""))
            causes = "; ".join(f"rank {rank}: {text}" for rank, text in told if text)
            raise ReplayDiffers(
                f"step {step} (channel {recorded.channel}) is the first that differs, {causes}"
            )
        self.num_compared += 1

    def evaluate_final(self, step: int) -> None:
        """Nothing: a replay asks no server."""

    def checkpoint(self, *, step: int, save_id: str) -> dict[str, object]:
        """Nothing: a replay is not resumed."""
        return {}

    def close(self) -> None:
        """There is nothing to end."""

    def _make(self, recorded: RecordedStep, num_packs: int) -> tuple[Pack, ...]:
        if recorded.channel is Channel.A:
            return ()
        assert self._maker is not None
        if len(recorded.packs) != num_packs:
            raise UserError(
                f"step {recorded.step} must train one pack in each of its {num_packs} micro_steps, the log tells of "
                f"{len(recorded.packs)}; it was changed, or the data set is another one"
            )
        return tuple(self._maker.make(pack) for pack in recorded.packs)


def _first_difference(recorded: Sequence[str], losses: Sequence[str]) -> str | None:
    if len(losses) != len(recorded):
        return f"it has {len(losses)} micro_steps, recorded {len(recorded)}"
    for number, (before, now) in enumerate(zip(recorded, losses, strict=True)):
        if before != now:
            return (
                f"micro_step {number} has loss {float.fromhex(now)!r}, recorded {float.fromhex(before)!r} "
                f"({now} and {before})"
            )
    return None
