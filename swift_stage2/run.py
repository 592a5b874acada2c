"""One rank's running stage 2: what the trainer talks to at every step, epoch and checkpoint.

Put together by ``assembly``; a replay puts its own together. Whatever raises here raises on all ranks.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from swift_stage2.collectives import ControlGroup, run_on_all_ranks
from swift_stage2.errors import ConfigError, DatasetError
from swift_stage2.learner import ChannelB, StepDecision
from swift_stage2.scheduling.watches import StarvationWatch
from swift_stage2.telemetry.events import Evaluation
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.timing import Activity

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005

ResultT = TypeVar("ResultT")


class Decider(Protocol):
    """Who decides every step: the learner, or a replay in its place. What has a body need not be done."""

    def start(self) -> None:
        return None

    def request_stop(self) -> None: ...

    def begin_step(self, step: int, num_packs: int) -> StepDecision: ...

    def end_step(self, step: int, losses: Sequence[str]) -> None: ...

    def evaluate_final(self, step: int) -> None:
        return None

    def checkpoint(self, *, step: int, save_id: str) -> dict[str, Any]: ...

    def close(self) -> None:
        return None


@dataclass(eq=False, repr=False)
class Stage2Run:
    """One rank's running stage 2: what the trainer talks to.

    ``record_start`` tells of the process once the run knows where it resumes.
    """

    learner: Decider
    telemetry: Telemetry
    control: ControlGroup
    channel_b: ChannelB | None
    logging_steps: int
    record_start: Callable[..., None]
    starvation: StarvationWatch | None = None
    """The learner's, if it has one; equal on all ranks."""
    saves_checkpoints: bool = True

    def __post_init__(self) -> None:
        self._resumed_save_id: str | None = None
        self._switch_interval_before: float | None = None

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """The evaluations on the servers that have ended in this process, equal on every rank."""
        evaluation = self.channel_b.evaluation if self.channel_b is not None else None
        return evaluation.ended if evaluation is not None else ()

    def start(self) -> None:
        """Starts the background threads; from here on the main thread counts as busy unless it says otherwise."""
        self.telemetry.clock.switch(Activity.BUSY)
        state = None
        if self.channel_b is not None:
            self._share_the_interpreter()
            state = self.channel_b.source.state_dict()
        self.record_start(save_id=self._resumed_save_id, state=state)
        self.learner.start()

    def end_step(self, step: int, epoch: float | None, losses: Sequence[float]) -> dict[str, float]:
        """Called on all ranks after optimizer step number ``step`` (from 1), with what each micro_step's loss was.

        Returns the scalars of a logging step by tag, equal on every rank; of any other step none.
        """
        self.learner.end_step(step - 1, [loss.hex() for loss in losses])
        if step % max(1, self.logging_steps) != 0:
            return {}
        return self.telemetry.merge_and_write(step, self.control.gather, epoch=epoch)

    def end_epoch(self, epoch: float | None, num_read: int, num_batches: int) -> None:
        """Tells how much of an epoch's batches channel A trained; B steps read none of them."""
        if self.control.rank == 0:
            logger.info("epoch %.2f: channel A trained %d of %d batches", epoch or 0, num_read, num_batches)

    def checkpoint(self, step: int) -> dict[str, Any]:
        """This rank's part of a checkpoint before ``step``, as JSON. All ranks together: they agree on its id.

        The event log is on disk before the checkpoint can be.

        Raises:
            StorageFull: some rank's cannot be written; on every rank.
        """
        save_id = str(self.control.broadcast(uuid.uuid4().hex))
        learner = self.learner.checkpoint(step=step, save_id=save_id)
        self.run_on_all_ranks(self.telemetry.log.flush_to_disk)
        return {"save_id": save_id, "learner": learner, "telemetry": self.telemetry.state_dict()}

    def resume(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Continues from the checkpoint of which ``read`` returns this rank's part; called before ``start``.

        Raises:
            UserError: a rank cannot read its part or continue from it, or the parts are of different checkpoints.
        """
        state = self.run_on_all_ranks(read)
        save_ids = self.control.gather(state["save_id"])
        if len(set(save_ids)) > 1:
            raise ConfigError(
                "all ranks resume from parts of one checkpoint",
                got=", ".join(f"rank {rank} save_id={save_id}" for rank, save_id in enumerate(save_ids)),
                remedy="resume from another checkpoint",
            )
        self.run_on_all_ranks(partial(self._continue_from, state))

    def _share_the_interpreter(self) -> None:
        """The main thread asks for the interpreter's lock after every operator, the pipeline's Python holds it for as
        long as the switch interval lets it: 5 ms cost 3 % of a step of 0.3 s (``bench interference``).
        """
        self._switch_interval_before = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._switch_interval_before))

    def _continue_from(self, state: Mapping[str, Any]) -> None:
        self._resumed_save_id = state["save_id"]
        self.telemetry.load_state_dict(state["telemetry"])
        if self.channel_b is not None and state["learner"]:
            _check_fingerprint(state["learner"]["answer_fingerprint"], self.channel_b.answer_fingerprint)
            self.channel_b.source.load_state_dict(state["learner"]["source"])
            if (version := state["learner"]["version"]) > self.channel_b.clock.current:
                self.channel_b.clock.advance(version)
                self.channel_b.schedule.begun = version
            if self.channel_b.evaluation is not None:
                self.channel_b.evaluation.schedule.resume(state["learner"].get("unfinished_evaluation"))

    def run_on_all_ranks(self, work: Callable[[], ResultT]) -> ResultT:
        """Returns what ``work`` does once it has succeeded on every rank; raises on all when it fails on one."""
        return run_on_all_ranks(self.control, work)

    def close(self) -> None:
        """Ends every thread and file of this rank. May be called again."""
        self.learner.close()
        if self._switch_interval_before is not None:
            sys.setswitchinterval(self._switch_interval_before)
            self._switch_interval_before = None
        self.telemetry.clock.switch(Activity.OTHER)
        self.telemetry.close()


def _check_fingerprint(before: Sequence[str], now: Sequence[str]) -> None:
    if before != list(now):
        raise DatasetError(
            "resume needs answers written as before",
            got=f"answers={list(now)}, checkpoint answers={before}",
            remedy="restore the data set's answers or start a new run from the checkpoint's weights",
        )
