"""Groups: the rollouts of one row, which wait for each other, and what each counts against the others.

A row of ``num_generations`` n stands at n positions of the stream, one after another, and each of them is a sample
with a rollout of its own. A group is whole when no sample of it is out any more: answered, or ended in another way.
Advantages are those of GRPO (Shao et al., 2024, arXiv:2402.03300); without the standard deviation those of Liu et al.
(2025, arXiv:2503.20783).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev

from swift_stage2.channel_b.attempts import AttemptOutcomes
from swift_stage2.channel_b.preprocessing import ScoredRollout
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.channel_b.task import TOTAL
from swift_stage2.config import GrpoConfig, Objective
from swift_stage2.records import ReturnReason, Rollout, SampleKey, UnusedReason
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh

GroupId = tuple[int, int]
"""Epoch, and number within this rank's shard of it."""

_EQUAL = 1e-6  # rewards that differ by less do not
_EPSILON = 1e-4  # beside a standard deviation, as ms-swift's GRPO has it


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings by which ``compare`` gives the rollouts of one row their advantages."""

    objective: Objective
    grpo: GrpoConfig


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout of a group. ``target_reward`` is that of its corrected answer, where anybody wants to know."""

    rollout: Rollout
    reward: float
    target_reward: float | None = None
    arrived_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """A group that waits for nothing more: what is trained of it, with advantages, and what is not."""

    trained: tuple[Rollout, ...]
    unused: tuple[SampleKey, ...] = ()
    reason: UnusedReason | None = None
    reward_std: float = 0.0
    seconds: float | None = None
    """From its first request to its last answer; None where others of it were, or may be, compared apart."""
    is_rest: bool = False
    """Others of it were compared before."""


def compare(members: Sequence[Member], settings: GroupSettings, *, is_rest: bool = False) -> ComparedGroup:
    """Decides what is trained of one group, with the advantages of every rollout.

    An advantage is the reward less the mean of the group's, over their standard deviation if ``scale_by_std``. With
    ``target_in_group`` the corrected answer of the best rollout is one more member, and trained with that rollout. With
    ``mixed`` it is trained there by its weight, also where all rewards are equal. The rest of a group, whose others
    were compared before, has none: a row's corrected answer is trained once.
    """
    grpo, with_target = settings.grpo, settings.objective is Objective.MIXED and not is_rest
    keys = tuple(member.rollout.sample.key for member in members)
    if len(members) < grpo.min_group:
        return ComparedGroup((), keys, UnusedReason.TOO_SMALL)
    best = max(range(len(members)), key=lambda number: members[number].reward)
    rewards = [member.reward for member in members]
    of_target = None if is_rest else members[best].target_reward
    if of_target is not None:
        rewards.append(of_target)
    spread = stdev(rewards)
    mean, divisor = fmean(rewards), spread + _EPSILON if grpo.scale_by_std else 1.0
    are_equal = max(rewards) - min(rewards) < _EQUAL
    if are_equal and not with_target:
        return ComparedGroup((), keys, UnusedReason.NO_VARIANCE)
    advantages: list[tuple[float, ...]] = [((reward - mean) / divisor,) for reward in rewards]
    if with_target:
        advantages[best] = (0.0 if are_equal else advantages[best][0], grpo.target_weight)
    elif of_target is not None:
        advantages[best] += advantages.pop()
    chosen = [best] if are_equal else range(len(members))
    return ComparedGroup(
        trained=tuple(replace(members[n].rollout, advantages=advantages[n]) for n in chosen),
        unused=tuple(key for number, key in enumerate(keys) if number not in chosen),
        reason=UnusedReason.NO_VARIANCE if are_equal else None,
        reward_std=spread,
    )


