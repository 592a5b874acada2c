"""Section ``stage2_ab``: when channel B is wanted, what it may train on, and how much is kept ready."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from swift_stage2.config.objective import REWARD_WEIGHTS, GrpoConfig, Objective, RewardConfig
from swift_stage2.config.rules import Count, NotNegative, Share, Whole, find
from swift_stage2.errors import ConfigError

DEFAULT_PHASE_STEPS = 4


class Mode(StrEnum):
    """Whether rollouts are made while the learner trains."""

    ASYNC = "async"
    INLINE = "inline"


class StarvationAction(StrEnum):
    """The reaction when channel B runs far less than the schedule wants."""

    WARN = "warn"
    FAIL = "fail"
    OFF = "off"


class OnPipelineFailure(StrEnum):
    """The reaction of all ranks when a background pipeline dies on one of them."""

    RAISE = "raise"
    CONTINUE_A = "continue_a"


class Preprocessing(StrEnum):
    """The place where a rank's answers become packs."""

    PROCESS = "process"
    THREAD = "thread"


class RowsWithoutObjects(StrEnum):
    """The treatment of rows that do not say which objects their image shows."""

    REFUSE = "refuse"
    CHANNEL_A_ONLY = "channel_a_only"


DEFAULT_TASK = "detection"
SHIPPED_DIALECTS = {"object_list": "detection", "object_map": "detection", "point_list": "point"}
"""Each with the task that it is for."""
SHIPPED_TASKS = {"detection": "object_list", "point": "point_list"}
"""Each with the dialect that it takes unless another is written. A user's file may register more of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    b_ratio: Share
    """Share of optimizer steps that want channel B, 0..1; 0 means that nothing of channel B exists."""

    @property
    def exact_b_ratio(self) -> Fraction:
        """The decimal as it was written: 0.3 is 3/10, not the nearest binary number."""
        return Fraction(repr(self.b_ratio))


def sustained(share: float) -> float:
    """A share of B steps that production feeds, rounded down to two digits at least."""
    digit = min(0.01, 10.0 ** math.floor(math.log10(share))) if share > 1e-9 else 1.0
    return min(1.0, round(math.floor(share / digit * (1 + 1e-12)) * digit, 12))


@dataclass(frozen=True, kw_only=True, slots=True)
class StarvationConfig:
    action: StarvationAction = StarvationAction.WARN
    """The reaction when fewer than half of the wanted B steps run; warn decides the exit status alone."""
    grace_steps: Count = 200
    """For how many optimizer steps that may be so before fail ends the run."""


_LEAST_TARGET, _LEAST_LIMIT = 4, 8  # of those that are not written
_MOST_B_STEPS = 8  # whose packs a derived target holds: they lie in main memory


def packs_of_b_steps(packs_per_b_step: int, b_ratio: Fraction, steps: float) -> int:
    """The packs of all B steps among so many steps, of one B step at least."""
    return packs_per_b_step * max(1, math.ceil(steps * b_ratio))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchConfig:
    queue_limit: Count | None = None
    """Ready packs that a rank keeps at most; one more waits, or takes the place of one about to expire. By default 8,
    or the derived target if that is more."""
    version_window: Whole = 2
    """A pack is fresh while it is at most this many versions old."""
    sync_every_steps: Count = 4
    """Optimizer steps from one version of the weights to the next, at least. It waits for rollouts that it would make
    too old, for 16 times as many steps at most."""
    prefetch_target_packs: Count | None = None
    """Ready packs that the producer aims at, beside those that are trained as they come. By default 4, or as many as B
    trains in ``version_window`` times ``sync_every_steps`` steps, of 8 B steps at most, and within a written
    ``queue_limit``."""
    min_ready_tokens: Whole = 0
    """Supervised tokens that a reservation must hold besides its packs; 0 asks for none."""
    redraw_dropped: bool = True
    """Whether the samples of a dropped pack return to the stream for a new rollout."""
    max_attempts: Count = 3
    """Rollouts of one sample before it is quarantined as too slow."""

    def __post_init__(self) -> None:
        target, limit = self.prefetch_target_packs, self.queue_limit
        if target is not None and target > (limit := _LEAST_LIMIT if limit is None else limit):
            raise ConfigError(
                "prefetch_target_packs <= queue_limit must hold",
                got=f"{target} <= {limit}",
                remedy=f"write queue_limit: {target} or more",
            )
        if not self.version_window and self.sync_every_steps == 1:
            raise ConfigError(
                "version_window >= 1, or sync_every_steps >= 2, must hold (otherwise a round precedes every "
                "reservation, and no pack is ever fresh)",
                got="version_window=0 sync_every_steps=1",
                remedy="write version_window: 1 or more",
            )

    def packs_in_window(self, packs_per_b_step: int, b_ratio: Fraction) -> int:
        """The packs of one version that B steps can train before it expires, of one B step at least."""
        steps = (self.version_window + 1) * self.sync_every_steps
        return packs_of_b_steps(packs_per_b_step, b_ratio, steps)

    def target(self, packs_per_b_step: int, b_ratio: Fraction) -> int:
        """``prefetch_target_packs`` as written or derived."""
        if self.prefetch_target_packs is not None:
            return self.prefetch_target_packs
        # A longer production has as much more in the making.
        longest = self.version_window * self.sync_every_steps
        packs = min(_MOST_B_STEPS * packs_per_b_step, packs_of_b_steps(packs_per_b_step, b_ratio, longest))
        target = max(_LEAST_TARGET, packs)
        # A limit below one step is refused by its own name.
        return target if self.queue_limit is None else max(packs_per_b_step, min(self.queue_limit, target))

    def limit(self, packs_per_b_step: int, b_ratio: Fraction) -> int:
        """``queue_limit`` as written or derived."""
        if self.queue_limit is not None:
            return self.queue_limit
        derived = self.prefetch_target_packs is None
        return max(_LEAST_LIMIT, self.target(packs_per_b_step, b_ratio)) if derived else _LEAST_LIMIT


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    packing_length: Count = 4096
    """Tokens that one pack holds at most; a longer sample is quarantined, never cut."""
    packing_min_fill_ratio: Share = 0.65
    """A pack filled less than this waits for more, unless the queue is starving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchingConfig:
    iou_threshold: Share = 0.3
    """Pairs with less intersection over union are infeasible."""
    top_k: Count = 10
    """Ground-truth candidates that each prediction keeps."""
    unmatched_prediction_cost: NotNegative = 1.0
    """Cost of a prediction without a partner; a pair costs 1 - IoU, of points distance / max_distance."""
    unmatched_ground_truth_cost: NotNegative = 1.0
    """Cost of a ground-truth object without a partner."""
    max_distance: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Pairs of points that are farther apart, as a share of the image's diagonal, are infeasible (task ``point``)."""
    same_label: bool = False
    """Whether only objects of one label may be paired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWeights:
    """Loss weight of every token of a target, by the group it belongs to."""

    structure: NotNegative = 1.0
    """Brackets, quotes and keys."""
    another: NotNegative | None = None
    """The separator of two objects, where the model says that one more is to come; by default as ``structure``."""
    matched_label: NotNegative = 1.0
    """Labels of objects that the model predicted."""
    missed_label: NotNegative = 1.0
    """Labels of objects that nobody predicted."""
    matched_coordinates: NotNegative = 1.0
    """Coordinates of objects that the model predicted."""
    missed_coordinates: NotNegative = 1.0
    """Coordinates of objects that nobody predicted."""
    closure: NotNegative = 1.0
    """The closing of the outermost container and the end of turn."""
    duplicate: NotNegative = 0.0
    """Not of a target's tokens, but of others: the unlikelihood, ``-log (1 - p)``, of those with which an object would
    begin once more that the rollout had listed twice."""

    def by_group(self) -> dict[str, float]:
        """The weights of a target's tokens."""
        weights = {name: getattr(self, name) for name in self.__slots__ if name != "duplicate"}
        return weights | {"another": self.structure if self.another is None else self.another}

    def __post_init__(self) -> None:
        if not any(self.by_group().values()):
            raise ConfigError(
                "at least one target weight must be above 0",
                got="0 for all",
                remedy="nothing would be trained",
            )


