"""One rank of a replay: the run's own configuration and trainer, with the recorded steps in the learner's place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, chdir
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from swift_stage2.assembly import progress_watch
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.channel_b.task import Rows
from swift_stage2.collectives import join_control_group, leave_job, together
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.errors import ReplayDiffers, UserError
from swift_stage2.preflight.channel_b_parts import make_task
from swift_stage2.preflight.samples import usable_samples
from swift_stage2.replay.recorded_run import RecordedRun, ReplayVerdict
from swift_stage2.replay.replayed_learner import PackMaker, ReplayedLearner
from swift_stage2.run import Stage2Run
from swift_stage2.run_directory import resume
from swift_stage2.run_directory.surroundings import surroundings
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.terminal.progress import say_beside_bar
from swift_stage2.training.sft import train

# Keeps a replay out of the run's own directory and of anybody's hub.
_OWN_PLACE = {"add_version": False, "report_to": ["none"], "push_to_hub": False, "logging_dir": None}


def replay_rank(recorded: RecordedRun, output: Path, *, rank: int) -> ReplayVerdict:
    """Takes the recorded steps, on as many ranks as the run had. Every rank comes to the same verdict.

    Raises:
        UserError: threads, device, data, model or checkpoint are not the run's, or ``output`` cannot be written.
    """
    directory = recorded.surroundings["directory"]
    with ExitStack() as stack:
        try:
            stack.enter_context(chdir(directory))  # the configuration's paths may be relative
        except OSError as error:
            raise UserError(
                f"a replay runs in the run's working directory, cannot enter {directory}: {error}"
            ) from error
        return _replay(recorded, output, rank)


def _replay(recorded: RecordedRun, output: Path, rank: int) -> ReplayVerdict:
    swift = {**recorded.config["swift"], **_OWN_PLACE, "output_dir": str(output)}
    config_path = output / "config" / f"rank{rank}.yaml"
    try:
        config_path.parent.mkdir(parents=True, exist_ok=True)
        config_path.write_text(write_yaml({**recorded.config, "swift": swift}), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--output must be a directory that can be written, got {output} ({error}); name another one"
        ) from error
    settings = load_config(config_path)
    _check_checkpoint(recorded, settings, rank)
    learners: list[ReplayedLearner] = []
    difference = None
    try:
        train(settings, start_run=partial(_start_replay, recorded, learners), asks_servers=False)
    except ReplayDiffers as error:
        leave_job()  # raised on every rank alike
        difference = str(error)
    return recorded.verdict(learners[0].num_compared if learners else 0, difference)


def _check_checkpoint(recorded: RecordedRun, config: Stage2Config, rank: int) -> None:
    """The one that the run resumed is still there, and still the same."""
    directory = config.swift.get("resume_from_checkpoint")
    if directory is None:
        return
    if not Path(directory).is_dir():
        raise UserError(
            f"the run resumed from {directory}, which is gone; a replay begins there as well, so bring it back"
        )
    if recorded.save_id is None:
        return
    state = resume.read_state(directory, rank=rank, world_size=recorded.world_size, step=recorded.first_step)
    if state["save_id"] != recorded.save_id:
        raise UserError(
            f"the run resumed from the save {recorded.save_id}, got save_id={state['save_id']} in {directory}, which "
            "was written over since; bring the checkpoint back"
        )


def _start_replay(
    recorded: RecordedRun,
    learners: list[ReplayedLearner],
    config: Stage2Config,
    *,
    rows: Rows,
    template: Any,
    module: nn.Module,
    run_directory: str,
    first_step: int,
    total_steps: int,
    logging_steps: int,
    **_: Any,
) -> Stage2Run:
    """In the place of ``assembly.start_run``, whose arguments it takes; the rest of them concerns servers."""
    control = join_control_group(config.control_timeout_s)
    if first_step != recorded.first_step:
        raise UserError(
            f"the run began before step {recorded.first_step}, got first_step={first_step}; bring its checkpoint back"
        )
    _check_surroundings(recorded.surroundings, surroundings(next(module.parameters()).device))
    telemetry = Telemetry(
        Path(run_directory),
        control.rank,
        control.world_size,
        tensorboard=False,
        events=False,
        say=partial(say_beside_bar, "replay") if control.rank == 0 else None,
        total_steps=total_steps,
    )

    def make_maker() -> PackMaker:
        channel_b, task = config.stage2_ab.channel_b, make_task(config)
        packing_length = channel_b.packing.packing_length
        encoder = Encoder(template, packing_length=packing_length)
        usable = usable_rows(rows, task, channel_b.rows_without_objects)
        (sample,) = usable_samples(rows, 0, encoder, task, 1, usable)
        return PackMaker(rows, encoder, task.learn(rows, sample, encoder), packing_length)

    maker = together(control, make_maker) if config.b_enabled else None
    learners.append(
        ReplayedLearner(recorded.steps[control.rank], maker=maker, control=control, events=telemetry)
    )
    return Stage2Run(
        learners[0],
        telemetry,
        control,
        None,
        logging_steps,
        record_start=lambda **_: None,
        watch=progress_watch(config, telemetry, None),
        saves_checkpoints=False,
    )


def _check_surroundings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    remedies = {"device": "use the run's", "threads": f"set OMP_NUM_THREADS={before['threads']}"}
    for name, remedy in remedies.items():
        if now[name] != before[name]:
            raise UserError(
                f"bit-equal losses need the run's {name}, got {name}={now[name]}, recorded {before[name]}; {remedy}"
            )
