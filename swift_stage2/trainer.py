"""The seam to ms-swift: its own trainer, with ``get_batch_samples`` asking the learner which channel a step trains.

Start it with ``torchrun -m swift_stage2 train CONFIG.yaml``, or give this file to ``swift sft`` as
``--external_plugins`` with ``SWIFT_STAGE2_CONFIG`` naming the YAML. Nothing of ms-swift's loop is repeated.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from swift_stage2.compat import declare_operators

declare_operators()  # before ms-swift imports torchvision

import torch  # noqa: E402
from swift.arguments import SftArguments  # noqa: E402
from swift.infer_engine import InferRequest, RequestConfig, TransformersEngine  # noqa: E402
from swift.pipelines import SwiftSft  # noqa: E402
from swift.trainers import Seq2SeqTrainer, TrainerFactory  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_utils import rotate_checkpoints  # noqa: E402

from swift_stage2.assembly import start_run  # noqa: E402
from swift_stage2.channel_b.encoding import Encoder  # noqa: E402
from swift_stage2.collectives import leave_job  # noqa: E402
from swift_stage2.compat import keep_buffers_exact, start_communication  # noqa: E402
from swift_stage2.config import Stage2Config, StarvationAction, load_config  # noqa: E402
from swift_stage2.config.swift_arguments import refuse_unknown_names  # noqa: E402
from swift_stage2.errors import ChannelBStarved, ConfigError, StorageFull, WeightSyncHang  # noqa: E402
from swift_stage2.learner import StepDecision  # noqa: E402
from swift_stage2.preflight.checks import Known, run_checks  # noqa: E402
from swift_stage2.preflight.swift_parsing import parse_swift_arguments  # noqa: E402
from swift_stage2.process.route import why_deaf  # noqa: E402
from swift_stage2.process.watches import EXIT_HANG  # noqa: E402
from swift_stage2.records import Pack, Sample  # noqa: E402
from swift_stage2.run import Stage2Run  # noqa: E402
from swift_stage2.run_directory import resume  # noqa: E402
from swift_stage2.run_directory.checkpoints import is_storage_failure, whole_checkpoint  # noqa: E402
from swift_stage2.scheduling.step_plan import Channel  # noqa: E402
from swift_stage2.servers import protocol as rollout_protocol  # noqa: E402
from swift_stage2.weights.canary import HALF_PRECISION_TIE_NATS, CanaryAnswer  # noqa: E402
from swift_stage2.weights.transport import WeightTransport  # noqa: E402

logger = logging.getLogger(__name__)

_CLEAN_UP_S = 45.0  # closing may take 30 s for the pipeline alone
CONFIG_VARIABLE = "SWIFT_STAGE2_CONFIG"
_CONNECT_TIMEOUT_S = 2.0
_CANARY_TOKENS = 16
_CANARY_ALTERNATIVES = 8
HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)


class Stage2Trainer(Seq2SeqTrainer):  # type: ignore[misc]
    """ms-swift's supervised trainer whose optimizer steps may train channel B's packs instead of its batches."""

    make_run: ClassVar[Callable[..., Stage2Run]] = staticmethod(start_run)
    """Puts this rank's run together; a replay sets another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage2_config = _config_from_environment()
        self.stage2_config.check_accumulation(self.args.gradient_accumulation_steps)
        run_checks(self.stage2_config, Known(num_validation_rows=len(self.eval_dataset or ())))
        self.stage2: Stage2Run | None = None
        self._resume_directory: str | None = None
        self._resumed_a_batches: int | None = None
        self._a_batches_in_epoch = 0
        self.stop_agreed = False
        self._losses: list[torch.Tensor] = []  # of this step's micro_steps, where they are recorded
        self.add_callback(_Stage2Callback(self))

    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains, and ends every thread of ours however training ends."""
        self._resume_directory = resume_from_checkpoint or None
        with _StopSignals(self):
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                if self.stage2 is not None:
                    self.stage2.close()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The window's batches: channel A's next ones, or one pack per micro_step on channel B."""
        assert self.stage2 is not None
        with self.stage2.telemetry.activity("waiting"):
            decision = self._begin_step(num_batches)
            # Told to the loop at the end of the step: it would leave this window after its first micro_step.
            self.stop_agreed = self.stop_agreed or decision.stop
            if decision.plan.channel is Channel.B:
                batches: list[Any] = [_copy_of_batch(pack) for pack in decision.packs]
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

    def end_step(self) -> None:
        """An optimizer step is over."""
        assert self.stage2 is not None
        losses, self._losses = [float(loss) for loss in self._losses], []
        self.stage2.end_step(self.state.global_step, self.state.epoch, losses)

    def _begin_step(self, num_batches: int) -> StepDecision:
        assert self.stage2 is not None
        try:
            return self.stage2.learner.begin_step(self.state.global_step, num_batches)
        except WeightSyncHang as hang:
            # Told here, and with an end of its own: what follows is clean-up of others beside a thread that is stuck.
            logger.error("a push hung and cannot be taken back: %s", hang)
            _leave_within(_CLEAN_UP_S)
            raise

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
            if self.args.should_save:
                resume.void_older(
                    str(directory)
                )  # no rank goes on to its own file before rank 0 has done this
            write = partial(
                _write_state,
                directory,
                rank=self.args.process_index,
                world_size=self.args.world_size,
                step=self.state.global_step,
                a_batches_in_epoch=self._a_batches_in_epoch,
                state=self.stage2.checkpoint(self.state.global_step),
            )
            # Rank 0 must not complete a checkpoint that lacks the file of a rank which is killed meanwhile.
            self.stage2.together(write)
            limit, self.args.save_total_limit = self.args.save_total_limit, None
            try:
                with whole_checkpoint(directory, is_owner=self.args.should_save):
                    result = super()._save_checkpoint(*args, **kwargs)
            finally:
                self.args.save_total_limit = limit
            # No older one goes before every rank has written its part of this one.
            self.stage2.together(lambda: None)
            if self.args.should_save:
                best = self.state.best_model_checkpoint
                rotate_checkpoints(self.args.output_dir, limit, best, use_mtime=True)
            return result

    def begin_stage2(self) -> None:
        """Builds and starts this rank's run, once model, optimizer and step are known."""
        module = self.accelerator.unwrap_model(self.model)
        # Mixed precision keeps float32 weights and casts them in the forward pass, also in the canary's.
        half_precision = self.accelerator.native_amp or module.dtype in HALF_PRECISION_DTYPES
        self.stage2 = self.make_run(
            self.stage2_config,
            rows=_rows_of(self.train_dataset),
            template=self.template,
            module=module,
            run_directory=self.args.output_dir,
            rank=self.args.process_index,
            seed=self.args.seed,
            total_steps=self.state.max_steps,
            first_step=self.state.global_step,
            make_canary=lambda encoder, sample: EngineCanary(
                module, self.template, encoder, sample, half_precision=half_precision
            ),
            packed_loss=self.packed_loss,
            packs_per_step=self.args.gradient_accumulation_steps,
            logging_steps=int(self.args.logging_steps),
            wrap_transport=self.wrap_transport,
            validation_rows=_rows_of(self.eval_dataset),
        )
        if self._resume_directory and self.stage2_config.b_enabled:
            self._resume()
        self.stage2.start()

    def wrap_transport(self, transport: WeightTransport) -> WeightTransport:
        """For subclasses that watch or disturb what a sync round sends."""
        return transport

    def _resume(self) -> None:
        assert self.stage2 is not None
        assert self._resume_directory is not None
        part = partial(
            resume.read_state,
            self._resume_directory,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            step=self.state.global_step,
        )
        self.stage2.resume(part)
        self._resumed_a_batches = resume.read_a_batches(self._resume_directory, self.args.process_index)
        self._a_batches_in_epoch = self._resumed_a_batches

    def begin_epoch(self) -> None:
        """Counts channel A's batches anew, unless the epoch was resumed in its middle."""
        if self._resumed_a_batches is not None:
            self._a_batches_in_epoch = self._resumed_a_batches if self._is_mid_epoch() else 0
            return
        self._a_batches_in_epoch = 0

    def end_epoch(self) -> None:
        """Reports the part of the epoch that channel A did not reach, because B steps read none of it."""
        self._resumed_a_batches = None
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

    def _is_mid_epoch(self) -> bool:
        return bool(self.state.epoch) and float(self.state.epoch) % 1 > 0