class MissedOrder(StrEnum):
    """The order of the objects that a rollout missed, behind those that it found."""

    GIVEN = "given"
    """The row's."""
    READING = "reading"
    """By upper edge, then by left edge."""
    RANDOM = "random"
    """Drawn anew for every attempt at a sample, from its key."""
    ANY = "any"
    """The row's, and the loss counts whatever missed object comes next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    dialect: str | None = None
    """Answer format, which must be the one that channel A's data set uses; by default the task's own: ``object_list``
    of detection, ``point_list`` of point."""
    missed_order: MissedOrder = MissedOrder.GIVEN
    """Order in which a target lists the objects that the model missed. ``any`` teaches none: at every token the loss is
    that of all tokens with which a missed object may go on."""
    weights: TargetWeights = field(default_factory=TargetWeights)
    """Loss weights by token group, all 1 by default."""

    @property
    def has_own_loss(self) -> bool:
        """True where the loss also reads the probabilities of tokens that are not labels (``training/losses.py``)."""
        return self.missed_order is MissedOrder.ANY or self.weights.duplicate > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelBConfig:
    on_pipeline_failure: OnPipelineFailure = OnPipelineFailure.RAISE
    """Whether a dead pipeline ends the run on all ranks or leaves channel A alone."""
    preprocessing: Preprocessing = Preprocessing.PROCESS
    """Where a rank parses, matches and encodes: a process of its own, or a thread of the learner's, which slows
    steps but saves 0.6 GB."""
    rows_without_objects: RowsWithoutObjects = RowsWithoutObjects.REFUSE
    """Whether rows without ``objects.bbox`` are refused or trained by channel A alone. Empty lists are an answer: an
    image without objects, which both channels train."""
    max_truncated_ratio: Share = 0.3
    """Channel B pauses while a larger share of recent rollouts was cut off by max_new_tokens."""
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    matching: MatchingConfig = field(default_factory=MatchingConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    every_steps: Whole = 0
    """Optimizer steps from one evaluation on the rollout servers to the next; 0 turns them off."""
    num_samples: Count = 64
    """Rows of ms-swift's validation set that are asked each time, the same ones: its first."""
    max_round_delay_steps: Whole = 4
    """For how many optimizer steps an evaluation may hold the next version back; then it is cut."""
    final_timeout_s: NotNegative = 600.0
    """With ``every_steps``, how many seconds after training one more round and evaluation, of the final weights, may
    take; 0 does without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage2AbConfig:
    schedule: ScheduleConfig
    mode: Mode = Mode.ASYNC
    """``inline``: a B step waits for its rollouts and training for every round, with which to compare what ``async``
    gives. With ``launch.share_devices`` training and rollouts take turns: servers sleep while the learner trains."""
    phase_steps: Count = DEFAULT_PHASE_STEPS
    """With ``inline`` and ``launch.share_devices``: servers make the packs of so many B steps, then they sleep."""
    objective: Objective = Objective.CORRECTED_TARGET
    """The tokens that channel B trains: corrected answers, its rollouts by their rewards (``grpo``), or both."""
    task: str = DEFAULT_TASK
    """The meaning of an answer: a task that is shipped or that a file of ``swift.external_plugins`` registers."""
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a task of your own declares, by name."""
    starvation: StarvationConfig = field(default_factory=StarvationConfig)
    channel_b: ChannelBConfig = field(default_factory=ChannelBConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for term in self.channel_b.reward.weights if self.task in SHIPPED_TASKS else ():
            find(REWARD_WEIGHTS, "a term of channel_b.reward.weights", term, "name one of them")
        dialect = self.channel_b.target.dialect
        owner = SHIPPED_DIALECTS.get(dialect or "")
        if self.task in SHIPPED_TASKS and owner not in (None, self.task):
            raise ConfigError(
                f"channel_b.target.dialect must be one of task {self.task}",
                got=f"dialect={dialect!r} of task {owner}",
                remedy=f"leave it out for {SHIPPED_TASKS[self.task]}, or write task: {owner}",
            )

    @property
    def uses_rewards(self) -> bool:
        """Whether rollouts are compared in groups."""
        return self.objective is not Objective.CORRECTED_TARGET

    @property
    def trains_targets_beside(self) -> bool:
        """Whether a corrected answer may be trained beside a rollout."""
        has_target = self.uses_rewards and self.channel_b.grpo.target_in_group
        return has_target or self.objective is Objective.MIXED

    @property
    def has_own_loss(self) -> bool:
        """True where the loss is not ms-swift's alone (``training/losses.py``)."""
        return self.uses_rewards or self.channel_b.target.has_own_loss

    @property
    def dialect(self) -> str | None:
        """The dialect of all answers; None of a user's task where none is written: rows hold what that task says."""
        return self.channel_b.target.dialect or SHIPPED_TASKS.get(self.task)
