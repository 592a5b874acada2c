"""One rank of a replay: the run's own configuration and trainer, with the recorded steps in the learner's place.

Every step has its recorded plan and packs, and its losses are compared. Packs are made on the main thread from the
recorded completions, through the encoder, task and packing of the run; nothing runs in the background. The ranks tell
each other at every step whether a loss differs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from swift_stage2.assembly import RunInputs
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_pack, make_segment
from swift_stage2.channel_b.sample_source import read_sample, usable_rows
from swift_stage2.channel_b.task import Rows, Task
from swift_stage2.checks.channel_b_parts import make_task
from swift_stage2.checks.samples import usable_samples
from swift_stage2.collectives import ControlGroup, join_control_group, leave_job, run_on_all_ranks
from swift_stage2.compat import surroundings
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.errors import MatchingError, ReplayDiffers, SampleError, UserError
from swift_stage2.learner import StepDecision
from swift_stage2.records import Pack, Rollout, Segment
from swift_stage2.replay.recorded_run import RecordedPack, RecordedRun, RecordedStep, ReplayVerdict
from swift_stage2.run import Decider, Stage2Run
from swift_stage2.runtime.output import say_beside_bar
from swift_stage2.scheduling.step_plan import Channel, StepPlan
from swift_stage2.telemetry.events import Step
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.training.sft import train


@dataclass(frozen=True, slots=True)
class PackMaker:
    """Recorded completions into the packs that a step trained."""

    rows: Rows
    encoder: Encoder
    task: Task

    def make(self, recorded: RecordedPack) -> Pack:
        """The pack again.

        Raises:
            UserError: a sample cannot be used as it was, or the pack has another length.
        """
        segments = [self._segment(completion) for completion in recorded.completions]
        pack = make_pack(recorded.pack_id, segments, self.encoder)
        if pack.num_tokens != recorded.num_tokens:
            raise UserError(
                f"pack {pack.pack_id} must have the recorded num_tokens={recorded.num_tokens}",
                got=str(pack.num_tokens),
                remedy="give the replay the run's data set, images, model and environment",
            )
        return pack

    def _segment(self, completion: Rollout) -> Segment:
        key = completion.sample.key
        if key.index >= len(self.rows):
            raise UserError(
                "the data set must be the run's",
                got=f"num_rows={len(self.rows)}, the record names row {key.index}",
                remedy="give the replay the same files",
            )
        try:
            sample = read_sample(self.rows, self.task, key)
            prompt = self.encoder.encode_prompt(sample)
            # That the server saw the same prompt was checked in the run.
            rollout = replace(completion, sample=sample, prompt_token_ids=prompt.token_ids)
            return make_segment(rollout, prompt, self.encoder, self.task)[0]
        except (SampleError, MatchingError) as error:
            raise UserError(
                f"row {key.index} could be trained in the run and cannot now: {error}",
                remedy="give the replay the same files",
            ) from error


class ReplayedLearner(Decider):
    """One rank's recorded decisions. ``num_compared`` steps have had the recorded losses so far.

    There is nothing to start or to end, and no server to ask.
    """

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
        packs = run_on_all_ranks(self._control, lambda: self._make(recorded))
        plan = StepPlan(recorded.channel)
        self._events.record_step(
            Step.planned(
                step,
                plan,
                packs,
                recorded.version,
                queue_depth=0,
                infer_in_flight=0,
                version_pending=False,
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
        difference = _first_difference(recorded.losses, losses)
        (differs,) = self._control.reduce_max([difference is not None])
        if differs:
            told = enumerate(self._control.gather(difference or ""))
            causes = "; ".join(f"rank {rank}: {text}" for rank, text in told if text)
            raise ReplayDiffers(
                f"step {step} (channel {recorded.channel}) is the first that differs, {causes}"
            )
        self.num_compared += 1

    def checkpoint(self, *, step: int, save_id: str) -> dict[str, object]:
        """Nothing: a replay is not resumed."""
        return {}

    def _make(self, recorded: RecordedStep) -> tuple[Pack, ...]:
        if recorded.channel is Channel.A:
            return ()
        assert self._maker is not None
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


# Keeps a replay out of the run's own directory and of anybody's hub.
_OWN_PLACE = {"add_version": False, "report_to": ["none"], "push_to_hub": False, "logging_dir": None}


def replay_rank(recorded: RecordedRun, output: Path, *, rank: int) -> ReplayVerdict:
    """Takes the recorded steps, on as many ranks as the run had. Every rank comes to the same verdict.

    Raises:
        UserError: threads, device, data, model or checkpoint are not the run's, or ``output`` cannot be written.
    """
    swift = {**recorded.config["swift"], **_OWN_PLACE, "output_dir": str(output)}
    config_path = output / "config" / f"rank{rank}.yaml"
    with ExitStack() as stack:
        try:
            # The configuration's paths may be relative.
            stack.enter_context(chdir(recorded.surroundings["directory"]))
            config_path.parent.mkdir(parents=True, exist_ok=True)
            config_path.write_text(write_yaml({**recorded.config, "swift": swift}), encoding="utf-8")
        except OSError as error:
            raise UserError(
                "a replay needs the run's working directory, and an --output that can be written",
                got=str(error),
            ) from error
        settings = load_config(config_path)
        resumed = settings.swift.get("resume_from_checkpoint")
        if resumed is not None and not Path(resumed).is_dir():
            raise UserError(
                f"the run resumed from {resumed}, which is gone",
                remedy="a replay begins there as well, so bring it back",
            )
        learners: list[ReplayedLearner] = []
        difference = None
        try:
            train(settings, start_run=partial(_start_replay, recorded, learners))
        except ReplayDiffers as error:
            leave_job()  # raised on every rank alike
            difference = str(error)
        return recorded.verdict(learners[0].num_compared if learners else 0, difference)


def _start_replay(
    recorded: RecordedRun,
    learners: list[ReplayedLearner],
    config: Stage2Config,
    given: RunInputs,
) -> Stage2Run:
    """In the place of ``assembly.start_run``."""
    control = join_control_group(config.control_timeout_s)
    if given.first_step != recorded.first_step:
        raise UserError(
            f"the run began before step {recorded.first_step}",
            got=f"first_step={given.first_step}",
            remedy="bring its checkpoint back",
        )
    _check_surroundings(recorded.surroundings, surroundings(next(given.module.parameters()).device))
    telemetry = Telemetry(
        Path(given.run_directory),
        control.rank,
        control.world_size,
        tensorboard=False,
        events=False,
        say=partial(say_beside_bar, "replay") if control.rank == 0 else None,
        total_steps=given.total_steps,
    )

    def make_maker() -> PackMaker:
        channel_b, task = config.stage2_ab.channel_b, make_task(config)
        encoder = Encoder(given.template, packing_length=channel_b.packing.packing_length)
        usable = usable_rows(given.rows, task, channel_b.rows_without_objects)
        (sample,) = usable_samples(given.rows, 0, encoder, task, 1, usable)
        return PackMaker(given.rows, encoder, task.learn(given.rows, sample, encoder))

    maker = run_on_all_ranks(control, make_maker) if config.b_enabled else None
    learners.append(
        ReplayedLearner(recorded.steps[control.rank], maker=maker, control=control, events=telemetry)
    )
    return Stage2Run(
        learners[0],
        telemetry,
        control,
        None,
        given.logging_steps,
        record_start=lambda **_: None,
        saves_checkpoints=False,
    )


def _check_surroundings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    remedies = {"device": "use the run's", "threads": f"set OMP_NUM_THREADS={before['threads']}"}
    for name, remedy in remedies.items():
        if now[name] != before[name]:
            raise UserError(
                f"bit-equal losses need the run's {name}",
                got=f"{name}={now[name]}, recorded {before[name]}",
                remedy=remedy,
            )