def train(config_path: str) -> int:
    """Runs ms-swift's supervised pipeline with this trainer; returns the exit status.

    Raises:
        UserError: a mistake in configuration, data or servers, on every rank.
        Stage2Error: anything else that ends the run, on every rank.
    """
    config = load_config(config_path)
    return run_pipeline(config, config_path, asks_servers=True)


def run_pipeline(config: Stage2Config, config_path: str, *, asks_servers: bool) -> int:
    """Runs the pipeline of ``config``, which ``config_path`` holds; see ``train``."""
    os.environ[CONFIG_VARIABLE] = os.path.abspath(config_path)
    # Both dialects are plain JSON; ms-swift's default would write boxes between special tokens.
    os.environ.setdefault("QWENVL_BBOX_FORMAT", "new")
    refuse_unknown_names(config.swift, {field.name for field in dataclasses.fields(SftArguments)})
    found = torch.accelerator.current_accelerator(check_available=True)
    run_checks(
        config,
        Known(
            files=True,
            rows=True,
            num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
            devices=(found.type if found else None, torch.cuda.device_count()),
        ),
    )
    if asks_servers and int(os.environ.get("RANK", "0")) == 0:
        _tell_of_deaf_servers(config)
    start_communication(config.swift)
    try:
        arguments = parse_swift_arguments(config.swift_arguments())
        if config.b_enabled:
            keep_buffers_exact()
        pipeline = _Pipeline(arguments)
        pipeline.main()
    except Exception as error:  # raised again unless a hang is behind it
        if _hang_behind(error) is not None:
            return EXIT_HANG
        if isinstance(error, OSError) and is_storage_failure(error):
            raise StorageFull(
                f"a run needs a disk that takes what it writes, got {error}; make room"
            ) from error
        raise
    leave_job()
    _tell_of_unused_b(config, pipeline.trainer)
    return 0


