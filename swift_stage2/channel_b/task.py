"""The ``Task`` says how a row should be answered and corrects what the model said; a table names those that there are.

Everything that knows what an answer means is here; the pipeline, evaluation and the checks before a run ask the task.
``stage2_ab.task`` names one. Detection and points are shipped; a file of ms-swift's ``external_plugins`` may register
others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from swift_stage2.columns import LOG_PROBS, SERVED, Column, stand_ins
from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.config.objective import MOST_REWARD, REWARD_WEIGHTS
from swift_stage2.config.rules import find, register
from swift_stage2.errors import ConfigError, SampleError, TaskError
from swift_stage2.records import MatchQuality, Rollout, Sample, SampleKey, Target, VersionSpan

if TYPE_CHECKING:
    from swift_stage2.channel_b.encoding import Encoder

TOTAL = "total"
"""The weighted sum of a reward's terms, beside them."""

Tokenise = Callable[[str], tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]
"""Token ids of a text as a whole, and the characters ``start <= i < end`` of each token."""


@dataclass(frozen=True, slots=True)
class Convert:
    """Called with lists of coordinates x, y, x, y, … in the row's own units, gives them in the template's space."""

    call: Callable[[Sequence[Sequence[float]]], tuple[tuple[int, ...], ...]]
    """As the template does it; raises SampleError for coordinates outside the image."""
    space: tuple[int, int] | None = None
    """Width and height of the template's space; None without images, as ``image_size``."""
    image_size: tuple[int, int] | None = None
    """Width and height, in pixels, of the row's first image as the model sees it."""

    def __call__(self, lists: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
        return self.call(lists)


class Rows(Protocol):
    """A map-style data set of rows as ms-swift reads them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def reward_terms(quality: MatchQuality) -> dict[str, float]:
    """The terms of one answer's reward, from the counts of its match: the larger the better, so no weight is below 0.

    Rewards of sets of boxes are known from VLM-R1 (Shen et al., 2025, arXiv:2504.07615: mAP, a penalty of redundant
    boxes, format) and VisionReasoner (Liu et al., 2025, arXiv:2505.12081: pairs by the Hungarian method, no
    repetition). The pairs here are those that targets follow.

    Returns:
        f1: 0 to 1, 2 * pairs / (predictions + truths).
        iou: 0 to 1, the mean over all truths of their partner's IoU, or closeness of points; 0 of a missed one. The
            mean over pairs alone would rise when an object that is hard to place is left out.
        format: 1 of an answer that was read whole: closed, not truncated, no object dropped, and nothing beside the
            list but white space and one code fence; else 0.
        duplicates: -1 to 0, minus the share of predictions without a partner that overlap a truth which has one.
        misses: -1 to 0, minus the share of truths without a partner.
        Of an image without objects f1 and iou are 1 of an answer that was read whole and is an empty list alone, not
        even of what was dropped, and else 0; duplicates and misses 0.
    """
    predictions, truths, pairs = quality.num_predictions, quality.num_ground_truth, quality.num_pairs
    is_odd = quality.num_unclosed or quality.num_beside or sum(quality.dropped.values())
    silent_and_right = float(not (predictions or truths or is_odd))
    return {
        "f1": 2 * pairs / (predictions + truths) if predictions + truths else silent_and_right,
        "iou": quality.sum_iou / truths if truths else silent_and_right,
        "format": float(not (is_odd or quality.num_truncated)),
        "duplicates": -quality.num_duplicates / predictions if predictions else 0.0,
        "misses": (pairs - truths) / truths if truths else 0.0,
    }


class Task(ABC):
    """Reads a row's truth, corrects rollouts by it, and says what is measured.

    Pure: it owns no thread, and is pickled to the process that preprocesses.
    """

    closing_weight: float = 1.0
    """Loss weight of the template's end-of-turn tokens."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of metrics of its own, which evaluations report beside the shipped ones. See ``Target.metrics``."""
    similarity: ClassVar[str] = "IoU"
    """The doctor's word for what ``MatchQuality.sum_iou`` adds up over pairs."""
    corrects_last_turn: ClassVar[bool] = False
    """True if ``correct`` writes a whole answer, which may be trained in the place of the last of several turns."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Names of the columns that it needs servers to give: it finds the values, one per token id, in a rollout's field
    of that name."""
    reward_terms: ClassVar[Mapping[str, float]] = REWARD_WEIGHTS
    """Names of the terms of its reward, each with its weight unless ``reward_weights`` has another."""
    reward_weights: Mapping[str, float] = MappingProxyType({})
    """Those that the configuration writes."""
    settings: ClassVar[type | None] = None
    """A frozen dataclass of the settings that ``stage2_ab.task_settings`` may hold; its rules raise ConfigError."""

    @classmethod
    def from_config(cls, config: Stage2Config) -> Task:
        """The task that a run's configuration describes: made with its settings, if it declares any."""
        return cls() if cls.settings is None else cls(cls.read_settings(config))  # type: ignore[call-arg]

    @classmethod
    def read_settings(cls, config: Stage2Config) -> Any:
        """``stage2_ab.task_settings`` as an instance of ``settings``; None of a task that declares none.

        Raises:
            ConfigError: a setting that is not declared, of another type, or that breaks a rule of its own.
        """
        written = config.stage2_ab.task_settings
        if cls.settings is not None:
            return bind(cls.settings, written, place="stage2_ab.task_settings")
        if written:
            raise ConfigError(
                "stage2_ab.task_settings must be empty for a task that declares no settings",
                got=f"task={config.stage2_ab.task} task_settings={dict(written)}",
                remedy="remove them, or declare them in its class",
            )
        return None

    @abstractmethod
    def read_truth(self, row: Mapping[str, Any]) -> Any:
        """The truth that the answer to a row should tell, in the row's own units; anything that can be pickled.

        Raises:
            SampleError: the row does not tell.
        """

    def has_truth(self, row: Mapping[str, Any]) -> bool:
        """Whether ``rows_without_objects: channel_a_only`` keeps the row for channel B."""
        return True

    def to_space(self, truth: Any, convert: Convert) -> Any:
        """The truth in the template's coordinate space; ``convert`` raises SampleError outside the image."""
        return truth

    @abstractmethod
    def correct(self, rollout: Rollout, truth: Any, tokenise: Tokenise) -> Target:
        """The answer that channel B trains in a rollout's place. ``truth`` is what ``to_space`` gave.

        Raises:
            SampleError, MatchingError: the sample cannot be used.
        """

    def reward(self, rollout: Rollout, truth: Any, target: Target) -> Mapping[str, float]:
        """How good the rollout is, by the names in ``reward_terms``: the larger the better. See ``reward_terms``.

        ``target`` is what ``correct`` gave for it. Nothing random, no clock: the same rollout has the same reward. Of
        several turns, which are all trained by it, ``rollout.earlier_texts`` are those before ``rollout.text``.
        """
        return reward_terms(target.quality)

    @abstractmethod
    def check_answer(self, text: str, truth: Any, normalise: Callable[[str], str] = str) -> object:
        """Refuses an answer of channel A that ``correct`` would not give for this truth: both must teach the same.

        ``normalise`` spells a text as the tokenizer does.

        Raises:
            ConfigError: shows both texts.
        """

    def learn(self, rows: Rows, sample: Sample, encoder: Encoder) -> Task:
        """The task after a look at all rows' answers, before the run. ``sample`` is one of them that can be encoded.

        Raises:
            ConfigError, DatasetError: the answers are nothing that the task could write.
        """
        return self

    @property
    def fingerprint(self) -> list[str]:
        """Answers as this task writes them: what all ranks and a resumed run must write alike."""
        return []


TASKS: dict[str, type[Task]] = {}


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Class decorator: lets ``stage2_ab.task`` name a task. Raises ConfigError: the name is taken."""
    return register(TASKS, "task", name)


def needed_columns(config: Stage2Config) -> tuple[Column, ...]:
    """The columns that the configured task or objective needs, or that ``telemetry`` records.

    Raises:
        ConfigError: nobody has registered the task, or a column that it names.
    """
    task = find(TASKS, "stage2_ab.task", config.stage2_ab.task)
    recorded = (LOG_PROBS.name,) if config.telemetry.log_probs or config.stage2_ab.uses_rewards else ()
    names = dict.fromkeys((*task.columns, *recorded))
    return tuple(find(SERVED, f"{task.__qualname__}.columns", name) for name in names)


def name_of(task: Task) -> str:
    """The name that ``stage2_ab.task`` gives it, or its class's where nobody registered that."""
    return next((name for name, known in TASKS.items() if type(task) is known), type(task).__qualname__)


def correct_by(task: Task, rollout: Rollout, truth: Any, tokenise: Tokenise) -> Target:
    """The target that the task gives, after a look at its form, with the rollout's reward in its ``quality``.

    ``truth`` is as ``Task.correct`` takes it.

    Raises:
        SampleError, MatchingError: the sample cannot be used, or the rollout lacks a column that the task needs.
        TaskError: the task gives no target, or one with another number of weights than of tokens; or other terms of
            the reward than it declares.
    """
    for name in task.columns:
        if getattr(rollout, name) is None:
            raise SampleError(f"task {name_of(task)} needs a rollout's {name}", got="one without")
    target: object = task.correct(rollout, truth, tokenise)
    if not isinstance(target, Target):
        raise _fault(task, "correct must return a Target", type(target).__name__)
    num_tokens = len(target.token_ids)
    if len(target.weights) != num_tokens:
        got = f"num_weights={len(target.weights)} num_token_ids={num_tokens} text={target.text[:80]!r}"
        raise _fault(task, "a Target needs one weight per token", got)
    return replace(target, quality=replace(target.quality, reward=_reward_by(task, rollout, truth, target)))


def _reward_by(task: Task, rollout: Rollout, truth: Any, target: Target) -> dict[str, float]:
    declared = task.reward_terms
    terms = {name: float(value) for name, value in task.reward(rollout, truth, target).items()}
    are_bounded = all(abs(term) <= MOST_REWARD for term in terms.values())
    if terms.keys() != declared.keys() or TOTAL in terms or not are_bounded:
        wanted = (
            f"reward must give a number within ±{MOST_REWARD:,} for each of {', '.join(declared)}, and {TOTAL} is the "
            "name of their sum"
        )
        raise _fault(task, wanted, str(terms), remedy="mend the task, or its reward_terms")
    weights = {**declared, **task.reward_weights}
    return terms | {TOTAL: float(sum(weight * terms[name] for name, weight in weights.items()))}


def _fault(task: Task, wanted: str, got: str, remedy: str = "mend the task") -> TaskError:
    return TaskError(f"task {name_of(task)}: {wanted}", got=got, remedy=remedy)


def try_task(
    task: Task, row: Mapping[str, Any], text: str, image_size: tuple[int, int] | None = None
) -> Target:
    """The target that a task gives for one row and one answer of a model, without any model.

    Every character is a token, and the row's own coordinates, rounded, are the template's. ``image_size`` (width and
    height) is for tasks that ask ``Convert`` for it.
    """
    sample = Sample(SampleKey(0, 0, 0), row, task.read_truth(row))
    token_ids, _ = _characters(text)
    spans = (VersionSpan(0, 0, 0),)
    rollout = Rollout(sample, text, token_ids, (), False, 0, "", spans, **stand_ins(len(token_ids)))
    convert = Convert(lambda lists: tuple(tuple(map(round, each)) for each in lists), image_size, image_size)
    truth = task.to_space(sample.truth, convert)
    return correct_by(task, rollout, truth, _characters)


def _characters(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    return tuple(map(ord, text)), tuple((start, start + 1) for start in range(len(text)))
