"""Section ``stage2_ab``: when channel B is wanted, what it may train on, and how much is kept ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from swift_stage2.config import rules
from swift_stage2.config.rules import Inequality
from swift_stage2.errors import ConfigError


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


SHIPPED_TASKS = ("detection",)
SHIPPED_DIALECTS = ("object_list", "object_map")
"""A user's file may register more of both; see ``Stage2Config``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    b_ratio: float = field(
        metadata={"allowed": "the share of steps that want channel B, 0..1; 0 turns it off"}
    )
    """Share of optimizer steps that want channel B, 0..1; 0 means that nothing of channel B exists."""

    def __post_init__(self) -> None:
        rules.in_unit_range(
            self, "b_ratio", "write the share of steps that want channel B, or 0 to turn it off"
        )

    @property
    def exact_b_ratio(self) -> Fraction:
        """The decimal as it was written: 0.3 is 3/10, not the nearest binary number."""
        return Fraction(repr(self.b_ratio))


@dataclass(frozen=True, kw_only=True, slots=True)
class StarvationConfig:
    action: StarvationAction = StarvationAction.WARN
    """The reaction when the realised ratio stays under half of b_ratio."""
    grace_steps: int = 200
    """For how many optimizer steps it may stay there first."""

    def __post_init__(self) -> None:
        rules.at_least(self, 1, "grace_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchConfig:
    queue_limit: int = 8
    """Ready packs that a rank keeps at most; the oldest goes when one more arrives."""
    version_window: int = 2
    """A pack is fresh while it is at most this many versions old."""
    sync_every_steps: int = 4
    """Optimizer steps from one commit of weights to the next sync round."""
    prefetch_target_packs: int = 4
    """Packs, ready or in the making, that the producer aims at."""
    min_ready_tokens: int = 0
    """Supervised tokens that a reservation must hold besides its packs; 0 asks for none."""
    redraw_dropped: bool = True
    """Whether the samples of a dropped pack return to the stream for a new rollout."""
    max_attempts: int = 3
    """Rollouts of one sample before it is quarantined as too slow."""

    def __post_init__(self) -> None:
        rules.at_least(self, 1, "queue_limit", "sync_every_steps", "prefetch_target_packs", "max_attempts")
        rules.at_least(self, 0, "version_window", "min_ready_tokens")
        for inequality in self.inequalities:
            inequality.require()

    @property
    def inequalities(self) -> tuple[Inequality, ...]:
        """The rules between these settings, with the numbers put in."""
        target, limit = self.prefetch_target_packs, self.queue_limit
        window, cadence = self.version_window, self.sync_every_steps
        return (
            Inequality(
                name="target within limit",
                statement="prefetch_target_packs <= queue_limit",
                numbers=f"{target} <= {limit}",
                holds=target <= limit,
                refusal="prefetch_target_packs must be at most queue_limit, got "
                f"prefetch_target_packs={target} queue_limit={limit}",
                remedy=f"write queue_limit: {target} or more",
            ),
            Inequality(
                name="version window",
                statement="version_window >= 1, or sync_every_steps >= 2",
                numbers=f"version_window {window}, sync_every_steps {cadence}",
                holds=window > 0 or cadence > 1,
                refusal=f"version_window 0 needs sync_every_steps of at least 2, got version_window={window} "
                f"sync_every_steps={cadence}",
                remedy="a round precedes every reservation, so no pack would ever be fresh: write "
                "version_window: 1 or more",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    packing_length: int = 4096
    """Tokens that one pack holds at most; a longer sample is quarantined, never cut."""
    packing_min_fill_ratio: float = 0.65
    """A pack filled less than this waits for more, unless the queue is starving."""

    def __post_init__(self) -> None:
        rules.at_least(self, 1, "packing_length")
        rules.in_unit_range(self, "packing_min_fill_ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchingConfig:
    iou_threshold: float = 0.3
    """Pairs with less intersection over union are infeasible."""
    top_k: int = 10
    """Ground-truth candidates that each prediction keeps."""
    unmatched_prediction_cost: float = 1.0
    """Cost of a prediction without a partner; a pair costs 1 - IoU."""
    unmatched_ground_truth_cost: float = 1.0
    """Cost of a ground-truth object without a partner."""
    same_label: bool = False
    """Whether only objects of one label may be paired."""

    def __post_init__(self) -> None:
        rules.in_unit_range(self, "iou_threshold")
        rules.at_least(self, 1, "top_k", remedy="each prediction needs at least one candidate")
        rules.at_least(self, 0, "unmatched_prediction_cost", "unmatched_ground_truth_cost")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWeights:
    """Loss weight of every token of a target, by the group it belongs to."""

    structure: float = 1.0
    """Brackets, quotes, keys and separators."""
    matched_label: float = 1.0
    """Labels of objects that the model predicted."""
    missed_label: float = 1.0
    """Labels of objects that nobody predicted."""
    matched_coordinates: float = 1.0
    """Coordinates of objects that the model predicted."""
    missed_coordinates: float = 1.0
    """Coordinates of objects that nobody predicted."""
    closure: float = 1.0
    """The closing of the outermost container and the end of turn."""

    def __post_init__(self) -> None:
        rules.at_least(self, 0, *self.__slots__)
        if not any(getattr(self, name) for name in self.__slots__):
            raise ConfigError(
                "at least one target weight must be above 0, got 0 for all; nothing would be trained"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    dialect: str = "object_list"
    """Answer format of the task ``detection``; it must be the one that channel A's data set uses."""
    weights: TargetWeights = field(default_factory=TargetWeights)
    """Loss weights by token group, all 1 by default."""


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
    max_truncated_ratio: float = 0.3
    """Channel B pauses while a larger share of recent rollouts was cut off by max_new_tokens."""
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    matching: MatchingConfig = field(default_factory=MatchingConfig)
    target: TargetConfig = field(default_factory=TargetConfig)

    def __post_init__(self) -> None:
        rules.in_unit_range(self, "max_truncated_ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    every_steps: int = 0
    """Optimizer steps from one evaluation on the rollout servers to the next; 0 turns them off."""
    num_samples: int = 64
    """Rows of ms-swift's validation set that are asked each time, the same ones: its first."""
    max_round_delay_steps: int = 4
    """For how many optimizer steps an evaluation may hold a sync round back before it is cut short."""

    def __post_init__(self) -> None:
        rules.at_least(self, 0, "every_steps", "max_round_delay_steps")
        rules.at_least(self, 1, "num_samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage2AbConfig:
    schedule: ScheduleConfig
    task: str = "detection"
    """The meaning of an answer: a task that is shipped or that a file of ``swift.external_plugins`` registers."""
    starvation: StarvationConfig = field(default_factory=StarvationConfig)
    channel_b: ChannelBConfig = field(default_factory=ChannelBConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
