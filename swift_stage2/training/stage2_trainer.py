"""The seam to ms-swift: its own trainer, with ``get_batch_samples`` asking the learner which channel a step trains.

Nothing of ms-swift's loop is repeated. Importing this changes nothing; ``register_trainer`` gives ms-swift the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from swift.dataset import packing
from swift.pipelines import SwiftSft
from swift.trainers import TrainerFactory
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_utils import rotate_checkpoints

from swift_stage2 import assembly
from swift_stage2.channel_b.encoding import ALTERNATIVE_TOKENS
from swift_stage2.checks.checks import CheckStage, run_checks
from swift_stage2.checks.preparation import HALF_PRECISION_DTYPES, EngineCanary
from swift_stage2.columns import COLUMNS
from swift_stage2.compat import pack_here
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.errors import ConfigError
from swift_stage2.run import Stage2Run
from swift_stage2.runtime import checkpoints
from swift_stage2.runtime.background import hung_round_ends_process
from swift_stage2.runtime.checkpoints import whole_checkpoint
from swift_stage2.runtime.output import going_on
from swift_stage2.runtime.run_directory import run_lock
from swift_stage2.runtime.worker import StopOnSignal
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.training import losses
from swift_stage2.training.best_model import EvaluatedTrainer

CONFIG_VARIABLE = "SWIFT_STAGE2_CONFIG"


class Stage2Trainer(EvaluatedTrainer):
    """ms-swift's supervised trainer whose optimizer steps may train channel B's packs instead of its batches."""

    def __init__(
        self,
        model: Any,
        args: Any,
        *others: Any,
        stage2: Stage2Config | None = None,
        start_run: Callable[..., Stage2Run] | None = None,
        **kwargs: Any,
    ) -> None:
        """All else goes to ms-swift's trainer.

        Args:
            stage2: the configuration; by default that of the file which SWIFT_STAGE2_CONFIG names.
            start_run: puts this rank's run together, by default ``assembly.start_run``, whose arguments it takes.

        Raises:
            ConfigError: there is no configuration, or it does not fit ms-swift's arguments and data.
        """
        args.check_model = False  # it would ask ModelScope about a model on disk, and tell nobody the answer
        super().__init__(model, args, *others, **kwargs)
        self.stage2_config = stage2 or _config_from_environment()
        self._start_run = start_run or assembly.start_run
        self.stage2_config.check_accumulation(self.args.gradient_accumulation_steps)
        losses.check_model(self.model, self.stage2_config)
        run_checks(self.stage2_config, CheckStage(num_validation_rows=len(self.eval_dataset or ())))
        self.stage2 = None
        self._resume_directory: str | None = None
        self._resumed_a_batches: int | None = None
        self._a_batches_in_epoch = 0
        self._losses: list[torch.Tensor] = []  # of this step's micro_steps, where they are recorded
        self._policy_sums: torch.Tensor | None = None  # of this step's sampled tokens
        self._until_first_step = ExitStack()
        self.add_callback(_Stage2Callback(self))

    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains, and ends every thread of ours however training ends."""
        self._resume_directory = resume_from_checkpoint or None
        # Also where ms-swift has just made the directory.
        hold = run_lock if self.args.process_index == 0 else nullcontext
        with hold(Path(self.args.output_dir)), StopOnSignal(self._ask_to_stop):
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._until_first_step.close()
                if self.stage2 is not None:
                    self.stage2.close()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The window's batches: channel A's next ones, or one pack per micro_step on channel B."""
        assert self.stage2 is not None
        with self.stage2.telemetry.activity("waiting"):
            with hung_round_ends_process():
                decision = self.stage2.learner.begin_step(self.state.global_step, num_batches)
            # Only noted: `should_training_stop` set now would end this window after its first micro_step.
            self.stop_agreed = self.stop_agreed or decision.stop
            if decision.plan.channel is Channel.B:
                # Copies: the loop and the loss function take entries out of the dictionary they are given.
                batches: list[Any] = [dict(pack.batch) for pack in decision.packs]
                num_items = self._get_num_items_in_batch(batches, device)
            else:
                batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
                self._a_batches_in_epoch += len(batches)
        return batches, num_items

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ms-swift does it; the loss is kept until the step ends."""
        assert self.stage2 is not None
        with self.stage2.telemetry.trace.span("micro_step"):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self.stage2_config.telemetry.record:
            self._losses.append(loss.detach())
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As ms-swift does it, whose loss knows no columns: one that needs others than these takes them first."""
        losses.set_text_positions(inputs)
        columns = {name: inputs.pop(name) for name in COLUMNS if name in inputs}
        found = {name: inputs.pop(name) for name in ALTERNATIVE_TOKENS if name in inputs}
        policy = losses.PolicyTerm.of(columns, self.stage2_config)
        if policy is not None and policy.grpo.kl_weight:
            policy.ask_reference(self.accelerator.unwrap_model(model), super().compute_loss, inputs)
        if found or policy is not None:
            weight = self.stage2_config.stage2_ab.channel_b.target.weights.duplicate
            own_loss = partial(losses.loss_with_aux_targets, duplicate_weight=weight, policy=policy, **found)
            inputs["compute_loss_func"] = own_loss
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if policy is not None and policy.sums is not None:
            self._policy_sums = policy.sums if self._policy_sums is None else self._policy_sums + policy.sums
        return loss

    def prepare_logits_to_keep(self, inputs: dict[str, Any]) -> None:
        """As ms-swift does it: labels and weights are cut to the supervised places, and so is all beside them."""
        losses.cut_aux_targets(inputs, super().prepare_logits_to_keep)
        super().prepare_logits_to_keep(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """As Hugging Face does it, which under DeepSpeed casts floats to the weights' dtype; not those of columns."""
        if not isinstance(data, Mapping) or not (names := COLUMNS.keys() & data.keys()):
            return super()._prepare_input(data)
        rest = super()._prepare_input({name: value for name, value in data.items() if name not in names})
        return {**rest, **{name: data[name].to(self.args.device) for name in names}}

    def end_step(self) -> None:
        assert self.stage2 is not None
        self._until_first_step.close()
        step_losses, self._losses = [float(loss) for loss in self._losses], []
        if self._policy_sums is not None:
            sums, self._policy_sums = self._policy_sums, None
            if sums.isfinite().all():  # else the loss tells; as 0 they would make the gap look small
                for name, amount in zip(losses.POLICY_SUMS, sums.tolist(), strict=True):
                    self.stage2.telemetry.counters.add(name, max(0.0, amount))
        scalars = self.stage2.end_step(self.state.global_step, self.state.epoch, step_losses)
        if scalars:
            self._report(scalars)

    def _report(self, scalars: Mapping[str, float]) -> None:
        """Gives whoever logs for the user what TensorBoard has, as W&B does; the screen has its own line."""
        ours = (TensorBoardCallback,) if self.stage2_config.telemetry.tensorboard else ()  # has its own tags
        others: tuple[type, ...] = (ProgressCallback, PrinterCallback, *ours)
        for callback in self.callback_handler.callbacks:
            if not isinstance(callback, others):
                callback.on_log(self.args, self.state, self.control, logs=dict(scalars), model=self.model)

    def get_train_dataloader(self, skip_batches: int = 0) -> Any:
        """As ms-swift builds it. On resume Hugging Face asks to skip as if B steps had read batches too."""
        if skip_batches and self._resumed_a_batches is not None:
            skip_batches = self._resumed_a_batches
        return super().get_train_dataloader(skip_batches)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As ms-swift does it; the time counts as evaluating."""
        if self.stage2 is None:
            return super().evaluate(*args, **kwargs)
        with self.stage2.telemetry.activity("evaluating"):
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        assert self.stage2 is not None
        if not self.stage2.saves_checkpoints:
            return None
        with self.stage2.telemetry.activity("saving"):
            directory = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            # May be refused, by all; then nothing is touched. No rank writes before rank 0 has voided what is older.
            state = self.stage2.checkpoint(self.state.global_step)
            void = partial(checkpoints.void_older, str(directory))
            self.stage2.run_on_all_ranks(void if self.args.should_save else lambda: None)
            write = partial(
                _write_state,
                directory,
                rank=self.args.process_index,
                world_size=self.args.world_size,
                step=self.state.global_step,
                a_batches_in_epoch=self._a_batches_in_epoch,
                state=state,
            )
            # Rank 0 must not complete a checkpoint that lacks the file of a rank which is killed meanwhile.
            self.stage2.run_on_all_ranks(write)
            limit, self.args.save_total_limit = self.args.save_total_limit, None
            try:
                with whole_checkpoint(directory, is_owner=self.args.should_save):
                    result = super()._save_checkpoint(*args, **kwargs)
            finally:
                self.args.save_total_limit = limit
            # No older one goes before every rank has written its part of this one.
            self.stage2.run_on_all_ranks(lambda: None)
            if self.args.should_save:
                best = self.state.best_model_checkpoint
                rotate_checkpoints(self.args.output_dir, limit, best, use_mtime=True)
            return result

    def _save_rng_state(self, output_dir: str) -> None:
        """As Hugging Face does it, whose rank 0 then writes what makes a checkpoint whole: not before all have this."""
        assert self.stage2 is not None
        save = super()._save_rng_state

        def write() -> None:  # a full disk is told as such
            with whole_checkpoint(Path(output_dir), is_owner=self.args.should_save):
                save(output_dir)

        self.stage2.run_on_all_ranks(write)

    def _ask_to_stop(self) -> None:
        if self.stage2 is None:
            raise KeyboardInterrupt
        self.stage2.learner.request_stop()

    def begin_stage2(self) -> None:
        """Builds and starts this rank's run, once model, optimizer and step are known."""
        module = self.accelerator.unwrap_model(self.model)
        # Mixed precision keeps float32 weights and casts them in the forward pass, also in the canary's.
        half_precision = self.accelerator.native_amp or module.dtype in HALF_PRECISION_DTYPES
        given = assembly.RunInputs(
            rows=_rows_of(self.train_dataset),
            template=self.template,
            module=module,
            run_directory=self.args.output_dir,
            seed=self.args.seed,
            total_steps=self.state.max_steps,
            first_step=self.state.global_step,
            make_canary=lambda encoder, sample: EngineCanary(
                module, self.template, encoder, sample, half_precision=half_precision
            ),
            packed_loss=self.packed_loss,
            packs_per_step=self.args.gradient_accumulation_steps,
            logging_steps=int(self.args.logging_steps),
            validation_rows=_rows_of(self.eval_dataset),
            optimizer=lambda: self.optimizer,
        )
        self.stage2 = self._start_run(self.stage2_config, given)
        if self._resume_directory and self.stage2_config.b_enabled:
            self._resume()
        self._until_first_step.enter_context(going_on("train", "taking the first step"))
        self.stage2.start()

    def _resume(self) -> None:
        assert self.stage2 is not None
        assert self._resume_directory is not None
        part = partial(
            checkpoints.read_state,
            self._resume_directory,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            step=self.state.global_step,
        )
        self.stage2.resume(part)
        self._resumed_a_batches = checkpoints.read_a_batches(self._resume_directory, self.args.process_index)
        self._a_batches_in_epoch = self._resumed_a_batches

    def begin_epoch(self) -> None:
        """Counts channel A's batches anew, unless the epoch was resumed in its middle."""
        self.is_between_epochs = False
        is_mid_epoch = bool(self.state.epoch) and float(self.state.epoch) % 1 > 0
        self._a_batches_in_epoch = (self._resumed_a_batches or 0) if is_mid_epoch else 0

    def end_epoch(self) -> None:
        """Reports the part of the epoch that channel A did not reach, because B steps read none of it."""
        self._resumed_a_batches, self.is_between_epochs = None, True
        assert self.stage2 is not None
        total = len(self.callback_handler.train_dataloader) if self.stage2_config.b_enabled else 0
        if total:
            self.stage2.end_epoch(self.state.epoch, self._a_batches_in_epoch, total)

    def packed_loss(self, batch: dict[str, Any]) -> float:
        """Summed loss of one collated pack under the present weights, without gradient or side effects.

        Used at start-up, to show that the attention implementation keeps packed segments apart.
        """
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                inputs = self._prepare_inputs(dict(batch))
                loss = self.compute_loss(model, inputs, num_items_in_batch=torch.tensor(1.0))
        finally:
            model.train(was_training)
            self.custom_metrics["eval"].clear()
        return float(loss.item()) / max(1, int(self.accelerator.num_processes))