class _Pipeline(SwiftSft):  # type: ignore[misc]
    """ms-swift's own, which does not keep its trainer."""

    trainer: Stage2Trainer

    def train(self, trainer: Stage2Trainer) -> Any:
        self.trainer = trainer
        return super().train(trainer)


def _tell_of_unused_b(config: Stage2Config, trainer: Stage2Trainer) -> None:
    """The run's last line, when channel B was wanted and never ran; on all ranks the same decision.

    Raises:
        ChannelBStarved: the run has trained to its end and the configuration asks to fail.
    """
    unused = trainer.stage2.telemetry.unused_b if trainer.stage2 is not None else ""
    if not unused:
        return
    if config.stage2_ab.starvation.action is StarvationAction.FAIL and not trainer.stop_agreed:
        raise ChannelBStarved(unused)
    if trainer.args.process_index == 0:
        print(f"swift-stage2 train: warning: {unused}", file=sys.stderr, flush=True)


def _tell_of_deaf_servers(config: Stage2Config) -> None:
    """Says now what the wait for servers would say only after the model was loaded. Decides nothing: they may start."""
    for server in config.rollout.servers if config.b_enabled else ():
        if reason := why_deaf(server.base_url, _CONNECT_TIMEOUT_S):
            logger.warning(
                "rollout server %s does not answer yet (%s); once the model is loaded it is waited for "
                "rollout.start_timeout_s=%g seconds; start it, or correct rollout.servers",
                server.base_url,
                reason,
                config.rollout.start_timeout_s,
            )


