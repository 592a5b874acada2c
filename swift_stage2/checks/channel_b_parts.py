"""Channel B's parts that know data set and template, made and checked when a run starts; the wait for its servers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from swift_stage2.channel_b import detection as detection  # registers a task that is shipped
from swift_stage2.channel_b import points as points  # and another
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import EncodedRollout, Preprocessor
from swift_stage2.channel_b.preprocessing_process import ProcessPreprocessor
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.channel_b.task import TASKS, Rows, Task, needed_columns
from swift_stage2.checks.packing_isolation import (
    IsolationBatches,
    PackedLoss,
    check_isolation,
    empty_rollout,
    isolation_batches,
)
from swift_stage2.checks.samples import RowLengths, check_rows
from swift_stage2.checks.servers import FoundServers
from swift_stage2.collectives import ControlGroup, run_on_all_ranks
from swift_stage2.config import Preprocessing, Stage2Config
from swift_stage2.config.objective import require_weight
from swift_stage2.config.rules import find
from swift_stage2.config.swift_arguments import is_on
from swift_stage2.errors import ConfigError, DatasetError, ServerUnavailable
from swift_stage2.records import Rollout, Sample
from swift_stage2.runtime.output import going_on, say
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.telemetry.facade import Telemetry

_WAIT_SLICE_S = 10.0
_MOST_A_STEPS = 16  # that one B step may stand for
_WANTED_A_STEPS = 4


def make_task(config: Stage2Config) -> Task:
    """The task that ``stage2_ab.task`` names.

    Raises:
        ConfigError: nobody has registered it or a column that it needs, it does not like its settings, its reward has
            no term of a name that has a weight, or it corrects no last turn and would have to.
    """
    needed_columns(config)
    kind = find(TASKS, "stage2_ab.task", config.stage2_ab.task)
    kind.read_settings(config)
    stage2_ab, max_turns = config.stage2_ab, config.rollout.max_turns
    trains_targets = stage2_ab.trains_targets_beside or not stage2_ab.uses_rewards
    if max_turns > 1 and trains_targets and not kind.corrects_last_turn:
        raise ConfigError(
            "a corrected answer takes the place of the last turn, which a task must say that it writes",
            got=f"rollout.max_turns={max_turns} objective={str(stage2_ab.objective)!r} task={stage2_ab.task}",
            remedy="write objective: grpo, or derive a task with corrects_last_turn = True",
        )
    weights = config.stage2_ab.channel_b.reward.weights
    for term in weights:
        find(kind.reward_terms, "a term of stage2_ab.channel_b.reward.weights", term, "name one of them")
    if config.stage2_ab.uses_rewards:
        require_weight(config.stage2_ab.objective, {**kind.reward_terms, **weights})
    task = kind.from_config(config)
    task.reward_weights = weights
    return task


@dataclass(frozen=True, slots=True)
class CheckedParts:
    """The parts that data set and template have become, checked, on this rank."""

    encoder: Encoder
    task: Task
    preprocessor: Preprocessor
    source: SampleSource
    samples: list[Sample]
    isolation: IsolationBatches
    lengths: RowLengths


def check_parts(
    config: Stage2Config,
    task: Task,
    rows: Rows,
    usable: Sequence[int],
    template: Any,
    seed: int,
    control: ControlGroup,
    telemetry: Telemetry,
    on_failure: ExitStack,
) -> CheckedParts:
    """The checks that read files and may fail on one rank alone; the model is not run."""
    encoder = Encoder(template, packing_length=config.stage2_ab.channel_b.packing.packing_length)
    mine = range(control.rank, len(rows), control.world_size)
    checked = check_rows(config, rows, usable, encoder, task, seed, measured=mine)
    source = SampleSource(
        rows,
        task,
        rank=control.rank,
        world_size=control.world_size,
        seed=seed,
        log=telemetry.log,
        usable=usable,
        origins=checked.origins,
        num_generations=config.rollout.num_generations,
    )
    isolation = isolation_batches(encoder, checked.task, checked.samples)
    # Before the checks that run the model, which give its process the time to load the template.
    preprocessor: Preprocessor
    if config.stage2_ab.channel_b.preprocessing is Preprocessing.THREAD:
        preprocessor = Preprocessor(encoder, checked.task)
    else:
        preprocessor = ProcessPreprocessor(encoder, checked.task)
    on_failure.callback(preprocessor.close)
    return CheckedParts(
        encoder, checked.task, preprocessor, source, checked.samples, isolation, checked.lengths
    )


def merge_lengths(
    config: Stage2Config, mine: CheckedParts, control: ControlGroup, telemetry: Telemetry, packs_per_step: int
) -> CheckedParts:
    """Every rank has measured its share of the rows, and gets all lengths.

    The first one tells what does not fit, and what a step of either channel trains.
    """
    lengths = RowLengths.merged(control.gather(mine.lengths.to_note()))
    if control.rank == 0:
        for found, remedy in lengths.troubles(config):
            telemetry.record_warning(f"{found}; {remedy}")
        sizes = step_sizes(config, lengths, packs_per_step * control.world_size)
        if sizes is not None and sizes.remedy:
            telemetry.record_warning("; ".join(sizes))
        elif sizes is not None:
            say(f"swift-stage2 train: {sizes.told}", is_error=True)
    return replace(mine, lengths=lengths)


class StepSizes(NamedTuple):
    """What a step of either channel trains, and what to write where that differs too much."""

    told: str
    remedy: str


def step_sizes(config: Stage2Config, lengths: RowLengths, num_packs: int) -> StepSizes | None:
    """Ratio of rows in one B step (``num_packs`` full packs, over all ranks) to rows in one A step.

    A step of either channel has as many micro steps: of a pack, or of ``per_device_train_batch_size`` rows (ms-swift's
    default is 1), each a pack of ms-swift's where it packs. None where nothing was measured.
    """
    if not lengths.num_tokens:
        return None
    channel, max_new_tokens = config.stage2_ab.channel_b, config.rollout.decoding.max_new_tokens
    capacity, batch = (
        channel.packing.packing_length,
        float(config.swift.get("per_device_train_batch_size", 1)),
    )
    mean, per_pack = lengths.num_tokens / lengths.num_rows, lengths.samples_per_pack(capacity)
    remedy = f"write swift.per_device_train_batch_size: {math.ceil(per_pack / _WANTED_A_STEPS)}"
    if is_on(config.swift.get("packing")):
        packed = config.swift.get("packing_length") or config.swift.get("max_length")
        if not packed:  # ms-swift takes the model's own maximum
            return None
        remedy = f"write swift.packing_length: {math.ceil(per_pack * mean / batch / _WANTED_A_STEPS)}"
        batch *= max(1.0, int(packed) / mean)
    longest = lengths.longest_segment[0]
    most = lengths.longest_prompt + max_new_tokens + longest * config.stage2_ab.trains_targets_beside
    wanted = max(math.ceil(_WANTED_A_STEPS * batch * mean), most, longest)
    if wanted < capacity and lengths.samples_per_pack(wanted) <= _MOST_A_STEPS * batch:
        remedy += f", or stage2_ab.channel_b.packing.packing_length: {wanted}"
    told = (
        f"one B step trains as many rows as {per_pack / batch:.3g} A steps: {num_packs * per_pack:.0f} "
        f"({num_packs} packs of {capacity} tokens, {mean:.0f} a row) and {num_packs * batch:.0f}, of "
        f"{lengths.num_rows:,} rows of data"
    )
    if per_pack <= _MOST_A_STEPS * batch:
        return StepSizes(told, "")
    return StepSizes(f"{told}; more than {_MOST_A_STEPS} A steps are too many", remedy)


def check_packing(parts: CheckedParts, packed_loss: PackedLoss, control: ControlGroup) -> None:
    """Packed segments do not see each other: found by running the model on the same batches on every rank."""
    for rule, mine in (
        ("read answers written in one way, got answers=", parts.task.fingerprint),
        ("be able to read the same rows, got samples of lengths ", parts.isolation.lengths),
    ):
        by_rank = control.gather(str(mine))
        if len(set(by_rank)) > 1:
            raise DatasetError(
                f"every rank must {rule}{by_rank} by rank", remedy="give all nodes the same files"
            )
    run_on_all_ranks(control, lambda: check_isolation(parts.isolation, packed_loss))


def check_preprocessing(parts: CheckedParts) -> None:
    """A process must encode as the learner does. Raises as ``compare_preprocessors``."""
    if isinstance(parts.preprocessor, ProcessPreprocessor):
        parts.preprocessor.await_ready()
        here = Preprocessor(parts.encoder, parts.task)
        rollouts = [empty_rollout(sample, parts.encoder) for sample in parts.samples]
        compare_preprocessors(parts.preprocessor, here, rollouts)


def compare_preprocessors(
    examined: Preprocessor, reference: Preprocessor, rollouts: Sequence[Rollout]
) -> None:
    """Both must make the same tensors of the same rollouts, and refuse the same ones.

    Raises:
        ConfigError: they do not.
        PreprocessorLost: the process failed, ended or does not answer.
    """
    for rollout in rollouts:
        one, other = (_tensors(preprocessor, rollout) for preprocessor in (reference, examined))
        same = {name for name in one.keys() & other.keys() if _equal(one[name], other[name])}
        if different := sorted((one.keys() | other.keys()) - same):
            raise ConfigError(
                "the preprocessing process must encode as the learner does",
                got=f"another {', '.join(different)} for the data set's row {rollout.sample.key.index}",
                remedy="what changes the template in the learner alone (a plugin, a variable set by a program) "
                "must go, or write stage2_ab.channel_b.preprocessing: thread",
            )


def _tensors(preprocessor: Preprocessor, rollout: Rollout) -> dict[str, torch.Tensor]:
    """Those of a rollout's pack, alone; none where it is refused."""
    (found,) = preprocessor.encode([rollout])
    pack = preprocessor.pack("check", [found.segment]) if isinstance(found, EncodedRollout) else None
    batch = pack.batch if pack is not None else {}
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def wait_for_servers(
    config: Stage2Config,
    control: ControlGroup,
    warn: Callable[[str], None] = lambda message: None,
) -> FoundServers:
    """Returns once every server answers and can be given weights, or ``rollout.start_timeout_s`` is over.

    ``warn`` is told on rank 0 of servers that are absent.

    Raises:
        UserError: a server cannot be given weights from here, refuses the key, or is named twice; on every rank.
        ServerUnavailable: none has answered in time; on every rank a UserError.
    """
    most_s, found = config.rollout.start_timeout_s, FoundServers()
    limit, end = f"rollout.start_timeout_s={most_s:g}", time.monotonic() + most_s
    # With what was heard instead of an answer.
    waiting = {server.base_url: "" for server in config.rollout.servers}
    num_servers = len(waiting)

    def what() -> str:
        shown = (f"{url} ({heard})" if heard else url for url, heard in tuple(waiting.items()))
        return f"waiting up to {most_s:g} s for {', '.join(shown)} to answer"

    def look() -> None:
        """One slice for one server; one that is absent leaves each of the others time to answer."""
        base_url = next(iter(waiting))
        slice_ends = time.monotonic() + min(_WAIT_SLICE_S, most_s / num_servers)
        heard = found.look_for(config, base_url, min(end, slice_ends))
        del waiting[base_url]
        if heard and time.monotonic() < end:
            waiting[base_url] = heard.partition("; ")[0]  # the others may answer meanwhile
        elif heard:
            found.absent[base_url] = heard
        if len(found.absent) == num_servers:
            raise ServerUnavailable(
                f"a rollout server must answer within {limit}",
                got=f"no answer: {heard}, or correct rollout.servers",
            )

    with going_on("train", what):
        # In slices, each with a broadcast: no rank waits in one collective for as long as a server may take.
        while control.broadcast(bool(waiting)):
            run_on_all_ranks(control, look if control.rank == 0 else lambda: None)
    if found.absent and control.rank == 0:
        warn(
            f"{len(found.absent)} of {num_servers} servers did not answer within {limit} and join when they do: "
            f"{', '.join(found.absent)}"
        )
    told = control.broadcast(asdict(found))
    kinds = {base_url: ServerKind(**kind) for base_url, kind in told["kinds"].items()}
    return FoundServers(**told | {"kinds": kinds})