class Stage2Sft(SwiftSft):  # type: ignore[misc]
    """ms-swift's supervised pipeline, which gives its trainer our configuration and keeps it."""

    trainer: Stage2Trainer

    def __init__(
        self, arguments: Any, config: Stage2Config, start_run: Callable[..., Stage2Run] | None = None
    ) -> None:
        """Raises:
        ConfigError: the trainer that ms-swift would make is not ours, nor derived from it.
        """
        found = TrainerFactory.get_trainer_cls(arguments)
        if not issubclass(found, Stage2Trainer):
            raise ConfigError(
                f"ms-swift's trainer of task_type={arguments.task_type} must be Stage2Trainer or derived from it",
                got=f"{found.__module__}.{found.__name__}",
                remedy="remove the plugin that sets another one, or start it with swift sft",
            )
        self._given = {"stage2": config} | ({"start_run": start_run} if start_run else {})
        super().__init__(arguments)

    def _prepare_dataset(self) -> Any:
        packing._spawn_workers = pack_here
        with going_on("train", "reading the data set"):
            return super()._prepare_dataset()

    def _get_trainer_kwargs(self) -> dict[str, Any]:
        return {**super()._get_trainer_kwargs(), **self._given}

    def _save_trainer_state(self, trainer: Stage2Trainer) -> Any:
        """As ms-swift does it at the end, but without a PNG of every curve that TensorBoard has."""
        trainer.args.report_to = [name for name in trainer.args.report_to if name != "tensorboard"]
        return super()._save_trainer_state(trainer)

    def train(self, trainer: Stage2Trainer) -> Any:
        self.trainer = trainer
        return super().train(trainer)