@dataclass(eq=False, repr=False)
class Groups:
    """One rank's groups that still wait. The pipeline's thread alone, but for ``drop`` and ``rollouts``."""

    ends: AttemptOutcomes
    settings: GroupSettings
    source: SampleSource
    clock: VersionClock
    version_window: int

    def __post_init__(self) -> None:
        self._waiting: dict[GroupId, list[Member]] = {}
        self._compared: dict[GroupId, set[SampleKey]] = {}

    @property
    def with_target(self) -> bool:
        """True if the preprocessor must also rate the corrected answer, as a member of the group."""
        return self.settings.grpo.target_in_group

    def add(self, rollout: Rollout, scored: ScoredRollout) -> None:
        group = self.source.group_of(rollout.sample.key)
        reward = scored.target.quality.reward[TOTAL]
        member = Member(rollout, reward, scored.target_reward, time.monotonic())
        self._waiting.setdefault(group, []).append(member)

    @property
    def rollouts(self) -> list[Rollout]:
        return [member.rollout for members in list(self._waiting.values()) for member in members]

    def take_all(self) -> list[Rollout]:
        """The same, and they wait no longer."""
        rollouts, self._waiting = self.rollouts, {}
        return rollouts

    def num_to_ask(self, coming: Collection[SampleKey]) -> int:
        """Samples that groups wait for beside those that are ``coming``: returned ones, and those never drawn."""
        missing = {key for group in self._waiting for key in self._missing(group)}
        return len(missing.difference(coming)) + self.source.num_to_whole_group

    def take(self, *, last_call: int | None = None) -> Iterator[ComparedGroup]:
        """Groups that are whole, and those that version ``last_call`` makes too old, which is on its way.

        Ends what is too old, and what has nothing to teach. What comes later of a group is compared by itself.
        """
        self._drop_stale()
        whole = {group for group in self._waiting if self.source.is_drawn(group) and not self._missing(group)}
        for group in [each for each in self._waiting if each in whole or self._goes_on(each, last_call)]:
            members = self._waiting.pop(group)
            is_rest = group in self._compared
            self._compared.setdefault(group, set()).update(m.rollout.sample.key for m in members)
            compared = compare(members, self.settings, is_rest=is_rest)
            if compared.reason is not None:
                self.ends.unused(compared.unused, compared.reason)
            asked_s = min(member.arrived_s - member.rollout.seconds for member in members)
            seconds = max(member.arrived_s for member in members) - asked_s
            yield replace(
                compared, seconds=seconds if group in whole and not is_rest else None, is_rest=is_rest
            )
        for group in list(self._compared):
            if self.source.is_drawn(group) and not self.source.members_of(group):
                del self._compared[group]

    def drop(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None:
        """Their segments were dropped. Drawn again are those of a group of which enough come. From any thread."""
        by_group: dict[GroupId, list[SampleKey]] = {}
        for key in keys:
            by_group.setdefault(self.source.group_of(key), []).append(key)
        for group, dropped in by_group.items():
            others = set(self.source.members_of(group)).difference(self._compared[group], dropped)
            if len(dropped) + len(others) >= self.settings.grpo.min_group:
                if not reason.counts_attempt:  # the same ones come again; such a drop is the pipeline's own
                    self._compared[group].difference_update(dropped)
                self.ends.dropped(dropped, reason)
            else:
                self.ends.unused(dropped, UnusedReason.DROPPED)

    def _drop_stale(self) -> None:
        is_still = partial(is_fresh, current=self.clock.current, window=self.version_window)
        for group, members in list(self._waiting.items()):
            stale = [each.rollout.sample.key for each in members if not is_still(each.rollout.version)]
            self.ends.events.count("rollouts_dropped_stale", len(stale))
            self.ends.dropped(stale, ReturnReason.STALE)
            self._waiting[group] = [each for each in members if each.rollout.sample.key not in stale]
            if not self._waiting[group]:
                del self._waiting[group]

    def _goes_on(self, group: GroupId, last_call: int | None) -> bool:
        """Whether the pipeline compares ``group`` now, without its missing rollouts."""
        members = self._waiting[group]
        if last_call is None or len(members) < self.settings.grpo.min_group:
            return False
        oldest = min(member.rollout.version for member in members)
        return not is_fresh(oldest, current=last_call, window=self.version_window)

    def _missing(self, group: GroupId) -> set[SampleKey]:
        """Those of a group that were drawn and may still come."""
        here = {member.rollout.sample.key for member in self._waiting[group]}
        return set(self.source.members_of(group)) - here - self._compared.get(group, set())