def _leave_within(seconds: float) -> None:
    """Ends this process with status 70 by then, however far its clean-up is."""
    timer = threading.Timer(seconds, os._exit, (EXIT_HANG,))
    timer.daemon = True
    timer.start()


def _hang_behind(error: BaseException | None) -> WeightSyncHang | None:
    """The hang that ended training; ms-swift's own clean-up may have failed after it and hidden it."""
    while error is not None and not isinstance(error, WeightSyncHang):
        error = error.__cause__ or error.__context__
    return error


class EngineCanary:
    """One greedy question, answered by ms-swift's own engine on the learner's module.

    ``half_precision``: the module computes in 16 bits, so that near ties count as the same answer.
    """

    def __init__(
        self, module: Any, template: Any, encoder: Encoder, sample: Sample, *, half_precision: bool
    ) -> None:
        self._module = module
        self._template = template
        self.request: dict[str, Any] = encoder.request(sample)
        self.config = rollout_protocol.request_config(
            max_new_tokens=_CANARY_TOKENS,
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            repetition_penalty=1.0,
            seed=1,
        )
        self._closing = encoder.closing_token_ids
        self._tie_nats = HALF_PRECISION_TIE_NATS if half_precision else 0.0
        self._answer = CanaryAnswer()
        self._engine: TransformersEngine | None = None

    def answer(self) -> None:
        """Generates under the present weights; mode, gradients and random state are left as they were."""
        model = self._module
        was_training = model.training
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), self._template.generate_context():
                if self._engine is None:
                    self._engine = TransformersEngine(model, template=self._template, max_batch_size=1)
                (response,) = self._engine.infer(
                    [InferRequest(**self.request)],
                    RequestConfig(**self.config, logprobs=True, top_logprobs=_CANARY_ALTERNATIVES),
                    use_tqdm=False,
                )
        finally:
            model.train(was_training)
        (choice,) = response.choices
        self._answer = CanaryAnswer(
            self._without_closing(choice.token_ids),
            tuple(
                {token["token"]: token["logprob"] for token in position["top_logprobs"]}
                for position in (choice.logprobs or {}).get("content", ())
            ),
            self._tie_nats,
        )

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Whether a server gave the learner's own answer; engines differ in showing the end of turn."""
        decode = self._template.tokenizer.decode
        return self._answer.agrees(self._without_closing(token_ids), decode, decode(self._closing[0]))

    def _without_closing(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(token_ids)
        for length in range(len(self._closing), 0, -1):
            if tokens[-length:] == self._closing[:length]:
                return tokens[:-length]
        return tokens


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
            self._trainer.stage2.telemetry.record_loss(state.global_step, float(loss))


class _StopSignals:
    """Turns SIGTERM and SIGINT into a stop that all ranks agree on; a second SIGINT ends at once."""

    def __init__(self, trainer: Stage2Trainer) -> None:
        self._trainer = trainer
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._trainer.stage2 is None:
            raise KeyboardInterrupt
        self._trainer.stage2.learner.request_stop()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT] or signal.default_int_handler)


def _write_state(directory: Path, **state: Any) -> None:
    """This rank's own file. What it raises of the disk is told on every rank alike."""
    with whole_checkpoint(directory, is_owner=state["rank"] == 0):
        resume.write_state(str(directory), **state)


def _rows_of(dataset: Any) -> Any:
    """The raw rows behind ms-swift's lazily encoding data set."""
    return getattr(dataset, "dataset", dataset)


def _copy_of_batch(pack: Pack) -> dict[str, Any]:
    # The loop and the loss function take entries out of the dictionary they are given.
    return dict(pack.batch)


def _config_from_environment() -> Stage2Config:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise ConfigError(
            f"{CONFIG_VARIABLE} must name the YAML configuration, got none; set it before training"
        )
    return load_config(path)


TrainerFactory.TRAINER_MAPPING["causal_lm"] = "swift_stage2.trainer.Stage2Trainer"
