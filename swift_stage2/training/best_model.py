"""Evaluations on the servers as Hugging Face's: logged, and where ``metric_for_best_model`` is theirs, they choose.

One is taken at the end of the step in which it ended, the same on every rank, with sums that all ranks have. Its
weights are those of its version: a checkpoint that is saved as the best is some steps younger than what was measured.
The last one is of the final weights, after they have been saved, and chooses as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from swift.callbacks.early_stop import EarlyStopCallback
from swift.trainers import Seq2SeqTrainer
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import SaveStrategy

from swift_stage2.errors import ConfigError
from swift_stage2.run import Stage2Run
from swift_stage2.runtime.background import hung_round_ends_process
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd
from swift_stage2.telemetry.events import Evaluation

logger = logging.getLogger(__name__)

_EVERY_SAVE = (SaveStrategy.STEPS, SaveStrategy.EPOCH)


class EvaluatedTrainer(Seq2SeqTrainer):  # type: ignore[misc]
    """ms-swift's trainer, whose best metric, checkpoint and early end evaluations on the servers may decide.

    It resumes from every weight of a checkpoint, or not at all.
    """

    stage2: Stage2Run | None = None
    control: Any
    stop_agreed = False
    is_between_epochs = False
    _num_taken = 0

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """A whole model as transformers loads any: Hugging Face's trainer loads weights of the module's own names.

        It passes over the rest without a word, and a checkpoint of Qwen2.5-VL has the first release's names alone
        (transformers #43701).

        Raises:
            ConfigError: the checkpoint lacks weights.
        """
        model = self.model if model is None else model
        if not isinstance(model, PreTrainedModel) or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        load: Callable[..., Any] = type(model).from_pretrained
        saved, found = load(resume_from_checkpoint, output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(
                "a checkpoint must have every weight of the model",
                got=f"{resume_from_checkpoint} without {missing[0]} ({len(missing)} in all)",
                remedy="resume from another checkpoint",
            )
        model.load_state_dict(saved.state_dict())

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._take_ended()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # Called after the last step, and again after its epoch, which may save as well.
        if self.stage2 is None or not (self.is_between_epochs and self.control.should_training_stop):
            return
        if not self.stop_agreed:
            with hung_round_ends_process():
                self.stage2.learner.evaluate_final(self.state.global_step)
        self._take_ended()
        if not self.control.should_save:
            return
        saved = getattr(self.state, "last_model_checkpoint", None)
        if str(saved).endswith(f"checkpoint-{self.state.global_step}"):  # the best weights are there
            self.control.should_save, self.state.best_model_checkpoint = False, saved
        else:
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face does it. With a limit of 1 it removes all but the best, also what a stop saved to resume."""
        limit = self.args.save_total_limit
        self.args.save_total_limit = None if self.stop_agreed else limit
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _take_ended(self) -> None:
        ended = self.stage2.evaluations if self.stage2 is not None else ()
        due = self.control.should_log  # to log an evaluation would cancel the step's own
        for evaluation in ended[self._num_taken :]:
            self._take(evaluation)
        self._num_taken = len(ended)
        self.control.should_log = due

    def _take(self, evaluation: Evaluation) -> None:
        metrics = {f"eval_{name}": value for name, value in evaluation.counts.ratios.items()}
        Trainer.log(self, dict(metrics))  # ms-swift's own would end the means of its training metrics here
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        # One that was cut has the first rows only, whichever were answered by then.
        if evaluation.end is not EvaluationEnd.COMPLETE or name not in metrics:
            return
        is_best = self._determine_best_metric(metrics, None)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if is_best and self.args.process_index == 0:
            logger.info(
                "%s=%.4f of version %d, asked from step %d on, is the best so far",
                name,
                metrics[name],
                evaluation.version,
                evaluation.begun_step,
            )
        strategy = self.args.save_strategy
        if strategy != SaveStrategy.BEST:
            self.state.best_global_step = None  # nothing says that this step is saved
        elif is_best:
            self.control.should_save = True
        if strategy not in _EVERY_SAVE and not (is_best and strategy == SaveStrategy.BEST):
            self._count_towards_early_stop()

    def _count_towards_early_stop(self) -> None:
        """ms-swift counts saves, of which there are none without a better model; so evaluations are counted."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStopCallback):
                callback.on_save(self.args, self.state, self.control)