def register_trainer(trainer: type[Stage2Trainer] = Stage2Trainer) -> None:
    """From now on ms-swift trains with this class, which must be importable by its module's name."""
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{trainer.__module__}.{trainer.__qualname__}"


class _Stage2Callback(TrainerCallback):
    """Moments of Hugging Face's loop that the trainer class itself is not told of."""

    def __init__(self, trainer: Stage2Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_stage2()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.end_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.end_step()
        if self._trainer.stop_agreed:
            control.should_training_stop = True
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")  # evaluations and the end of training are logged without one
        if loss is not None and self._trainer.stage2 is not None:
            self._trainer.stage2.telemetry.record_loss(float(loss))


def _write_state(directory: Path, **state: Any) -> None:
    """This rank's own file. A disk's error is told on every rank alike."""
    with whole_checkpoint(directory, is_owner=state["rank"] == 0):
        checkpoints.write_state(str(directory), **state)


def _rows_of(dataset: Any) -> Any:
    """The raw rows behind ms-swift's lazily encoding data set, or behind its packs of such rows."""
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def _config_from_environment() -> Stage2Config:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        remedy = f"give it as stage2=load_config(...), or name the YAML in {CONFIG_VARIABLE}"
        raise ConfigError("the trainer needs a configuration", got="none", remedy=remedy)
    return load_config(path)
